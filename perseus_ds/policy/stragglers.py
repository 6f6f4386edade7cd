"""Which data-parallel pipelines may take their time because another one takes longer anyway, and how much of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_APART = 1.06
_TOGETHER = 1.03
_IN_A_ROW = 2
# Room is cut as soon as a pipeline would keep the others waiting, and widened where that is worth a change for sure.
_CUT = 0.99
_WIDEN = 1.03
_FOR_SURE = 5


@dataclass(frozen=True)
class Straggler:
    """A pipeline all others wait for.

    Attributes:
        pipeline: Which.
        slowdown: How many times as long it takes as it would.
    """

    pipeline: int
    slowdown: float


class StragglerWatch:
    """Looks at how long each pipeline takes itself, relative to what its plan says.

    What a pipeline takes longer on purpose, under a slower plan, is in its plan; what it waits for
    others is not in its own time. Every pipeline has *room*: how many times as long as the policy's
    plan its plan may take until it finishes with the slowest pipeline (T' of the paper, section 3.2).
    One that is slow itself, but not the slowest, has the less of it.

    Room is given once the slowest is 6 % behind the fastest twice in a row, and taken back once all
    are within 3 % twice in a row, so that one slow iteration changes nothing and a pipeline at the
    border does not flap. In between, it is cut where a pipeline would keep the others waiting twice in
    a row, and widened to what was there in each of the last five iterations, if that is 3 % more.

    Attributes:
        rooms: For each pipeline, >= 1; all 1 while none straggles.
    """

    def __init__(self, pipelines: int) -> None:
        self.rooms = (1.0,) * pipelines
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_FOR_SURE)

    def update(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Take in an iteration and return the rooms.

        Args:
            ratios: For each pipeline, its own time over that of the plan it ran, > 0.
        """
        slowest = max(ratios)
        self._seen.append(tuple(slowest / ratio for ratio in ratios))
        if len(self._seen) >= _IN_A_ROW:
            self.rooms = self._next_rooms([*self._seen][-_IN_A_ROW:])
        return self.rooms

    def _next_rooms(self, last: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        least, most = _each(min, last), _each(max, last)
        if max(self.rooms) == 1:
            # Two iterations with another straggler each are noise: nobody has room in both.
            return least if max(least) > _APART else self.rooms
        if max(most) < _TOGETHER:
            return (1.0,) * len(least)
        if any(room < _CUT * given for room, given in zip(most, self.rooms, strict=True)):
            return least
        sure = _each(min, self._seen)
        worth_it = any(room > _WIDEN * given for room, given in zip(sure, self.rooms, strict=True))
        return sure if worth_it and len(self._seen) == _FOR_SURE else self.rooms


def _each(choose: Callable[..., float], seen: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the least or most of each pipeline."""
    return tuple(choose(rooms) for rooms in zip(*seen, strict=True))


def with_told(rooms: Sequence[float], told: Straggler | None) -> tuple[float, ...]:
    """Return the rooms there are when one pipeline is known to take longer than its peers usually do."""
    if told is None:
        return tuple(rooms)
    slowness = [max(rooms) / room for room in rooms]
    others = [slow for pipeline, slow in enumerate(slowness) if pipeline != told.pipeline]
    slowness[told.pipeline] = told.slowdown * (statistics.median_low(others) if others else 1.0)
    return tuple(max(slowness) / slow for slow in slowness)


def straggler_of(rooms: Sequence[float]) -> Straggler | None:
    """Return the pipeline all others wait for, if they do."""
    if max(rooms) == 1:
        return None
    return Straggler(min(range(len(rooms)), key=lambda pipeline: rooms[pipeline]), max(rooms))
