"""The energy counter of a GPU, which is refreshed about every 100 ms.

Average power from its refreshes, its refresh period, and its delay after a step of the load. GPUs without a counter get
a :class:`PowerIntegrator`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_POLL_S = 5e-4
_FEWEST_REFRESHES = 3
# Number of refreshes after which a power counts as steady, and number of those that determine it.
_STEADY_REFRESHES, _POWER_REFRESHES = 6, 6
# Powers count as equal if they differ by less than this share of the step, or of the power.
_STEP_TOLERANCE, _POWER_TOLERANCE = 0.05, 0.05
_STOP_TIMEOUT_S = 3.0
_SHORTEST_POLL_S = 0.002
_LONGEST_POLL_S = 0.010
# A reading far above a lower clock means that the change is still pending. A limit may keep the GPU a little below.
_TOLERANCE_ABOVE, _TOLERANCE_BELOW = 0.02, 0.1


class CounterRefreshes:
    """Refreshes of an energy counter.

    A counter refreshed every 100 ms does not show the energy of one 20 ms instruction, but its values right after a
    refresh lie on the true energy curve: the slope through several of them is the average power.

    Attributes:
        changes: Time [s] and energy [J] of each refresh.
        clocks: Time [s] and clock [MHz] of each reading of the clock.
        error: Error that stopped the readings, or None.
    """

    def __init__(self, gpu: str) -> None:
        self._name = gpu
        self.changes: list[tuple[float, float]] = []
        self.clocks: list[tuple[float, int]] = []
        self.error: GpuError | None = None

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return time [s] and energy [J] of the refreshes from ``start_s`` to ``end_s``."""
        if self.error is not None:
            raise self.error
        return [change for change in self.changes if start_s <= change[0] <= end_s]

    def reached_s(self, clock_mhz: int, start_s: float, end_s: float) -> float | None:
        """Return when the GPU first ran at about the given clock in a time window [s], or None."""
        for moment_s, read_mhz in self.clocks:
            if start_s <= moment_s <= end_s and -_TOLERANCE_BELOW <= read_mhz / clock_mhz - 1 <= _TOLERANCE_ABOVE:
                return moment_s
        return None

    def forget(self, before_s: float) -> None:
        """Drop the refreshes before a time [s]."""
        self.changes = [change for change in self.changes if change[0] >= before_s]
        self.clocks = [reading for reading in self.clocks if reading[0] >= before_s]

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two points in time [W], which needs three refreshes."""
        inside = self.readings(start_s, end_s)
        if len(inside) < 3:
            raise GpuError(
                f"{self._name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Either its refresh period is too long, or the driver is too "
                "slow to answer. Measure for longer."
            )
        return mean_power_w(inside)


class CounterLog(CounterRefreshes):
    """Records when the energy counter was refreshed, as a context on a thread, or by calls of :meth:`read`.

    Attributes:
        due_s: Time of the next reading [s]. Infinite after an error.
    """

    def __init__(
        self, gpu: Gpu, timebase: Timebase = REAL_TIME, *, on_refresh: Callable[[], None] = lambda: None
    ) -> None:
        """Begin without a reading. ``on_refresh`` is called after each refresh, and after an error."""
        super().__init__(gpu.name)
        self._gpu = gpu
        self._time = timebase
        self._on_refresh = on_refresh
        self._seen_s: deque[float] = deque(maxlen=6)
        self._last: tuple[float, float] | None = None
        self.due_s = -math.inf
        self._stop = Flag(timebase)
        self._thread = timebase.thread(self._read_until_stopped, "perseus-energy")

    def __enter__(self) -> CounterLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def read(self) -> None:
        """Read the counter once, and the clock if the counter was refreshed."""
        try:
            self._read()
            self.due_s = self._time.now_s() + self._next_reading_in_s()
        except Exception as error:  # callers of readings() expect only GpuError
            if not isinstance(error, GpuError):
                error = GpuError(f"{self._name}: the energy counter cannot be read ({error!r}).")
            self.error, self.due_s = error, math.inf
            self._on_refresh()

    def _read(self) -> None:
        energy_j = self._gpu.energy_j()
        now_s = self._time.now_s()
        if self._last is not None and energy_j != self._last[1]:
            # The refresh took place between the two readings.
            self.changes.append(((self._last[0] + now_s) / 2, energy_j))
            self._seen_s.append(now_s)
            with suppress(GpuError):  # AMD's driver reports no clock at times
                self.clocks.append((now_s, self._gpu.clock_mhz()))
            self._on_refresh()
        self._last = now_s, energy_j

    def _next_reading_in_s(self) -> float:
        """Return the delay until the next reading [s], which is short when a refresh is expected.

        Every reading is a call of the driver, which the ranks of a node share.
        """
        if len(self._seen_s) < 3:
            return _SHORTEST_POLL_S
        periods_s = [after - before for before, after in pairwise(self._seen_s)]
        period_s = statistics.median(periods_s)
        near_s = 2 * _SHORTEST_POLL_S + max(abs(each_s - period_s) for each_s in periods_s)
        expected_in_s = self._seen_s[-1] + period_s - self._time.now_s()
        if abs(expected_in_s) <= near_s:
            return _SHORTEST_POLL_S
        if expected_in_s < 0:
            return _LONGEST_POLL_S
        return max(_SHORTEST_POLL_S, min(_LONGEST_POLL_S, expected_in_s - near_s))

    def _read_until_stopped(self) -> None:
        self.read()
        while self.error is None and not self._stop.wait(self.due_s - self._time.now_s()):
            self.read()


class CounterAnswer(NamedTuple):
    """Response of a counter to the end of a load.

    Attributes:
        period_s: Its refresh period [s].
        settle_s: Time for which it includes power drawn before the end of the load [s]. About a second if it
            integrates averages.
        power_w: Power after that [W].
        is_steady: Whether the power has been steady for some refreshes. If not, it may change further.
    """

    period_s: float
    settle_s: float
    power_w: float
    is_steady: bool


class PowerIntegrator:
    """Wraps a GPU without an energy counter (older than Volta, or virtual) and integrates its power on a thread.

    This is less exact than a counter: boards average the power that they report, some over a second.
    """

    has_energy_counter = True

    def __init__(self, gpu: Gpu, period_s: float = 0.02, timebase: Timebase = REAL_TIME) -> None:
        self._gpu = gpu
        self._period_s = period_s
        self._time = timebase
        self._energy_j = 0.0
        self._error: GpuError | None = None
        self._stop = Flag(timebase)
        self._thread = timebase.thread(self._integrate, "perseus-power")
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def __str__(self) -> str:
        return str(self._gpu)

    def energy_j(self) -> float:
        """Return the energy used since the start [J]. Raises a ``GpuError`` if power could not be read."""
        if self._error is not None:
            raise self._error
        return self._energy_j

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._gpu.close()

    def _integrate(self) -> None:
        try:
            last_s, last_w = self._time.now_s(), self._gpu.power_w()
            while not self._stop.wait(self._period_s):
                now_s, power_w = self._time.now_s(), self._gpu.power_w()
                self._energy_j += (power_w + last_w) / 2 * (now_s - last_s)
                last_s, last_w = now_s, power_w
        except GpuError as error:
            self._error = error


def with_energy(gpu: Gpu, timebase: Timebase = REAL_TIME) -> Gpu:
    """Return the GPU, wrapped in a :class:`PowerIntegrator` if it has no energy counter."""
    return gpu if gpu.has_energy_counter else PowerIntegrator(gpu, timebase=timebase)


def counter_period_s(gpu: Gpu, duration_s: float = 1.0, timebase: Timebase = REAL_TIME) -> float | None:
    """Return the refresh period of the energy counter [s]. None if fewer than two refreshes were seen.

    While the GPU draws power, its counter changes at every refresh.
    """
    return period_s_of(list(_refreshes(gpu, duration_s, timebase)))


def period_s_of(refreshes: Sequence[tuple[float, float]]) -> float | None:
    """Return the median time between refreshes [s]. None if there are fewer than two."""
    periods_s = _periods_s(refreshes)
    return statistics.median(periods_s) if periods_s else None


def answer_to_a_step(seen: Sequence[tuple[float, float]], before_w: float, ended_s: float) -> CounterAnswer | None:
    """Return the response of a counter to the end of a load. None after fewer than three refreshes.

    Args:
        seen: Time [s] and energy [J] of the refreshes since then.
        before_w: Power under the load [W].
        ended_s: When the load ended [s].
    """
    if len(seen) < _FEWEST_REFRESHES:
        return None
    steady, period_s = _steady_from(seen, before_w), statistics.median(_periods_s(seen))
    first = min(max(steady, len(seen) - _POWER_REFRESHES), len(seen) - 2)
    return CounterAnswer(
        period_s=period_s,
        # Even without a delay the first refresh can take a whole period.
        settle_s=max(0.0, seen[steady][0] - ended_s - period_s),
        power_w=mean_power_w(seen[first:]),
        is_steady=steady <= len(seen) - 1 - _STEADY_REFRESHES,
    )


def mean_power_w(refreshes: Sequence[tuple[float, float]]) -> float:
    """Return the mean power between the first and the last of some refreshes [W]. NaN if there are fewer than two."""
    if len(refreshes) < 2:
        return math.nan
    (begin_s, begin_j), (end_s, end_j) = refreshes[0], refreshes[-1]
    return (end_j - begin_j) / (end_s - begin_s)


def _steady_from(seen: Sequence[tuple[float, float]], before_w: float) -> int:
    """Return the index of the first refresh after which the power no longer changes."""
    powers_w = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(seen)]
    last_w = statistics.fmean(powers_w[-_STEADY_REFRESHES:])
    tolerance_w = max(_STEP_TOLERANCE * abs(before_w - last_w), _POWER_TOLERANCE * last_w)
    return max((n + 1 for n, power_w in enumerate(powers_w) if abs(power_w - last_w) > tolerance_w), default=0)


def _refreshes(gpu: Gpu, duration_s: float, timebase: Timebase) -> Iterator[tuple[float, float]]:
    """Yield the time [s] and the new value [J] of each refresh."""
    end_s = timebase.now_s() + duration_s
    last_j = gpu.energy_j()
    while (now_s := timebase.now_s()) < end_s:
        energy_j = gpu.energy_j()
        if energy_j != last_j:
            last_j = energy_j
            yield now_s, energy_j
        timebase.sleep(_POLL_S)


def _periods_s(refreshes: Sequence[tuple[float, float]]) -> list[float]:
    return [after[0] - before[0] for before, after in pairwise(refreshes)]
