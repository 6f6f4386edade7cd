"""Clocks that are not reached, latencies and limits, read through the real NVML binding."""

import math
from types import SimpleNamespace

import pytest
from stub_nvml.controller import StubNvml
from stub_nvml.fixtures import StubTime
from virtual.agent import actor_of

from perseus_ds.agent.actor import ChangedFromOutside
from perseus_ds.agent.readback import LimitWatch
from perseus_ds.gpu.nvml import NvmlGpu

POWER_CAP, IDLE, SW_THERMAL = 0x4, 0x1, 0x20
NO_LIMITS = 0x2, 0x10, 0x100
"""Settings of application clocks, synchronized boards and display clocks do not limit the clock."""


@pytest.fixture
def node(stub_nvml_here: StubNvml, stub_time: StubTime):
    """A stub GPU, its actor, and the actor's reports."""
    refusals = []
    gpu = NvmlGpu(0)
    clocks = actor_of(gpu, stub_time)
    clocks.listeners.append(refusals.append)
    limits = clocks.readback.limits
    yield SimpleNamespace(stub=stub_nvml_here.gpus[0], time=stub_time, clocks=clocks, refusals=refusals, limits=limits)
    clocks.close()
    gpu.close()


def refused(node):
    return [(refusal.clock_mhz, refusal.reached_mhz, refusal.reasons) for refusal in node.refusals]


@pytest.mark.parametrize(
    ("reasons", "expected"), [(POWER_CAP, [(1410, 1305, ("sw_power_cap",))]), (0, [(1410, 1305, ())]), (IDLE, [])]
)
def test_a_clock_that_is_not_reached_is_reported_once(node, reasons, expected):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1305, reasons
    for clock in (1410, 1200, 1410):
        node.clocks.request(clock)
        node.time.sleep(2.0)
    assert refused(node) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [(POWER_CAP, [(None, 1410, ("sw_power_cap",))]), *((reason, []) for reason in (0, IDLE, *NO_LIMITS))],
)
def test_a_limit_at_default_clocks_is_reported_once_and_looked_for_for_a_minute(node, reasons, expected):
    node.time.sleep(5.0)
    assert node.stub.calls("clock_info") == 0, "it was not requested"
    node.clocks.watch_default_clocks()
    node.time.sleep(5.0)
    node.stub.throttle_reasons = reasons
    node.time.sleep(200.0)
    assert refused(node) == expected
    assert node.stub.calls("clock_info") == (11 if expected else 120)


@pytest.mark.parametrize(("reasons", "expected"), [(POWER_CAP, 1305), (IDLE, None)], ids=["busy", "idle"])
def test_the_default_clock_is_that_of_a_busy_gpu(node, reasons, expected):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1305, reasons
    assert node.clocks.readback.default_mhz is None, "it was not read"
    node.clocks.watch_default_clocks()
    node.time.sleep(5.0)
    assert node.clocks.readback.default_mhz == expected


@pytest.mark.parametrize(("reasons", "expected"), [(0, [(None, 1200, ())]), (IDLE, [])], ids=["busy", "idle"])
def test_default_clocks_below_the_highest_without_a_limit_are_reported_once(node, reasons, expected):
    """For example, another user has locked the clock, which the driver does not report."""
    node.clocks.watch_default_clocks()
    node.stub.throttle_reasons = reasons
    for _ in range(3):  # a short drop is not a lock
        node.stub.limit_clock_mhz = 1200
        node.time.sleep(1.0)
        node.stub.limit_clock_mhz = 0
        node.time.sleep(1.0)
    assert node.refusals == []
    node.stub.limit_clock_mhz = 1200
    node.time.sleep(100.0)
    assert refused(node) == expected


@pytest.mark.parametrize("settle_s", [0.020, 0.070, 0.5])
def test_the_latency_includes_what_the_clock_takes_after_the_call(node, settle_s):
    node.stub.lock_latency_s, node.stub.settle_s = 0.010, settle_s
    for clock in (1410, 1200, 1410, 1200):
        node.clocks.request(clock)
        node.time.sleep(2 * settle_s + 0.02)
    for clock, rises in ((1410, True), (1200, False)):
        # The clock is read every millisecond, later at longer intervals.
        found_s = node.clocks.readback.latencies.latest_s(clock, rises=rises)
        assert found_s == pytest.approx(0.010 + settle_s, rel=0.06, abs=0.0011)
    assert node.refusals == []


def test_each_clock_has_its_own_latency(node):
    """Neighbouring clocks that were rarely requested have the same latency."""
    for _ in range(4):
        for clock, settle_s in ((1410, 0.020), (1200, 0.3)):
            node.stub.settle_s = settle_s
            node.clocks.request(clock)
            node.time.sleep(1.0)
    latencies = node.clocks.readback.latencies
    assert latencies.latest_s(1410, rises=True) == pytest.approx(0.02, abs=0.0011)
    assert latencies.latest_s(1200, rises=False) == pytest.approx(0.3, rel=0.06)
    assert latencies.latest_s(1395, rises=True) == latencies.latest_s(1410, rises=True)
    assert latencies.dwell_s(1200) == 2 * latencies.latest_s(1200, rises=False)


