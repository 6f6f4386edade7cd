"""Whole jobs of one rank under goals that change, in virtual time."""

import re
from datetime import timedelta

import pytest
from frontiers import save_true_frontier
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_events import GoalChanged, PowerCapChanged
from perseus_ds.pipeline.instruction import Kind

WORK_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.1 * (2 - 1 / 6), Kind.TAIL: 0.01}


@pytest.fixture(scope="module")
def frontier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontier")
    # Twice the latency of the simulated driver, as in the profile of a job.
    return folder, save_true_frontier(folder, stages=1, micro_batches=3, forward_s=0.1, least_dwell_s=0.03)


@pytest.fixture
def start(tmp_path, frontier):
    """Return a function that starts a job with a goal."""
    jobs = []

    def start(folder="perseus", **goal):
        block = {"mode": "run", "frontier": str(frontier[0]), "goal": goal}
        jobs.append(VirtualJob(tmp_path / folder, work_s=dict(WORK_S), **block))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_power_is_below_a_changed_limit_from_the_second_iteration_after_the_change_on(start, frontier):
    plans = frontier[1].plans
    high_w, low_w = (plans[n].energy_j / plans[n].time_s for n in (1, len(plans) * 2 // 3))
    high_w *= 1.006  # half a percent is kept in reserve
    job = start(watts=high_w)
    job.train(8)
    told_s = job.time.seconds
    job.control(command="set", goal={"watts": low_w})
    began_s, powers_w = [], {}
    for iteration in range(9, 33):
        began_s.append(job.time.seconds)
        begin_j = job.gpu.true_energy_j
        job.train()
        powers_w[iteration] = (job.gpu.true_energy_j - begin_j) / (job.time.seconds - began_s[-1])
    records = [r for r in job.close() if r.iteration > 8]
    before, under = [r for r in records if r.plan == 1], [r for r in records if r.plan not in (1, None)]
    assert [r.iteration for r in before] == list(range(9, 9 + len(before)))
    assert began_s[len(before)] - told_s <= 2.05 * records[0].time_s
    assert len(before) <= 2
    # True energy of the GPU, because its counter is refreshed every 0.1 s, too rarely for a single iteration.
    settled = [powers_w[r.iteration] for r in under[10:]]
    assert sum(settled) / len(settled) <= low_w
    assert max(powers_w[r.iteration] for r in under) < 1.01 * low_w, "also before the power of the profile is corrected"


def test_power_is_reduced_for_as_long_as_ordered_and_training_then_goes_on_as_before(start, frontier):
    plans = frontier[1]
    default_w, least_w = plans.baseline.mean_power_w, plans.plans[-1].mean_power_w
    fraction = (least_w + 0.3 * (default_w - least_w)) / default_w
    job = start()
    job.train(8)
    until = (job.time.date() + timedelta(seconds=40)).isoformat()
    answer = job.control(command="set", goal={"power_fraction": fraction, "until": until})["done"]
    assert "s later" in answer
    job.train(2)
    end_s, begin_s, begin_j = job.time.seconds + 30.0, job.time.seconds, job.gpu.true_energy_j
    while job.time.seconds < end_s:
        job.train()
    assert (job.gpu.true_energy_j - begin_j) / (job.time.seconds - begin_s) <= 1.005 * fraction * default_w
    job.train(25)
    records = job.close()
    assert {record.plan for record in records[-3:]} == {0}
    assert [event.watts is None for event in job.events(PowerCapChanged)] == [False, True]
    assert [sorted(event.goal) for event in job.events(GoalChanged)] == [["power_fraction", "until"], []]


def test_another_goal_is_in_force_in_the_next_iterations_while_a_plan_rests(start, capsys):
    job = start()
    job.late_under_plans()
    job.train_until("observe", most=400)
    job.train(5)
    job.control(command="set", goal={"max_slowdown": 0.1})
    step = len(job.taken) + 1
    assert "run" in job.train(3)
    job.close()
    log = capsys.readouterr().out
    assert re.search(rf"max_slowdown 0.1 by control: plan \d+ from step {step + 1}, about \d+\.\d % slower, -", log), (
        log
    )
