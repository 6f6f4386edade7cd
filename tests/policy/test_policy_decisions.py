"""Plans selected by each policy over time."""

import random
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lone_selector import FRONTIER, PLANS

from perseus_ds.config import parse_block
from perseus_ds.errors import ConfigError
from perseus_ds.policy.decisions import (
    MARGIN,
    Decision,
    PowerCap,
    RunStatistics,
    Situation,
    decide,
    stretched_plan,
)
from perseus_ds.policy.policies import (
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PowerCapPolicy,
    SlowdownPolicy,
)

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


def test_slowdown_and_energy_optimal_and_a_deadline_that_is_over_or_a_training_that_is_done():
    situation = Situation(step=5, now=NOW)
    assert decide(SlowdownPolicy(), FRONTIER, situation).plan == 0
    assert decide(SlowdownPolicy(max_slowdown=0.05), FRONTIER, situation).plan == 5
    assert decide(EnergyOptimalPolicy(name="energy_optimal"), FRONTIER, situation).plan == 29
    deadline = DeadlinePolicy(name="deadline", finish_by=NOW, total_steps=10)
    assert decide(deadline, FRONTIER, situation).plan == 0
    assert decide(deadline, FRONTIER, Situation(step=10, now=NOW)).plan == 29


@given(st.integers(0, 99), st.floats(0.5, 3.0), st.floats(0.9, 1.3), st.floats(0, 0.3))
def test_a_deadline_takes_the_slowest_plan_that_still_makes_it(step, seconds_per_step, ratio, stopped_s):
    finish_by = NOW + timedelta(seconds=(100 - step) * seconds_per_step)
    policy = DeadlinePolicy(name="deadline", finish_by=finish_by, total_steps=100)
    decision = decide(policy, FRONTIER, Situation(step=step, now=NOW, time_ratio=ratio, stopped_s=stopped_s))
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
    policy = DeadlinePolicy(name="deadline", finish_by=NOW + timedelta(seconds=400 * PLANS[9].time_s), total_steps=100)
    plans = [decide(policy, FRONTIER, Situation(0, NOW, iterations_per_step=number)).plan for number in (1.0, 4.0, 8.0)]
    assert plans == [29, 8, 0]


@given(st.floats(50, 1000), st.integers(1, 8), st.floats(0.8, 1.2))
def test_a_power_cap_takes_the_fastest_plan_under_it(watts, gpus, ratio):
    situation = Situation(0, NOW, gpus_per_rank=gpus, power_ratio=ratio)
    decision = decide(PowerCapPolicy(name="power_cap", watts=watts), FRONTIER, situation)
    powers = [gpus * ratio * plan.energy_j / plan.time_s for plan in PLANS]
    if decision.problem:
        assert min(powers) > watts
    else:
        assert powers[decision.plan] <= watts
        assert decision.plan == 0 or powers[decision.plan - 1] > (1 - MARGIN) * watts


@given(st.integers(0, 29), st.floats(0.995, 1.005))
def test_a_plan_that_still_fits_is_kept_where_another_would_hardly_do_better(running, noise):
    time_s, power_w = PLANS[running].time_s * 1.001, PLANS[running].energy_j / PLANS[running].time_s * 1.0025
    deadline = DeadlinePolicy(name="deadline", finish_by=NOW + timedelta(seconds=1001 * time_s), total_steps=1000)
    before = decide(deadline, FRONTIER, Situation(0, NOW, before=Decision(running))).plan
    assert abs(before - running) <= 1
    wavering = decide(deadline, FRONTIER, Situation(0, NOW, time_ratio=min(1.0, noise), before=Decision(before))).plan
    assert wavering == before
    situation = Situation(0, NOW, power_ratio=min(1.0, noise), before=Decision(running, cap=PowerCap(power_w)))
    assert decide(PowerCapPolicy(name="power_cap", watts=power_w), FRONTIER, situation).plan == running


def test_a_deadline_is_met_by_a_run_that_stops_slows_down_and_is_resumed_later():
    draw = random.Random(5)
    policy = DeadlinePolicy(name="deadline", finish_by=NOW + timedelta(seconds=500 * 1.2), total_steps=500)
    pace, now, decision, energy_j = RunStatistics(), NOW, None, 0.0
    for step in range(500):
        if step == 300:  # a checkpoint, resumed ten seconds later in a new process
            pace, now = RunStatistics.model_validate_json(pace.model_dump_json()), now + timedelta(seconds=10)
        situation = Situation(step, now, pace.time_ratio, 1.0, pace.stopped_s, before=decision)
        decision = decide(policy, FRONTIER, situation)
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
    early_s = (policy.finish_by - done).total_seconds()
    assert 0 <= early_s < 5, "on time, and not unnecessarily early"
    assert energy_j < 500 * PLANS[8].energy_j


def test_others_run_as_slow_as_a_straggler_but_never_slower_than_is_worth_it():
    assert stretched_plan(FRONTIER, 3, 1.0) == 3
    assert stretched_plan(FRONTIER, 3, 1.1) == 12
    assert stretched_plan(FRONTIER, 3, 9.0) == 29


def test_a_policy_that_was_removed_is_named_with_what_to_use_instead():
    reduction = {"name": "reduce", "power_fraction": 0.8, "until": "2030-01-31T08:00:00Z"}
    blocks = [
        ("cheapest", {"name": "cheapest"}),
        ("cheapest", {**reduction, "policy": {"name": "cheapest"}}),
        ("signal", {"name": "power_cap", "signal": "cap.csv"}),
        ("signal", {**reduction, "signal": "power.csv"}),
    ]
    for word, block in blocks:
        with pytest.raises(ConfigError, match=rf'perseus\.policy.*: "{word}" was removed in 0\.2\.0\. .*docs/policies'):
            parse_block({"policy": block})


@given(st.floats(1.05, 3.0), st.floats(0.2, 5.0))
def test_a_deadline_slows_down_orders_of_different_lengths_by_the_same_factor(seconds_per_step, relative_time):
    policy = DeadlinePolicy(
        name="deadline", finish_by=NOW + timedelta(seconds=1001 * seconds_per_step), total_steps=1000
    )
    alone = decide(policy, FRONTIER, Situation(0, NOW))
    # A plan of this order takes ``relative_time`` times as long as the same plan of the mean iteration.
    mixed = decide(policy, FRONTIER, Situation(0, NOW, time_ratio=relative_time, relative_time=relative_time))
    assert mixed == alone
