"""Ranks return to default clocks after a fault, and run under plans again when it is over."""

import pytest
from hostile_day import HostileDay
from virtual.gpu import DRIVER_FAULTS, FaultyGpu
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_events import Failed, Recovered


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job of two ranks in auto mode."""
    monkeypatch.setattr("perseus_ds.agent.driver_health._OVER_S", 10.0)
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05), micro_batches=4, gpu_class=FaultyGpu, mode="auto")
    yield job
    job.close()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault == "driver error" else pytest.mark.extended)
        for fault in DRIVER_FAULTS
        if fault != "counter fails"  # clocks follow plans without a counter
    ],
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
    job.train_while(lambda: not job.is_under_a_plan, most=10)
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


@pytest.fixture
def reports_of_rank_1(job, monkeypatch):
    """Return a switch: while it is off, reports of rank 1 wait on their way to the server."""
    receive, switch = job.server.receive, Switch()

    def receive_unless_off(rank, message):
        if rank == 1 and not switch.is_on:
            switch.held.append(message)
        else:
            receive(rank, message)

    def switch_on():
        switch.is_on = True
        for message in switch.held:
            receive(1, message)

    switch.turn_on = switch_on
    monkeypatch.setattr(job.server, "receive", receive_unless_off)
    return switch


class Switch:
    def __init__(self):
        self.is_on = True
        self.held = []


def train_at_a_profiling_clock(job):
    job.train_while(lambda: job.gpus[0].clock_mhz() > 1200)
    assert job.phase == "profile"


def test_a_rank_whose_reports_stop_leaves_no_rank_at_a_profiling_clock(job, reports_of_rank_1, caplog):
    train_at_a_profiling_clock(job)
    reports_of_rank_1.is_on = False
    lost_s, iteration_s = job.time.now_s(), job.taken[-1][1]
    job.train_while(lambda: job.time.now_s() < lost_s + 10.0 + 3 * iteration_s)
    assert all(gpu.is_at_default_clock for gpu in job.gpus)
    job.train(100)
    assert all(gpu.is_at_default_clock for gpu in job.gpus)
    assert caplog.text.count("reports of rank 1 no longer arrive. Training continues at default clocks") == 1
    assert len(job.events(Failed)) == 1
    reports_of_rank_1.turn_on()
    job.train_while(lambda: not job.is_under_a_plan)


@pytest.mark.parametrize("slowdown", [2.0, 20.0])
def test_reports_are_missing_after_ten_seconds_or_five_iterations(job, reports_of_rank_1, slowdown):
    job.slowdowns = [slowdown] * 2
    train_at_a_profiling_clock(job)
    reports_of_rank_1.is_on = False
    lost_s, iteration_s = job.time.now_s(), job.taken[-1][1]
    job.train(3)
    while not job.server.next.is_at_default_clocks:
        job.time.sleep(0.5)
        job.server.tick()
    without_s = job.time.now_s() - lost_s
    assert without_s == pytest.approx(max(10.0, 5 * iteration_s), abs=iteration_s + 0.5)


def test_reports_that_wait_while_training_or_the_server_stands_still_are_not_missing(job, reports_of_rank_1):
    train_at_a_profiling_clock(job)
    reports_of_rank_1.is_on = False
    job.train()
    for _ in range(60):  # rank 1 writes a checkpoint before it reports
        job.time.sleep(1.0)
        job.server.tick()
    job.train(4)  # reports of rank 1 take longer on their way
    job.time.sleep(60.0)  # the server is stopped
    job.server.tick()
    reports_of_rank_1.turn_on()
    job.train(4)
    assert job.phase == "profile"
    assert job.events(Failed) == []


@pytest.mark.extended
def test_every_promise_is_kept_under_faults(tmp_path):
    day = HostileDay(tmp_path, seed=2)
    assert day.run(minutes=30) == []
    assert all(outcome.times for outcome in day.outcomes.values()), "each fault must happen"
