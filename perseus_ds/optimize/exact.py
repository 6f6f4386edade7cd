"""The frontier from the relaxed problem: proven bounds, and real clocks close to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.optimize.certificate import Certificate, Verifier
from perseus_ds.optimize.deadlines import Tangent, refine, spread
from perseus_ds.optimize.descent import Descent
from perseus_ds.optimize.hull import corners
from perseus_ds.optimize.network import Network
from perseus_ds.optimize.options import OptionTable
from perseus_ds.optimize.problem import Choice, Problem
from perseus_ds.optimize.relaxation import Relaxation, Relaxed
from perseus_ds.optimize.rounding import durations_at, options_at, round_late, splice
from perseus_ds.optimize.switches import settle
from perseus_ds.plan import FrequencyPlan

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, float], None]

_NEAR = 1e-7
"""The relaxed problem has no interior at ``T_min`` itself, so it is solved this much later, relative."""
_FIRST_SWEEPS, _LATER_SWEEPS = 4, 3


@dataclass(frozen=True)
class Proven:
    """A frontier of plans and the proofs of their bounds, one each."""

    plans: list[FrequencyPlan]
    certificates: list[Certificate]


def solve_exact(problem: Problem, *, plans: int, switch_cost_j: float, progress: Progress) -> Proven:
    """Return about ``plans`` plans from ``T_min`` to ``T*``, none worse than another, with their bounds.

    Args:
        problem: What there is to decide.
        plans: How many deadlines to plan for, at least 2.
        switch_cost_j: What a change of clock is taken to cost when clocks are chosen [J].
        progress: Told how far the solver is.
    """
    network = Network(problem)
    relaxation = Relaxation(network)
    bounds = _Bounds(problem, network)
    solved = _relaxed(problem, relaxation, bounds, max(2, min(plans, 4 + plans // 4)), progress)
    time_s = np.array([r.deadline_s for r in solved])
    time_s[0] = problem.t_min_s
    deadline_s = time_s if len(solved) == 1 else spread(time_s, bounds.energies_j, plans)
    target_s = _between(np.stack([r.event_s for r in solved], axis=1), time_s, deadline_s)
    table = OptionTable(problem.groups)
    event_s = _round(network, table, relaxation.position, target_s, deadline_s, progress)
    options = settle(network, table, event_s, switch_cost_j)
    choices = table.last[problem.group][:, None] - options
    return _proven(problem, bounds, choices)


def _relaxed(
    problem: Problem, relaxation: Relaxation, bounds: _Bounds, count: int, progress: Progress
) -> list[Relaxed]:
    """Solve the relaxed problem at ``T_min``, at ``T*`` and where the bound bends between them."""
    solved: dict[float, Relaxed] = {}

    def record(relaxed: Relaxed) -> Tangent:
        solved[relaxed.deadline_s] = relaxed
        progress("bounds", len(solved) / (count + 1))
        return bounds.add(relaxed)

    fastest_s = problem.t_min_s * (1 + _NEAR)
    slowest_s = problem.time_s(problem.most_frugal)
    left = record(relaxation.solve(fastest_s))
    waiting_w = problem.waiting_energy_j(1.0)
    star = relaxation.solve(slowest_s, waiting_w=waiting_w) if waiting_w > 0 else None
    if star is None or star.deadline_s > slowest_s:
        star = relaxation.solve(max(slowest_s, fastest_s * (1 + _NEAR)))
    if star.deadline_s > fastest_s * (1 + 10 * _NEAR):
        refine(left, record(star), lambda time_s: record(relaxation.solve(time_s)), count)
    bounds.sort()
    return [solved[time_s] for time_s in sorted(solved)]


class _Bounds:
    """The flows of the solved deadlines, and what they prove at any iteration time."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self.problem, self.network = problem, network
        self.verifier = Verifier(problem)
        self._found: list[tuple[float, float, Floats, Floats]] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Keep a relaxed optimum's flow; return what it proves at its deadline."""
        edges, source = self.network.dag_flow(np.maximum(relaxed.flow_w, 0.0)[:, None])
        edges_w, source_w = edges[:, 0], source[:, 0]
        energy_j = self.verifier.bound_j(relaxed.deadline_s, edges_w, source_w)
        self._found.append((relaxed.deadline_s, energy_j, edges_w, source_w))
        return Tangent(relaxed.deadline_s, energy_j, float(source_w.sum()) - self.problem.waiting_energy_j(1.0))

    def sort(self) -> None:
        self._found.sort(key=lambda found: found[0])

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([energy_j for _, energy_j, _, _ in self._found])

    def certify(self, time_s: float) -> Certificate:
        """Return the best proof at hand for an iteration time: the flow of a neighbour, or a mixture of two."""
        times_s = [found[0] for found in self._found]
        right = min(int(np.searchsorted(times_s, time_s)), len(times_s) - 1)
        left = max(right - 1, 0)
        span_s = times_s[right] - times_s[left]
        share = min(max((time_s - times_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
        best: Certificate | None = None
        for part in sorted({0.0, share, 1.0}):
            (_, _, edges_a, source_a), (_, _, edges_b, source_b) = self._found[left], self._found[right]
            edges_w = (1 - part) * edges_a + part * edges_b
            source_w = (1 - part) * source_a + part * source_b
            energy_j = self.verifier.bound_j(time_s, edges_w, source_w)
            if best is None or energy_j > best.bound_j:
                best = Certificate(time_s, energy_j, edges_w, source_w)
        assert best is not None
        return best


def _between(values: Floats, known_s: Floats, wanted_s: Floats) -> Floats:
    """Interpolate columns of values; between two optima lies a solution that both constraints allow."""
    if len(known_s) == 1:
        return np.repeat(values, len(wanted_s), axis=1)
    right = np.clip(np.searchsorted(known_s, wanted_s), 1, len(known_s) - 1)
    share = (wanted_s - known_s[right - 1]) / (known_s[right] - known_s[right - 1])
    return values[:, right - 1] * (1 - share) + values[:, right] * share


def _round(
    network: Network, table: OptionTable, position: Floats, target_s: Floats, deadline_s: Floats, progress: Progress
) -> Floats:
    """Return event times of good plans with real clocks, shape (events, plans) [s]."""
    descent = Descent(network, table)
    coarse = OptionTable(network.problem.groups, hull_only=True)
    candidates = []
    for options in (coarse, table):
        progress("clocks", len(candidates) / 4)
        start_s = round_late(network, options, target_s, deadline_s)
        candidates.append(descent.run(start_s, _FIRST_SWEEPS))
    best_s = _better(descent, *candidates)
    waiting_w = network.problem.waiting_energy_j(1.0)
    arc_position = network.earliest_s(network.least_s)[network.tail] / float(network.earliest_s(network.least_s)[-1])
    for slow_first in (True, False):
        progress("clocks", 0.5 if slow_first else 0.75)
        cost_j = descent.cost_j(best_s) + waiting_w * deadline_s
        fast, slow = _chords(deadline_s, cost_j)
        durations_s = durations_at(network, table, options_at(network, table, best_s))
        spliced_s = splice(network, durations_s[:, slow], durations_s[:, fast], deadline_s, arc_position, slow_first)
        best_s = _better(descent, best_s, descent.run(spliced_s, _LATER_SWEEPS))
    progress("clocks", 1.0)
    return best_s


def _chords(time_s: Floats, energy_j: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For every plan, the plans on the lower hull of all that are next to it, the faster and the slower."""
    on_hull = np.array(corners(time_s, energy_j))
    right = np.clip(np.searchsorted(on_hull, np.arange(len(time_s))), 0, len(on_hull) - 1)
    left = np.where(on_hull[right] == np.arange(len(time_s)), right, right - 1)
    return on_hull[left], on_hull[right]


def _better(descent: Descent, one_s: Floats, other_s: Floats) -> Floats:
    return np.where(descent.cost_j(one_s) <= descent.cost_j(other_s), one_s, other_s)


def _proven(problem: Problem, bounds: _Bounds, choices: Choice) -> Proven:
    plans = [problem.plan(choices[:, column]) for column in range(choices.shape[1])]
    plans.sort(key=lambda plan: (plan.time_s, plan.energy_j))
    result = Proven([], [])
    least_j = math.inf
    for plan in plans:
        if plan.energy_j < least_j:
            least_j = plan.energy_j
            certificate = bounds.certify(plan.time_s)
            result.certificates.append(certificate)
            result.plans.append(
                FrequencyPlan(plan.instructions, plan.clocks_mhz, plan.time_s, plan.energy_j, certificate.bound_j)
            )
    return result
