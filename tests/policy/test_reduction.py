"""Temporary power caps in addition to the policy, requested by a command or by a policy."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lone_selector import FRONTIER, PLANS, Job
from pydantic import ValidationError

from perseus_ds.artifacts.run_records import PowerCapChanged
from perseus_ds.errors import ConfigError
from perseus_ds.policy.decisions import Situation, decide
from perseus_ds.policy.policies import POLICY, PowerCapPolicy, ReducePolicy, SlowdownPolicy, parse_order
from perseus_ds.server.job_control import JobControl

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


def test_a_reduction_needs_an_end_and_a_percentage_is_not_a_fraction():
    with pytest.raises(ValidationError, match=r"until\s+Field required"):
        POLICY.validate_python({"name": "reduce", "power_fraction": 0.8})
    with pytest.raises(ConfigError, match=r"order: power_fraction: .*Did you mean 0.8\?"):
        order(80)


def test_beside_a_lower_cap_the_lower_one_is_in_force_and_recorded():
    job = Job(PowerCapPolicy(name="power_cap", watts=0.8 * DEFAULT_W))
    plans = [job.iterate() for _ in range(5)]
    job.control.carry_out(order(0.9, duration_s=100.0))
    plans += [job.iterate() for _ in range(5)]
    assert len(set(plans)) == 1
    job.control.carry_out(order(0.75, duration_s=100.0))
    assert [job.iterate() for _ in range(5)][-1] > plans[-1]
    caps = [event.watts for event in job.events if isinstance(event, PowerCapChanged)]
    assert caps == pytest.approx([0.8 * DEFAULT_W, 0.75 * DEFAULT_W])


def test_the_answer_says_what_it_costs():
    job = Job(SlowdownPolicy())
    answer = job.control.carry_out(order(0.9, duration_s=3600.0, within_s=1.0))["done"]
    assert "at most 90% of the power at default clocks" in answer
    assert "later than the 1.000 s asked for" in answer
    plan = job.selector.effect_of(job.control.policy)
    late_s = 3600.0 * (1 - plan.without_s / plan.time_s)
    assert f"{late_s / plan.without_s:.0f} iterations later" in answer
    assert "cannot be kept: the plan with the lowest power draws" in job.control.carry_out(order(0.1))["done"]
    job.control.carry_out(parse_order({"command": "pause"}))
    assert "paused, and runs at default clocks until it is resumed" in job.control.carry_out(order(0.9))["done"]


def test_a_job_without_plans_says_that_it_does_not_know_yet():
    assert "not known yet" in JobControl(SlowdownPolicy(), 1).carry_out(order(0.8))["done"]


def test_a_second_order_replaces_the_first_and_its_answer_counts_from_the_policy():
    job = Job(SlowdownPolicy())
    first = job.control.carry_out(order(0.9, duration_s=3600.0))["done"]
    for _ in range(4):
        job.iterate()
    assert job.in_force.plan > 0
    second = job.control.carry_out(order(0.9, duration_s=3600.0))["done"]
    assert first.partition("iterations take")[2] == second.partition("iterations take")[2]
    assert job.control.policy.policy == SlowdownPolicy()
