"""The actor of a GPU is the only caller of its driver, and ends at the default clock, in virtual time."""

import math

import pytest
from hostile_gpu import MOODS, HostileGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual.agent import actor_of
from virtual.gpu import RecordingGpu, set_clock
from virtual.time import VirtualTime

from perseus_ds.agent.actor import GpuActor
from perseus_ds.agent.gpu_records import GpuRecord, UnrecordedGpu
from perseus_ds.agent.process import Agent
from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.protocol.job_messages import RankFailed

LATENCY_S = 0.02
A_WHILE_S = 10.0
"""Longer than all pending actions of an actor."""
BUSY = GpuBusyError("the driver did not answer in time")


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", lock_latency_s=LATENCY_S, timebase=now)


@pytest.fixture
def actor(gpu, told, now):
    actor = actor_of(gpu, now)
    actor.listeners.append(told.append)
    yield actor
    actor.close()


def test_requests_return_immediately_and_equal_clocks_are_set_once(actor, gpu, now):
    begin_s = now.now_s()
    for _ in range(5):
        actor.request(1200)
    assert now.now_s() == begin_s
    assert gpu.clocks_set == []
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200]
    assert actor.changes == 1


def test_a_request_is_skipped_if_a_newer_one_comes_before_the_driver_is_free(actor, gpu, now):
    actor.request(1200)
    now.sleep(LATENCY_S / 2)
    for clock_mhz in (1110, 1005, 990):
        actor.request(clock_mhz)
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, 990]
    assert actor.skips == 2


def test_a_reset_voids_older_requests_and_undoes_a_call_under_way(actor, gpu, now):
    begin_s = now.now_s()
    actor.request(1200)
    now.sleep(LATENCY_S / 2)
    actor.request(1305)
    actor.reset()
    assert not actor.is_reset
    now.sleep(A_WHILE_S)
    assert actor.is_reset
    assert gpu.set_at == [(1200, begin_s), (None, pytest.approx(begin_s + LATENCY_S))]


def test_a_reset_calls_the_driver_although_no_clock_was_locked_here(actor, gpu, now):
    """Another process may have locked one."""
    actor.reset()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [None]
    assert actor.changes == 0


def test_a_call_that_takes_effect_and_fails_is_undone(actor, gpu, now):
    lock = gpu.lock_clock

    def lock_and_fail(clock_mhz):
        lock(clock_mhz)
        raise BUSY

    gpu.lock_clock = lock_and_fail
    actor.request(1200)
    now.sleep(LATENCY_S / 2)
    actor.reset()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]
    assert actor.is_reset


def test_a_refusal_is_reported_once_and_nothing_is_requested_after(actor, gpu, told, now):
    set_clock(actor, 1200)
    gpu.refusal = GpuError("the GPU is lost")
    for clock in (1110, 1050, 1005):
        set_clock(actor, clock)
    now.sleep(A_WHILE_S)
    assert told == [RankFailed("the GPU is lost")]
    assert gpu.clocks_set == [1200, None], "the default clock is restored immediately"


def test_a_reset_that_a_failed_driver_refuses_is_tried_again(actor, gpu, told, now):
    set_clock(actor, 1200)
    gpu.refusal = gpu.refusal_to_reset = GpuError("no permission any more")
    actor.request(1110)
    now.sleep(A_WHILE_S)
    gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1200, None]
    assert len(told) == 1


def test_a_driver_that_is_busy_is_asked_again_for_the_newest_clock(actor, gpu, told, now):
    set_clock(actor, 1200)
    gpu.refusal = BUSY
    for clock_mhz in (1305, 1110):
        actor.request(clock_mhz)
        now.sleep(1.6)
    assert set(gpu.clocks_set[1:]) == {None}, "the default clock is kept until the driver accepts a clock"
    assert "has not answered for 3 s" in str(actor.problem)
    gpu.refusal = None
    now.sleep(A_WHILE_S)
    assert actor.problem is None
    assert gpu.clocks_set[-2:] == [None, 1110]
    gpu.refusal = BUSY
    actor.request(1305)
    now.sleep(3.1)
    assert actor.problem is not None
    actor.request(None)
    now.sleep(A_WHILE_S)
    assert actor.problem is None, "default clocks need no driver"
    assert told == []


