"""The clock controller does not block training and always restores the default clock, in virtual time."""

import itertools

import pytest
from virtual.gpu import RecordingGpu, set_clock

from perseus_ds.agent.controller import ClockController
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.timebase import Flag, RealTime

LATENCY_S = 0.02
A_WHILE_S = 10.0
"""Longer than all pending actions of a controller."""


class LaterEvent:
    """A point in the GPU's progress that passes when the test chooses."""

    def __init__(self, now):
        self.passed = Flag(now)
        self._time = now
        self._passed_s = None

    def pass_now(self):
        self._passed_s = self._time.now_s()
        self.passed.set()

    def passed_s(self):
        return self._passed_s

    def query(self):
        return self.passed.is_set()

    def look_again_s(self):
        return 0.001


class PassedEvent(float):
    """A point in the GPU's progress that has passed, stored as its time [s]."""

    def query(self):
        return True

    def passed_s(self):
        return float(self)


class SeenLateEvent:
    """Passes at a given time, but is noticed later, as on a busy node."""

    def __init__(self, now, at_s, held_s):
        self._time, self._at_s, self._held_s = now, at_s, held_s

    def passed_s(self):
        return self._at_s

    def look_again_s(self):
        return self._at_s + self._held_s - self._time.now_s()

    def query(self):
        return self._time.now_s() >= self._at_s + self._held_s - 1e-9


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", lock_latency_s=LATENCY_S, timebase=now)


@pytest.fixture
def errors():
    return []


@pytest.fixture
def clocks(gpu, errors, now):
    controller = ClockController(gpu, errors.append, timebase=now)
    yield controller
    controller.close()


def test_requests_return_at_once_and_are_applied(clocks, gpu, now):
    begin_s = now.now_s()
    clocks.request(1200)
    clocks.reset_when_idle(60.0)
    assert now.now_s() == begin_s
    assert gpu.clocks_set == []
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200]
    assert gpu.clock_mhz() == 1200


def test_equal_clocks_are_set_once(clocks, gpu):
    for _ in range(5):
        set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200]
    assert clocks.changes == 1


def test_requests_made_during_a_call_of_the_driver_overtake_each_other(clocks, gpu, now):
    clocks.request(1200)
    now.sleep(LATENCY_S / 2)
    for clock in (1110, 1005, 990):
        clocks.request(clock)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, 990]
    assert clocks.overtaken == 2


def test_a_request_is_overtaken_once_the_gpu_has_passed_the_next_ones_event(clocks, gpu, now):
    first, second = LaterEvent(now), LaterEvent(now)
    clocks.request(1200, after=first)
    clocks.request(1110, after=second)
    second.pass_now()
    first.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110]
    assert clocks.overtaken == 1


def test_closing_restores_the_default_clock_once_and_for_good(clocks, gpu, now):
    set_clock(clocks, 1200)
    clocks.close()
    assert clocks.is_closed
    clocks.close()
    clocks.request(1110)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]
    assert gpu.clock_mhz() == 1410


def test_a_clock_at_its_default_is_left_alone_when_idle_and_at_the_end(clocks, gpu, now):
    clocks.reset_when_idle(0.0)
    now.sleep(A_WHILE_S)
    clocks.close()
    assert gpu.clocks_set == []


def test_closing_does_not_wait_for_a_driver_that_hangs(now):
    gpu = RecordingGpu.named("a100-sxm", lock_latency_s=100.0, timebase=now)
    clocks = ClockController(gpu, pytest.fail, timebase=now)
    clocks.request(1200)
    now.sleep(1.0)
    begin_s = now.now_s()
    clocks.close(timeout_s=5.0)
    assert now.now_s() - begin_s == pytest.approx(5.0)


def test_closing_does_not_wait_for_the_gpu_and_nothing_is_applied_after_it(clocks, gpu, now):
    event = LaterEvent(now)
    set_clock(clocks, 1200)
    now.sleep(A_WHILE_S)
    clocks.request(1110, after=event)
    now.sleep(0.001)  # the controller's thread waits for the event
    begin_s = now.now_s()
    closing = now.thread(lambda: clocks.close(timeout_s=5.0), "closing")
    closing.start()
    now.sleep(1.0)
    assert gpu.set_at[1:] == [(None, begin_s)]
    event.pass_now()
    closing.join()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]


def test_closing_waits_for_a_call_that_is_under_way(clocks, gpu, now):
    begin_s = now.now_s()
    clocks.request(1200)
    now.sleep(LATENCY_S / 2)
    clocks.close()
    assert gpu.set_at == [(1200, begin_s), (None, pytest.approx(begin_s + LATENCY_S))]


