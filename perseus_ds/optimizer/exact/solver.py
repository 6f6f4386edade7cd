"""Computes the frontier from the relaxed problem: proven bounds, and plans with energies close to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.exact.bounds import Bounds
from perseus_ds.optimizer.exact.deadlines import Tangent, spread
from perseus_ds.optimizer.exact.descent import Descent
from perseus_ds.optimizer.exact.long_iterations import solve_long
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxation, Relaxed
from perseus_ds.optimizer.exact.rhythm import Rhythms
from perseus_ds.optimizer.exact.rounding import durations_at, options_at, round_late, splice
from perseus_ds.optimizer.exact.search import Progress, ProvenPlans, better, between, proven, relaxed_curve
from perseus_ds.optimizer.exact.switches import SwitchCosts, settle

Floats = npt.NDArray[np.float64]

_FIRST_SWEEPS, _LATER_SWEEPS = 2, 2


def solve_exact(problem: Problem, *, plans: int, switches: SwitchCosts, progress: Progress) -> ProvenPlans:
    """Return about ``plans`` plans from ``T_min`` to ``T*``, none worse than another, with their bounds.

    Args:
        problem: The optimisation problem.
        plans: How many deadlines to plan for, at least 2.
        switches: What a change of clock is taken to cost when clocks are chosen.
        progress: Called with the solver's progress.
    """
    found = solve_long(problem, plans=plans, switches=switches, progress=progress)
    return found or _solve_whole(problem, plans, switches, progress)


def _solve_whole(problem: Problem, plans: int, switches: SwitchCosts, progress: Progress) -> ProvenPlans:
    network = Network(problem)
    relaxation = Relaxation(network)
    bounds = Bounds(problem)

    def record(relaxed: Relaxed) -> Tangent:
        return bounds.add(relaxed.deadline_s, [network.dag_flow(np.maximum(relaxed.flow_w, 0.0))])

    curve = relaxed_curve(relaxation, max(2, min(plans, 4 + plans // 4)), record, progress)
    bounds.sort()
    time_s = np.array([tangent.time_s for tangent, _ in curve])
    time_s[0] = problem.t_min_s
    deadline_s = time_s if len(curve) == 1 else spread(time_s, bounds.energies_j, plans)
    target_s = between(np.stack([relaxed.event_s for _, relaxed in curve], axis=1), time_s, deadline_s)
    event_s = _round(network, target_s, deadline_s, progress)
    table = OptionTable(problem.groups)
    options = settle(network, table, event_s, switches)
    return proven(problem, bounds, options - table.begin[problem.group][:, None])


def _round(network: Network, target_s: Floats, deadline_s: Floats, progress: Progress) -> Floats:
    """Return event times of good plans with measured clocks, shape (events, plans) [s]."""
    table = OptionTable(network.problem.groups)
    descent = Descent(network, table)
    best_s: Floats | None = None
    for number, hull_only in enumerate((True, False)):
        progress("clocks", number / 4)
        start_s = round_late(network, OptionTable(network.problem.groups, hull_only=hull_only), target_s, deadline_s)
        best_s = better(descent, descent.run(start_s, _FIRST_SWEEPS), best_s)
    assert best_s is not None
    mixed_s = Rhythms(network, table).mixed_into(best_s, deadline_s)
    best_s = better(descent, descent.run(mixed_s, _LATER_SWEEPS), best_s)
    for number, slow_first in enumerate((True, False)):
        progress("clocks", 0.5 + number / 4)
        cost_j = descent.cost_j(best_s) + network.problem.waiting_energy_j(1.0) * deadline_s
        fast, slow = _chords(deadline_s, cost_j)
        between = np.flatnonzero(fast != slow)
        durations_s = durations_at(network, table, options_at(network, table, best_s))
        spliced_s = splice(
            network,
            durations_s[:, slow[between]],
            durations_s[:, fast[between]],
            deadline_s[between],
            slow_first=slow_first,
        )
        best_s[:, between] = better(descent, descent.run(spliced_s, _LATER_SWEEPS), best_s[:, between])
    progress("clocks", 1.0)
    return best_s


def _chords(time_s: Floats, energy_j: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For every plan, the plans on the lower hull of all that are next to it, the faster and the slower."""
    on_hull = np.array(lower_hull(time_s, energy_j))
    right = np.clip(np.searchsorted(on_hull, np.arange(len(time_s))), 0, len(on_hull) - 1)
    left = np.where(on_hull[right] == np.arange(len(time_s)), right, right - 1)
    return on_hull[left], on_hull[right]