def test_a_clock_is_set_though_the_driver_was_busy_when_it_was_requested(actor, gpu, now):
    set_clock(actor, 1110)
    gpu.refusal = gpu.refusal_to_reset = BUSY
    actor.request(1410)
    now.sleep(0.1)
    gpu.refusal = gpu.refusal_to_reset = None
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [1110, None, 1410], "after an error the clock is unknown, so it is reset"


def test_after_a_failure_no_clock_is_set_until_a_probe_works_and_then_the_same_one_again(actor, gpu, now):
    set_clock(actor, 1200)
    gpu.refusal = GpuError("unknown error")
    set_clock(actor, 1110)
    set_clock(actor, 1200)
    now.sleep(A_WHILE_S)
    actor.update()
    now.sleep(A_WHILE_S)
    assert actor.health.has_failed
    assert gpu.clocks_set == [1200, None, None]
    gpu.refusal = None
    actor.update()
    now.sleep(A_WHILE_S)
    set_clock(actor, 1200)
    assert not actor.health.has_failed
    assert gpu.clocks_set[3:] == [1410, None, 1200]


def test_a_probe_that_is_due_before_a_reset_locks_no_clock_after_it(actor, gpu, now):
    actor.fail(GpuError("unknown error"))
    now.sleep(A_WHILE_S)
    actor.call(lambda: now.sleep(1.0))
    actor.update()
    actor.reset()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == [None]


def test_a_gpu_that_another_process_has_taken_over_is_not_probed(actor, gpu, now):
    actor.fail(GpuError("unknown error"))
    actor.record.is_current = False
    now.sleep(A_WHILE_S)
    actor.update()
    now.sleep(A_WHILE_S)
    assert gpu.clocks_set == []


def test_calls_are_refused_while_one_hangs(actor, now):
    assert actor.call(lambda: now.sleep(20.0))
    now.sleep(2.9)
    assert actor.problem is None, "a slow call is waited for"
    now.sleep(0.1)
    assert isinstance(actor.problem, GpuBusyError)
    assert "has not answered for 3 s" in str(actor.problem)
    assert not actor.call(pytest.fail)
    now.sleep(20.0)
    assert actor.problem is None
    assert actor.call(lambda: None)


def test_a_clock_that_is_set_after_the_rank_has_fallen_back_is_reset_at_once(actor, gpu, now, monkeypatch):
    lock_clock = gpu.lock_clock
    monkeypatch.setattr(gpu, "lock_clock", lambda clock_mhz: (now.sleep(5.0), lock_clock(clock_mhz)))
    actor.request(1200)
    now.sleep(3.5)
    actor.update()
    assert actor.health.has_failed
    now.sleep(2.0)
    assert gpu.clocks_set == [1200, None]


def test_a_clock_may_be_locked_before_the_driver_is_called(actor, gpu):
    seen = []
    lock = gpu.lock_clock
    gpu.lock_clock = lambda clock_mhz: (seen.append(actor.may_be_locked), lock(clock_mhz))
    set_clock(actor, 1200)
    assert seen == [True]
    set_clock(actor, None)
    assert not actor.may_be_locked


def test_of_two_ranks_only_the_one_that_set_the_clock_returns_it_to_the_default(actor, gpu, now):
    actor.request(1200, "first")
    now.sleep(1.0)
    actor.request(None, "second")
    now.sleep(1.0)
    assert gpu.clocks_set == [1200]
    actor.request(None, "first")
    now.sleep(1.0)
    assert gpu.clocks_set == [1200, None]


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
    actor = GpuActor(record, lambda: gpu, timebase=time)
    actor.reset()
    while not (actor.is_reset or actor.has_given_up):
        time.sleep(0.1)
    assert actor.is_reset == (at_s is not None)
    assert (gpu.reset_at_s is None) if at_s is None else (gpu.reset_at_s <= at_s)
    assert time.seconds < until_s


def test_a_driver_that_hangs_is_waited_for_two_minutes(record, time):
    actor = GpuActor(record, lambda: LeftGpu(time, hangs_s=1000.0), timebase=time)
    actor.reset()
    while not actor.has_given_up:
        time.sleep(0.1)
    assert 120.0 <= time.seconds < 121.0


