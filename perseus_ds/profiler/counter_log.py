"""Average power from an energy counter that is refreshed about every 100 ms."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise, starmap
from types import TracebackType

from perseus_ds.device.gpu.base import Gpu, GpuState
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_HANGS_S = 3.0
_OFTEN_S = 0.002
_SELDOM_S = 0.010
# A lower clock that comes late is not reached yet; a limit may keep the GPU a little below a clock, off and on.
_ABOVE, _BELOW = 0.02, 0.1


@dataclass(frozen=True)
class Power:
    """Average power over some time.

    Attributes:
        watts: The average.
        relative_error: Its standard error, infinite where it is not known yet.
        values: From how many values that error is.
        clock_mhz: The median of the clocks read back meanwhile; not a number where none was.
    """

    watts: float
    relative_error: float
    values: int
    clock_mhz: float


class _RefreshTimes:
    """Decides when to read the counter: often while a refresh is expected, and seldom otherwise.

    Every reading is a call of the driver, which the ranks of a node share.
    """

    def __init__(self) -> None:
        self._seen_s: deque[float] = deque(maxlen=6)

    def add(self, seen_s: float) -> None:
        """Note when a refresh was seen [s]."""
        self._seen_s.append(seen_s)

    def next_reading_in_s(self, now_s: float) -> float:
        """Return how long to wait before the next reading [s]."""
        if len(self._seen_s) < 3:
            return _OFTEN_S
        periods_s = [after - before for before, after in pairwise(self._seen_s)]
        period_s = statistics.median(periods_s)
        near_s = 2 * _OFTEN_S + max(abs(each_s - period_s) for each_s in periods_s)
        expected_in_s = self._seen_s[-1] + period_s - now_s
        if abs(expected_in_s) <= near_s:
            return _OFTEN_S
        return _SELDOM_S if expected_in_s < 0 else max(_OFTEN_S, min(_SELDOM_S, expected_in_s - near_s))


class CounterLog:
    """Reads the energy counter on a thread and records when it was refreshed.

    A counter refreshed every 100 ms does not show the energy of one 20 ms instruction, but its values right after a
    refresh lie on the true energy curve: the slope through several of them is the average power.

    Args:
        gpu: The GPU whose counter is read.
        timebase: The time that moments are given in.

    Attributes:
        state: Of the GPU, when the counter was last refreshed.
    """

    def __init__(self, gpu: Gpu, timebase: Timebase = REAL_TIME) -> None:
        self._gpu = gpu
        self._time = timebase
        self._refreshes = _RefreshTimes()
        self._changes: list[tuple[float, float]] = []
        self._clocks: list[tuple[float, int]] = []
        self.state = GpuState()
        self._last_j: float | None = None
        self._stop = Flag(timebase)
        self._error: GpuError | None = None
        self._thread = timebase.thread(self._read_until_stopped, "perseus-energy")

    def __enter__(self) -> CounterLog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; harmless when called again."""
        self._stop.set()
        self._thread.join(_HANGS_S)

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return moment [s] and energy [J] of the refreshes seen from ``start_s`` to ``end_s``."""
        if self._error is not None:
            raise self._error
        return [change for change in self._changes if start_s <= change[0] <= end_s]

    def reached_s(self, clock_mhz: int, start_s: float, end_s: float) -> float | None:
        """Return when, between two moments, the GPU was first at or a little below a clock [s]; None if it was not.

        The clock is read whenever the counter was refreshed.
        """
        for moment_s, read_mhz in self._clocks:
            if start_s <= moment_s <= end_s and -_BELOW <= read_mhz / clock_mhz - 1 <= _ABOVE:
                return moment_s
        return None

    def forget(self) -> None:
        """Drop the refreshes seen so far."""
        self._changes = []
        self._clocks = []

    def power(self, start_s: float, end_s: float, at_least_s: float = 0.0) -> Power:
        """Return the average power between two moments.

        Args:
            start_s: From when [s].
            end_s: Until when [s].
            at_least_s: The time over which to average power so that one value does not depend on the next [s].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        inside = self.readings(start_s, end_s)
        if len(inside) < 3:
            raise GpuError(
                f"{self._gpu.name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Make perseus.profile.max_window_s longer."
            )
        watts = _slope(inside[0], inside[-1])
        stride = max(1, math.ceil(at_least_s * (len(inside) - 1) / (inside[-1][0] - inside[0][0]) - 1e-6))
        steps_w = list(starmap(_slope, pairwise(inside[::stride])))
        error = (
            statistics.stdev(steps_w) / math.sqrt(len(steps_w)) / watts if len(steps_w) > 1 and watts > 0 else math.inf
        )
        clocks = [clock for moment, clock in self._clocks if start_s <= moment <= end_s]
        return Power(watts, error, len(steps_w), statistics.median(clocks) if clocks else math.nan)

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two moments [W].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        return self.power(start_s, end_s).watts

    def _read(self) -> None:
        """Read the counter once, and the clock whenever the counter was refreshed."""
        energy_j = self._gpu.energy_j()
        if self._last_j is not None and energy_j != self._last_j:
            now_s = self._time.now_s()
            self._changes.append((now_s, energy_j))
            self._refreshes.add(now_s)
            self._clocks.append((now_s, self._gpu.clock_mhz()))
            self.state = self._gpu.state
        self._last_j = energy_j

    def _read_until_stopped(self) -> None:
        try:
            self._read()
            while not self._stop.wait(self._refreshes.next_reading_in_s(self._time.now_s())):
                self._read()
        except GpuError as error:
            self._error = error
        except Exception as error:  # those who ask for readings know only the errors of a GPU
            self._error = GpuError(f"{self._gpu.name}: the energy counter cannot be read ({error!r}).")


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
