"""Plans whose runs each last at least a dwell time, compared with simple shapes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import GPipe, dual_pipe_v, one_f_one_b, synthetic_profile
from profiles import stage_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.alternatives import simple_plans
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.run_choice import best_runs
from perseus_ds.optimizer.runs import RunSearch
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.instruction import Kind

POWER_W = 80.0
SCHEDULES = [one_f_one_b(3, 5), dual_pipe_v(2, 4), read_schedule(GPipe, ranks=3, micro_batches=4)]
TAIL = (Kind.TAIL,)
PAIR_S = 0.15
"""Approximate time of a forward and a backward of the synthetic profile at the highest clock [s]."""


def noisy_profile(stages, clocks, seed):
    rng = np.random.default_rng(seed)
    profile = synthetic_profile(stages, clocks=clocks)
    return StageProfile(
        [replace(m, energy_j=m.energy_j * rng.uniform(0.97, 1.03)) for m in profile.measurements], profile.info
    )


def runs_s(problem, plan):
    """Return clock and length [s] of each run by rank, including waits and the iteration's end."""
    dag = problem.dag
    node_of = {node.work: number for number, node in enumerate(dag.nodes)}
    times_s = {(m.stage, m.kind, m.clock_mhz): m.time_s for m in problem.profile.measurements}
    duration_s = problem.fixed_s.copy()
    for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        for work, clock in zip(stream, clocks, strict=True):
            duration_s[node_of[work]] = times_s[work.stage, work.kind, clock]
    finish_s = dag.finish_s(duration_s)
    assert max(finish_s) == pytest.approx(plan.time_s, rel=1e-12)
    result = []
    for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        changes = [number for number, clock in enumerate(clocks) if clock != clocks[number - 1]]
        # A change happens at the end of the previous instruction; for the first one, in the previous iteration.
        begins_s = [finish_s[node_of[stream[n - 1]]] - (0.0 if n else plan.time_s) for n in changes]
        ends_s = [*begins_s[1:], begins_s[0] + plan.time_s] if begins_s else []
        runs = zip(changes, begins_s, ends_s, strict=True)
        result.append([(clocks[number], end_s - begin_s) for number, begin_s, end_s in runs])
    return result


def test_a_rank_may_have_no_passes():
    schedule = one_f_one_b(1, 4)
    idle = replace(schedule, ranks=(*schedule.ranks, ()))
    profile = synthetic_profile(1, clocks=4)
    alone, beside = (
        optimize(ranks, profile, blocking_power_w=POWER_W, plans=5, least_dwell_s=0.1) for ranks in (schedule, idle)
    )
    assert alone.plans[0].clocks_mhz[0] == beside.plans[0].clocks_mhz[0]


@settings(max_examples=6, deadline=None)
@given(schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 10_000), pairs=st.floats(0.7, 6.0))
@example(schedule=dual_pipe_v(2, 4), seed=42, pairs=4.802)  # the search also finds cheaper plans with shorter runs
def test_every_run_of_every_plan_lasts_its_dwell_time(schedule, seed, pairs):
    profile, dwell_s = noisy_profile(schedule.num_stages, 8, seed), pairs * PAIR_S
    costs = {"least_dwell_s": dwell_s}
    frontier = optimize(schedule, profile, blocking_power_w=POWER_W, plans=5, **costs)
    problem = problem_for(schedule, profile, blocking_power_w=POWER_W, **costs)
    for plan in frontier.plans:
        assert min((s for runs in runs_s(problem, plan) for _, s in runs), default=dwell_s) >= dwell_s * (1 - 1e-9)
        assert plan.energy_j >= plan.lower_bound_j
    assert frontier.plans[0].time_s == pytest.approx(problem.t_min_s, rel=1e-9)


def test_a_clock_that_comes_late_is_held_for_longer_than_others():
    schedule, profile = one_f_one_b(3, 8), synthetic_profile(3, clocks=8)
    clocks = profile.options(0, Kind.FORWARD).clock_mhz.tolist()
    dwell_s = {clock: (6.0 if clock < clocks[4] else 1.0) * PAIR_S for clock in clocks}
    frontier = optimize(schedule, profile, blocking_power_w=POWER_W, plans=12, least_dwell_s=dwell_s)
    problem = problem_for(schedule, profile, blocking_power_w=POWER_W, least_dwell_s=6.0 * PAIR_S)
    found = [run for plan in frontier.plans for runs in runs_s(problem, plan) for run in runs]
    assert all(length_s >= dwell_s[clock] * (1 - 1e-9) for clock, length_s in found)
    assert any(length_s < 6.0 * PAIR_S for _, length_s in found)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_down_a_ladder_of_dwell_times_no_plan_gets_worse(seed):
    problem = problem_for(one_f_one_b(3, 6), noisy_profile(3, 6, seed), blocking_power_w=POWER_W)
    deadline_s, ladder = problem.t_min_s * np.linspace(1.0, 1.25, 4), []
    for pairs in (20.0, 6.0, 3.0, 1.0, 0.0):
        start = [plan for plan in ladder[-1] if plan is not None] if ladder else ()
        ladder.append(RunSearch(Network(problem), pairs * PAIR_S).plans(deadline_s, start=start))
    for longer, shorter in itertools.pairwise(ladder):
        assert all(ours.cost_j <= theirs.cost_j for ours, theirs in zip(shorter, longer, strict=True))
    best = replace(ladder[-1][0], cost_j=0.0)
    assert RunSearch(Network(problem), 0.0).plans(deadline_s, start=[best]) == [best] * len(deadline_s)


