"""The keys of a goal, and the plans that goals select over time."""

import itertools
import json
import random
import statistics
from datetime import datetime, timedelta, timezone

import pytest
from frontiers import thirty_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_ds.config import parse_block
from perseus_ds.errors import ConfigError
from perseus_ds.policy.decisions import (
    MARGIN,
    Decision,
    PowerCap,
    RunStatistics,
    Situation,
    decide,
    slowdown_of,
)
from perseus_ds.policy.goal import Goal
from perseus_ds.policy.plans import stretched_plan

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
NO_SLOWER = 0.0011
"""Slowdown that counts as none."""
FRONTIER = thirty_plans()
PLANS = FRONTIER.plans
DEFAULT_W = PLANS[0].mean_power_w
SLOWDOWNS = st.floats(0, 0.28)


def deadline(seconds, steps, **keys):
    """Return a goal to finish some steps within some seconds from now on."""
    return Goal(finish_by=NOW + timedelta(seconds=seconds), total_steps=steps, **keys)


def test_the_slowdown_limits_the_plan_and_without_one_the_plan_of_least_energy_runs():
    situation = Situation(step=5, now=NOW)
    assert decide(Goal(), FRONTIER, situation).plan == 0
    assert decide(Goal(max_slowdown=0.055), FRONTIER, situation).plan == 5
    assert decide(Goal(max_slowdown=None), FRONTIER, situation).plan == 29
    assert decide(deadline(0, 10), FRONTIER, situation).plan == 0
    assert decide(deadline(0, 10), FRONTIER, Situation(step=10, now=NOW)).plan == 29, "the training is done"


@settings(deadline=None, max_examples=30)
@given(st.floats(0.001, 0.28), st.floats(-0.02, 0.02))
def test_the_mean_slowdown_is_the_allowed_one_as_measured_in_the_job(max_slowdown, late):
    """The allowed slowdown lies between those of two plans, which take turns."""
    goal, spare, before = Goal(max_slowdown=max_slowdown), 0.0, None
    slowdowns, plans = [], []
    for step in range(1500):
        before = decide(goal, FRONTIER, Situation(step, NOW, late=late, spare=spare, before=before))
        plans.append(before.plan)
        slowdowns.append((1 + slowdown_of(FRONTIER, before.plan)) * (1 + late) - 1)
        spare += max_slowdown - slowdowns[-1]
    least, most = late, (1 + slowdown_of(FRONTIER, 29)) * (1 + late) - 1
    possible = min(max(max_slowdown, least), most)
    assert abs(statistics.mean(slowdowns) - possible) <= NO_SLOWER
    assert len(set(plans)) <= 2
    assert sum(plan != other for plan, other in itertools.pairwise(plans)) < 150, "plans change ever more rarely"


@given(st.integers(0, 99), st.floats(0.5, 3.0), st.floats(0.9, 1.3), st.floats(0, 0.3))
def test_a_deadline_takes_the_slowest_plan_that_still_makes_it(step, seconds_per_step, ratio, stopped_s):
    goal = deadline((100 - step) * seconds_per_step, 100)
    decision = decide(goal, FRONTIER, Situation(step=step, now=NOW, time_ratio=ratio, stopped_s=stopped_s))
    step_s = PLANS[decision.plan].time_s * ratio + stopped_s
    in_reserve_s = seconds_per_step * (100 - step) / (101 - step)
    if decision.problem:
        assert decision.plan == 0
        assert step_s > seconds_per_step * (1 - 1e-5)
        assert "cannot be met" in decision.problem
    else:
        assert step_s <= (seconds_per_step if decision.plan == 0 else in_reserve_s) * (1 + 1e-5)
        if decision.plan < 29:
            assert PLANS[decision.plan + 1].time_s * ratio + stopped_s > in_reserve_s * (1 - 1e-5)


