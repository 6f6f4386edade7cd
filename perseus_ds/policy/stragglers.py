"""Computes how much longer each data-parallel pipeline may take because another one is slower."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perseus_ds.clocks.timers import Span
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute

_APART = 1.06
_TOGETHER = 1.03
_IN_A_ROW = 2
# A stretch factor is cut as soon as a pipeline would make the others wait, and raised only where it is sure and worth
# a change of plan.
_CUT = 0.99
_RAISE = 1.03
_SURE_AFTER = 5


@dataclass(frozen=True)
class Straggler:
    """A pipeline all others wait for.

    Attributes:
        slowdown: How many times as long it takes as it would.
    """

    pipeline: int
    slowdown: float


class StragglerWatch:
    """Compares the time each pipeline takes by itself with its plan's.

    The plan of a pipeline says how much longer it takes on purpose; the time it waits for others is not in its own
    time. Every pipeline has a *stretch factor*: how many times as long as the policy's plan its plan may take until it
    finishes together with the slowest pipeline (T' of the paper, section 3.2). A pipeline that is slow itself, but not
    the slowest, has a smaller one.

    Stretch factors above 1 begin once the slowest is 6 % behind the fastest twice in a row, and end once all are within
    3 % twice in a row, so that one slow iteration changes nothing and a pipeline near a threshold does not change plans
    all the time. In between, a factor is cut where a pipeline would make the others wait twice in a row, and raised to
    the least of the last five iterations, if that is 3 % more.

    Attributes:
        stretch_factors: For each pipeline, >= 1; all 1 while none straggles.
    """

    def __init__(self, pipelines: int) -> None:
        self.stretch_factors = (1.0,) * pipelines
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_SURE_AFTER)

    def update(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Add an iteration and return the stretch factors.

        Args:
            ratios: For each pipeline, its own time over that of the plan it ran, > 0.
        """
        slowest = max(ratios)
        self._seen.append(tuple(slowest / ratio for ratio in ratios))
        if len(self._seen) >= _IN_A_ROW:
            self.stretch_factors = self._next_factors([*self._seen][-_IN_A_ROW:])
        return self.stretch_factors

    def _next_factors(self, last: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        given = self.stretch_factors
        least, most = _each(min, last), _each(max, last)
        if max(given) == 1:
            # Two iterations with another straggler each are noise: no pipeline could be stretched in both.
            return least if max(least) > _APART else given
        if max(most) < _TOGETHER:
            return (1.0,) * len(least)
        if any(possible < _CUT * factor for possible, factor in zip(most, given, strict=True)):
            return least
        sure = _each(min, self._seen)
        worth_it = any(possible > _RAISE * factor for possible, factor in zip(sure, given, strict=True))
        return sure if worth_it and len(self._seen) == _SURE_AFTER else given


def _each(choose: Callable[..., float], seen: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the least or most of each pipeline."""
    return tuple(choose(factors) for factors in zip(*seen, strict=True))


def with_reported(stretch_factors: Sequence[float], reported: Straggler | None) -> tuple[float, ...]:
    """Return the stretch factors when a user has reported that one pipeline takes longer than its peers usually do."""
    if reported is None:
        return tuple(stretch_factors)
    slowness = [max(stretch_factors) / factor for factor in stretch_factors]
    others = [slow for pipeline, slow in enumerate(slowness) if pipeline != reported.pipeline]
    slowness[reported.pipeline] = reported.slowdown * (statistics.median_low(others) if others else 1.0)
    return tuple(max(slowness) / slow for slow in slowness)


def straggler_of(stretch_factors: Sequence[float]) -> Straggler | None:
    """Return the pipeline all others wait for, if they do."""
    largest = max(stretch_factors)
    return None if largest == min(stretch_factors) else Straggler(stretch_factors.index(min(stretch_factors)), largest)


def computed_and_tail_s(spans: Iterable[Span]) -> dict[str, float]:
    """Return the times of a rank that tell stragglers, as fields of its report; 0 where they are not known.

    Returns:
        When the rank had computed its last, and how long its tail was, waiting included [s].
    """
    work = [(span.operation.instruction.kind, span.end_s) for span in spans if isinstance(span.operation, Compute)]
    last_s = max((end_s for kind, end_s in work if kind is not Kind.TAIL), default=0.0)
    tail_s = max((end_s for kind, end_s in work if kind is Kind.TAIL), default=last_s) - last_s
    return {"computed_s": last_s, "tail_s": max(0.0, tail_s)}
