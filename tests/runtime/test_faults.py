"""Ranks fall back to default clocks when something fails, and are under plans again once it works."""

import pytest
from virtual.gpu import DRIVER_FAULTS, FaultyGpu
from virtual.hostile_day import GPU_FAULTS, JOB_FAULTS, HostileDay
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_records import Failed, PlanJudged, Recovered, to_line

RANKS = 2


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Two ranks under a plan."""
    monkeypatch.setattr("perseus_ds.runtime.supervision._OVER_S", 10.0)
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05), micro_batches=4, gpu_class=FaultyGpu, mode="auto")
    yield job
    job.close()


def runs_plans(job):
    """Whether the next iteration of all ranks is under a plan."""
    return all(r.next.plan is not None and not r.has_fallen_back for r in job.runtimes)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if fault == "driver error" else pytest.mark.extended) for fault in DRIVER_FAULTS],
)
def test_after_a_fault_of_one_driver_under_a_plan_all_ranks_are_under_it_again(job, fault, caplog):
    job.train_while(lambda: not runs_plans(job))
    gpu = job.gpus[1]
    gpu.begin(fault)
    job.train(20)
    assert job.runtimes[1].has_fallen_back
    assert gpu.is_at_default_clock or fault in ("no permission", "driver hangs")
    assert not job.runtimes[0].has_fallen_back
    gpu.end()
    job.train_while(lambda: not runs_plans(job))
    job.train(20)  # more than ten seconds
    assert runs_plans(job)
    assert caplog.text.count("Training continues at default clocks") == 1
    assert caplog.text.count("the driver works again. This rank runs under plans again.") == 1
    assert [event.rank for event in job.events(Failed)] == [1]
    assert [event.rank for event in job.events(Recovered)] == [1]


def test_under_a_plan_that_was_judged_no_rank_waits_for_all_others_whatever_one_has_to_tell(job):
    job.train_while(lambda: not job.events(PlanJudged))
    job.train(2)
    waits = job.waits
    job.train(20)
    job.runtimes[1].rank.communicator.send_event(to_line(Failed(rank=1, error="something")).encode())
    job.train(20)
    assert job.waits == waits
    assert [event.rank for event in job.events(Failed)] == [1]


def test_a_mode_that_ended_by_a_fault_while_profiling_begins_again(job):
    job.train_while(lambda: job.runtimes[0].next.phase != "profile")
    job.gpus[1].begin("driver error")
    job.train_while(lambda: job.runtimes[0].next.phase != "observe")
    job.train(10)
    assert {runtime.next.phase for runtime in job.runtimes} == {"observe"}
    job.gpus[1].end()
    job.train_while(lambda: not runs_plans(job))


@pytest.mark.extended
def test_a_fault_that_comes_back_at_once_is_told_once(job, caplog):
    job.train_while(lambda: not runs_plans(job))
    for _ in range(5):
        job.gpus[0].begin("driver error")
        job.train(5)
        job.gpus[0].end()
        job.train_while(lambda: not runs_plans(job))
    assert caplog.text.count("Training continues at default clocks") == 1


def test_a_mistake_is_final(job):
    job.train_while(lambda: not runs_plans(job))
    job.gpus[1].begin("a mistake of ours")
    job.train(5)
    job.gpus[1].end()
    job.train(200)
    assert job.runtimes[1].has_fallen_back


@pytest.mark.parametrize(
    ("seed", "causes", "minutes"),
    [(1, GPU_FAULTS, 1), pytest.param(2, GPU_FAULTS + JOB_FAULTS, 30, marks=pytest.mark.extended)],
    ids=["drivers", "drivers and jobs"],
)
def test_every_promise_is_kept_under_faults(tmp_path, seed, causes, minutes):
    day = HostileDay(tmp_path, seed=seed, causes=causes)
    assert day.run(minutes=minutes) == []
    assert sum(outcome.times for outcome in day.outcomes.values()) >= 1