def test_a_refusal_is_reported_once_and_nothing_is_requested_after(clocks, gpu, errors, now):
    set_clock(clocks, 1200)
    gpu.refusal = GpuError("the GPU is lost")
    for clock in (1110, 1050, 1005):
        set_clock(clocks, clock)
    now.sleep(A_WHILE_S)
    assert [str(error) for error in errors] == ["the GPU is lost"]
    assert gpu.clocks_set == [1200, None], "the default clock is restored immediately"
    clocks.close()
    assert gpu.clocks_set == [1200, None]


def test_a_driver_that_is_busy_for_a_few_seconds_is_asked_again(clocks, gpu, errors, now):
    set_clock(clocks, 1200)
    gpu.refusal = GpuBusyError("the driver did not answer in time")
    clocks.request(1110)
    now.sleep(3.0)
    assert gpu.clocks_set == [1200, None, None, None], "the default clock is kept until the driver accepts a clock"
    assert clocks.failing_s == pytest.approx(3.0)
    gpu.refusal = None
    now.sleep(A_WHILE_S)
    assert clocks.failing_s == 0.0
    assert gpu.clocks_set[4:] == [1110]
    set_clock(clocks, 1200)
    assert errors == []


def test_a_driver_that_recovers_is_asked_for_the_newest_clock(clocks, gpu, errors, now):
    gpu.refusal = GpuBusyError("the driver did not answer in time")
    for clock_mhz in (1200, 1110, 1005):
        clocks.request(clock_mhz)
        now.sleep(1.0)
    gpu.refusal = None
    now.sleep(A_WHILE_S)
    assert [clock_mhz for clock_mhz in gpu.clocks_set if clock_mhz is not None] == [1005]
    assert errors == []


def test_a_busy_driver_is_no_longer_failing_once_default_clocks_are_requested(clocks, gpu, now):
    set_clock(clocks, 1200)
    gpu.refusal = GpuBusyError("the driver did not answer in time")
    clocks.request(1110)
    now.sleep(3.1)
    assert clocks.failing_s > 3.0
    clocks.request(None)
    now.sleep(A_WHILE_S)
    assert clocks.failing_s == 0.0


def test_a_reset_that_a_busy_driver_refused_is_made_at_the_end(clocks, gpu, now):
    set_clock(clocks, 1200)
    gpu.refusal_to_reset = GpuBusyError("the driver did not answer in time")
    clocks.request(None)
    now.sleep(0.1)
    gpu.refusal_to_reset = None
    clocks.close()
    assert gpu.clocks_set == [1200, None]


def test_a_clock_is_set_though_it_was_the_last_one_before_a_refused_change(clocks, gpu, now):
    set_clock(clocks, 1110)
    gpu.refusal = gpu.refusal_to_reset = GpuBusyError("the driver did not answer in time")
    clocks.request_early(1410, PassedEvent(now.now_s()), 0.0)
    clocks.request(1410)
    now.sleep(0.1)
    gpu.refusal = gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110, 1410]


def test_a_driver_that_has_failed_is_probed_when_asked_to(clocks, gpu, errors, now):
    worked = []
    gpu.refusal = GpuError("unknown error")
    clocks.request(1110)
    now.sleep(A_WHILE_S)
    clocks.probe(lambda: worked.append(now.now_s()))
    now.sleep(A_WHILE_S)
    assert worked == []
    gpu.refusal = None
    clocks.request(1200)
    now.sleep(A_WHILE_S)
    assert 1200 not in gpu.clocks_set
    clocks.probe(lambda: worked.append(now.now_s()))
    now.sleep(A_WHILE_S)
    assert len(worked) == 1
    assert gpu.clocks_set[-2:] == [1410, None]
    set_clock(clocks, 1110)
    assert gpu.clock_mhz() == 1110


def test_after_giving_up_no_clock_is_set_until_a_probe_works_and_then_the_same_one_again(clocks, gpu, errors, now):
    set_clock(clocks, 1200)
    clocks.give_up()
    now.sleep(A_WHILE_S)
    set_clock(clocks, 1110)
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None]
    clocks.probe(lambda: None)
    now.sleep(A_WHILE_S)
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None, 1410, None, 1200]
    assert errors == []


def test_a_event_that_cannot_be_queried_is_reported_and_the_default_restored(clocks, gpu, errors, now):
    class FailedEvent(LaterEvent):
        def query(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    set_clock(clocks, 1200)
    clocks.request(1110, after=FailedEvent(now))
    now.sleep(A_WHILE_S)
    assert [str(error) for error in errors] == ["CUDA error: unspecified launch failure"]
    assert gpu.clocks_set == [1200, None]


def test_an_idle_clock_returns_to_the_default_and_is_requested_anew(clocks, gpu, now):
    set_clock(clocks, 1200)
    idle_s = now.now_s()
    clocks.reset_when_idle(2.0)
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(None, pytest.approx(idle_s + 2.0))]
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None, 1200]


