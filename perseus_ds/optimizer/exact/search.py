"""Steps that plans for whole and for shortened iterations have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.artifacts.frontier import drop_dominated
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.optimizer.exact.bounds import Bounds
from perseus_ds.optimizer.exact.deadlines import Tangent, refine
from perseus_ds.optimizer.exact.descent import Descent
from perseus_ds.optimizer.exact.problem import OptionIndices, Problem
from perseus_ds.optimizer.exact.relaxation import Relaxation, Relaxed

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, float], None]

_NEAR = 1e-7
"""The relaxed problem has no interior at ``T_min`` itself, so it is solved this much later, relative."""


@dataclass(frozen=True)
class ProvenPlans:
    """A frontier of plans, and the proofs of their bounds."""

    plans: list[FrequencyPlan]
    certificates: Certificates


def relaxed_curve(
    relaxation: Relaxation, count: int, record: Callable[[Relaxed], Tangent], progress: Progress
) -> list[tuple[Tangent, Relaxed]]:
    """Solve the relaxed problem at ``T_min``, at ``T*`` and where the bound bends between them.

    Args:
        relaxation: The relaxed problem.
        count: At how many deadlines at most.
        record: Returns the point of the bound's curve that an optimum proves.
        progress: Called with the share that is done.

    Returns:
        The points of the curve, the fastest first, and the optima.
    """
    problem = relaxation.network.problem
    found: list[tuple[Tangent, Relaxed]] = []

    def add(relaxed: Relaxed) -> Tangent:
        found.append((record(relaxed), relaxed))
        found.sort(key=lambda pair: pair[0].time_s)
        progress("bounds", len(found) / (count + 1))
        return next(tangent for tangent, optimum in found if optimum is relaxed)

    def at(time_s: float) -> Tangent:
        # The relaxed problem may be that of a shorter iteration, with other deadlines than the curve's times.
        deadlines_s = [relaxed.deadline_s for _, relaxed in found]
        return add(relaxation.solve(float(np.interp(time_s, [tangent.time_s for tangent, _ in found], deadlines_s))))

    fastest_s = problem.t_min_s * (1 + _NEAR)
    slowest_s = problem.time_s(problem.most_frugal)
    left = add(relaxation.solve(fastest_s))
    waiting_w = problem.waiting_energy_j(1.0)
    star = relaxation.solve(slowest_s, waiting_w=waiting_w) if waiting_w > 0 else None
    if star is None or star.deadline_s > slowest_s:
        star = relaxation.solve(max(slowest_s, fastest_s * (1 + _NEAR)))
    if star.deadline_s > fastest_s * (1 + 10 * _NEAR):
        refine(left, add(star), at, count)
    return found


def between(values: Floats, known_s: Floats, wanted_s: Floats) -> Floats:
    """Interpolate columns of values; between two optima lies a solution that both constraints allow."""
    if len(known_s) == 1:
        return np.repeat(values, len(wanted_s), axis=1)
    right = np.clip(np.searchsorted(known_s, wanted_s), 1, len(known_s) - 1)
    share = (wanted_s - known_s[right - 1]) / (known_s[right] - known_s[right - 1])
    return values[:, right - 1] * (1 - share) + values[:, right] * share


def better(descent: Descent, new_s: Floats, old_s: Floats | None) -> Floats:
    """Of every pair of plans, the one of less energy."""
    return new_s if old_s is None else np.where(descent.cost_j(new_s) < descent.cost_j(old_s), new_s, old_s)


def proven(problem: Problem, bounds: Bounds, choices: OptionIndices) -> ProvenPlans:
    """Return the plans with these options, shape (decisions, plans), with their bounds; none is worse than another."""
    plans = drop_dominated([problem.plan(choices[:, column]) for column in range(choices.shape[1])])
    bounds_j, certificates = bounds.certify([plan.time_s for plan in plans])
    proven = [replace(plan, lower_bound_j=bound_j) for plan, bound_j in zip(plans, bounds_j, strict=True)]
    return ProvenPlans(proven, certificates)