def test_a_step_of_several_iterations_takes_as_long_as_all_of_them():
    """Gradients that are accumulated over calls of ``step()`` of a torch schedule are one training step."""
    goal = deadline(400 * PLANS[9].time_s, 100)
    plans = [decide(goal, FRONTIER, Situation(0, NOW, iterations_per_step=number)).plan for number in (1.0, 4.0, 8.0)]
    assert plans == [29, 8, 0]


@given(st.floats(50, 1000), st.integers(1, 8), st.floats(0.8, 1.2))
def test_a_power_limit_takes_the_fastest_plan_under_it(watts, gpus, ratio):
    situation = Situation(0, NOW, gpus_per_rank=gpus, power_ratio=ratio)
    decision = decide(Goal(watts=watts), FRONTIER, situation)
    powers = [gpus * ratio * plan.energy_j / plan.time_s for plan in PLANS]
    if decision.problem:
        assert min(powers) > watts
    else:
        assert powers[decision.plan] <= watts
        assert decision.plan == 0 or powers[decision.plan - 1] > (1 - MARGIN) * watts


@given(st.floats(0.5, 0.99), SLOWDOWNS)
def test_under_a_power_limit_the_plan_is_the_other_limits_one_or_a_slower_one(fraction, slowdown):
    goal = Goal(max_slowdown=slowdown, power_fraction=fraction)
    decision = decide(goal, FRONTIER, Situation(0, NOW, default_power_w=DEFAULT_W))
    allowed = decide(Goal(max_slowdown=slowdown), FRONTIER, Situation(0, NOW)).plan
    assert decision.plan >= allowed
    drawn_w = PLANS[decision.plan].mean_power_w
    assert drawn_w <= fraction * DEFAULT_W or "cannot be kept" in decision.problem
    assert decision.plan == allowed or PLANS[decision.plan - 1].mean_power_w > 0.995 * fraction * DEFAULT_W


def test_a_deadline_holds_under_a_power_limit_or_it_is_said_that_it_cannot():
    situation = Situation(0, NOW)
    possible = decide(deadline(1200, 1000, watts=0.9 * DEFAULT_W), FRONTIER, situation)
    assert (possible.plan, possible.problem) == (decide(deadline(1200, 1000), FRONTIER, situation).plan, "")
    watts = PLANS[25].mean_power_w * 1.006
    impossible = decide(deadline(1200, 1000, watts=watts), FRONTIER, situation)
    assert impossible.plan == 25
    assert "deadline 2026-11-21T00:20:00+00:00 cannot be met below the power limit" in impossible.problem


def test_a_deadline_and_a_slowdown_both_hold():
    situation = Situation(0, NOW)
    assert decide(deadline(1280, 1000, max_slowdown=0.055), FRONTIER, situation).plan == 5
    early = decide(deadline(1030, 1000, max_slowdown=0.055), FRONTIER, situation)
    assert 0 < early.plan < 5
    assert early == decide(deadline(1030, 1000), FRONTIER, situation)
    assert deadline(1280, 1000).max_slowdown is None


@given(st.integers(0, 29), st.floats(0.995, 1.005))
def test_a_plan_that_still_fits_is_kept_where_another_would_hardly_do_better(running, noise):
    time_s, power_w = PLANS[running].time_s * 1.001, PLANS[running].energy_j / PLANS[running].time_s * 1.0025
    goal = deadline(1001 * time_s, 1000)
    before = decide(goal, FRONTIER, Situation(0, NOW, before=Decision(running))).plan
    assert abs(before - running) <= 1
    wavering = decide(goal, FRONTIER, Situation(0, NOW, time_ratio=min(1.0, noise), before=Decision(before))).plan
    assert wavering == before
    situation = Situation(0, NOW, power_ratio=min(1.0, noise), before=Decision(running, cap=PowerCap(power_w)))
    assert decide(Goal(watts=power_w), FRONTIER, situation).plan == running


