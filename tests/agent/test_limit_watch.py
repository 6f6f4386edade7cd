"""A lowered power limit, and a GPU slowed down by heat, as reported by the real NVML binding."""

import math
from types import SimpleNamespace

import pytest
from stub_nvml.controller import StubNvml
from stub_nvml.fixtures import StubTime

from perseus_ds.agent.controller import ClockController
from perseus_ds.agent.readback import LimitWatch
from perseus_ds.gpu.nvml import NvmlGpu

POWER_CAP, SW_THERMAL = 0x4, 0x20


@pytest.fixture
def node(stub_nvml_here: StubNvml, stub_time: StubTime):
    """A stub GPU with a limit of 400 W, the watch of its limits and the controller of its clock."""
    stub = stub_nvml_here.gpus[0]
    stub.enforced_power_limit_w = 400.0
    gpu = NvmlGpu(0)
    clocks = ClockController(gpu, lambda error: None, timebase=stub_time)
    clocks.readback.limits.read()
    yield SimpleNamespace(stub=stub, time=stub_time, clocks=clocks, limits=clocks.readback.limits)
    clocks.close()
    gpu.close()


def power_limits(node, *enforced_w):
    found = []
    for limit_w in enforced_w:
        node.stub.enforced_power_limit_w = limit_w
        node.limits.read()
        found.append(node.limits.power_w)
    return found


def test_only_a_limit_below_the_first_one_counts(node):
    assert power_limits(node, 400.0, 450.0, 396.0, 300.0, 400.0) == [math.inf, math.inf, math.inf, 300.0, math.inf]


def test_a_limit_that_varies_a_little_stays_what_it_was(node):
    assert power_limits(node, 300.0, 302.0, 305.0, 301.0, 310.0, 299.9) == [300.0] * 4 + [308.0, 296.0]
    assert power_limits(node, 395.0, 393.0, 395.0, 397.0) == [392.0] * 3 + [math.inf]


def test_a_limit_counts_against_what_a_profile_records(node):
    node.limits.profiled_w = 500.0
    assert power_limits(node, 400.0) == [400.0]


def test_a_limit_that_cannot_be_read_is_none(node):
    node.stub.fail("enforced_power_limit", "not_supported")
    node.stub.fail("power_limit", "not_supported")
    assert power_limits(node, 300.0) == [math.inf]


@pytest.mark.parametrize(("reasons", "limit_mhz"), [(SW_THERMAL, 1200), (POWER_CAP, math.inf), (0, math.inf)])
def test_a_clock_counts_where_heat_holds_it_down(node, reasons, limit_mhz):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1210, reasons
    node.clocks.request(1410)
    node.time.sleep(2.0)
    assert node.limits.clock_mhz == limit_mhz


def test_heat_is_over_once_a_higher_clock_is_reached(node):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1210, SW_THERMAL
    node.clocks.request(1410)
    node.time.sleep(2.0)
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 0, 0
    node.time.sleep(2.0)
    assert node.limits.clock_mhz == math.inf


def test_without_a_higher_clock_heat_counts_as_over_after_a_while_and_longer_each_time_that_this_is_wrong(stub_time):
    watch = LimitWatch(SimpleNamespace(power_limit_w=lambda: None), stub_time)
    lasted_s = []
    for _ in range(4):
        watch.reached(1210, ("sw_thermal_slowdown",))
        begin_s = stub_time.now_s()
        while watch.clock_mhz == 1200:
            stub_time.sleep(1.0)
            watch.read()
        lasted_s.append(round(stub_time.now_s() - begin_s))
    assert lasted_s == [31, 61, 121, 241]
