"""Plans that start from relaxed optima in which clocks alternate."""

import numpy as np
from pipelines import one_f_one_b
from profiles import stage_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.optimizer.search import Descent, round_late


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