@pytest.mark.parametrize(("settle_s", "every_s", "latency_s"), [(3.0, 5.0, 1.0), (0.3, 0.1, 0.1)])
def test_a_clock_that_has_not_come_within_a_second_or_before_the_next_is_at_least_so_late(
    node, settle_s, every_s, latency_s
):
    node.stub.settle_s = settle_s
    for clock in (1410, 1200, 1410, 1200, 1410):
        node.clocks.request(clock)
        node.time.sleep(every_s)
    assert node.clocks.readback.latencies.latest_s(1200, rises=False) == pytest.approx(latency_s, rel=0.1)


def test_a_clock_that_a_limit_keeps_the_gpu_from_has_no_latency(node):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1305, POWER_CAP
    for clock in (1200, 1410) * 4:
        node.clocks.request(clock)
        node.time.sleep(2.0)
    assert node.clocks.readback.latencies.latest_s(1410, rises=True) < 0.1


def test_a_clock_that_cannot_be_read_does_no_harm(node):
    node.stub.fail("clock_info", "not_supported")
    for clock in (1410, 1200):
        node.clocks.request(clock)
        node.time.sleep(1.0)
    assert node.stub.calls("clock_info") == 2, "it is tried once for each clock"
    assert node.stub.locked_clock_mhz == 1200
    assert node.refusals == []


@pytest.mark.parametrize(
    ("enforced_w", "limits_w", "profiled_w"),
    [
        ((400.0, 450.0, 396.0, 300.0, 400.0), (math.inf, math.inf, math.inf, 300.0, math.inf), None),
        ((300.0, 302.0, 305.0, 301.0, 310.0, 299.9), (300.0, 300.0, 300.0, 300.0, 308.0, 296.0), None),
        ((395.0, 393.0, 395.0, 397.0), (math.inf, 392.0, 392.0, math.inf), None),
        ((400.0,), (400.0,), 500.0),
        ((None, 300.0), (math.inf, math.inf), None),
    ],
    ids=["below the first one", "varies a little", "about the threshold", "against a profile", "cannot be read"],
)
def test_a_power_limit_below_the_first_or_the_profiled_one_counts(node, enforced_w, limits_w, profiled_w):
    node.stub.enforced_power_limit_w = 400.0
    node.limits.read()
    if profiled_w is not None:
        node.limits.profiled_w = profiled_w
    found_w = []
    for limit_w in enforced_w:
        if limit_w is None:
            node.stub.fail("enforced_power_limit", "not_supported")
            node.stub.fail("power_limit", "not_supported")
        else:
            node.stub.enforced_power_limit_w = limit_w
        node.limits.read()
        found_w.append(node.limits.power_w)
    assert tuple(found_w) == limits_w


@pytest.mark.parametrize(("reasons", "limit_mhz"), [(SW_THERMAL, 1200), (POWER_CAP, math.inf), (0, math.inf)])
def test_heat_limits_the_clock_until_a_higher_one_is_reached(node, reasons, limit_mhz):
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 1210, reasons
    node.clocks.request(1410)
    node.time.sleep(2.0)
    assert node.limits.clock_mhz == limit_mhz
    node.stub.limit_clock_mhz, node.stub.throttle_reasons = 0, 0
    node.time.sleep(2.0)
    assert node.limits.clock_mhz == math.inf


def test_a_slowdown_is_assumed_to_end_after_a_time_that_doubles_when_this_is_wrong(stub_time):
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


def test_a_clock_that_is_reset_from_outside_is_set_again_within_a_second_and_left_after_three_times(node):
    node.clocks.request(1200)
    node.time.sleep(5.0)
    for _ in range(3):
        node.stub.locked_clock_mhz = 0
        node.time.sleep(1.1)
        assert node.stub.locked_clock_mhz == 1200
    node.stub.locked_clock_mhz = 0
    node.time.sleep(60.0)
    assert node.stub.locked_clock_mhz == 0
    assert node.refusals == [ChangedFromOutside(1200, 1410, 4)]
    node.clocks.request(1305)
    node.time.sleep(1.0)
    assert node.stub.locked_clock_mhz == 1305, "the plan changes it as before"


def test_an_operator_who_resets_a_clock_once_an_hour_is_never_left_alone(node):
    node.clocks.request(1200)
    for _ in range(8):
        node.time.sleep(3600.0)
        node.stub.locked_clock_mhz = 0
    node.time.sleep(1.1)
    assert node.stub.locked_clock_mhz == 1200
    assert node.refusals == []


def test_the_higher_clock_of_an_idle_gpu_is_no_change_from_outside(node):
    node.clocks.request(1200)
    node.time.sleep(5.0)
    node.stub.throttle_reasons = IDLE
    node.stub.locked_clock_mhz = 0
    node.time.sleep(5.0)
    assert node.stub.locked_clock_mhz == 0
