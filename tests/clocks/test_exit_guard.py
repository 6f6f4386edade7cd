"""The default clock is restored however a process ends, and handlers of others are still called."""

import signal
import subprocess
import sys
import threading

import pytest
from run_log import GIVE_UP_S

PROGRAM = """
import os, signal, sys, time
from perseus_ds.clocks.exit_guard import ExitGuard
{before}
def restore():
    guard.release()  # as the runtime does when it closes
    os.write(1, b"restored\\n")
guard = ExitGuard(restore, {at_once})
print("ready", flush=True)
{end}
"""
TERM = "os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
INT = "os.kill(os.getpid(), signal.SIGINT); signal.pause()"
WORKER = """
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    os.write(writer, b"1")
    while True:
        time.sleep(0.01)
os.read(reader, 1)
os.kill(worker, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
"""
FORK = """
if os.fork() == 0:
    sys.exit()
os.wait()
print("on", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "end", "returncode", "printed"),
    [
        ("", "", 0, ["restored"]),
        ("", "raise ValueError", 1, ["restored"]),
        ("", TERM, -signal.SIGTERM, ["restored"]),
        # Set, because a job that a shell has put into the background is born with SIGINT ignored.
        ("signal.signal(signal.SIGINT, signal.default_int_handler)", INT, -signal.SIGINT, ["restored"]),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL)", INT, -signal.SIGINT, ["restored"]),
        (
            "signal.signal(signal.SIGINT, signal.SIG_IGN)",
            "os.kill(os.getpid(), signal.SIGINT); print('on', flush=True)",
            0,
            ["on", "restored"],
        ),
        (
            "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), os._exit(7)))",
            TERM,
            7,
            ["restored", "theirs"],
        ),
        ("", "guard.release()", 0, []),
        ("", WORKER, 0, [str(-signal.SIGTERM), "restored"]),
        ("", FORK, 0, ["on", "restored"]),
    ],
)
def test_the_exit_guard_acts_however_the_process_ends(before, end, returncode, printed):
    program = PROGRAM.format(before=before, end=end, at_once=PRINT if end in (WORKER, FORK) else "lambda: None")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )
    assert done.returncode == returncode, done.stderr
    assert done.stdout.split() == ["ready", *printed]


# A call that no signal interrupts, as CUDA's are.
STUCK = """
import ctypes
ctypes.CDLL(None).system(b"echo stuck; exec cat > /dev/null")
"""
PRINT = r"lambda: os.write(1, b'reset\n')"
# Somebody who listens to signals in the same way, as asyncio does.
LISTEN = """
import socket
reader, writer = socket.socketpair()
writer.setblocking(False)
signal.set_wakeup_fd(writer.fileno())
"""


def lines_of(before="", end="", signalled_at=None):
    """Start a process, send it SIGTERM when it prints a line, and yield what it prints; it is killed at last.

    If it ends before, what has ended it is yielded last.
    """
    program = PROGRAM.format(before=before, end=end, at_once=PRINT)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(GIVE_UP_S, process.kill)  # only ends a test that hangs
        killer.start()
        try:
            for line in process.stdout:
                if line.strip() == signalled_at:
                    process.terminate()
                yield line.strip()
            if process.wait() < 0:
                yield signal.Signals(-process.returncode).name
        finally:
            killer.cancel()
            process.kill()


def test_a_signal_resets_the_clock_at_once_and_ends_a_process_whose_main_thread_is_in_a_call_that_does_not_return():
    """As without the guard: a rank that waits for one that is gone must not need the scheduler's SIGKILL."""
    assert list(lines_of(end=STUCK, signalled_at="stuck")) == ["ready", "stuck", "reset", "SIGTERM"]


def test_a_handler_of_theirs_is_called_when_such_a_call_is_over():
    before = "signal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))"
    lines = list(lines_of(before, STUCK.replace("cat", "sleep 2"), signalled_at="stuck"))
    assert lines == ["ready", "stuck", "reset", "restored", "theirs"]


def test_whoever_listened_to_signals_before_still_hears_them():
    # Each thread writes its line whole: with PYTHONUNBUFFERED, print writes the end of a line by itself.
    heard = "os.write(1, signal.Signals(reader.recv(1)[0]).name.encode() + b'\\n'); signal.pause()"
    theirs = "signal.signal(signal.SIGTERM, lambda *_: None)"
    lines = lines_of(LISTEN + theirs, heard, signalled_at="ready")
    assert sorted(next(lines) for _ in range(4)) == ["SIGTERM", "ready", "reset", "restored"]
    lines.close()


def test_after_its_release_the_guard_hears_nothing_and_the_listener_before_does():
    end = "guard.release(); print(signal.set_wakeup_fd(-1) == writer.fileno(), flush=True)"
    assert list(lines_of(LISTEN, end)) == ["ready", "True"]