def test_a_dwell_time_that_every_instruction_lasts_costs_nothing():
    schedule, profile = one_f_one_b(3, 6), noisy_profile(3, 6, 1)
    free, short = (
        optimize(schedule, profile, blocking_power_w=POWER_W, plans=6, least_dwell_s=s).plans for s in (0.0, 0.01)
    )
    assert short == free


def best_by_trying(priced_j, begins_s, length_s, dwell_s, change_j):
    """Return the least cost of valid sequences by enumeration."""
    count, clocks = priced_j.shape
    least_j = np.inf
    for chosen in itertools.product(range(clocks), repeat=count):
        changes = [number for number in range(count) if chosen[number] != chosen[number - 1]]
        at_s = begins_s[changes]
        if changes:
            lengths_s = np.diff(np.append(at_s, at_s[0] + length_s))
            if np.any(lengths_s < dwell_s[[chosen[number] for number in changes]] * (1 + 1e-9)):
                continue
        cost_j = priced_j[np.arange(count), chosen].sum() + change_j[changes, np.array(chosen)[changes]].sum()
        least_j = min(least_j, cost_j)
    return least_j


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 7), dwell=st.floats(0.0, 4.0))
def test_runs_of_a_rank_are_the_best_at_given_prices(seed, count, dwell):
    rng = np.random.default_rng(seed)
    priced_j, time_s, change_j = (
        rng.uniform(1, 3, (count, 3)),
        rng.uniform(0.5, 1.5, count),
        rng.uniform(0, 0.3, (count, 3)),
    )
    begins_s, length_s = np.cumsum(time_s) - time_s - rng.uniform(0, 1), float(time_s.sum())
    dwell_s = np.array([dwell, dwell, 1.3 * dwell])
    (chosen,) = best_runs(
        priced_j[None],
        begins_s[None],
        np.array([length_s]),
        dwell_s=dwell_s,
        change_j=change_j[None],
        places=np.arange(count),
    )
    changed = np.flatnonzero(chosen != np.roll(chosen, 1))
    cost_j = priced_j[np.arange(count), chosen].sum() + change_j[changed, chosen[changed]].sum()
    assert cost_j == pytest.approx(best_by_trying(priced_j, begins_s, length_s, dwell_s, change_j))


def test_on_the_published_profile_plans_under_a_long_dwell_time_save_what_was_aimed_at():
    """GPT-3 175B on A100, with a dwell time of four pairs.

    At 0, 1 and 5 % slowdown, a plain search saves 6.0, 11.1 and 15.8 %.
    """
    profile = StageProfile.load(stage_profile("a100-sxm"))
    pair_s = sum(profile.at_highest_clock(0, kind).time_s for kind in (Kind.FORWARD, Kind.BACKWARD))
    frontier = optimize(one_f_one_b(8, 24), profile, blocking_power_w=83.64, plans=12, least_dwell_s=4 * pair_s)
    energy_j = [frontier.lookup(frontier.t_min_s * (1 + slower + 1e-9)).energy_j for slower in (0.0, 0.01, 0.05)]
    assert all(1 - np.array(energy_j) / frontier.baseline.energy_j > [0.08, 0.12, 0.17])


def test_a_tail_that_does_not_depend_on_the_clock_costs_no_saving():
    rng, schedule = np.random.default_rng(0), one_f_one_b(3, 6)
    with_tail = [
        Measurement(stage, Kind.TAIL, clock, 0.08 * rng.normal(1, 0.0005), 0.08 * (100 + 0.1 * clock))
        for stage in range(3)
        for clock in synthetic_profile(3).options(0, Kind.FORWARD).clock_mhz.tolist()
    ]
    rows = [*synthetic_profile(3).measurements, *with_tail]
    frontier = optimize(schedule, StageProfile(rows), blocking_power_w=POWER_W, plans=12, least_dwell_s=0.2)
    without = optimize(schedule, synthetic_profile(3), blocking_power_w=POWER_W, plans=12, least_dwell_s=0.2)
    saved_j, expected_j = (f.baseline.energy_j - f.within(0.0).energy_j for f in (frontier, without))
    assert len(frontier.plans) > 3
    assert saved_j > 0.8 * expected_j > 0


