"""The clock controller never makes the training thread wait, and always restores the default."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from perseus_ds.clocks import ClockController
from perseus_ds.errors import GpuError
from perseus_ds.gpu.simulated import DEVICES, SimulatedGpu


class RecordingGpu(SimulatedGpu):
    """A simulated GPU that notes what was asked of it."""

    def __init__(self, **settings):
        super().__init__(DEVICES["a100-sxm"], **settings)
        self.asked = []
        self.refuse_after = None

    def lock_clock(self, clock_mhz):
        if self.refuse_after is not None and len(self.asked) >= self.refuse_after:
            raise GpuError("the GPU is lost")
        super().lock_clock(clock_mhz)
        self.asked.append(clock_mhz)

    def reset_clock(self):
        super().reset_clock()
        self.asked.append(None)


class LaterMoment:
    """A point in the GPU's progress that a test decides on."""

    def __init__(self):
        self.passed = threading.Event()

    def synchronize(self):
        self.passed.wait(10)

    def query(self):
        return self.passed.is_set()


@pytest.fixture
def gpu():
    return RecordingGpu(lock_latency_s=0.02)


@pytest.fixture
def errors():
    return []


@pytest.fixture
def clocks(gpu, errors):
    controller = ClockController(gpu, errors.append)
    yield controller
    controller.close()


def test_requests_return_at_once_and_are_applied(clocks, gpu):
    begin_s = time.perf_counter()
    clocks.request(1200)
    assert time.perf_counter() - begin_s < gpu._lock_latency_s / 2
    clocks.set_and_wait(1110)
    assert gpu.asked[-1] == 1110


def test_equal_clocks_are_set_once(clocks, gpu):
    for _ in range(5):
        clocks.set_and_wait(1200)
    assert gpu.asked == [1200]
    assert clocks.changes == 1


def test_a_request_that_was_overtaken_is_skipped_and_counted(clocks, gpu):
    clocks.request(1200)
    for clock in (1110, 1005, 990):
        clocks.request(clock)
    clocks.set_and_wait(975)
    assert gpu.asked[-1] == 975
    assert clocks.overtaken >= 2
    assert clocks.changes + clocks.overtaken == 5


def test_a_clock_waits_for_the_gpus_own_progress(clocks, gpu):
    moment = LaterMoment()
    clocks.request(1200)
    clocks.request(1110, after=moment)
    time.sleep(0.1)
    assert gpu.asked == [1200]
    moment.passed.set()
    deadline = time.monotonic() + 5
    while gpu.asked != [1200, 1110] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert gpu.asked == [1200, 1110]


def test_closing_restores_the_default_clock_once(clocks, gpu):
    clocks.set_and_wait(1200)
    clocks.close()
    clocks.close()
    assert gpu.asked == [1200, None]
    assert gpu.clock_mhz() == 1410


def test_closing_restores_nothing_where_nothing_was_changed(clocks, gpu):
    clocks.close()
    assert gpu.asked == []


def test_a_refusal_is_told_once_and_nothing_is_requested_after(clocks, gpu, errors):
    gpu.refuse_after = 1
    clocks.set_and_wait(1200)
    for clock in (1110, 1050):
        with pytest.raises(GpuError, match="cannot be set any more"):
            clocks.set_and_wait(clock)
    clocks.request(1005)
    time.sleep(0.1)
    assert [str(error) for error in errors] == ["the GPU is lost"]
    assert gpu.asked == [1200]
    clocks.close()
    assert gpu.asked == [1200, None]


PROGRAM = """
import os, signal, sys, time
from perseus_ds.clocks import ExitGuard
{before}
guard = ExitGuard(lambda: print("restored", flush=True))
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("before", "end", "returncode", "printed"),
    [
        ("", "", 0, ["restored"]),
        ("", "raise ValueError", 1, ["restored"]),
        ("", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, ["restored"]),
        ("", "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT, ["restored", "restored"]),
        (
            "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), os._exit(7)))",
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
            7,
            ["restored", "theirs"],
        ),
        ("", "guard.release()", 0, []),
    ],
)
def test_the_exit_guard_acts_however_the_process_ends(before, end, returncode, printed):
    program = PROGRAM.format(before=before, end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == returncode, done.stderr
    assert done.stdout.split() == ["ready", *printed]
