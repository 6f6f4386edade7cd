"""Properties of the exact solver, and comparison with enumeration of small cases."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import EarlyRecomputation, GPipe, dual_pipe_v, one_f_one_b, scaled, synthetic_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.optimizer import optimize, solver
from perseus_ds.optimizer.bounds import Bounds, Tangent
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.optimizer.solver import refine
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Schedule, Transfer

POWER_W = 80.0
FIXED = {
    "load_s": {0: 0.004},
    "tail_s": {0: 0.03, 1: 0.02},
    "transfers": [
        {"payload": "activation", "source": 0, "target": 1, "time_s": 0.003},
        {"payload": "grad", "source": 1, "target": 0, "time_s": 0.005},
    ],
}


def noisy_profile(stages, clocks, seed, kinds=(Kind.FORWARD, Kind.BACKWARD), **info):
    """Return a profile like a measured one, with unequal stages and irregular times and energies."""
    rng, profile = np.random.default_rng(seed), synthetic_profile(stages, clocks=clocks, kinds=sorted(kinds), **info)
    return StageProfile(
        [
            replace(m, time_s=m.time_s * rng.uniform(0.93, 1.07), energy_j=m.energy_j * rng.uniform(0.93, 1.07))
            for m in profile.measurements
        ],
        profile.info,
    )


def solve(problem, plans=12):
    return optimize(problem.dag.schedule, problem.profile, problem.settings, plans=plans)


SCHEDULES = [
    one_f_one_b(3, 5),
    dual_pipe_v(2, 6),
    read_schedule(GPipe, ranks=3, micro_batches=4),
    read_schedule(EarlyRecomputation, ranks=3, micro_batches=4),
]


@pytest.mark.parametrize("is_long", [False, True])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), schedule=st.sampled_from(SCHEDULES), info=st.sampled_from([{}, FIXED]))
def test_plans_run_from_t_min_to_t_star_and_never_beat_their_bound(is_long, seed, schedule, info):
    kinds = {i.kind for stream in schedule.instructions for i in stream}
    profile = noisy_profile(schedule.num_stages, 7, seed, kinds - {Kind.TAIL} if info else kinds, **info)
    problem = problem_for(schedule, profile, blocking_power_w=POWER_W)
    with pytest.MonkeyPatch.context() as patch:
        if is_long:
            patch.setattr(solver, "_LONG", 0)
        proven = solve(problem)
    assert {i.kind for stream in proven.instructions for i in stream} == {kind for _, kind in profile.keys}
    assert proven.plans[0].time_s == pytest.approx(problem.t_min_s, rel=1e-9)
    for faster, slower in itertools.pairwise(proven.plans):
        assert faster.time_s < slower.time_s
        assert faster.energy_j > slower.energy_j
    for plan in proven.plans:
        assert plan.lower_bound_j <= plan.energy_j
        again = problem.evaluate(plan.clocks_mhz)
        assert (again.time_s, again.energy_j) == pytest.approx((plan.time_s, plan.energy_j), rel=1e-12)
    # These profiles are far from smooth; the bound must still be useful.
    assert np.mean([plan.gap for plan in proven.plans]) < 0.03


def every_plan(problem):
    """Return the time and the energy, until its own end, of every possible plan."""
    sizes = [len(problem.groups[g].cost_j) for g in problem.group]
    plans = [problem.plan(problem.fastest + choice) for choice in itertools.product(*map(range, sizes))]
    return np.array([(plan.time_s, plan.energy_j) for plan in plans]).T


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), shape=st.sampled_from([(1, 3, 3), (2, 2, 2), (2, 1, 4), (3, 1, 2)]))
def test_on_tiny_pipelines_the_optimum_lies_between_bound_and_plan(seed, shape):
    ranks, micro_batches, clocks = shape
    problem = problem_for(
        one_f_one_b(ranks, micro_batches), noisy_profile(ranks, clocks, seed), blocking_power_w=POWER_W
    )
    time_s, energy_j = every_plan(problem)
    excess = []
    for plan in solve(problem).plans:
        optimum_j = energy_j[time_s <= plan.time_s * (1 + 1e-12)].min()
        assert plan.lower_bound_j <= optimum_j <= plan.energy_j * (1 + 1e-12)
        excess.append(plan.energy_j / optimum_j - 1)
    # Not always the optimum, but close to it.
    assert np.mean(excess) < 0.01


@pytest.mark.parametrize(("time", "energy"), [(0.01, 0.01), (8.0, 1.0)])
def test_scaled_times_and_energies_scale_the_frontier(time, energy):
    schedule, profile = one_f_one_b(3, 4), synthetic_profile(3)
    first = optimize(schedule, profile, blocking_power_w=POWER_W, plans=10)
    second = optimize(
        schedule, scaled(profile, time=time, energy=energy), blocking_power_w=POWER_W * energy / time, plans=10
    )
    assert second.t_min_s == pytest.approx(first.t_min_s * time)
    for ends in (0, -1):
        assert second.plans[ends].time_s == pytest.approx(first.plans[ends].time_s * time, rel=2e-3)
        assert second.plans[ends].energy_j == pytest.approx(first.plans[ends].energy_j * energy, rel=2e-3)
        assert second.plans[ends].lower_bound_j == pytest.approx(first.plans[ends].lower_bound_j * energy, rel=2e-3)


def test_a_profile_whose_times_hardly_differ_saves_all_that_costs_no_time():
    rows = [replace(m, time_s=0.05 * (1 - 1e-9 * m.clock_mhz)) for m in synthetic_profile(3).measurements]
    frontier = optimize(one_f_one_b(3, 4), StageProfile(rows), blocking_power_w=POWER_W, plans=8)
    problem = problem_for(one_f_one_b(3, 4), StageProfile(rows), blocking_power_w=POWER_W)
    assert frontier.within(0.0).energy_j == pytest.approx(problem.plan(problem.most_frugal).energy_j, rel=1e-9)


def test_a_row_below_blocking_power_is_an_option_like_others(caplog):
    rows = synthetic_profile(2, clocks=4).measurements
    low = min(m.clock_mhz for m in rows)
    below = [replace(m, energy_j=0.9 * POWER_W * m.time_s) if m.clock_mhz == low else m for m in rows]
    for dwell_s in (0.0, 0.3):
        frontier = optimize(
            one_f_one_b(2, 4), StageProfile(below), blocking_power_w=POWER_W, plans=8, least_dwell_s=dwell_s
        )
        assert set(frontier.plans[-1].clocks_mhz[0]) == {low}
    assert "4 of 16 rows do not exceed the blocking power" in caplog.text


def test_where_waiting_costs_nothing_the_slowest_clocks_are_the_last_plan():
    problem = problem_for(one_f_one_b(2, 3), synthetic_profile(2), blocking_power_w=0.0)
    assert solve(problem).plans[-1].energy_j == pytest.approx(problem.plan(problem.most_frugal).energy_j)


def test_where_the_highest_clock_is_the_most_frugal_there_is_one_plan():
    rows = [
        Measurement(0, kind, clock, 100 / clock, 50 + 1e5 / clock)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for clock in (1000, 1200, 1400)
    ]
    (plan,) = optimize(one_f_one_b(1, 4), StageProfile(rows), blocking_power_w=POWER_W).plans
    assert set(plan.clocks_mhz[0]) == {1400}
    assert plan.gap == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (
            synthetic_profile(2).where(lambda stage, kind, clock: (stage, kind) != (1, Kind.BACKWARD)),
            "no backward rows for stage 1",
        ),
        (
            synthetic_profile(2).where(lambda stage, kind, clock: stage or clock == 900),
            "stage 0, forward: only one clock",
        ),
        (scaled(synthetic_profile(2), energy=0.1), "do not exceed the blocking power"),
        (synthetic_profile(1), "has 2 stages, the profile 1"),
    ],
)
def test_a_profile_that_cannot_be_planned_for_is_refused(profile, words):
    with pytest.raises(ProfileError, match=words):
        optimize(one_f_one_b(2, 3), profile, blocking_power_w=POWER_W)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"blocking_power_w": None}, "blocking_power_w is missing"),
        ({"least_dwell_s": 1e300}, r"least_dwell_s=1e\+300: expected a number of seconds >= 0, at most"),
        ({"blocking_power_w": 83640.0}, "blocking_power_w=83640: .* probably in milliwatts: write 83.64"),
        ({"reserve": 2.0}, "reserve=2: expected a fraction from 0 to 1, such as 0.02"),
        ({"plans": 1}, r"plans=1: expected 2, one for T_min and one for T\*, to 10000"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_planning(arguments, words, monkeypatch):
    monkeypatch.setattr("perseus_ds.optimizer.solve_exact", None)
    with pytest.raises(ConfigError, match=words):
        optimize(one_f_one_b(2, 3), synthetic_profile(2), **{"blocking_power_w": POWER_W, **arguments})


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(SCHEDULES))
def test_with_a_reserve_slowed_instructions_may_take_longer_without_delaying_a_plan(seed, schedule):
    kinds = {i.kind for stream in schedule.instructions for i in stream}
    profile = noisy_profile(schedule.num_stages, 6, seed, kinds)
    problem = problem_for(schedule, profile, blocking_power_w=POWER_W)
    reserve = 0.05

    def late_s(plan):
        """Return the time of a plan whose slowed instructions take longer by the reserve."""
        longer = []
        for row in profile.measurements:
            fastest_s = profile.options(row.stage, row.kind).time_s.min()
            time_s = row.time_s + min(reserve * row.time_s, row.time_s - fastest_s)
            longer.append(replace(row, time_s=time_s))
        return problem_for(schedule, StageProfile(longer), blocking_power_w=POWER_W).evaluate(plan.clocks_mhz).time_s

    without, found = (optimize(schedule, profile, blocking_power_w=POWER_W, plans=8, reserve=r) for r in (0.0, reserve))
    assert found.plans[0].time_s == without.plans[0].time_s == pytest.approx(problem.t_min_s)
    assert late_s(found.plans[0]) <= 1.001 * problem.t_min_s < late_s(without.plans[0])
    for plan in found.plans:
        evaluated = problem.evaluate(plan.clocks_mhz)
        assert (plan.time_s, plan.energy_j) == (evaluated.time_s, evaluated.energy_j), "without the reserve"
        assert plan.lower_bound_j <= plan.energy_j
    assert (without.provenance.reserve, found.provenance.reserve) == (0.0, reserve)


def test_gaps_of_long_iterations_are_nearly_those_of_a_full_search(monkeypatch):
    problem = problem_for(one_f_one_b(4, 24), synthetic_profile(4), blocking_power_w=POWER_W)
    full = solve(problem, plans=24)
    monkeypatch.setattr(solver, "_LONG", 0)
    proven = solve(problem, plans=24)
    assert proven.plans != full.plans
    assert len(proven.plans) > 20
    assert np.mean([plan.gap for plan in proven.plans]) < np.mean([plan.gap for plan in full.plans]) + 1.5e-3


def meeting_twice(stage):
    """Return the operations of one of two ranks that meet twice in a row."""
    transfers = [Transfer("activation", 0, 1, 0), Transfer("activation", 0, 1, 1)]
    transfers += [Transfer("grad", 1, 0, 0), Transfer("grad", 1, 0, 1)]
    sides = [Exchange(**{"sends" if t.source == stage else "receives": (t,)}) for t in transfers]
    passes = [Compute(Instruction(stage, kind, 0)) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return sides[0], passes[0], sides[1], sides[2], passes[1], sides[3]


NEIGHBOURS = [one_f_one_b(2, 2), Schedule("meeting twice", 1, (meeting_twice(0), meeting_twice(1)))]


@pytest.mark.parametrize("schedule", NEIGHBOURS, ids=["1f1b", "meeting twice"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), info=st.sampled_from([{}, FIXED]))
def test_any_flow_proves_a_bound_that_no_plan_is_below(schedule, seed, info):
    problem = problem_for(schedule, noisy_profile(2, 2, seed, **info), blocking_power_w=POWER_W / 10)
    time_s, energy_j = every_plan(problem)
    network, rng = Network(problem), np.random.default_rng(seed)
    bounds, relaxation = Bounds(network), Relaxation(network)
    for _ in range(20):
        at_s = rng.uniform(1.001, 1.2) * problem.t_min_s
        flow_w = np.maximum(relaxation.solve(at_s).flow_w, 0.0)
        # The second and third flow are not conserved.
        others = [flow_w * rng.uniform(0.5, 1.5, len(flow_w)), rng.exponential(100.0, len(flow_w))]
        for any_w in (flow_w, *others):
            assert bounds.bound_j(at_s, any_w) <= energy_j[time_s <= at_s].min()


def test_the_search_for_a_step_in_the_curve_ends_at_equal_times():
    asked = []

    def at(time_s):
        asked.append(time_s)
        return Tangent(time_s, 2.0 if time_s < 1.3 else 1.0, 0.0)

    refine(at(1.0), at(2.0), at, 10_000)
    assert 20 < len(asked) == len(set(asked)) < 50


def test_deadlines_are_spread_evenly_along_the_curve_between_the_known_ones():
    time_s, energy_j = np.array([1.0, 2.0, 4.0]), np.array([9.0, 8.0, 8.0])
    found_s = solver.spread(time_s, energy_j, 8)
    assert found_s == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 8 / 3, 10 / 3, 4.0])


def test_clocks_that_cannot_meet_the_deadline_do_not_loosen_the_bound():
    """On a single rank no pass has slack, so at ``T_min`` each runs at its fastest clock."""
    problem = problem_for(one_f_one_b(1, 4), synthetic_profile(1), blocking_power_w=POWER_W)
    relaxation = Relaxation(Network(problem))
    assert relaxation.pieces(problem.t_min_s).length_s.size == 0
    assert relaxation.pieces(1.5 * problem.t_min_s).length_s.size > 0
