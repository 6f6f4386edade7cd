"""The clock controller does not block training and returns to the default clock, in virtual time."""

import pytest
from virtual.gpu import RecordingGpu, set_clock

from perseus_ds.agent.controller import ClockController
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.protocol.job_messages import RankFailed

LATENCY_S = 0.02
A_WHILE_S = 10.0
"""Longer than all pending actions of a controller."""
BUSY = GpuBusyError("the driver did not answer in time")


class LaterEvent:
    """A point in the GPU's progress that passes when the test chooses."""

    def __init__(self, clocks, now):
        self._clocks, self._time = clocks, now
        self._passed_s = None

    def pass_now(self, late_s=0.0):
        """Pass, and notify the controller after some time [s], as on a busy node."""
        self._passed_s = self._time.now_s() - late_s
        self._clocks.wake()

    def query(self):
        return self._passed_s is not None

    def passed_s(self):
        return self._passed_s


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", lock_latency_s=LATENCY_S, timebase=now)


@pytest.fixture
def told():
    return []


@pytest.fixture
def clocks(gpu, told, now):
    controller = ClockController(gpu, told.append, timebase=now)
    yield controller
    controller.leave()


@pytest.fixture
def event(clocks, now):
    """A function that returns a new event."""
    return lambda: LaterEvent(clocks, now)


@pytest.fixture
def passed(event):
    """An event that has passed."""
    passed = event()
    passed.pass_now()
    return passed


def test_requests_return_immediately_and_equal_clocks_are_set_once(clocks, gpu, now):
    begin_s = now.now_s()
    for _ in range(5):
        clocks.request(1200)
    clocks.reset_when_idle(60.0)
    assert now.now_s() == begin_s
    assert gpu.clocks_set == []
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200]
    assert clocks.changes == 1


def test_a_request_is_skipped_if_the_next_one_is_due(clocks, gpu, now, event, passed):
    clocks.request(1200)
    now.sleep(LATENCY_S / 2)
    for clock, after in ((1110, None), (1005, passed), (990, None), (1305, event())):
        clocks.request(clock, after)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, 990]
    assert clocks.skips == 2


def test_a_controller_that_leaves_sets_no_more_clocks_and_undoes_a_call_under_way(clocks, gpu, now, event):
    begin_s = now.now_s()
    later = event()
    clocks.request(1200)
    now.sleep(LATENCY_S / 2)
    clocks.request(1305, later)
    clocks.leave()
    clocks.request(1110)
    later.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.set_at == [(1200, begin_s), (None, pytest.approx(begin_s + LATENCY_S))]


def test_a_call_that_takes_effect_and_fails_after_the_lease_has_ended_is_undone(clocks, gpu, now):
    lock = gpu.lock_clock

    def lock_and_fail(clock_mhz):
        lock(clock_mhz)
        raise BUSY

    gpu.lock_clock = lock_and_fail
    clocks.request(1200)
    now.sleep(LATENCY_S / 2)
    clocks.leave()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]


def test_a_refusal_is_reported_once_and_nothing_is_requested_after(clocks, gpu, told, now):
    set_clock(clocks, 1200)
    gpu.refusal = GpuError("the GPU is lost")
    for clock in (1110, 1050, 1005):
        set_clock(clocks, clock)
    now.sleep(A_WHILE_S)
    assert told == [RankFailed("the GPU is lost")]
    assert gpu.clocks_set == [1200, None], "the default clock is restored immediately"


def test_a_reset_that_a_failed_driver_refuses_is_tried_again(clocks, gpu, told, now):
    set_clock(clocks, 1200)
    gpu.refusal = gpu.refusal_to_reset = GpuError("no permission any more")
    clocks.request(1110)
    now.sleep(A_WHILE_S)
    gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]
    assert len(told) == 1