def test_what_changes_while_the_thread_decides_how_long_to_wait_is_seen(clocks, gpu, now, monkeypatch):
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


def test_a_clock_is_not_idle_while_the_device_is_at_the_iteration_before_the_next_one(clocks, gpu, now):
    """The host has launched an iteration of more than two seconds, and waits for it in the next one."""
    set_clock(clocks, 1200)
    clocks.reset_when_idle(2.0)
    next_begun = LaterEvent(now)
    clocks.request(1200, after=next_begun)
    now.sleep(10.0)
    next_begun.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200]


def test_an_early_request_waits_for_its_time_and_not_for_the_next_one(clocks, gpu, now):
    set_clock(clocks, 1110)
    begin_s = now.now_s()
    clocks.request_early(1410, PassedEvent(begin_s), 0.1)
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(1410, pytest.approx(begin_s + 0.1))]
    clocks.request(1410)
    set_clock(clocks, 1410)
    assert gpu.clocks_set == [1110, 1410]
    assert clocks.overtaken == 0


@pytest.mark.parametrize("on_the_gpu", [False, True])
def test_an_early_request_is_due_at_the_latest_when_its_instruction_ends(clocks, gpu, now, on_the_gpu):
    """Its end is known from a request made then, or from an event of the GPU."""
    begun, ended = LaterEvent(now), LaterEvent(now)
    set_clock(clocks, 1110)
    clocks.request_early(1410, begun if on_the_gpu else PassedEvent(now.now_s()), 30.0)
    if on_the_gpu:
        clocks.request(1410, after=ended)
        begun.pass_now()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110]
    ended_s = now.now_s()
    if on_the_gpu:
        ended.pass_now()
    else:
        clocks.request(1410)
    now.sleep(A_WHILE_S)
    assert gpu.set_at[1:] == [(1410, pytest.approx(ended_s, abs=0.0011))]


def test_a_clock_is_read_back_while_an_early_request_waits_for_its_time(clocks, gpu, now):
    """Otherwise the latencies of clocks would never be known in short runs."""
    for clock in (1110, 1410) * 3:
        clocks.request(clock)
        clocks.request_early(2520 - clock, PassedEvent(now.now_s()), 0.08)
        now.sleep(0.08 + 2 * LATENCY_S)
    assert clocks.readback.latencies.latest_s(1410, rises=True) == pytest.approx(LATENCY_S)


def test_reading_back_delays_a_request_by_one_reading_at_most(clocks, gpu, now):
    readings = []

    def slow_reading():
        now.sleep(0.002)
        readings.append(now.now_s())
        return 0

    gpu.clock_mhz = slow_reading
    for clock in (1110, 1200) * 20:
        begin_s = now.now_s()
        set_clock(clocks, clock)
        assert now.now_s() - begin_s <= LATENCY_S + 0.0021
        now.sleep(0.005)
    assert readings


class InterruptedNotifier:
    """Runs a handler while it notifies, as if a signal arrived then."""

    handler = None

    def __init__(self, notifier):
        self.wait, self._notify = notifier.wait, notifier.notify

    def notify(self):
        handler, InterruptedNotifier.handler = InterruptedNotifier.handler, None
        if handler is not None:
            handler()
        self._notify()


def test_a_signal_that_interrupts_a_request_restores_the_default_clock(monkeypatch):
    gpu = RecordingGpu.named("a100-sxm", timebase=RealTime())
    notifier = RealTime.notifier
    monkeypatch.setattr(RealTime, "notifier", lambda self: InterruptedNotifier(notifier(self)))
    clocks = ClockController(gpu, pytest.fail)
    set_clock(clocks, 1200)
    InterruptedNotifier.handler = clocks.close
    for clock_mhz in itertools.cycle((1215, 1110)):
        if clocks.is_closed:
            break
        clocks.request(clock_mhz)  # it wakes the controller's thread only if that thread waits
    assert gpu.clocks_set[-1] is None


def raises(error):
    def function():
        raise error

    return function


def test_values_and_errors_of_calls_come_through(clocks):
    assert clocks.call(lambda: 2.5).value() == 2.5
    with pytest.raises(GpuError, match="the GPU is lost"):
        clocks.call(raises(GpuError("the GPU is lost"))).value()
    assert clocks.call(lambda: 3.5).value() == 3.5


