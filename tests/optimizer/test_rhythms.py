"""Starting points of the search: rhythms and alternating relaxed optima."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import one_f_one_b, synthetic_profile
from profiles import stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.optimizer.search import Descent, joint_options, round_late, with_rhythms


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_no_choice_of_options_that_is_as_fast_needs_less(seed, count):
    factors = np.random.default_rng(seed).uniform(0.7, 1.3, 16)
    rows = synthetic_profile(2, clocks=4).measurements
    rows = [replace(row, time_s=row.time_s * factor) for row, factor in zip(rows, factors, strict=True)]
    groups = problem_for(one_f_one_b(2, 2), StageProfile(rows), blocking_power_w=0.0).groups[:count]
    time_s, cost_j, chosen = joint_options(groups)
    assert np.all(np.diff(time_s) > 0)
    assert np.all(np.diff(cost_j) < 0)

    def of(options):
        own = list(zip(groups, options, strict=True))
        return sum(g.options.time_s[n] for g, n in own), sum(g.cost_j[n] for g, n in own)

    for options in itertools.product(*[range(len(group.cost_j)) for group in groups]):
        own_s, own_j = of(options)
        assert cost_j[time_s <= own_s * (1 + 1e-12)].min() <= own_j * (1 + 1e-12)
    for found, options in zip(np.column_stack([time_s, cost_j]), chosen, strict=True):
        assert found == pytest.approx(of(options))


def test_rhythms_save_energy_on_a_gpu_whose_energy_drops_at_one_clock():
    problem = problem_for(one_f_one_b(8, 48), StageProfile.load(stage_profile("a40")), blocking_power_w=70.38)
    deadline_s = problem.t_min_s * np.array([1.008, 1.02, 1.03])
    network = Network(problem)
    descent = Descent(network)
    target_s = np.stack([Relaxation(network).solve(time_s).event_s for time_s in deadline_s], axis=1)
    without_s = descent.run(round_late(network, problem.table, target_s, deadline_s), 4)
    with_s = descent.run(with_rhythms(network, without_s, deadline_s), 2)
    energy_j = problem.plan(problem.fastest).energy_j
    assert ((descent.cost_j(without_s) - descent.cost_j(with_s)) / energy_j).max() > 0.001


def test_relaxed_optima_that_alternate_lead_to_less_energy_where_no_single_clock_fits():
    """The published A40 at 1 % above T_min: half of the backwards run where the energy drops."""
    problem = problem_for(one_f_one_b(8, 24), StageProfile.load(stage_profile("a40")), blocking_power_w=70.38)
    deadline_s = np.array([1.01 * problem.t_min_s])
    network = Network(problem)
    descent = Descent(network)
    targets_s = [Relaxation(network, turns=turns).solve(deadline_s[0]).event_s[:, None] for turns in (1, 2)]
    starts_s = [round_late(network, problem.table, target_s, deadline_s) for target_s in targets_s]
    usual_j, alternating_j = (descent.cost_j(descent.run(start_s, 4))[0] for start_s in starts_s)
    assert usual_j - alternating_j > 0.002 * problem.plan(problem.fastest).energy_j
