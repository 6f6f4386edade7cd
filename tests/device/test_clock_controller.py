"""The clock controller never makes the training thread wait, and always restores the default."""

import dataclasses
import statistics
import threading
import time
from contextlib import contextmanager

import pytest

from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.gpu.simulated import DEVICES, SimulatedGpu
from perseus_ds.errors import GpuError


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

    @contextmanager
    def computing(self):
        """An instruction that takes as long as what is done meanwhile."""
        self.begin_work()
        yield
        self.finish_work(0.0)


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
def refusals():
    return []


@pytest.fixture
def clocks(gpu, errors, refusals):
    controller = ClockController(gpu, errors.append, refusals.append)
    yield controller
    controller.close()


def comes(condition, within_s=5.0):
    """Wait until something is so; returns whether it came to be in time."""
    deadline_s = time.monotonic() + within_s
    while not (so := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return so


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
    assert comes(lambda: gpu.asked == [1200, 1110])


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
    assert gpu.asked == [1200, None], "the default clock is restored at once"
    clocks.close()
    assert gpu.asked == [1200, None]


def test_an_idle_clock_returns_to_the_default_and_is_requested_anew(clocks, gpu):
    clocks.set_and_wait(1200)
    begin_s = time.monotonic()
    clocks.reset_when_idle(0.1)
    assert comes(lambda: gpu.asked == [1200, None])
    assert time.monotonic() - begin_s >= 0.1
    clocks.set_and_wait(1200)
    assert gpu.asked == [1200, None, 1200]


def test_a_clock_that_is_requested_in_time_is_not_idle(clocks, gpu):
    clocks.set_and_wait(1200)
    clocks.reset_when_idle(0.1)
    clocks.set_and_wait(1200)
    time.sleep(0.2)
    assert gpu.asked == [1200]


def test_a_clock_at_its_default_is_left_alone_when_idle(clocks, gpu):
    clocks.reset_when_idle(0.0)
    time.sleep(0.1)
    assert gpu.asked == []


def test_the_worker_chooses_its_device_before_it_asks_for_any_moment(gpu, errors):
    done = []

    class NotingMoment(LaterMoment):
        def query(self):
            done.append(("query", threading.current_thread().name))
            return True

    clocks = ClockController(
        gpu, errors.append, on_start=lambda: done.append(("start", threading.current_thread().name))
    )
    clocks.request(1200, after=NotingMoment())
    clocks.set_and_wait(1110)
    clocks.close()
    assert done[:2] == [("start", "perseus-clocks"), ("query", "perseus-clocks")]


def test_an_early_request_waits_for_its_time_and_not_for_the_next_one(clocks, gpu):
    clocks.set_and_wait(1110)
    begin_s = time.monotonic()
    clocks.request_early(1410, None, 0.1)
    time.sleep(0.05)
    assert gpu.asked == [1110]
    assert comes(lambda: gpu.asked == [1110, 1410])
    assert time.monotonic() - begin_s >= 0.1
    clocks.request(1410)
    clocks.set_and_wait(1410)
    assert gpu.asked == [1110, 1410]
    assert clocks.overtaken == 0


@pytest.mark.parametrize("on_the_gpu", [False, True])
def test_an_early_request_does_not_outlive_an_instruction_that_ends_before_it(clocks, gpu, on_the_gpu):
    """Whether the instruction's end is known by a request that comes then, or by a moment of the GPU's."""
    begun, ended = LaterMoment(), LaterMoment()
    clocks.set_and_wait(1110)
    clocks.request_early(1410, begun if on_the_gpu else None, 30.0)
    if on_the_gpu:
        clocks.request(1410, after=ended)
        begun.passed.set()
    time.sleep(0.05)
    assert gpu.asked == [1110]
    if on_the_gpu:
        ended.passed.set()
    else:
        clocks.request(1410)
    assert comes(lambda: gpu.asked == [1110, 1410])


def test_an_early_request_counts_from_the_moment_that_the_gpu_begins(clocks, gpu):
    begun, ended = LaterMoment(), LaterMoment()
    clocks.set_and_wait(1110)
    clocks.request_early(1410, begun, 0.1)
    clocks.request(1410, after=ended)
    time.sleep(0.2)
    assert gpu.asked == [1110]
    begin_s = time.monotonic()
    begun.passed.set()
    assert comes(lambda: gpu.asked == [1110, 1410])
    assert time.monotonic() - begin_s >= 0.1
    ended.passed.set()


def test_the_latency_is_measured_once_there_are_enough_changes(clocks, gpu):
    clocks.set_and_wait(1110)
    assert clocks.latency_s == 0.0
    for clock in (1410, 1110, 1410, 1110):
        clocks.set_and_wait(clock)
        time.sleep(0.03)
    assert clocks.latency_s == pytest.approx(0.02, rel=0.5)


def test_a_clock_that_the_power_limit_keeps_down_is_told_once_with_the_reason(clocks, gpu, refusals):
    gpu.model = dataclasses.replace(gpu.model, power_limit_w=300.0)
    with gpu.computing():
        for clock in (1410, 900, 1410):
            clocks.set_and_wait(clock)
            time.sleep(0.2 if not refusals else 0.6)
    (refusal,) = refusals
    assert refusal.clock_mhz == 1410
    assert refusal.reached_mhz == round(gpu.model.reached_clock_mhz(1410)) < 1410
    assert refusal.reasons == ("sw_power_cap",)


def test_reading_back_does_not_delay_requests(clocks, gpu):
    read = []

    def slow_reading():
        time.sleep(0.002)
        read.append(time.monotonic())
        return 0

    gpu.clock_mhz = slow_reading
    waited_s = []
    for clock in (1110, 1200) * 20:
        begin_s = time.monotonic()
        clocks.set_and_wait(clock)
        waited_s.append(time.monotonic() - begin_s)
        time.sleep(0.005)
    assert read
    assert statistics.median(waited_s) < gpu._lock_latency_s + 0.004
