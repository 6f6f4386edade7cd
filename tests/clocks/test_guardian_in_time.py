"""What the guardian notices, and how long it tries and waits, in a time that the test moves."""

import os
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from run_log import GIVE_UP_S, wait_until
from stub_nvml.controller import StubNvml

from perseus_ds.clocks import local_socket
from perseus_ds.clocks.guardian import Guardian, socket_name
from perseus_ds.clocks.guardian_daemon import GuardianServer, restore, wait_for_end
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu


class MovedTime:
    """Moves only when the test moves it, or by those who sleep."""

    def __init__(self):
        self.seconds = 0.0
        self.was_asked = threading.Event()

    def now_s(self):
        seconds = self.seconds
        self.was_asked.set()
        return seconds

    def sleep(self, seconds):
        self.seconds += seconds


class RefusingGpu:
    def __init__(self, times):
        self.times = times
        self.calls = 0

    def reset_clock(self):
        self.calls += 1
        if self.calls <= self.times:
            raise GpuError("the driver is busy")


@pytest.mark.parametrize(
    ("refusals", "error", "calls", "tried_s"), [(0, None, 1, 0), (2, None, 3, 1), (9, "busy", 3, 1)]
)
def test_a_reset_is_tried_three_times_half_a_second_apart(refusals, error, calls, tried_s):
    gpu, now = RefusingGpu(refusals), MovedTime()
    said = restore(gpu, now)
    assert (said is None) if error is None else (error in said)
    assert (gpu.calls, now.seconds) == (calls, tried_s)


@pytest.fixture
def now():
    return MovedTime()


@pytest.fixture
def serving(tmp_path, now):
    """A guardian on a thread; its address, and the thread."""
    address = f"\0perseus-ds-test/{tmp_path}"
    with GuardianServer(address, now) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield address, thread
        now.seconds += 1000.0
        thread.join(GIVE_UP_S)


def test_a_guardian_that_no_rank_reaches_ends(serving, now):
    _, thread = serving
    assert now.was_asked.wait(GIVE_UP_S)
    now.seconds += 10.1
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()


def test_a_driver_that_hangs_keeps_the_guardian_for_ten_seconds_only(serving, now, stub_nvml_here: StubNvml) -> None:
    address, thread = serving
    gpu = stub_nvml_here.gpus[0]
    connection = local_socket.connect(address, GIVE_UP_S)
    registered = local_socket.exchange(connection, {"gpus": [f"nvml:{gpu.uuid.decode()}"]})
    assert registered == {"error": None, "pid": os.getpid()}
    gpu.hang("reset_locked")
    connection.close()
    wait_until(lambda: gpu.calls("reset_locked"), "a call that hangs")
    assert thread.is_alive()
    now.seconds += 10.1
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
    gpu.hang("reset_locked", False)


@pytest.mark.parametrize("call_s", [0.0, 5.0])
def test_a_clock_that_a_busy_driver_refuses_to_reset_is_reset_later(
    serving, now, stub_nvml_here: StubNvml, monkeypatch, call_s
) -> None:
    address, thread = serving
    reset = NvmlGpu.reset_clock

    def take_a_while(gpu):
        now.sleep(call_s)
        reset(gpu)

    monkeypatch.setattr(NvmlGpu, "reset_clock", take_a_while)
    gpu = stub_nvml_here.gpus[0]
    gpu.locked_clock_mhz = 1200
    connection = local_socket.connect(address, GIVE_UP_S)
    local_socket.exchange(connection, {"gpus": [f"nvml:{gpu.uuid.decode()}"]})
    gpu.fail("reset_locked", "unknown")
    sleep = now.sleep

    def sleep_until_it_works(seconds):
        sleep(seconds)
        if now.seconds > 60.0:
            gpu.fail("reset_locked", "none")

    now.sleep = sleep_until_it_works
    connection.close()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
    assert gpu.locked_clock_mhz == 0
    assert 60.0 < now.seconds < 80.0 + 2 * call_s


def test_a_guardian_outlives_a_lack_of_files_and_of_threads(serving, now, monkeypatch):
    address, thread = serving
    accept, start = socket.socket.accept, threading.Thread.start
    problems = [OSError(24, "too many open files"), RuntimeError("can't start new thread")]

    def fail_once(*arguments):
        if any(type(problem) is OSError for problem in problems):
            raise problems.pop(0)
        return accept(*arguments)

    def fail_to_start(*arguments):
        if problems:
            raise problems.pop()
        start(*arguments)

    now.sleep = lambda seconds: None
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    refused = local_socket.connect(address, GIVE_UP_S)
    assert refused.recv(1) == b""
    served = local_socket.connect(address, GIVE_UP_S)
    assert local_socket.exchange(served, {"gpus": []})["error"] is None
    served.close()
    refused.close()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()


def test_ranks_give_up_when_no_guardian_answers(now, tmp_path: Path) -> None:
    class HangsUp(socketserver.BaseRequestHandler):
        pass

    with local_socket.LocalServer(socket_name(str(tmp_path)), HangsUp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(GpuError, match=r"No guardian answered within 30 s\. Clocks may stay locked"):
            Guardian(["nvml:GPU-0"], str(tmp_path), now)
        server.shutdown()
        thread.join(GIVE_UP_S)
    assert now.seconds >= 30.0


@pytest.fixture
def server(tmp_path, now):
    with GuardianServer(f"\0perseus-ds-test/{tmp_path}", now) as made:
        yield made


def test_a_gpu_is_to_be_reset_when_the_last_of_its_ranks_ends(server):
    with server.living(1, ("a", "b")), server.living(2, ("b",)), server.living(3, ("c",)):
        assert server.end(1) == ["a"]
        assert server.is_registered("b")
        assert server.end(2) == ["b"]
        assert not server.is_registered("b")
        assert server.end(3) == ["c"]


# The first thread ends, which makes the process a zombie for as long as the other one lives.
LEADER_ENDS = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread only
"""


@pytest.fixture
def process(monkeypatch):
    """A process that another one holds the connection of, and a function that says whether its end is noticed."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        started.stdout.readline()
        monkeypatch.setattr(local_socket, "peer", lambda connection: (started.pid, os.getuid()))
        yield started
        started.kill()


@pytest.fixture
def waiter():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        yield threading.Thread(target=wait_for_end, args=[ours], daemon=True), theirs


def test_a_process_whose_first_thread_has_ended_has_not_ended_while_another_one_lives(process, waiter):
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the first thread's end")
    thread, _ = waiter
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    process.stdin.close()  # the other thread ends; the process stays a zombie, since nobody waits for it
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["closes", "says something"])
def test_a_connection_is_noticed_before_the_process(process, waiter, what):
    thread, theirs = waiter
    thread.start()
    theirs.close() if what == "closes" else theirs.sendall(b"x")
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("pid", [0, 2**22 + 1])
def test_a_process_that_cannot_be_seen_is_watched_by_its_connection_and_one_that_is_gone_not_at_all(
    waiter, monkeypatch, pid
):
    monkeypatch.setattr(local_socket, "peer", lambda connection: (pid, os.getuid()))
    thread, theirs = waiter
    thread.start()
    if pid == 0:
        theirs.close()
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