def test_a_call_is_made_when_the_gpu_has_passed_its_event(clocks, now):
    event = LaterEvent(now)
    called = clocks.call(now.now_s, event)
    now.sleep(A_WHILE_S)
    assert not called.is_over
    event.pass_now()
    passed_s = now.now_s()
    now.sleep(A_WHILE_S)
    assert called.value() == pytest.approx(passed_s, abs=0.0011)


def test_a_host_that_is_seconds_ahead_of_the_gpu_does_not_take_the_driver_for_silent(clocks, gpu, now):
    set_clock(clocks, 1200)
    event = LaterEvent(now)
    clocks.request(1110, event)
    calls = [clocks.call(gpu.energy_j, event), clocks.call(gpu.energy_j)]
    now.sleep(0.1)
    begin_s = now.now_s()
    now.thread(lambda: now.sleep(20.0) or event.pass_now(), "gpu").start()
    assert all(call.value() >= 0 for call in calls)
    assert now.now_s() - begin_s == pytest.approx(20.0 + LATENCY_S)
    assert clocks.failing_s == 0.0


def test_a_hung_call_is_given_up_and_none_is_made_until_it_returns(clocks, now):
    assert clocks.call(lambda: now.sleep(2.9) or 1.0).value() == 1.0, "a slow call is waited for"
    begin_s = now.now_s()
    hung = clocks.call(lambda: now.sleep(20.0) or 1.0)
    now.sleep(0.5)
    with pytest.raises(GpuBusyError, match="has not answered for 3 s"):
        hung.value()
    assert now.now_s() - begin_s == pytest.approx(3.0)
    made = []
    now.sleep(10.0)
    with pytest.raises(GpuBusyError, match="has not answered for 13 s"):
        clocks.call(lambda: made.append(1)).value()
    assert now.now_s() - begin_s == pytest.approx(13.0), "the hung call is not waited for again"
    now.sleep(10.0)
    assert clocks.failing_s == 0.0
    assert clocks.call(lambda: 2.5).value() == 2.5
    assert made == []


def test_calls_that_were_given_before_the_end_are_made_and_none_after(clocks, gpu, now):
    event = LaterEvent(now)
    last = clocks.call(gpu.energy_j, event)
    clocks.close()
    with pytest.raises(GpuError, match="restored for good"):
        clocks.call(gpu.energy_j).value()
    event.pass_now()
    assert last.value() >= 0
    now.sleep(A_WHILE_S)
    with pytest.raises(GpuError, match="restored for good"):
        clocks.call(gpu.energy_j).value()


def test_the_clock_is_the_default_while_a_driver_that_refuses_everything_is_asked_again(clocks, gpu, errors, now):
    set_clock(clocks, 1200)
    gpu.refusal = gpu.refusal_to_reset = GpuError("no permission any more")
    clocks.request(1110)
    now.sleep(A_WHILE_S)
    gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]
    assert len(errors) == 1


@pytest.mark.parametrize(("held_s", "late_s"), [(0.001, 0.0), (0.006, 0.006)])
def test_a_thread_that_is_kept_from_going_on_says_by_how_much(now, gpu, held_s, late_s):
    clocks = ClockController(gpu, lambda error: None, timebase=now)
    for number in range(5):
        clocks.request((1200, 1410)[number % 2], SeenLateEvent(now, now.now_s() + 0.1, held_s))
        now.sleep(A_WHILE_S)
    assert clocks.thread_late_s == pytest.approx(late_s, abs=1e-6)
    clocks.close()


@pytest.fixture
def memory(clocks):
    return clocks.memory


def test_an_agent_knows_that_a_clock_may_be_locked_before_it_is(clocks, gpu, memory):
    seen = []
    lock = gpu.lock_clock
    gpu.lock_clock = lambda clock_mhz: (seen.append(memory.may_be_locked), lock(clock_mhz))
    set_clock(clocks, 1200)
    assert seen == [True]
    set_clock(clocks, None)
    assert not memory.may_be_locked


def test_a_clock_that_the_agent_has_reset_is_set_again_when_it_is_requested(clocks, gpu, memory):
    set_clock(clocks, 1200)
    memory.count_reset()
    gpu.reset_clock()
    set_clock(clocks, 1200)
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None, 1200]


def test_no_clock_is_set_once_the_agent_has_revoked_the_lease(clocks, gpu, memory):
    set_clock(clocks, 1200)
    memory.revoke()
    set_clock(clocks, 1305)
    clocks.close()
    assert gpu.clocks_set == [1200, None]


def test_a_call_that_was_under_way_when_the_lease_was_revoked_leaves_no_clock_locked(clocks, gpu, memory, now):
    lock = gpu.lock_clock
    gpu.lock_clock = lambda clock_mhz: (lock(clock_mhz), memory.revoke())
    set_clock(clocks, 1200)
    assert gpu.clocks_set == [1200, None]