def test_a_clock_at_which_one_kind_was_not_measured_is_used_for_the_others():
    profile = synthetic_profile(2, clocks=5)
    clocks = profile.options(0, Kind.FORWARD).clock_mhz.tolist()
    partial = profile.where(lambda stage, kind, clock: kind is Kind.FORWARD or clock in (clocks[0], clocks[-1]))
    search = RunSearch(Network(problem_for(one_f_one_b(2, 4), partial, blocking_power_w=POWER_W)), 0.2)
    assert all(rank.clock_mhz.tolist() == clocks for rank in search.ranks)
    frontier = optimize(one_f_one_b(2, 4), partial, blocking_power_w=POWER_W, plans=6, least_dwell_s=0.2)
    assert frontier.plans[-1].energy_j < frontier.baseline.energy_j


def test_a_clock_whose_latency_is_unknown_is_held_as_long_as_the_slowest():
    problem = problem_for(one_f_one_b(2, 4), synthetic_profile(2, clocks=3), blocking_power_w=POWER_W)
    clocks = synthetic_profile(2, clocks=3).options(0, Kind.FORWARD).clock_mhz.tolist()
    search = RunSearch(Network(problem), {clocks[0]: 0.1, clocks[1]: 0.3})
    assert search.ranks[0].dwell_s.tolist() == [0.1, 0.3, 0.3]


@st.composite
def rough_profiles(draw, stages):
    """Profiles with times that are flat, noisy or independent of the clock, missing rows, and powers below blocking."""
    clocks = draw(st.sampled_from([(800, 1400), (800, 1100, 1400), (800, 950, 1100, 1250, 1400)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = [Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, *draw(st.sampled_from([(), TAIL]))]
    rows = []
    for stage, kind in itertools.product(range(stages), kinds):
        bound = draw(st.sampled_from([0.0, 0.5, 1.0]))
        flat_above_mhz = draw(st.sampled_from([1000, 1400]))
        noise = draw(st.sampled_from([0.0, 0.0005, 0.02]))
        missing = draw(st.sampled_from([(), clocks[1:2], clocks[-1:]])) if len(clocks) > 2 else ()
        usual_s = rng.uniform(0.02, 0.1)
        for clock_mhz in clocks:
            if clock_mhz in missing:
                continue
            share = bound + (1 - bound) * 1400 / min(clock_mhz, flat_above_mhz)
            time_s = usual_s * share * (1 + noise * rng.standard_normal())
            power_w = POWER_W * rng.uniform(0.98, 1.3) + 240 * (clock_mhz / 1400) ** 3 * rng.uniform(0.9, 1.1)
            rows.append(Measurement(stage, kind, clock_mhz, time_s, power_w * time_s))
    return StageProfile(rows)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), schedule=st.sampled_from(SCHEDULES), pairs=st.sampled_from([0.0, 0.5, 1.0, 2.0, 6.0]))
def test_no_plan_is_worse_than_a_simple_setting_that_holds_its_clocks(data, schedule, pairs):
    profile = data.draw(rough_profiles(schedule.num_stages))
    dwell_s = pairs * PAIR_S
    held = {"blocking_power_w": POWER_W, "least_dwell_s": dwell_s}
    frontier, problem = optimize(schedule, profile, plans=4, **held), problem_for(schedule, profile, **held)
    simple = [problem.evaluate(clocks) for clocks in simple_plans(problem)]
    assert simple
    for plan in simple:
        slower = [other for other in frontier.plans if other.time_s >= plan.time_s]
        assert all(other.lower_bound_j <= plan.energy_j * (1 + 1e-9) for other in slower)
        if not dwell_s or min((s for runs in runs_s(problem, plan) for _, s in runs), default=np.inf) >= dwell_s:
            assert frontier.lookup(plan.time_s).energy_j <= plan.energy_j * (1 + 1e-9)


def test_planning_ends_if_a_higher_clock_is_slower_for_some_instructions():
    """Regression test: on the published A40, times rise and fall with the clock."""
    profile = StageProfile.load(stage_profile("a40"))
    pair_s = sum(profile.at_highest_clock(0, kind).time_s for kind in (Kind.FORWARD, Kind.BACKWARD))
    held = {"blocking_power_w": 70.38, "least_dwell_s": 0.5 * pair_s}
    frontier = optimize(one_f_one_b(8, 8), profile, plans=4, **held)
    problem = problem_for(one_f_one_b(8, 8), profile, **held)
    lengths_s = [length_s for plan in frontier.plans for runs in runs_s(problem, plan) for _, length_s in runs]
    assert min(lengths_s) >= 0.5 * pair_s * (1 - 1e-9)
