"""Less power for a while: a cap beside the policy, by an order, by the policy itself, and afterwards as before."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lone_selector import FRONTIER, PLANS, Job
from pydantic import TypeAdapter, ValidationError

from perseus_ds.artifacts.run_records import OrderGiven, PolicyChanged, PowerCapChanged
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.decisions import Situation, decide
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.policies import (
    EnergyOptimalPolicy,
    PolicyConfig,
    ReducePolicy,
    SlowdownPolicy,
    in_force,
)

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
DEFAULT_W = PLANS[0].energy_j / PLANS[0].time_s


def reduction(fraction, until=NOW + timedelta(hours=1), policy=SlowdownPolicy()):  # noqa: B008 - it is frozen
    return ReducePolicy(name="reduce", power_fraction=fraction, until=until, policy=policy)


def order(fraction, duration_s=100.0, within_s=None):
    return parse_order(
        {"command": "reduce", "power_fraction": fraction, "duration_s": duration_s, "within_s": within_s}
    )


@given(st.floats(0.5, 1.0), st.floats(0, 0.29))
def test_the_plan_is_the_policys_or_a_slower_one_that_draws_no_more(fraction, slowdown):
    policy = SlowdownPolicy(max_slowdown=slowdown)
    decision = decide(reduction(fraction, policy=policy), FRONTIER, Situation(0, NOW, default_power_w=DEFAULT_W))
    asked = decide(policy, FRONTIER, Situation(0, NOW)).plan
    assert decision.plan >= asked
    drawn_w = PLANS[decision.plan].energy_j / PLANS[decision.plan].time_s
    assert drawn_w <= fraction * DEFAULT_W or "cannot be kept" in decision.problem
    assert decision.plan == asked or PLANS[decision.plan - 1].mean_power_w > 0.995 * fraction * DEFAULT_W


def test_after_it_the_policy_decides_alone():
    asked = EnergyOptimalPolicy(name="energy_optimal")
    policy = reduction(0.9, policy=asked)
    assert in_force(policy, NOW) == policy
    assert in_force(policy, policy.until) == asked


@pytest.mark.parametrize("wrong", [{"power_fraction": 0}, {"power_fraction": 1.5}, {"until": "2030-01-01T00:00:00"}])
def test_a_wrong_reduction_is_an_error(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(PolicyConfig).validate_python(
            {"name": "reduce", "power_fraction": 0.8, "until": "2030-01-01T00:00:00Z", **wrong}
        )


def test_a_job_runs_below_it_for_as_long_as_ordered_and_then_as_before():
    job = Job(SlowdownPolicy())
    job.selector.default_power_w = DEFAULT_W
    for _ in range(3):
        job.iterate()
    job.control.carry_out(order(0.9, duration_s=20.0))
    job.iterate()
    plans = []
    for _ in range(20):
        job.time.seconds += 1.0
        plans.append(job.iterate())
    reduced = [plan for plan in plans if plan]
    assert all(PLANS[plan].mean_power_w <= 0.9 * DEFAULT_W for plan in reduced)
    assert len(reduced) >= 17
    for _ in range(4):
        job.time.seconds += 1.0
        plans.append(job.iterate())
    assert plans[-1] == 0
    caps = [event.watts for event in job.events if isinstance(event, PowerCapChanged)]
    assert caps == pytest.approx([0.9 * DEFAULT_W, None])
    assert any(isinstance(event, PolicyChanged) and event.by_schedule for event in job.events)


def test_power_that_is_measured_above_it_takes_a_slower_plan():
    job = Job(SlowdownPolicy())
    job.selector.default_power_w = DEFAULT_W
    job.control.policy = reduction(0.9, until=datetime(2030, 1, 1, tzinfo=timezone.utc))
    plans = [job.iterate(power_ratio=1.05) for _ in range(15)]
    assert 1.05 * PLANS[plans[-1]].mean_power_w <= 0.9 * DEFAULT_W


def test_the_answer_says_what_it_costs():
    job = Job(SlowdownPolicy())
    job.selector.default_power_w = DEFAULT_W
    answer = job.control.carry_out(order(0.9, duration_s=3600.0, within_s=1.0))["done"]
    assert "at most 90% of the power at default clocks" in answer
    assert "later than the 1.000 s asked for" in answer
    plan = job.selector.effect_of(job.control.policy)
    late_s = 3600.0 * (1 - plan.time_now_s / plan.time_s)
    assert f"{late_s / plan.time_now_s:.0f} iterations later" in answer


def test_the_answer_says_what_can_be_reached_where_it_cannot_be():
    job = Job(SlowdownPolicy())
    job.selector.default_power_w = DEFAULT_W
    answer = job.control.carry_out(order(0.1))["done"]
    assert "cannot be kept: the plan that draws least takes" in answer


def test_a_job_without_plans_says_that_it_does_not_know_yet():
    control = JobControl(SlowdownPolicy(), 1)
    given_orders = []
    control.on_order = given_orders.append
    assert "not known yet" in control.carry_out(order(0.8))["done"]
    assert isinstance(given_orders[0], OrderGiven)
    assert given_orders[0].policy["name"] == "reduce"


def test_a_second_order_replaces_the_first_and_keeps_the_policy():
    control = JobControl(EnergyOptimalPolicy(name="energy_optimal"), 1)
    control.carry_out(order(0.8))
    control.carry_out(order(0.7))
    assert (control.policy.power_fraction, control.policy.policy.name) == (0.7, "energy_optimal")


def test_a_checkpoint_keeps_it():
    control = JobControl(SlowdownPolicy(), 1)
    control.carry_out(order(0.8))
    resumed = JobControl(SlowdownPolicy(), 1)
    assert resumed.restore(control.state())
    assert resumed.policy == control.policy