def test_a_driver_that_is_busy_is_asked_again_for_the_newest_clock(clocks, gpu, told, now):
    set_clock(clocks, 1200)
    gpu.refusal = BUSY
    for clock_mhz in (1305, 1110):
        clocks.request(clock_mhz)
        now.sleep(1.5)
    assert set(gpu.clocks_set[1:]) == {None}, "the default clock is kept until the driver accepts a clock"
    assert clocks.failing_s == pytest.approx(3.0)
    gpu.refusal = None
    now.sleep(A_WHILE_S)
    assert clocks.failing_s == 0.0
    assert gpu.clocks_set[-2:] == [None, 1110]
    gpu.refusal = BUSY
    clocks.request(1305)
    now.sleep(3.1)
    assert clocks.failing_s > 3.0
    clocks.request(None)
    now.sleep(A_WHILE_S)
    assert clocks.failing_s == 0.0, "default clocks need no driver"
    assert told == []


def test_a_clock_is_set_though_it_was_the_last_one_before_a_refused_change(clocks, gpu, now, passed):
    set_clock(clocks, 1110)
    gpu.refusal = gpu.refusal_to_reset = BUSY
    clocks.request_early(1410, passed, 0.0)
    clocks.request(1410)
    now.sleep(0.1)
    gpu.refusal = gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110, 1410]


def test_after_a_failure_no_clock_is_set_until_a_probe_works_and_then_the_same_one_again(clocks, gpu, now):
    set_clock(clocks, 1200)
    gpu.refusal = GpuError("unknown error")
    set_clock(clocks, 1110)
    set_clock(clocks, 1200)
    now.sleep(A_WHILE_S)
    clocks.update()
    now.sleep(A_WHILE_S)
    assert clocks.has_failed
    assert gpu.clocks_set == [1200, None, None]
    gpu.refusal = None
    clocks.update()
    now.sleep(A_WHILE_S)
    set_clock(clocks, 1200)
    assert not clocks.has_failed
    assert gpu.clocks_set[3:] == [1410, None, 1200]


def test_an_idle_clock_returns_to_the_default_and_is_requested_anew(clocks, gpu, now):
    clocks.reset_when_idle(2.0)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [], "it is the default already"
    set_clock(clocks, 1200)
    idle_s = now.now_s()
    clocks.reset_when_idle(2.0)
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(None, pytest.approx(idle_s + 2.0))]
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None, 1200]


def test_a_clock_is_not_idle_while_the_device_is_at_the_iteration_before_the_next_one(clocks, gpu, now, event):
    """The host has launched an iteration of more than two seconds, and waits for it in the next one."""
    set_clock(clocks, 1200)
    clocks.reset_when_idle(2.0)
    next_begun = event()
    clocks.request(1200, after=next_begun)
    now.sleep(10.0)
    next_begun.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200]


def test_a_change_while_the_thread_decides_how_long_to_wait_is_seen(clocks, gpu, now, monkeypatch):
    decide, read = clocks.readback.due_in_s, []

    def changes_meanwhile():
        due_in_s = decide()
        if due_in_s is None:
            clocks.watch_default_clocks()
        return due_in_s

    set_clock(clocks, 1200)
    monkeypatch.setattr(clocks.readback, "due_in_s", changes_meanwhile)
    monkeypatch.setattr(gpu, "throttle_reasons", lambda: read.append(now.now_s()) or ())
    clocks.request(None)
    now.sleep(A_WHILE_S)
    assert read


def test_an_early_request_is_due_after_its_delay_and_not_repeated_by_the_next_one(clocks, gpu, now, passed):
    set_clock(clocks, 1110)
    begin_s = passed.passed_s()
    clocks.request_early(1410, passed, 0.1)
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(1410, pytest.approx(begin_s + 0.1))]
    set_clock(clocks, 1410)
    assert gpu.clocks_set == [1110, 1410]
    assert clocks.skips == 0


def test_an_early_request_is_due_at_the_latest_when_its_instruction_ends(clocks, gpu, now, passed, event):
    set_clock(clocks, 1110)
    ended = event()
    clocks.request_early(1410, passed, 30.0)
    clocks.request(1410, after=ended)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110]
    ended_s = now.now_s()
    ended.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(1410, ended_s)]


