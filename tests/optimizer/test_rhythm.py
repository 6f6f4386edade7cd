"""Plans whose middle runs in rhythms meet their deadlines, and use less energy where a rank's clocks are few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import GPipe, dual_pipe_v, one_f_one_b, synthetic_profile
from published import stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer import problem_for
from perseus_ds.optimizer.exact.alternation import Alternations
from perseus_ds.optimizer.exact.descent import Descent
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.relaxation import Relaxation
from perseus_ds.optimizer.exact.rhythm import Rhythms
from perseus_ds.optimizer.exact.rounding import durations_at, options_at, round_late
from perseus_ds.pipeline.schedule import read_schedule


def rounded(problem, deadline_s):
    """The network, its options, and plans for these deadlines."""
    network = Network(problem)
    table = OptionTable(problem.groups)
    target_s = np.stack([Relaxation(network).solve(time_s).event_s for time_s in deadline_s], axis=1)
    return network, table, round_late(network, table, target_s, deadline_s)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([one_f_one_b, dual_pipe_v]), st.integers(1, 3), st.integers(6, 9), st.floats(0.0, 0.3))
def test_plans_in_rhythms_meet_their_deadlines(pipeline, ranks, micro_batches, slowdown):
    schedule = pipeline(ranks, micro_batches)
    problem = problem_for(schedule, synthetic_profile(schedule.num_stages), 80.0)
    deadline_s = problem.t_min_s * (1 + np.array([1e-6, slowdown + 1e-6]))
    network, table, event_s = rounded(problem, deadline_s)
    mixed_s = Rhythms(network, table).mixed_into(event_s, deadline_s)
    durations_s = durations_at(network, table, options_at(network, table, mixed_s))
    assert np.all(network.earliest_s(durations_s)[-1] <= deadline_s * (1 + 1e-9))


def test_rhythms_save_energy_on_a_gpu_whose_energy_drops_at_one_clock():
    problem = problem_for(one_f_one_b(8, 48), StageProfile.load(stage_profile("a40")), 70.38)
    deadline_s = problem.t_min_s * np.array([1.008, 1.02, 1.03])
    network, table, event_s = rounded(problem, deadline_s)
    descent = Descent(network, table)
    without_s = descent.run(event_s, 4)
    with_s = descent.run(Rhythms(network, table).mixed_into(without_s, deadline_s), 2)
    energy_j = problem.energy_j(problem.fastest, problem.t_min_s)
    assert ((descent.cost_j(without_s) - descent.cost_j(with_s)) / energy_j).max() > 0.001


def test_ranks_that_alternate_save_energy_that_clocks_of_one_micro_batch_do_not(monkeypatch):
    problem = problem_for(one_f_one_b(8, 48), StageProfile.load(stage_profile("a40")), 70.38)
    deadline_s = problem.t_min_s * np.array([1.008, 1.012, 1.02])
    network, table, event_s = rounded(problem, deadline_s)
    cost = Descent(network, table).cost_j
    alternating_j = cost(Rhythms(network, table).mixed_into(event_s, deadline_s))
    monkeypatch.setattr(Alternations, "at", lambda self, period_s: [])
    repeating_j = cost(Rhythms(network, table).mixed_into(event_s, deadline_s))
    energy_j = problem.energy_j(problem.fastest, problem.t_min_s)
    assert ((repeating_j - alternating_j) / energy_j).max() > 0.001


@pytest.mark.parametrize(
    "schedule", [read_schedule(GPipe, ranks=4, micro_batches=12), dual_pipe_v(4, 12)], ids=["gpipe", "dualpipev"]
)
def test_schedules_of_another_order_have_no_alternating_ranks(schedule, monkeypatch):
    monkeypatch.setattr(Alternations, "at", None)
    profile = StageProfile.load(stage_profile("a40")).where(lambda stage, kind, clock: stage < schedule.num_stages)
    problem = problem_for(schedule, profile, 70.38)
    Rhythms(Network(problem), OptionTable(problem.groups))


def test_a_pipeline_that_repeats_nothing_has_no_rhythm():
    problem = problem_for(one_f_one_b(2, 1), synthetic_profile(2), 80.0)
    deadline_s = np.array([problem.t_min_s * 1.1])
    network, table, event_s = rounded(problem, deadline_s)
    mixed_s = Rhythms(network, table).mixed_into(event_s, deadline_s)
    assert network.problem.time_s(
        options_at(network, table, mixed_s)[:, 0] - table.begin[problem.group]
    ) == pytest.approx(network.problem.time_s(options_at(network, table, event_s)[:, 0] - table.begin[problem.group]))
