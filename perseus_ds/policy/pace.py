"""Whether ranks keep their pace: drift from the profile, and pipelines that make the others wait.

Drift is that instructions take longer or shorter than in the profile by more than they vary. Passes of 5 ms vary by
much more than passes of 50 ms, where the host delays them. So a rank reports only the part of a deviation that the
spread of the same iteration's instructions does not explain.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.clocks.timers import Span
from perseus_ds.measures import error_of_median
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_APART = 1.06
_TOGETHER = 1.03
_IN_A_ROW = 2
# A stretch factor is cut as soon as a pipeline would make the others wait, and raised only where it is sure and worth
# a change of plan.
_CUT = 0.99
_RAISE = 1.03
_SURE_AFTER = 5
# A drift counts where it exceeds so many of its standard errors, and by how much it does.
_SURE = 3.0


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
    time. ``docs/policies.md`` says when stretch factors begin, change and end.

    Attributes:
        stretch_factors: For each pipeline, how many times as long as the policy's plan its plan may take until it
            finishes together with the slowest one (T' of the paper, section 3.2), >= 1; all 1 while none straggles.
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


def reported_drift(
    spans: Sequence[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> dict[str, float]:
    """Return the fields of a rank's report that say how far it is from the profile; without clocks, that it is not.

    Times of one stage and kind vary about their median; by this, the medians are uncertain.

    Args:
        spans: One iteration.
        clocks_mhz: Clock of each instruction; empty where they were not a plan's.
        expected: The times that the profile says.
    """
    if not clocks_mhz:
        return {"drift": 0.0}
    ratios: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        if isinstance(span.operation, Compute):
            instruction = span.operation.instruction
            key = instruction.stage, instruction.kind
            expected_s = expected.get((*key, clocks_mhz.get(instruction, 0)))
            if expected_s is not None:
                ratios[key].append(span.time_s / expected_s)
    if not ratios:
        return {"drift": 0.0, "pace_low": math.nan, "pace_high": math.nan}
    medians = {key: statistics.median(of_kind) for key, of_kind in ratios.items()}
    deviations = [ratio - medians[key] for key, of_kind in ratios.items() for ratio in of_kind if len(of_kind) > 1]

    def unsure(samples: int) -> float:
        return _SURE * error_of_median(deviations or [0.0], samples)

    every = [*chain.from_iterable(ratios.values())]
    drift = abs(statistics.median(every) - 1) - unsure(len(every))
    paces = [(medians[key], unsure(len(of_kind))) for key, of_kind in ratios.items() if key[1] is not Kind.TAIL]
    low = min((pace + error for pace, error in paces), default=math.nan)
    high = max((pace - error for pace, error in paces), default=math.nan)
    return {"drift": max(0.0, drift), "pace_low": low, "pace_high": high}


class DriftWatch:
    """Counts how often in a row the pipelines were found too far from the profile.

    Args:
        max_drift: How far instructions may be from it, as a fraction.
    """

    def __init__(self, max_drift: float) -> None:
        self._max_drift = max_drift
        self._in_a_row = 0

    def has_drifted(self, drift: float) -> bool:
        """Return whether the profile has turned out to be out of date.

        Args:
            drift: How far the pipelines are from it, by their lower median.
        """
        self._in_a_row = self._in_a_row + 1 if drift > self._max_drift else 0
        return self._in_a_row >= _IN_A_ROW