def test_a_clock_is_read_back_while_an_early_request_waits_for_its_time(clocks, now, event):
    """Otherwise the latencies of clocks would never be known in short runs."""
    for clock in (1110, 1410) * 3:
        begun = event()
        begun.pass_now()
        clocks.request(clock)
        clocks.request_early(2520 - clock, begun, 0.08)
        now.sleep(0.08 + 2 * LATENCY_S)
    assert clocks.readback.latencies.latest_s(1410, rises=True) == pytest.approx(LATENCY_S)


def test_a_host_that_is_seconds_ahead_of_the_gpu_does_not_take_the_driver_for_silent(clocks, now, event):
    later, called_s = event(), []
    clocks.request(1110, later)
    assert clocks.call(lambda: called_s.append(now.now_s()), later)
    now.sleep(20.0)
    assert called_s == []
    assert clocks.failing_s == 0.0
    assert clocks.call(lambda: called_s.append(now.now_s()))
    later.pass_now()
    passed_s = now.now_s()
    now.sleep(A_WHILE_S)
    assert called_s == pytest.approx([passed_s + LATENCY_S] * 2)


def test_calls_are_refused_while_one_hangs(clocks, now):
    assert clocks.call(lambda: now.sleep(20.0))
    now.sleep(2.9)
    assert clocks.problem is None, "a slow call is waited for"
    now.sleep(0.1)
    assert isinstance(clocks.problem, GpuBusyError)
    assert "has not answered for 3 s" in str(clocks.problem)
    assert not clocks.call(pytest.fail)
    now.sleep(20.0)
    assert clocks.failing_s == 0.0
    assert clocks.call(lambda: None)


def test_a_gpu_that_lists_no_clocks_is_reset_by_an_agent_that_replaces_another_one(clocks, gpu, told, now, monkeypatch):
    def refuse():
        raise GpuError("no clocks")

    monkeypatch.setattr(gpu, "supported_clocks_mhz", refuse)
    clocks.take_over()
    clocks.request(None)
    now.sleep(A_WHILE_S)
    assert (gpu.clocks_set, told, clocks.has_failed) == ([None], [], False)


def test_a_clock_that_is_set_after_the_rank_has_fallen_back_is_reset_at_once(clocks, gpu, now, monkeypatch):
    lock_clock = gpu.lock_clock
    monkeypatch.setattr(gpu, "lock_clock", lambda clock_mhz: (now.sleep(5.0), lock_clock(clock_mhz)))
    clocks.request(1200)
    now.sleep(3.5)
    clocks.update()
    assert clocks.has_failed
    now.sleep(2.0)
    assert gpu.clocks_set == [1200, None]


@pytest.mark.parametrize(("late_s", "counts_s"), [(0.001, 0.0), (0.006, 0.006)])
def test_the_delay_of_a_busy_node_is_measured(clocks, now, event, late_s, counts_s):
    for number in range(5):
        later = event()
        clocks.request((1200, 1410)[number % 2], later)
        now.sleep(A_WHILE_S)
        later.pass_now(late_s)
        now.sleep(A_WHILE_S)
    assert clocks.thread_late_s == pytest.approx(counts_s, abs=1e-6)


def test_an_agent_knows_that_a_clock_may_be_locked_before_it_is(clocks, gpu):
    seen = []
    lock = gpu.lock_clock
    gpu.lock_clock = lambda clock_mhz: (seen.append(clocks.memory.may_be_locked), lock(clock_mhz))
    set_clock(clocks, 1200)
    assert seen == [True]
    set_clock(clocks, None)
    assert not clocks.memory.may_be_locked


def test_a_clock_that_the_agent_has_reset_is_set_again_when_it_is_requested(clocks, gpu):
    set_clock(clocks, 1200)
    clocks.memory.count_reset()
    gpu.reset_clock()
    set_clock(clocks, 1200)
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None, 1200]


def test_no_clock_is_set_once_the_agent_has_revoked_the_lease(clocks, gpu):
    lock = gpu.lock_clock
    gpu.lock_clock = lambda clock_mhz: (lock(clock_mhz), clocks.memory.revoke())
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None], "the call under way leaves no clock locked"
    set_clock(clocks, 1305)
    assert gpu.clocks_set == [1200, None]
