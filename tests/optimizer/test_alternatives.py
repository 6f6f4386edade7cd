"""Alternatives to plans, evaluated with the same DAG."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import dual_pipe_v, one_f_one_b, synthetic_profile
from profiles import stage_profile

from perseus_ds.artifacts.profile import ClockOptions, StageProfile
from perseus_ds.optimizer import optimize, with_alternatives
from perseus_ds.optimizer.alternatives import THROTTLED, alternatives, capped
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.instruction import Kind

POWER_W = 83.64
OPTIONS = ClockOptions(np.array([900, 1200, 1410]), np.array([1.5, 1.2, 1.0]), np.array([300.0, 300.0, 400.0]))


@pytest.fixture(scope="module")
def frontier():
    profile = StageProfile.load(stage_profile("a100-sxm"))
    schedule = one_f_one_b(8, 12)
    return with_alternatives(optimize(schedule, profile, blocking_power_w=POWER_W, plans=8), schedule, profile)


def points_of(frontier, name):
    return next(one.points for one in frontier.alternatives if one.name == name)


@settings(max_examples=6, deadline=None)
@given(st.builds(one_f_one_b, st.integers(2, 4), st.integers(2, 8)) | st.just(dual_pipe_v(2, 6)), st.integers(2, 9))
def test_no_alternative_is_below_the_lower_bound(schedule, clocks):
    profile = synthetic_profile(schedule.num_stages, clocks=clocks)
    frontier = optimize(schedule, profile, blocking_power_w=40.0, plans=12)
    for one in with_alternatives(frontier, schedule, profile).alternatives:
        assert one.points
        for plan in frontier.plans:
            point = one.within(plan.time_s)
            assert point is None or point.energy_j >= plan.lower_bound_j * (1 - 1e-6), one.name


def test_one_clock_is_what_the_same_clocks_take_as_a_plan(frontier):
    profile = StageProfile.load(stage_profile("a100-sxm"))
    problem = problem_for(one_f_one_b(8, 12), profile, blocking_power_w=POWER_W)
    for point in points_of(frontier, "one clock for all GPUs"):
        clock_mhz = int(point.setting.removesuffix(" MHz"))
        plan = problem.evaluate(tuple((clock_mhz,) * len(stream) for stream in problem.instructions))
        assert (point.time_s, point.energy_j) == pytest.approx((plan.time_s, plan.energy_j))


def test_one_clock_is_one_that_all_stages_have():
    profile = synthetic_profile(2, clocks=6)
    clocks = profile.options(0, Kind.FORWARD).clock_mhz.tolist()

    def found(*left_out):
        """Return the alternatives by name, without some rows (stage, clock)."""
        part = profile.where(lambda stage, kind, clock: (stage, clock) not in left_out)
        problem = problem_for(one_f_one_b(2, 4), part, blocking_power_w=40.0)
        return {one.name: {point.setting for point in one.points} for one in alternatives(problem)}

    one_clock, a_stage = "one clock for all GPUs", "one clock for each stage"
    assert f"{clocks[2]} MHz" in found()[one_clock]
    assert f"{clocks[2]} MHz" not in found((1, clocks[2]))[one_clock]
    halves = found(*((0, clock) for clock in clocks[:3]), *((1, clock) for clock in clocks[3:]))
    assert one_clock not in halves
    assert a_stage in halves


def test_a_rule_whose_clocks_a_job_cannot_hold_is_no_alternative():
    profile, schedule = synthetic_profile(4, clocks=6), one_f_one_b(4, 8)
    longest_s = max(m.time_s for m in profile.measurements)
    for dwell_s, has_rule in ((0.0, True), (2.5 * longest_s, False)):
        frontier = optimize(schedule, profile, blocking_power_w=40.0, plans=4, least_dwell_s=dwell_s)
        names = {one.name for one in with_alternatives(frontier, schedule, profile).alternatives}
        assert ("EnvPipe's rule" in names) is has_rule
        assert "one clock for each stage" in names


@pytest.mark.parametrize(
    ("cap_w", "expected"),
    [(400.0, (1.0, 400.0)), (399.0, (1.2, 300.0 * (1 + THROTTLED))), (100.0, (1.5, 300.0 * (1 + THROTTLED)))],
    ids=["no instruction reaches it", "throttled", "below all powers"],
)
def test_a_throttled_instruction_costs_more_than_at_the_locked_clock_of_its_time(cap_w, expected):
    assert capped(OPTIONS, cap_w) == pytest.approx(expected)


def test_envpipes_rule_takes_no_more_time_than_the_fastest_clocks(frontier):
    (point,) = points_of(frontier, "EnvPipe's rule")
    assert point.time_s == pytest.approx(frontier.t_min_s)
    assert point.energy_j < frontier.baseline.energy_j


def test_savings_at_the_highest_clock_are_those_of_the_plans_and_settings_in_time(frontier):
    savings = frontier.savings()
    assert savings["Perseus"][0] == pytest.approx(1 - frontier.within(0.0).energy_j / frontier.baseline.energy_j)
    assert savings["one clock for all GPUs"][0] == pytest.approx(0.0)
    assert all(np.all(np.diff(saved) >= 0) for saved in savings.values())
