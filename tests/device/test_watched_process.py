"""The end of another process is noticed, by a pid file descriptor or, where there is none, by polling."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from perseus_ds.device.watched_process import WatchedProcess

GENEROUS_S = 60.0
"""Only ends a test that hangs."""
# The first thread ends, which makes the process a zombie for as long as the other one lives.
LEADER_ENDS = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread only
"""


def refuse(pid):
    raise PermissionError("as a container's system call filter does")


@pytest.fixture(params=[os.pidfd_open, refuse], ids=["pidfd", "psutil"])
def open_descriptor(request):
    return request.param


@pytest.fixture
def silent():
    """A connection on which nothing happens, and its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        yield ours, theirs


class Waiter:
    """Waits for the end of a process on a thread."""

    def __init__(self, pid, open_descriptor, connection):
        self.process = WatchedProcess(pid, open_descriptor)
        self.thread = threading.Thread(target=self.process.wait_until_gone_or_readable, args=[connection], daemon=True)
        self.thread.start()

    def returns(self):
        self.thread.join(GENEROUS_S)
        self.process.close()
        return not self.thread.is_alive()


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_killed_process_is_gone_though_nobody_has_waited_for_it(sleeper, open_descriptor, silent):
    waiter = Waiter(sleeper.pid, open_descriptor, silent[0])
    os.kill(sleeper.pid, signal.SIGKILL)  # a zombie until the fixture waits for it
    assert waiter.returns()


def test_a_process_that_has_ended_before_is_gone(open_descriptor, silent):
    with subprocess.Popen(["true"]) as process:
        process.wait(GENEROUS_S)
    assert Waiter(process.pid, open_descriptor, silent[0]).returns()


@pytest.mark.parametrize("ends", [True, False])
def test_a_connection_is_noticed_before_the_process(sleeper, open_descriptor, silent, ends):
    waiter = Waiter(sleeper.pid, open_descriptor, silent[0])
    if ends:
        silent[1].close()
    else:
        silent[1].sendall(b"x")
    assert waiter.returns()
    assert sleeper.poll() is None


def test_a_process_that_cannot_be_seen_is_watched_by_its_connection(open_descriptor, silent):
    waiter = Waiter(0, open_descriptor, silent[0])
    silent[1].close()
    assert waiter.returns()


def test_a_process_whose_first_thread_has_ended_is_not_gone_while_another_one_lives(open_descriptor, silent):
    program = [sys.executable, "-c", LEADER_ENDS]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        wait_until_zombie(process.pid)
        waiter = Waiter(process.pid, open_descriptor, silent[0])
        assert not waiter.process.is_gone()
        process.stdin.close()  # the other thread ends
        assert waiter.returns()


def wait_until_zombie(pid):
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
