"""The plan in force, which is decided after every iteration and restored by later starts of the job."""

import itertools
import math
import random

import pytest
from lone_selector import FRONTIER, PLANS, Job

from perseus_ds.artifacts.run_records import PlanChosen, PolicyChanged
from perseus_ds.policy.policies import EnergyOptimalPolicy, PowerCapPolicy


def test_a_decision_is_for_the_iterations_to_come():
    job = Job()
    assert [job.iterate() for _ in range(3)] == [5, 5, 5]
    job.control.policy = EnergyOptimalPolicy(name="energy_optimal")
    assert [job.iterate() for _ in range(4)] == [5, 29, 29, 29]
    job.control.paused = True
    assert [job.iterate() for _ in range(4)] == [29, None, None, None]
    assert [(event.plan, event.paused) for event in job.events if isinstance(event, PlanChosen)] == [
        (5, False),
        (29, False),
        (29, True),
    ]


def test_a_condition_that_no_plan_meets_is_recorded_and_said_once():
    job = Job(PowerCapPolicy(name="power_cap", watts=5.0))
    for iteration in range(20):
        job.iterate(power_ratio=1 + 0.01 * (iteration % 3))
    assert len(job.said) == 1
    assert [event.problem for event in job.events if isinstance(event, PolicyChanged)] == job.said


@pytest.mark.parametrize(("noise", "differ"), [(0.05, 0.0), (0.01, 0.015)])
def test_a_cap_at_the_edge_of_two_plans_hardly_changes_plans_and_is_kept_on_average(noise, differ):
    cap_w = sum(PLANS[n].energy_j / PLANS[n].time_s for n in (5, 6)) / 2
    job, draw = Job(PowerCapPolicy(name="power_cap", watts=cap_w)), random.Random(1)
    ran, powers_w = [], []
    for _ in range(1000):
        plan = PLANS[job.selector.in_force.plan]
        differs = 1 + (-differ if ran and ran[-1] % 2 else differ)  # from the profile, differently for each plan
        ratio = differs * (1 + draw.gauss(0, noise))
        ran.append(job.iterate(power_ratio=ratio))
        powers_w.append(ratio * plan.energy_j / plan.time_s)
    changed = [number for number, (before, after) in enumerate(itertools.pairwise(ran)) if before != after]
    assert len(changed) <= 12
    assert sum(number < 44 for number in changed) <= 5
    assert sum(powers_w[changed[-1] if changed else 0 :]) / len(powers_w[changed[-1] if changed else 0 :]) <= cap_w
    assert max(ran) <= 10, "must be nearly the fastest plan below the cap"


def test_a_faster_plan_is_taken_where_it_stays_below_the_cap_by_far_and_at_once_when_the_cap_changes():
    power_w = [plan.energy_j / plan.time_s for plan in PLANS]
    job = Job(PowerCapPolicy(name="power_cap", watts=power_w[10]))
    assert [job.iterate() for _ in range(3)] == [11] * 3
    assert {job.iterate(power_ratio=0.995) for _ in range(30)} == {11}
    for _ in range(20):
        faster = job.iterate(power_ratio=0.9)
    assert power_w[faster] * 0.9 <= 0.98 * power_w[10] < power_w[faster - 1] * 0.9
    job.control.policy = PowerCapPolicy(name="power_cap", watts=1.001 * power_w[10])
    assert [job.iterate(power_ratio=0.9) for _ in range(4)][-1] < faster


def test_whether_default_clocks_would_exceed_a_cap_is_measured_or_else_by_the_profile():
    baseline_w = FRONTIER.baseline.energy_j / FRONTIER.baseline.time_s
    job = Job(PowerCapPolicy(name="power_cap", watts=0.97 * baseline_w))
    assert job.selector.in_force.capped
    job.selector.default_power_w = 0.9 * baseline_w
    assert not job.selector.default_clocks_exceed_cap()
    assert not Job().selector.in_force.capped


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": math.inf},
        {"stretch_factors": [math.nan]},
        {"statistics": None},
        {"statistics": {"stopped_s": math.nan, "stops": 3, "times": [], "powers": []}},
        {"statistics": {"stopped_s": 0.0, "stops": 3, "times": [1.0], "powers": [[1.0, 0.0]]}},
        {"statistics": {"stopped_s": 0.0, "stops": 10**400, "times": [1.0], "powers": []}},
    ],
)
def test_damaged_progress_of_an_earlier_start_is_ignored_as_a_whole(damage, caplog):
    before = Job().selector.state()
    good = {**before, "plan": 3, "stretch_factors": [1.2]}
    assert Job(progress=good).selector.in_force.plan == 3
    assert Job(progress={**good, "plan": None}).selector.in_force.plan == 5
    job = Job(progress={**good, **damage})
    assert "cannot be read" in caplog.text
    assert job.selector.state() == {**before, "plan": 5}
