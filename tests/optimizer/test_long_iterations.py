"""Iterations of many micro-batches, planned from shorter ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import GPipe, dual_pipe_v, one_f_one_b, synthetic_profile

from perseus_ds.optimizer.exact import long_iterations
from perseus_ds.optimizer.exact.extension import Cut, ExtensionError, FlowExtension
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxation
from perseus_ds.optimizer.exact.repetition import find_repetition, parts_of
from perseus_ds.optimizer.exact.solver import solve_exact
from perseus_ds.optimizer.exact.switches import SwitchCosts
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.schedule import read_schedule

POWER_W = 80.0
FIXED = {
    "load_s": {0: 0.004},
    "tail_s": {0: 0.03, 1: 0.02},
    "transfers": [
        {"payload": "activation", "source": 0, "target": 1, "time_s": 0.003},
        {"payload": "grad", "source": 1, "target": 0, "time_s": 0.005},
    ],
}


def problem_of(schedule):
    return Problem(Dag.build(schedule), synthetic_profile(schedule.num_stages, **FIXED), POWER_W)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([one_f_one_b, dual_pipe_v]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(4, 8),
    st.integers(3, 20),
)
def test_a_schedule_without_some_periods_is_the_schedule_of_fewer_micro_batches(pipeline, ranks, more, kept, left_out):
    if pipeline is dual_pipe_v:
        ranks, more = 2 * ((ranks + 1) // 2), 2 * more
    found = find_repetition(pipeline(ranks, 2 * ranks + 2 * (kept + left_out) + more), kept)
    assert found is not None
    assert found.short.ranks == pipeline(ranks, found.short.micro_batches).ranks


def test_a_schedule_that_repeats_forwards_and_backwards_apart_is_not_shortened():
    assert find_repetition(read_schedule(GPipe, ranks=3, micro_batches=60), 4) is None


def test_a_schedule_with_few_repetitions_is_not_shortened():
    assert find_repetition(one_f_one_b(4, 10), 8) is None


def inflow_w(problem, edges_w, source_w):
    tail, head = problem.edges
    nodes = len(problem.dag.nodes)
    return np.bincount(head, edges_w, nodes) + source_w, np.bincount(tail, edges_w, nodes)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 5), st.integers(20, 40), st.floats(0.01, 0.3))
def test_the_flow_of_a_shorter_iteration_is_conserved_in_the_whole_one(ranks, micro_batches, slowdown):
    whole = problem_of(one_f_one_b(ranks, micro_batches))
    repetition = find_repetition(whole.dag.schedule, 8)
    short = problem_of(repetition.short)
    network = Network(short)
    relaxed = Relaxation(network).solve(short.t_min_s * (1 + slowdown))
    flow = network.dag_flow(np.maximum(relaxed.flow_w, 0.0))
    extended = FlowExtension(Cut(whole, short, repetition, 4)).flow(*flow)
    total_w = flow[1].sum()
    assert extended[1].sum() == pytest.approx(total_w)
    into, out = inflow_w(whole, *extended)
    ends = np.array([not after for after in whole.dag.successors])
    assert into[~ends] == pytest.approx(out[~ends], abs=1e-6 * total_w)
    assert into[ends].sum() == pytest.approx(total_w)


@pytest.mark.parametrize("ranks", [1, 4])
def test_nodes_of_the_whole_iteration_repeat_those_of_the_shorter_one(ranks):
    whole = problem_of(one_f_one_b(ranks, 40))
    repetition = find_repetition(whole.dag.schedule, 8)
    short = problem_of(repetition.short)
    cut = Cut(whole, short, repetition, 3)
    nodes, later = cut.repeated()
    for node, other, periods in zip(whole.dag.nodes, nodes.tolist(), later.tolist(), strict=True):
        assert parts_of(node.work)[0] == parts_of(short.dag.nodes[other].work)[0]
        assert parts_of(node.work)[1] - parts_of(short.dag.nodes[other].work)[1] in {periods, 0}
    # At the fastest clocks, the missing periods take as long as those that are there.
    network = Network(short)
    finish_s = network.earliest_s(network.least_s)[network.end_event]
    period_s = FlowExtension(cut).period_s(finish_s, 2)
    assert whole.t_min_s == pytest.approx(short.t_min_s + repetition.left_out * period_s)


def test_problems_that_do_not_belong_together_are_refused():
    whole, other = problem_of(one_f_one_b(3, 40)), problem_of(one_f_one_b(3, 30))
    with pytest.raises(ExtensionError):
        Cut(whole, other, find_repetition(whole.dag.schedule, 8), 4).repeated()


def solve(problem):
    return solve_exact(problem, plans=24, switches=SwitchCosts(), progress=lambda what, done: None)


def test_plans_from_a_shorter_iteration_are_proven_and_nearly_as_good(monkeypatch):
    problem = problem_of(one_f_one_b(4, 80))
    direct = solve(problem)
    monkeypatch.setattr(long_iterations, "_MANY", 0)
    extended = solve(problem)
    assert extended.plans != direct.plans
    assert extended.plans[0].time_s == pytest.approx(problem.t_min_s, rel=1e-9)
    times_s = [plan.time_s for plan in direct.plans]
    excess = []
    for plan in extended.plans:
        assert plan.lower_bound_j <= plan.energy_j
        ours_j = np.interp(plan.time_s, times_s, [other.energy_j for other in direct.plans])
        bound_j = np.interp(plan.time_s, times_s, [other.lower_bound_j for other in direct.plans])
        excess.append(plan.energy_j / ours_j - 1)
        assert plan.lower_bound_j > 0.997 * bound_j
    assert np.mean(excess) < 2e-3
    assert max(excess) < 6e-3