@pytest.mark.parametrize("job", ["this", "another"])
def test_a_gpu_that_a_process_left_locked_is_reset_before_it_is_used(record, time, job):
    record.close()
    left, gpu = GpuRecord("nvml:GPU-1", job), LeftGpu(time)
    actor = GpuActor(left, lambda: gpu, timebase=time)
    assert not actor.is_reset
    time.sleep(0.1)
    assert actor.is_reset
    assert gpu.reset_at_s is not None


def test_a_gpu_that_cannot_be_opened_is_a_problem_in_words(record, time):
    def refuse():
        raise GpuError("no such GPU")

    actor = GpuActor(record, refuse, timebase=time)
    time.sleep(0.1)
    assert actor.gpu is None
    assert str(actor.error) == "no such GPU"


def test_a_permission_that_cannot_be_checked_is_an_error_also_after_a_description_without_the_check(record, time):
    gpu = RecordingGpu.named("a100-sxm", timebase=time)
    actor = GpuActor(record, lambda: gpu, timebase=time)
    actor.describe(checks_permission=False)
    time.sleep(1.0)
    assert actor.is_described(False)
    assert not actor.is_described(True)
    gpu.check_lock_permission = lambda: 1 / 0
    actor.describe(checks_permission=True)
    time.sleep(1.0)
    assert actor.is_described(True)
    assert isinstance(actor.description_error, ZeroDivisionError)


def test_an_agent_that_replaces_another_one_resets_its_gpus_at_once(record, time):
    record.close()
    gpu = RecordingGpu.named("a100-sxm", timebase=time)
    agent = Agent("this", open_gpu=lambda address: gpu, timebase=time)
    time.sleep(0.1)
    agent.step()
    assert gpu.set_at == [(None, 0.0)]


ACTIONS = st.sampled_from(["lock", "lock lower", "default", "read", "reset", "update", "replace"])
PAUSES_S = st.sampled_from([0.0, 0.005, 0.1, 1.0, 5.0])


@settings(deadline=None, max_examples=40)
@given(st.lists(MOODS, max_size=8), st.lists(st.tuples(ACTIONS, PAUSES_S), max_size=20))
def test_whatever_happens_the_gpu_ends_at_its_default_clock_and_its_driver_has_one_caller(moods, actions):
    time = VirtualTime()
    gpu = HostileGpu(time, moods)
    actor = actor_of(gpu, time)
    for action, pause_s in actions:
        if action in ("lock", "lock lower"):
            actor.request(1200 if action == "lock" else 900)
        elif action == "default":
            actor.request(None)
        elif action == "read":
            actor.call(gpu.energy_j)
        elif action == "reset":
            actor.reset()
        elif action == "update":
            actor.update()
        else:  # its process has died, and another agent resets the clock that may be locked
            actor.reset()
            while not actor.is_reset:
                time.sleep(1.0)
            actor.close()
            record = UnrecordedGpu("virtual")
            record.left_by = 1
            actor = GpuActor(record, lambda: gpu, timebase=time)
            time.sleep(0.0)
        time.sleep(pause_s)
    actor.reset()
    while not actor.is_reset:
        time.sleep(1.0)
    time.sleep(60.0)
    assert gpu.clock_mhz_now is None
    assert not actor.may_be_locked
    assert gpu.callers <= 1
    actor.close()
    time.sleep(1.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(MOODS, max_size=8), st.lists(st.sampled_from([None, 900, 1200, 1410]), max_size=20), PAUSES_S)
def test_after_errors_the_actual_clock_is_the_requested_one_or_the_default(moods, clocks_mhz, pause_s):
    time = VirtualTime()
    gpu = HostileGpu(time, moods)
    actor = actor_of(gpu, time)
    for clock_mhz in clocks_mhz:
        actor.request(clock_mhz)
        actor.update()
        time.sleep(pause_s)
    time.sleep(200.0)
    actor.update()
    time.sleep(200.0)
    assert gpu.clock_mhz_now in (None, clocks_mhz[-1] if clocks_mhz else None)
    actor.close()
    time.sleep(1.0)


def test_a_process_without_permission_has_nothing_to_reset(gpu, actor, now):
    gpu.refusal = gpu.refusal_to_reset = GpuPermissionError("changing clocks needs root")
    actor.request(1200)
    now.sleep(1.0)
    actor.reset()
    now.sleep(1.0)
    assert actor.is_reset
