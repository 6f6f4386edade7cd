"""The interior-point method finds HiGHS's optimum, on pipelines and on arbitrary DAGs."""

import numpy as np
import pytest
from highs import highs_saving_j, our_saving_j
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import GPipe, dual_pipe_v, one_f_one_b, synthetic_profile

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Problem
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.optimizer.search import durations_at
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.dag import Dag, Node
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Load, Schedule
from perseus_ds.planning import PlanningSettings

POWER_W = 80.0


@st.composite
def random_dags(draw):
    """Draw a random DAG of up to 14 instructions and loads of fixed duration."""
    nodes, predecessors, instructions = [], [], []
    for number in range(draw(st.integers(1, 14))):
        stage = draw(st.integers(0, 2))
        work = Load(stage, number)
        if number == 0 or draw(st.integers(0, 3)):
            work = Instruction(stage, draw(st.sampled_from([Kind.FORWARD, Kind.BACKWARD])), number)
            instructions.append(work)
        nodes.append(Node(work, (0,)))
        predecessors.append(draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ())
    schedule = Schedule("random", 1, (tuple(Compute(i) for i in instructions),))
    return Dag(schedule, nodes, predecessors)


def relaxation_of(dag):
    stages = 1 + max(node.work.stage for node in dag.nodes if not hasattr(node.work, "source"))
    profile = synthetic_profile(stages, load_s={0: 0.02, 1: 0.0}, blocking_power_w=POWER_W)
    return Relaxation(Network(Problem(dag, profile, PlanningSettings())))


PIPELINES = [one_f_one_b(4, 12), dual_pipe_v(2, 8), read_schedule(GPipe, ranks=3, micro_batches=6)]


@settings(deadline=None, max_examples=60)
@given(random_dags() | st.sampled_from(PIPELINES).map(Dag.build), st.just(1.00001) | st.floats(1.0001, 3.0))
def test_both_save_the_same(dag, slowdown):
    relaxation = relaxation_of(dag)
    network = relaxation.network
    deadline_s = network.problem.t_min_s * slowdown
    relaxed = relaxation.solve(deadline_s)
    windows_s = relaxed.event_s[network.head] - relaxed.event_s[network.tail]
    assert (windows_s >= network.least_s - 1e-7).all()
    assert relaxed.deadline_s == pytest.approx(deadline_s, rel=1e-9)
    optimum_j = highs_saving_j(relaxation, deadline_s)
    assert our_saving_j(relaxation, relaxed) == pytest.approx(optimum_j, abs=1e-6 * relaxation.fastest_j)


@settings(deadline=None, max_examples=30)
@given(random_dags(), st.floats(1.0, 1000.0))
def test_both_choose_an_iteration_time_of_the_same_cost(dag, waiting_w):
    relaxation = relaxation_of(dag)
    problem = relaxation.network.problem
    relaxed = relaxation.solve(problem.time_s(problem.most_frugal), waiting_w=waiting_w)
    ours_j = our_saving_j(relaxation, relaxed, waiting_w)
    scale_j = relaxation.fastest_j + waiting_w * problem.t_min_s
    assert ours_j == pytest.approx(highs_saving_j(relaxation, 0.0, waiting_w=waiting_w), abs=1e-6 * scale_j)


@settings(deadline=None, max_examples=60)
@given(random_dags() | st.sampled_from(PIPELINES).map(Dag.build), st.integers(0, 10_000))
def test_the_network_of_events_takes_as_long_as_the_dag(dag, seed):
    network = relaxation_of(dag).network
    problem, rng = network.problem, np.random.default_rng(seed)
    choice = rng.integers(problem.fastest, problem.most_frugal + 1)
    duration_s = durations_at(network, choice[:, None])[:, 0]
    assert network.earliest_s(duration_s)[-1] == pytest.approx(problem.time_s(choice), rel=1e-12)


@pytest.mark.parametrize("slowdown", [1.0201, 1.06, 1.15])
def test_between_two_optima_the_optimum_is_found_from_the_pieces_that_compete(slowdown):
    relaxation = relaxation_of(Dag.build(one_f_one_b(4, 12)))
    problem = relaxation.network.problem
    faster, slower = (relaxation.solve(problem.t_min_s * times) for times in (1.02, 1.2))
    deadline_s = problem.t_min_s * slowdown
    between = relaxation.solve_between(deadline_s, faster, slower)
    assert between.deadline_s == pytest.approx(deadline_s, rel=1e-9)
    optimum_j = highs_saving_j(relaxation, deadline_s)
    assert our_saving_j(relaxation, between) == pytest.approx(optimum_j, rel=1e-3)
