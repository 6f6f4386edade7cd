"""Which plan each policy asks for, and stragglers recognised."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.frontier import Frontier, Provenance
from perseus_ds.instruction import Instruction, Kind
from perseus_ds.plan import FrequencyPlan
from perseus_ds.policy import (
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PowerCapPolicy,
    Situation,
    SlowdownPolicy,
    decide,
    no_slower_than,
)
from perseus_ds.stragglers import StragglerWatch

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),),)
PLANS = tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - 10 * i,),), 1.0 + 0.01 * i, 100.0 - i) for i in range(30))
PROVENANCE = Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=1, solver="none")
FRONTIER = Frontier(PLANS, 1.0, PLANS[0], PROVENANCE)


def test_slowdown_and_energy_optimal():
    situation = Situation(step=0, now=NOW)
    assert decide(SlowdownPolicy(), FRONTIER, situation).plan == 0
    assert decide(SlowdownPolicy(max_slowdown=0.05), FRONTIER, situation).plan == 5
    assert decide(EnergyOptimalPolicy(name="energy_optimal"), FRONTIER, situation).plan == 29


@given(st.integers(0, 99), st.floats(0.5, 3.0), st.floats(0.9, 1.3))
def test_a_deadline_takes_the_slowest_plan_that_still_makes_it(step, seconds_per_step, ratio):
    finish_by = NOW + timedelta(seconds=(100 - step) * seconds_per_step)
    policy = DeadlinePolicy(name="deadline", finish_by=finish_by, total_steps=100)
    decision = decide(policy, FRONTIER, Situation(step=step, now=NOW, time_ratio=ratio))
    time_s = PLANS[decision.plan].time_s * ratio
    in_reserve_s = seconds_per_step * (100 - step) / (101 - step)
    if decision.problem:
        assert decision.plan == 0
        assert time_s > seconds_per_step * (1 - 1e-5)
        assert "cannot be met" in decision.problem
    else:
        assert time_s <= (seconds_per_step if decision.plan == 0 else in_reserve_s) * (1 + 1e-5)
        if decision.plan < 29:
            assert PLANS[decision.plan + 1].time_s * ratio > in_reserve_s * (1 - 1e-5)


def test_a_deadline_that_is_over_or_a_training_that_is_done_is_no_error():
    policy = DeadlinePolicy(name="deadline", finish_by=NOW, total_steps=10)
    assert decide(policy, FRONTIER, Situation(step=5, now=NOW)).plan == 0
    assert decide(policy, FRONTIER, Situation(step=10, now=NOW)).plan == 29


@given(st.floats(50, 1000), st.integers(1, 8))
def test_a_power_cap_takes_the_fastest_plan_under_it(watts, gpus):
    decision = decide(PowerCapPolicy(name="power_cap", watts=watts), FRONTIER, Situation(0, NOW, gpus_per_rank=gpus))
    powers = [gpus * plan.energy_j / plan.time_s for plan in PLANS]
    if decision.problem:
        assert min(powers) > watts
    else:
        assert powers[decision.plan] <= watts
        assert decision.plan == 0 or powers[decision.plan - 1] > watts


def test_others_run_as_slow_as_a_straggler_but_never_slower_than_is_worth_it():
    assert no_slower_than(FRONTIER, 3, None) == 3
    assert no_slower_than(FRONTIER, 3, 1.0) == 3
    assert no_slower_than(FRONTIER, 3, 1.2) == 20
    assert no_slower_than(FRONTIER, 3, 9.0) == 29


def test_a_straggler_is_recognised_and_recovers():
    watch = StragglerWatch()
    seen = [watch.update(r) for r in [(1, 1.01, 1)] * 3 + [(1, 1.2, 1)] * 4 + [(1, 1.0, 1.01)] * 4]
    pipelines = [s.pipeline if s else None for s in seen]
    assert pipelines == [None] * 4 + [1] * 4 + [None] * 3
    assert seen[5].slowdown == pytest.approx(1.2)


def test_one_slow_iteration_and_a_pipeline_at_the_border_change_nothing():
    watch = StragglerWatch()
    assert [watch.update(r) for r in [(1, 1), (1, 1.5), (1, 1), (1.5, 1), (1, 1)]] == [None] * 5
    for ratios in [(1, 1.08)] * 2:
        watch.update(ratios)
    assert all(watch.update((1, 1.04 + 0.02 * (i % 2))).pipeline == 1 for i in range(6))


@given(st.lists(st.floats(0.9, 1.5), min_size=1, max_size=1))
def test_a_single_pipeline_has_no_straggler(ratios):
    assert StragglerWatch().update(ratios) is None
