"""Rhythms keep their period in the DAG and are the best of their kind; plans made of them meet their deadlines."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import GPipe, dual_pipe_v, one_f_one_b, synthetic_profile
from profiles import stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.optimizer.rhythms import RhythmSearch, Work, least_period_s, mixed_into
from perseus_ds.optimizer.search import Descent, durations_at, options_at, round_late
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind


@st.composite
def works(draw, most_options):
    """An instruction whose times differ by a few percent, and whose energies lie on a hull."""
    times = sorted(draw(st.sets(st.integers(0, 15), min_size=1, max_size=most_options)))
    return Work(1.0 + np.array(times) / 1000, 5.0 - np.sqrt(np.array(times)))


def pipelines(most_ranks, most_options):
    return st.lists(st.tuples(works(most_options), works(most_options)), min_size=1, max_size=most_ranks)


@cache
def dag_of(ranks, micro_batches):
    return Dag.build(one_f_one_b(ranks, micro_batches))


def makespan_s(ranks, found, micro_batches):
    """How long an iteration takes whose middle has the clocks of an alternation, by its DAG."""
    dag = dag_of(len(ranks), micro_batches)
    time_s = np.zeros(len(dag.nodes))
    for rank, nodes in enumerate(dag.compute_nodes):
        (forward, backward), parity = ranks[rank], 0
        for node in reversed(nodes):
            work = dag.nodes[node].work
            if work.kind is Kind.BACKWARD:
                parity = work.micro_batch % 2
                time_s[node] = backward.time_s[found.backwards[rank, parity]]
            elif work.kind is Kind.FORWARD:
                time_s[node] = forward.time_s[found.forwards[rank, parity]]
    return dag.finish_s(time_s).max()


@settings(deadline=None, max_examples=40)
@given(pipelines(4, 3))
def test_its_period_is_by_how_much_a_micro_batch_more_delays_the_end(ranks):
    for found in filter(None, map(RhythmSearch(ranks).alternating, np.linspace(2.0, 2.03, 6))):
        longer_s, shorter_s = (makespan_s(ranks, found, micro_batches) for micro_batches in (60, 40))
        np.testing.assert_allclose((longer_s - shorter_s) / 20, found.period_s, rtol=1e-9)


def least_cost_j(ranks, period_s):
    """The least energy of any clocks, by trying all of them."""
    least_j = np.inf
    clocks = [itertools.product(*[range(len(work.time_s)) for work in (f, f, b, b)]) for f, b in ranks]
    for chosen in itertools.product(*map(list, clocks)):
        forwards, backwards = np.array(chosen)[:, :2], np.array(chosen)[:, 2:]
        forward_s = np.array([work.time_s[own] for (work, _), own in zip(ranks, forwards, strict=True)])
        backward_s = np.array([work.time_s[own] for (_, work), own in zip(ranks, backwards, strict=True)])
        if least_period_s(forward_s, backward_s) <= period_s:
            of_ranks = zip(ranks, forwards, backwards, strict=True)
            cost_j = sum(f.cost_j[own].sum() + b.cost_j[theirs].sum() for (f, b), own, theirs in of_ranks)
            least_j = min(least_j, cost_j / 2)
    return least_j


@settings(deadline=None, max_examples=40)
@given(pipelines(2, 3), st.floats(1.0, 1.02))
def test_no_clocks_of_its_period_need_less(ranks, slowdown):
    """But for what the differences between two values of d may hide: half of 0.05 % of a period."""
    period_s = slowdown * max(forward.time_s[0] + backward.time_s[0] for forward, backward in ranks)
    found = RhythmSearch(ranks).alternating(period_s)
    cost_j = found.cost_j if found else np.inf
    assert least_cost_j(ranks, period_s * (1 + 1e-9)) <= cost_j + 1e-9
    assert cost_j <= least_cost_j(ranks, period_s * (1 - 0.0003)) + 1e-9


def test_ranks_that_alternate_use_less_on_a_gpu_whose_energy_drops_at_one_clock():
    """The published A40: at 1.25 % above the fastest period no single clocks fit well, and two in turns do."""
    problem = problem_for(one_f_one_b(8, 8), StageProfile.load(stage_profile("a40")), 70.38)
    groups = {(group.stage, group.kind): Work(group.options.time_s, group.cost_j) for group in problem.groups}
    ranks = [(groups[stage, Kind.FORWARD], groups[stage, Kind.BACKWARD]) for stage in range(8)]
    fastest_s = max(forward.time_s[0] + backward.time_s[0] for forward, backward in ranks)
    period_s = 1.0125 * fastest_s
    search, waiting_j = RhythmSearch(ranks), 8 * 70.38 * period_s
    single_j, two_j = (one(period_s).cost_j + waiting_j for one in (search.repeating, search.alternating))
    assert two_j < 0.99 * single_j


def rounded(problem, deadline_s):
    """The network, and plans for these deadlines."""
    network = Network(problem)
    target_s = np.stack([Relaxation(network).solve(time_s).event_s for time_s in deadline_s], axis=1)
    return network, round_late(network, problem.table, target_s, deadline_s)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([one_f_one_b, dual_pipe_v]), st.integers(1, 3), st.integers(6, 9), st.floats(0.0, 0.3))
def test_plans_in_rhythms_meet_their_deadlines(pipeline, ranks, micro_batches, slowdown):
    schedule = pipeline(ranks, micro_batches)
    problem = problem_for(schedule, synthetic_profile(schedule.num_stages), 80.0)
    deadline_s = problem.t_min_s * (1 + np.array([1e-6, slowdown + 1e-6]))
    network, event_s = rounded(problem, deadline_s)
    mixed_s = mixed_into(network, event_s, deadline_s)
    durations_s = durations_at(network, options_at(network, mixed_s))
    assert np.all(network.earliest_s(durations_s)[-1] <= deadline_s * (1 + 1e-9))


def test_rhythms_save_energy_on_a_gpu_whose_energy_drops_at_one_clock():
    problem = problem_for(one_f_one_b(8, 48), StageProfile.load(stage_profile("a40")), 70.38)
    deadline_s = problem.t_min_s * np.array([1.008, 1.02, 1.03])
    network, event_s = rounded(problem, deadline_s)
    descent = Descent(network)
    without_s = descent.run(event_s, 4)
    with_s = descent.run(mixed_into(network, without_s, deadline_s), 2)
    energy_j = problem.plan(problem.fastest).energy_j
    assert ((descent.cost_j(without_s) - descent.cost_j(with_s)) / energy_j).max() > 0.001


@pytest.mark.parametrize(
    "schedule",
    [read_schedule(GPipe, ranks=4, micro_batches=12), dual_pipe_v(4, 12), one_f_one_b(2, 1)],
    ids=["gpipe", "dualpipev", "one micro-batch"],
)
def test_where_ranks_do_not_run_forward_and_backward_in_turns_plans_stay_as_they_are(schedule):
    problem = problem_for(schedule, synthetic_profile(schedule.num_stages), 80.0)
    deadline_s = np.array([problem.t_min_s * 1.1])
    network, event_s = rounded(problem, deadline_s)
    np.testing.assert_array_equal(mixed_into(network, event_s, deadline_s), event_s)