def test_a_deadline_is_met_by_a_run_that_stops_slows_down_and_is_resumed_later():
    draw = random.Random(5)
    goal = deadline(500 * 1.2, 500)
    pace, now, decision, energy_j = RunStatistics(), NOW, None, 0.0
    for step in range(500):
        if step == 300:  # a checkpoint, resumed ten seconds later in a new process
            pace, now = RunStatistics.model_validate_json(pace.model_dump_json()), now + timedelta(seconds=10)
        situation = Situation(step, now, pace.time_ratio, 1.0, stopped_s=pace.stopped_s, before=decision)
        decision = decide(goal, FRONTIER, situation)
        plan = decision.plan
        time_s = PLANS[plan].time_s * draw.gauss(1.02 if step < 250 else 1.06, 0.02)
        stop_s = 2.0 if step % 50 == 49 else 0.01
        pace.add_iteration(
            time_s=time_s, energy_j=1.0, promised_time_s=PLANS[plan].time_s, promised_energy_j=PLANS[plan].energy_j
        )
        pace.add_stop(stop_s)
        done = now + timedelta(seconds=time_s)
        now = done + timedelta(seconds=stop_s)
        energy_j += PLANS[plan].energy_j
    early_s = (goal.finish_by - done).total_seconds()
    assert 0 <= early_s < 5, "on time, and not unnecessarily early"
    assert energy_j < 500 * PLANS[8].energy_j


@given(st.floats(1.05, 3.0), st.floats(0.2, 5.0))
def test_a_deadline_slows_down_orders_of_different_lengths_by_the_same_factor(seconds_per_step, relative_time):
    goal = deadline(1001 * seconds_per_step, 1000)
    alone = decide(goal, FRONTIER, Situation(0, NOW))
    # A plan of this order takes ``relative_time`` times as long as the same plan of the mean iteration.
    mixed = decide(goal, FRONTIER, Situation(0, NOW, time_ratio=relative_time, relative_time=relative_time))
    assert mixed == alone


def test_others_run_as_slow_as_a_straggler_but_never_slower_than_is_worth_it():
    assert stretched_plan(FRONTIER, 3, 1.0) == 3
    assert stretched_plan(FRONTIER, 3, 1.1) == 12
    assert stretched_plan(FRONTIER, 3, 9.0) == 29


def test_pipelines_that_must_become_faster_run_the_fastest_plan_at_most():
    assert 0 < stretched_plan(FRONTIER, 9, 0.97) < 9
    assert stretched_plan(FRONTIER, 9, 0.1) == 0


UNTIL = "2030-01-31T08:00:00Z"


@pytest.mark.parametrize(
    ("policy", "goal"),
    [
        ({"name": "slowdown", "max_slowdown": 0.05}, '{"goal": {"max_slowdown": 0.05}}'),
        ({"name": "energy_optimal"}, '{"goal": {"max_slowdown": null}}'),
        ({"name": "power_cap", "watts": 5000}, '{"goal": {"watts": 5000}}'),
        (
            {"name": "deadline", "finish_by": UNTIL, "total_steps": 9},
            f'{{"goal": {{"finish_by": "{UNTIL}", "total_steps": 9}}}}',
        ),
        (
            {"name": "reduce", "power_fraction": 0.8, "until": UNTIL, "policy": {"name": "energy_optimal"}},
            f'{{"goal": {{"max_slowdown": null, "power_fraction": 0.8, "until": "{UNTIL}"}}}}',
        ),
        ({"name": "cheapest"}, "give max_slowdown, finish_by and total_steps, watts or power_fraction"),
        ("slowdown", "give max_slowdown, finish_by and total_steps, watts or power_fraction"),
    ],
    ids=str,
)
def test_a_policy_of_an_earlier_version_is_an_error_with_the_goal_to_write_instead(policy, goal):
    with pytest.raises(ConfigError) as error:
        parse_block({"policy": policy})
    assert str(error.value) == f'perseus: "policy" is now "goal": {goal} (docs/power-and-deadlines.md).'
    if goal.startswith("{"):
        parse_block(json.loads(goal))
