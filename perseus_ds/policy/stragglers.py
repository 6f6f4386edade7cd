"""Data-parallel pipelines that are slower than others, and how slow the others may be without delaying the job."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Straggler(NamedTuple):
    """A pipeline for which all others wait, and its slowdown as a factor."""

    pipeline: int
    slowdown: float


_APART = 1.06
_TOGETHER = 1.03
# Number of iterations in a row after which a pipeline counts as a straggler, and after which it no longer does. Lengths
# of inputs that vary let any pipeline be the slowest one several times in a row.
_SURE_AFTER, _OVER_AFTER = 5, 2
# A stretch factor is reduced as soon as a pipeline would delay the others. It is increased only if it is certain and
# the gain is worth a change of plan.
_CUT = 0.99
_RAISE = 1.03


class StragglerWatch:
    """Compares the time of each pipeline, without waits for others, with the time of its plan.

    ``docs/during-training.md`` describes when stretch factors start, change and end.

    Attributes:
        stretch_factors: For each pipeline, the time that its plan may take relative to the goal's plan so that it
            finishes with the slowest pipeline (T' of the paper, section 3.2), >= 1. All are 1 if no pipeline straggles.
    """

    def __init__(self, pipelines: int) -> None:
        self.stretch_factors = (1.0,) * pipelines
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_SURE_AFTER)

    def update(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Add an iteration, by each pipeline's own time divided by that of its plan, and return the stretch factors."""
        slowest = max(ratios)
        self._seen.append(tuple(slowest / ratio for ratio in ratios))
        if len(self._seen) == _SURE_AFTER:
            self.stretch_factors = self._next_factors()
        return self.stretch_factors

    def _next_factors(self) -> tuple[float, ...]:
        given, sure = self.stretch_factors, _each(min, self._seen)
        if max(given) == 1:
            # A different straggler in each iteration is noise: no pipeline could be stretched in all of them.
            return sure if max(sure) > _APART else given
        last = [*self._seen][-_OVER_AFTER:]
        least, most = _each(min, last), _each(max, last)
        if max(most) < _TOGETHER:
            return (1.0,) * len(least)
        if any(possible < _CUT * factor for possible, factor in zip(most, given, strict=True)):
            return least
        worth_it = any(possible > _RAISE * factor for possible, factor in zip(sure, given, strict=True))
        return sure if worth_it else given


def _each(choose: Callable[..., float], seen: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(choose(factors) for factors in zip(*seen, strict=True))


def with_reported(stretch_factors: Sequence[float], reported: Straggler | None) -> tuple[float, ...]:
    """Return the stretch factors, combined with a pipeline that a user has reported as a straggler."""
    if reported is None:
        return tuple(stretch_factors)
    slowness = [max(stretch_factors) / factor for factor in stretch_factors]
    others = [slow for pipeline, slow in enumerate(slowness) if pipeline != reported.pipeline]
    slowness[reported.pipeline] = reported.slowdown * (statistics.median_low(others) if others else 1.0)
    return tuple(max(slowness) / slow for slow in slowness)


def straggler_of(stretch_factors: Sequence[float]) -> Straggler | None:
    """Return the pipeline for which all others wait, if any."""
    largest = max(stretch_factors)
    return None if largest == min(stretch_factors) else Straggler(stretch_factors.index(min(stretch_factors)), largest)
