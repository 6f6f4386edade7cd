"""Time for which an agent tries to reset a clock and waits for the driver, in virtual time."""

import math

import pytest
from virtual.gpu import RecordingGpu
from virtual.time import VirtualTime

from perseus_ds.agent.gpu_driver import GpuDriver
from perseus_ds.agent.gpu_records import GpuRecord
from perseus_ds.agent.process import Agent
from perseus_ds.errors import GpuError


class LeftGpu:
    """A GPU with a driver that works from some time on [s], or hangs for some time [s]."""

    def __init__(self, time, works_from_s=0.0, hangs_s=0.0):
        self.time = time
        self.works_from_s = works_from_s
        self.hangs_s = hangs_s
        self.reset_at_s = None

    def reset_clock(self):
        self.time.sleep(self.hangs_s)
        if self.time.seconds < self.works_from_s:
            raise (GpuError if self.time.seconds < 30.0 else RuntimeError)("the driver is not well")
        self.reset_at_s = self.time.seconds


@pytest.fixture
def time():
    return VirtualTime(0.0)


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSEUS_RUNTIME_DIR", str(tmp_path))
    record = GpuRecord("nvml:GPU-1", "this")
    record.set_locked(True)
    yield record
    record.close()


@pytest.mark.parametrize(
    ("works_from_s", "at_s", "until_s"), [(0.0, 0.1, 1.0), (60.0, 60.5, 62.0), (math.inf, None, 132.0)]
)
def test_a_driver_that_refuses_is_called_for_two_minutes(record, time, works_from_s, at_s, until_s):
    gpu = LeftGpu(time, works_from_s)
    driver = GpuDriver(record, lambda: gpu, lambda: None, time)
    driver.reset()
    while not (driver.is_reset or driver.has_given_up):
        time.sleep(0.1)
    assert driver.is_reset == (at_s is not None)
    assert (gpu.reset_at_s is None) if at_s is None else (gpu.reset_at_s <= at_s)
    assert time.seconds < until_s


def test_a_driver_that_hangs_is_waited_for_two_minutes(record, time):
    driver = GpuDriver(record, lambda: LeftGpu(time, hangs_s=1000.0), lambda: None, time)
    driver.reset()
    while not driver.has_given_up:
        time.sleep(0.1)
    assert 120.0 <= time.seconds < 121.0


def test_a_gpu_that_another_job_left_locked_is_reset_before_it_is_used(record, time):
    record.close()
    left, gpu = GpuRecord("nvml:GPU-1", "another"), LeftGpu(time)
    driver = GpuDriver(left, lambda: gpu, lambda: None, time)
    assert not driver.is_reset
    time.sleep(0.1)
    assert driver.is_reset
    assert gpu.reset_at_s is not None


def test_a_gpu_that_cannot_be_opened_is_a_problem_in_words(record, time):
    def refuse():
        raise GpuError("no such GPU")

    driver = GpuDriver(record, refuse, lambda: None, time)
    time.sleep(0.1)
    assert driver.gpu is None
    assert str(driver.error) == "no such GPU"


def test_a_permission_that_cannot_be_checked_is_an_error_also_after_a_description_without_the_check(record, time):
    gpu = RecordingGpu.named("a100-sxm", timebase=time)
    driver = GpuDriver(record, lambda: gpu, lambda: None, time)
    driver.describe(checks_permission=False)
    time.sleep(1.0)
    assert driver.is_described(False)
    assert not driver.is_described(True)
    gpu.check_lock_permission = lambda: 1 / 0
    driver.describe(checks_permission=True)
    time.sleep(1.0)
    assert driver.is_described(True)
    assert isinstance(driver.description_error, ZeroDivisionError)


def test_the_gpu_of_an_agent_that_died_is_reset_if_no_rank_requests_it_again_within_ten_seconds(record, time):
    record.close()
    gpu = RecordingGpu.named("a100-sxm", timebase=time)
    agent = Agent("this", open_gpu=lambda address: gpu, timebase=time)
    while time.seconds < 11.0:
        time.sleep(0.1)
        agent.step()
    assert gpu.set_at == [(None, pytest.approx(10.1))]
