"""How a job's saving develops over its life."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from perseus_ds.report.history import History, Step
from perseus_ds.report.measured import undisturbed
from perseus_ds.report.savings import Reference

_MOST_PARTS = 40
_LEAST_STEPS = 5
"""Per part: a median of fewer iterations would mostly show their noise."""


@dataclass(frozen=True)
class Trend:
    """Medians over equal parts of the iterations under plans.

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
    if count < 2:
        return None
    edges = [round(part * len(steps) / count) for part in range(count + 1)]
    parts = [steps[first:last] for first, last in pairwise(edges)]
    timed = all(step.record.ended is not None for step in steps) and history.started > 0
    return Trend(
        x=tuple(statistics.median(_hours(step, history) if timed else step.number for step in part) for part in parts),
        x_title="hours since the start" if timed else "iteration",
        energy=tuple(_median_energy_j(part) / reference.energy_j - 1 for part in parts),
        time=tuple(statistics.median(step.record.time_s for step in part) / reference.time_s - 1 for part in parts),
        texts=tuple(
            f"iterations {part[0].record.iteration} to {part[-1].record.iteration}, plans "
            + ", ".join(map(str, sorted({step.record.plan for step in part if step.record.plan is not None})))
            for part in parts
        ),
    )


def _hours(step: Step, history: History) -> float:
    assert step.record.ended is not None
    return (step.record.ended - history.started) / 3600


def _median_energy_j(part: Sequence[Step]) -> float:
    return statistics.median(step.record.energy_j for step in part if step.record.energy_j is not None)
