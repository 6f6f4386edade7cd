"""Series of figures over a job of any length, in bounded memory."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from perseus_ds.artifacts.run_iterations import PowerSums, Sums

_SECOND_S = 1.0
_Point = TypeVar("_Point")


class PowerFigures(NamedTuple):
    """Power of all GPUs over a second.

    A second consists of the fewest consecutive whole iterations that take at least a second, because the power within
    an iteration is unknown. With an energy counter that is refreshed every 100 ms, the power of a GPU over one second
    has an error of 4 %.

    Attributes:
        change_w: Largest change from one second to the next [W].
        window_s: Mean length of these seconds [s].
    """

    mean_w: float
    highest_w: float
    lowest_w: float
    change_w: float
    window_s: float


class _Second(NamedTuple):
    time_s: float
    energy_j: float
    follows: bool  # the previous second, without a gap

    @property
    def power_w(self) -> float:
        return self.energy_j / self.time_s


class _Seconds:
    """Groups iterations to seconds."""

    def __init__(self) -> None:
        self._time_s = self._energy_j = 0.0
        self._ended: float | None = None
        self._follows = False

    def add(self, time_s: float, energy_j: float | None, ended: float | None) -> _Second | None:
        """Add an iteration, and return the second that it completes."""
        is_apart = ended is not None and self._ended is not None and ended - time_s - self._ended > _SECOND_S
        self._ended = ended
        if energy_j is None or is_apart:
            self._time_s, self._energy_j, self._follows = 0.0, 0.0, False
        if energy_j is None:
            return None
        self._time_s, self._energy_j = self._time_s + time_s, self._energy_j + energy_j
        if self._time_s < _SECOND_S:
            return None
        second = _Second(self._time_s, self._energy_j, self._follows)
        self._time_s, self._energy_j, self._follows = 0.0, 0.0, True
        return second


class RecentPower:
    """The power over each of the last seconds of a job."""

    def __init__(self, most: int) -> None:
        self._grouped = _Seconds()
        self._seconds: deque[_Second] = deque(maxlen=most)

    def add(self, time_s: float, energy_j: float | None, ended: float | None) -> None:
        """Add an iteration, of which energy and end [Unix seconds] may be unknown."""
        second = self._grouped.add(time_s, energy_j, ended)
        if second is not None:
            self._seconds.append(second)

    @property
    def figures(self) -> PowerFigures | None:
        """The figures of the last seconds, or None if there are fewer than two."""
        found = PowerExtremes()
        for number, second in enumerate(self._seconds):
            found.add_second(second if number else second._replace(follows=False))
        return found.figures


class PowerExtremes:
    """The extremes of the power over a second, in all iterations that were added."""

    def __init__(self) -> None:
        self._grouped = _Seconds()
        self._count = 0
        self._time_s = self._energy_j = self._change_w = self._last_w = 0.0
        self._lowest_w, self._highest_w = math.inf, -math.inf

    def add(self, time_s: float, energy_j: float | None, ended: float | None) -> None:
        """Add an iteration, of which energy and end [Unix seconds] may be unknown."""
        second = self._grouped.add(time_s, energy_j, ended)
        if second is not None:
            self.add_second(second)

    def add_second(self, second: _Second) -> None:
        """Add a second."""
        power_w = second.power_w
        if second.follows:
            self._change_w = max(self._change_w, abs(power_w - self._last_w))
        self._last_w = power_w
        self._lowest_w, self._highest_w = min(self._lowest_w, power_w), max(self._highest_w, power_w)
        self._count += 1
        self._time_s, self._energy_j = self._time_s + second.time_s, self._energy_j + second.energy_j

    def add_sums(self, sums: PowerSums) -> None:
        """Add the seconds of another series, which follows after a gap."""
        self._grouped = _Seconds()
        self._change_w = max(self._change_w, sums.change_w)
        self._lowest_w, self._highest_w = min(self._lowest_w, sums.lowest_w), max(self._highest_w, sums.highest_w)
        self._count += sums.seconds
        self._time_s, self._energy_j = self._time_s + sums.time_s, self._energy_j + sums.energy_j

    @property
    def sums(self) -> PowerSums | None:
        """The seconds so far. None if there are none."""
        if not self._count:
            return None
        return PowerSums(
            seconds=self._count,
            time_s=self._time_s,
            energy_j=self._energy_j,
            lowest_w=self._lowest_w,
            highest_w=self._highest_w,
            change_w=self._change_w,
        )

    @property
    def figures(self) -> PowerFigures | None:
        """The figures, or None if there are fewer than two seconds."""
        if self._count < 2:
            return None
        mean_w, window_s = self._energy_j / self._time_s, self._time_s / self._count
        return PowerFigures(mean_w, self._highest_w, self._lowest_w, self._change_w, window_s)


class EveryNth(Generic[_Point]):
    """Keeps every n-th of the points that were added, with the least n for which they are at most ``most``.

    n is a power of two. A point may stand for several, and is kept if one of these would be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self.n = 1
        # The place of each point, the number of points for which it stands, and the point.
        self._kept: list[tuple[int, int, _Point]] = []

    @property
    def points(self) -> list[_Point]:
        """The points that are kept."""
        return [point for _, _, point in self._kept]

    def add(self, point: _Point, count: int = 1) -> None:
        """Add a point that stands for a number of points."""
        place, self._count = self._count, self._count + count
        while self._is_nth(place, count) and len(self._kept) == self._most:
            self.n *= 2
            self._kept = [kept for kept in self._kept if self._is_nth(*kept[:2])]
        if self._is_nth(place, count):
            self._kept.append((place, count, point))

    def _is_nth(self, place: int, count: int) -> bool:
        """Return whether there is a multiple of n among the places from this one on."""
        return -place % self.n < count


class SeriesPart(NamedTuple):
    """Consecutive iterations of a series.

    Attributes:
        first, last: Numbers of the first and the last iteration.
        ended: End of the last iteration [Unix seconds]; None if it is not recorded.
        plans: Plans under which they ran.
    """

    first: int
    last: int
    ended: float | None
    plans: frozenset[int]
    sums: Sums


class SeriesParts:
    """Divides a series of iterations into parts of equal length, at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = 1
        self._parts: list[SeriesPart] = []

    def add(self, part: SeriesPart) -> None:
        """Add one iteration, or several that are already summed up."""
        if self._parts and self._parts[-1].sums.iterations < self._length:
            self._parts[-1] = _merged([*self._parts[-1:], part])
            return
        if len(self._parts) == 2 * self._most:
            self._parts = [_merged(self._parts[place : place + 2]) for place in range(0, len(self._parts), 2)]
            self._length *= 2
        self._parts.append(part)

    def of_at_least(self, iterations: int) -> list[SeriesPart]:
        """Return the parts, at most ``most``, each of at least a number of iterations except the last one."""
        count = sum(part.sums.iterations for part in self._parts)
        length = max(iterations, math.ceil(count / self._most))
        found: list[SeriesPart] = []
        for part in self._parts:
            if found and found[-1].sums.iterations < length:
                found[-1] = _merged([found[-1], part])
            else:
                found.append(part)
        if len(found) > 1 and found[-1].sums.iterations < iterations:
            found[-2:] = [_merged(found[-2:])]
        return found


def _merged(parts: Sequence[SeriesPart]) -> SeriesPart:
    sums = Sums()
    for part in parts:
        sums.add(part.sums)
    plans = frozenset(itertools.chain.from_iterable(part.plans for part in parts))
    return SeriesPart(parts[0].first, parts[-1].last, parts[-1].ended, plans, sums)
