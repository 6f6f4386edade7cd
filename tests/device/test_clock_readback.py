"""The clock is read back through the real NVML binding: clocks that the GPU does not reach are reported, with why."""

import pytest
from stub_nvml.controller import StubNvml
from stub_nvml.fixtures import StubTime

from perseus_ds.device import clock_readback
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.gpu import nvml
from perseus_ds.device.gpu.nvml import NvmlGpu

POWER_CAP, IDLE = 0x4, 0x1


@pytest.mark.parametrize(
    ("reasons", "expected"), [(POWER_CAP, [(1410, 1305, ("sw_power_cap",))]), (0, [(1410, 1305, ())]), (IDLE, [])]
)
def test_a_clock_that_is_not_reached_is_reported_once(
    stub_nvml_here: StubNvml, stub_time: StubTime, reasons, expected
) -> None:
    stub = stub_nvml_here.gpus[0]
    stub.limit_clock_mhz, stub.throttle_reasons = 1305, reasons
    gpu = NvmlGpu(0)
    refusals, errors = [], []
    clocks = ClockController(gpu, errors.append, refusals.append, timebase=stub_time)
    for clock in (1410, 1200, 1410):
        clocks.set_and_wait(clock)
        stub_time.sleep(2.0)
    clocks.close()
    gpu.close()
    assert [(r.clock_mhz, r.reached_mhz, r.reasons) for r in refusals] == expected
    assert errors == []


@pytest.mark.parametrize(("reasons", "expected"), [(POWER_CAP, [(None, ("sw_power_cap",))]), (0, []), (IDLE, [])])
def test_a_limit_at_default_clocks_is_reported_once_and_looked_for_for_a_minute(
    stub_nvml_here: StubNvml, stub_time: StubTime, reasons, expected
) -> None:
    stub = stub_nvml_here.gpus[0]
    gpu = NvmlGpu(0)
    refusals, errors = [], []
    clocks = ClockController(gpu, errors.append, refusals.append, timebase=stub_time)
    stub_time.sleep(5.0)
    assert stub.calls("clock_info") == 0, "nobody asked for it"
    clocks.watch_default_clocks()
    stub_time.sleep(5.0)
    stub.throttle_reasons = reasons
    stub_time.sleep(200.0)
    clocks.close()
    gpu.close()
    assert [(r.clock_mhz, r.reasons) for r in refusals] == expected
    assert errors == []
    assert stub.calls("clock_info") == (11 if expected else 120)


def test_reasons_that_limit_nothing_are_reasons_of_the_driver():
    assert set(nvml._THROTTLE_REASONS.values()) > clock_readback._NO_LIMITS


@pytest.mark.parametrize(("reasons", "expected"), [(POWER_CAP, 1305), (IDLE, None)], ids=["busy", "idle"])
def test_the_default_clock_is_that_of_a_busy_gpu(stub_nvml_here: StubNvml, stub_time: StubTime, reasons, expected):
    stub = stub_nvml_here.gpus[0]
    stub.limit_clock_mhz, stub.throttle_reasons = 1305, reasons
    gpu = NvmlGpu(0)
    clocks = ClockController(gpu, lambda error: None, timebase=stub_time)
    assert clocks.readback.default_mhz is None, "it was not read"
    clocks.watch_default_clocks()
    stub_time.sleep(5.0)
    assert clocks.readback.default_mhz == expected
    clocks.close()
    gpu.close()


@pytest.mark.parametrize(("reasons", "expected"), [(0, [(None, 1200, ())]), (IDLE, [])], ids=["busy", "idle"])
def test_default_clocks_below_the_highest_without_a_limit_are_reported_once(
    stub_nvml_here: StubNvml, stub_time: StubTime, reasons, expected
) -> None:
    """As where somebody has locked the clock, of which the driver says nothing."""
    stub = stub_nvml_here.gpus[0]
    gpu = NvmlGpu(0)
    refusals, errors = [], []
    clocks = ClockController(gpu, errors.append, refusals.append, timebase=stub_time)
    clocks.watch_default_clocks()
    stub.throttle_reasons = reasons
    for _ in range(3):  # a dip is no lock
        stub.limit_clock_mhz = 1200
        stub_time.sleep(1.0)
        stub.limit_clock_mhz = 0
        stub_time.sleep(1.0)
    assert refusals == []
    stub.limit_clock_mhz = 1200
    stub_time.sleep(100.0)
    clocks.close()
    gpu.close()
    assert [(r.clock_mhz, r.reached_mhz, r.reasons) for r in refusals] == expected
    assert errors == []


def test_the_latency_includes_what_the_clock_takes_after_the_call(
    stub_nvml_here: StubNvml, stub_time: StubTime
) -> None:
    stub = stub_nvml_here.gpus[0]
    stub.lock_latency_s, stub.settle_s = 0.010, 0.020
    gpu = NvmlGpu(0)
    clocks = ClockController(gpu, [].append, [].append, timebase=stub_time)
    for clock in (1410, 1200, 1410, 1200):
        clocks.set_and_wait(clock)
        stub_time.sleep(0.06)
    assert clocks.latency_s == pytest.approx(0.030, abs=0.0011)  # the clock is read every millisecond
    clocks.close()
    gpu.close()


def test_a_clock_that_cannot_be_read_does_no_harm(stub_nvml_here: StubNvml, stub_time: StubTime) -> None:
    stub = stub_nvml_here.gpus[0]
    stub.fail("clock_info", "not_supported")
    gpu = NvmlGpu(0)
    refusals, errors = [], []
    clocks = ClockController(gpu, errors.append, refusals.append, timebase=stub_time)
    for clock in (1410, 1200):
        clocks.set_and_wait(clock)
        stub_time.sleep(1.0)
    assert stub.calls("clock_info") == 2, "it is tried once for each clock"
    assert stub.locked_clock_mhz == 1200
    clocks.close()
    gpu.close()
    assert (refusals, errors) == ([], [])
