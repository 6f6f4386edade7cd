"""Iteration time and energy as measured: at default clocks, and under each plan.

The one place that says which iterations count. Reports, pictures, comparisons and examples all use it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perseus_ds.report.history import History, Step

# In order of preference. In the warm-up, ranks wait for each other before the tail, which an ordinary iteration does
# not.
_DEFAULT_CLOCKS = ("observe", "default", "plan", "warm-up")
# Of a run with more plans, those that ran for longest are shown.
_MOST_PLANS = 3


@dataclass(frozen=True)
class MeasuredPoint:
    """A typical one of several iterations of the same kind.

    Attributes:
        label: Names the kind.
        plan: The plan's place on the frontier; None at default clocks.
        time_s: Iteration time [s].
        energy_j: Energy of one pipeline, one GPU per rank [J].
        iterations: How many there were.
    """

    label: str
    plan: int | None
    time_s: float
    energy_j: float
    iterations: int


def at_default_clocks(histories: Sequence[History]) -> tuple[History, list[Step]] | None:
    """Return the iterations that show what the job takes at default clocks, and the run they are from.

    All are of one phase and of one run. Those of ``observe`` mode come first, then those a job ran to compare its
    plans with, then those while it planned, then its warm-up. Iterations that something disturbed are left out.

    Args:
        histories: Runs of one job, the preferred one first.
    """
    for phase in _DEFAULT_CLOCKS:
        for history in histories:
            found = [s for s in undisturbed(history.steps) if s.record.phase == phase]
            if any(step.record.energy_j is not None for step in found):
                return history, found
    return None


def undisturbed(steps: Iterable[Step]) -> list[Step]:
    """Return the iterations that nothing disturbed."""
    return [step for step in steps if not step.disturbed]


def by_plan(history: History) -> dict[int, list[Step]]:
    """Return the iterations under each plan, the plan that ran for longest first."""
    plans: dict[int, list[Step]] = {}
    for step in history.under_plans:
        assert step.record.plan is not None
        plans.setdefault(step.record.plan, []).append(step)
    return dict(sorted(plans.items(), key=lambda item: -len(item[1])))


def measured_points(histories: Sequence[History], *, pipelines: int = 1) -> list[MeasuredPoint]:
    """Return for each run a point at default clocks and one for each plan, as far as there are such iterations.

    Args:
        histories: The runs; where there are several, labels say which one a point is from.
        pipelines: GPUs per pipeline rank: the energies of the job are so many times those of one pipeline.
    """
    points = []
    for history in histories:
        run = f", run '{history.name}'" if len(histories) > 1 else ""
        # A run that only profiles was at default clocks only to warm up.
        found = at_default_clocks([history]) if history.mode != "profile" else None
        points.append(found and measured_point(f"default clocks{run}", None, found[1], pipelines))
        for plan, steps in sorted(list(by_plan(history).items())[:_MOST_PLANS]):
            points.append(measured_point(f"plan {plan}{run}", plan, undisturbed(steps) or steps, pipelines))
    return [point for point in points if point is not None]


def measured_point(label: str, plan: int | None, steps: Sequence[Step], pipelines: int = 1) -> MeasuredPoint | None:
    """Return what a typical one of some iterations takes; None where no energy could be read."""
    typical = typical_iteration(steps)
    return typical and MeasuredPoint(label, plan, typical[0], typical[1] / pipelines, len(steps))


def typical_iteration(steps: Sequence[Step]) -> tuple[float, float] | None:
    """Return time [s] and energy of the whole job [J] of a typical iteration; None where no energy could be read.

    The time is the median, since single iterations may be held up. The energy is the mean power times that: a GPU's
    counter is refreshed about every 100 ms, so that single short iterations read too much or nothing.
    """
    known = [(step.record.time_s, step.record.energy_j) for step in steps if step.record.energy_j is not None]
    if not known:
        return None
    time_s = statistics.median(time_s for time_s, _ in known)
    return time_s, sum(energy_j for _, energy_j in known) / sum(time_s for time_s, _ in known) * time_s
