"""How long the guardian tries, and waits, in a time that the test moves."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from stub_nvml.controller import StubNvml

from perseus_ds.device import local_socket
from perseus_ds.device.gpu.nvml import NvmlGpu
from perseus_ds.device.guarded_ranks import GuardedRanks
from perseus_ds.device.guardian_client import Guardian, socket_name
from perseus_ds.device.guardian_daemon import guard, restore
from perseus_ds.device.guardian_process import names_of
from perseus_ds.errors import GpuError

GENEROUS_S = 60.0
"""Only ends a test that hangs."""


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
    with local_socket.listen(address) as listener:
        thread = threading.Thread(target=guard, args=(listener, GuardedRanks(now), now), daemon=True)
        thread.start()
        yield address, thread
        now.seconds += 1000.0
        thread.join(GENEROUS_S)


def test_a_guardian_that_no_rank_reaches_ends(serving, now):
    _, thread = serving
    assert now.was_asked.wait(GENEROUS_S)
    now.seconds += 10.1
    thread.join(GENEROUS_S)
    assert not thread.is_alive()


def test_a_driver_that_hangs_keeps_the_guardian_for_ten_seconds_only(serving, now, stub_nvml_here: StubNvml) -> None:
    address, thread = serving
    gpu = stub_nvml_here.gpus[0]
    connection = local_socket.connect(address, GENEROUS_S)
    registered = local_socket.exchange(connection, {"rank": "0", "gpus": [f"nvml:{gpu.uuid.decode()}"]})
    assert registered == {"error": None, "pid": os.getpid()}
    gpu.hang("reset_locked")
    connection.close()
    while not gpu.calls("reset_locked"):
        threading.Event().wait(0.01)
    assert thread.is_alive()
    now.seconds += 10.1
    thread.join(GENEROUS_S)
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
    connection = local_socket.connect(address, GENEROUS_S)
    local_socket.exchange(connection, {"rank": "0", "gpus": [f"nvml:{gpu.uuid.decode()}"]})
    gpu.fail("reset_locked", "unknown")
    sleep = now.sleep

    def sleep_until_it_works(seconds):
        sleep(seconds)
        if now.seconds > 60.0:
            gpu.fail("reset_locked", "none")

    now.sleep = sleep_until_it_works
    connection.close()
    thread.join(GENEROUS_S)
    assert not thread.is_alive()
    assert gpu.locked_clock_mhz == 0
    assert 60.0 < now.seconds < 80.0 + 2 * call_s


def test_a_guardian_outlives_a_lack_of_files_and_of_threads(now, monkeypatch, tmp_path):
    address = f"\0perseus-ds-test/{tmp_path}"
    failures = iter([OSError(24, "too many open files"), RuntimeError("can't start new thread")])
    with local_socket.listen(address) as listener:

        class Scarce:
            """A listener that gets no connection at first, and then one that no thread serves."""

            settimeout = listener.settimeout

            def accept(self):
                problem = next(failures, None)
                if isinstance(problem, OSError):
                    raise problem
                accepted = listener.accept()
                if problem is not None:
                    monkeypatch.setattr(threading.Thread, "start", fail_once(problem))
                return accepted

        def fail_once(problem):
            start = threading.Thread.start

            def fail(thread):
                monkeypatch.setattr(threading.Thread, "start", start)
                raise problem

            return fail

        ranks = GuardedRanks(now)
        now.sleep = lambda seconds: None
        thread = threading.Thread(target=guard, args=(Scarce(), ranks, now), daemon=True)
        thread.start()
        refused = local_socket.connect(address, GENEROUS_S)
        assert refused.recv(1) == b""
        served = local_socket.connect(address, GENEROUS_S)
        assert local_socket.exchange(served, {"rank": "0", "gpus": []})["error"] is None
        served.close()
        refused.close()
        thread.join(GENEROUS_S)
        assert not thread.is_alive()


def test_ranks_give_up_when_no_guardian_answers(now, tmp_path: Path) -> None:
    job = str(tmp_path)

    def hang_up(listener: socket.socket) -> None:
        try:
            while True:
                listener.accept()[0].close()
        except OSError:
            pass

    with contextlib.ExitStack() as listening:
        for name in names_of(socket_name(job)):
            listener = listening.enter_context(local_socket.listen(name))
            server = threading.Thread(target=hang_up, args=[listener], daemon=True)
            server.start()
            listening.callback(server.join, GENEROUS_S)
            listening.callback(listener.shutdown, socket.SHUT_RDWR)
        with pytest.raises(GpuError, match=r"No guardian answered within 30 s\. Clocks may stay locked"):
            Guardian.start(["nvml:GPU-0"], job, now)
    assert now.seconds >= 30.0
