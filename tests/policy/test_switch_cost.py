"""What a clock change costs, learnt from plans that were late."""

import pytest

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.policy.plan_proof import PlanComparison, SwitchCost


def plan(changes):
    """A plan in which the busier of two ranks changes its clock so often."""
    return FrequencyPlan(((), ()), ((1200, 1410) * (changes // 2), (1410, 1410)), 1.0, 100.0)


def late_by(slowdown, promised=0.0, error=0.0005):
    return PlanComparison(slowdown, error, 0.1, 0.005, promised)


def test_a_late_plan_sets_the_switch_cost_by_its_changes():
    cost = SwitchCost()
    assert cost.learn(plan(10), late_by(0.02), 2.0)
    assert cost.time_s == pytest.approx(0.004)


def test_a_plan_in_time_costs_nothing():
    cost = SwitchCost()
    assert not cost.learn(plan(10), late_by(0.001), 2.0)
    assert not cost.learn(plan(10), late_by(0.02, error=0.01), 2.0)
    assert cost.time_s == 0.0


def test_lateness_that_a_plan_allows_for_counts_in_the_fit_only():
    cost = SwitchCost()
    cost.learn(plan(10), late_by(0.02), 2.0)
    assert not cost.learn(plan(6), late_by(0.012, promised=0.012), 2.0)
    assert cost.time_s == pytest.approx(0.004)


def test_a_switch_cost_that_was_too_low_rises_and_is_tried_twice_at_most():
    cost = SwitchCost()
    assert cost.learn(plan(20), late_by(0.01), 2.0)
    assert cost.learn(plan(6), late_by(0.06), 2.0)
    assert cost.time_s > 0.0014
    assert not cost.learn(plan(6), late_by(0.06), 2.0)


def test_lateness_that_changes_of_the_clock_cannot_explain_sets_no_switch_cost():
    cost = SwitchCost()
    assert not cost.learn(plan(10), late_by(0.22), default_s=1.0)
    assert cost.time_s == 0.0
