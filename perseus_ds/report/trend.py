"""How a job's saving develops over its life."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from perseus_ds.report.history import History, Step
from perseus_ds.report.measured import typical_iteration, undisturbed
from perseus_ds.report.savings import Reference

_LEAST_PARTS, _MOST_PARTS = 4, 40
_LEAST_STEPS = 5
"""Per part: fewer iterations would mostly show their noise."""


@dataclass(frozen=True)
class Trend:
    """Typical iterations of equal parts of those under plans.

    Attributes:
        x: Middle of each part: hours since the job started, or iterations where no times are recorded.
        x_title: Says which.
        energy: Against default clocks, as a fraction: -0.1 is 10 % less.
        time: Likewise.
        texts: What to say of each part.
    """

    x: tuple[float, ...]
    x_title: str
    energy: tuple[float, ...]
    time: tuple[float, ...]
    texts: tuple[str, ...]


def trend_of(history: History, reference: Reference) -> Trend | None:
    """Return how energy and time compare with default clocks over time; None for a run too short to tell.

    Args:
        history: A job that ran under plans.
        reference: An iteration at default clocks.
    """
    steps = [step for step in undisturbed(history.under_plans) if step.record.energy_j is not None]
    count = min(_MOST_PARTS, len(steps) // _LEAST_STEPS)
    if count < _LEAST_PARTS:
        return None
    edges = [round(part * len(steps) / count) for part in range(count + 1)]
    parts = [steps[first:last] for first, last in pairwise(edges)]
    timed = all(step.record.ended is not None for step in steps) and history.started > 0
    typical = [typical_iteration(part) for part in parts]
    return Trend(
        x=tuple(statistics.median(_hours(step, history) if timed else step.number for step in part) for part in parts),
        x_title="hours since the start" if timed else "iteration",
        energy=tuple(found[1] / reference.energy_j - 1 for found in typical if found is not None),
        time=tuple(found[0] / reference.time_s - 1 for found in typical if found is not None),
        texts=tuple(
            f"iterations {part[0].record.iteration} to {part[-1].record.iteration}, plans "
            + ", ".join(map(str, sorted({step.record.plan for step in part if step.record.plan is not None})))
            for part in parts
        ),
    )


def _hours(step: Step, history: History) -> float:
    assert step.record.ended is not None
    return (step.record.ended - history.started) / 3600
