"""Ranks return to default clocks after a fault, and run under plans again when it is over."""

import pytest
from virtual.gpu import DRIVER_FAULTS, FaultyGpu
from virtual.hostile_day import HostileDay
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_records import Failed, Recovered


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job of two ranks in auto mode."""
    monkeypatch.setattr("perseus_ds.agent.controller._OVER_S", 10.0)
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05), micro_batches=4, gpu_class=FaultyGpu, mode="auto")
    yield job
    job.close()


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if fault == "driver error" else pytest.mark.extended) for fault in DRIVER_FAULTS],
)
def test_after_a_fault_of_one_driver_under_a_plan_all_ranks_are_under_it_again(job, fault, caplog):
    job.train_while(lambda: not job.is_under_a_plan)
    gpu = job.gpus[1]
    gpu.begin(fault)
    job.train(20)
    assert job.has_fallen_back(1)
    assert gpu.is_at_default_clock or fault in ("no permission", "driver hangs")
    assert not job.has_fallen_back(0)
    gpu.end()
    job.train_while(lambda: not job.is_under_a_plan)
    job.train(20)  # more than ten seconds
    assert job.is_under_a_plan
    assert caplog.text.count("Training continues at default clocks") == 1
    assert caplog.text.count("the fault has passed. This rank runs under plans again.") == 1
    assert [event.rank for event in job.events(Failed)] == [1]
    assert [event.rank for event in job.events(Recovered)] == [1]


def test_a_mode_that_ended_by_a_fault_while_profiling_begins_again(job):
    job.train_while(lambda: job.phase != "profile")
    job.gpus[1].begin("driver error")
    job.train_while(lambda: job.phase != "observe")
    job.train(10)
    assert job.phase == "observe"
    job.gpus[1].end()
    job.train_while(lambda: not job.is_under_a_plan)


@pytest.mark.extended
def test_every_promise_is_kept_under_faults(tmp_path):
    day = HostileDay(tmp_path, seed=2)
    assert day.run(minutes=30) == []
    assert sum(outcome.times for outcome in day.outcomes.values()) >= 1
