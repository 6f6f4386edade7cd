"""The default clock is restored however a process ends, and handlers of others are still called."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from perseus_ds.device.exit_guard import ExitGuard
{before}
def restore():
    guard.release()  # as the runtime does when it closes
    print("restored", flush=True)
guard = ExitGuard(restore)
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
    signal.pause()
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
    program = PROGRAM.format(before=before, end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == returncode, done.stderr
    assert done.stdout.split() == ["ready", *printed]
