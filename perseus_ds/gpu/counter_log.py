"""Average power from an energy counter that is refreshed about every 100 ms."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu, GpuState
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_HANGS_S = 3.0
_OFTEN_S = 0.002
_SELDOM_S = 0.010
# A lower clock that comes late is not reached yet; a limit may keep the GPU a little below a clock, off and on.
_ABOVE, _BELOW = 0.02, 0.1


class Refreshes:
    """Refreshes of an energy counter.

    A counter refreshed every 100 ms does not show the energy of one 20 ms instruction, but its values right after a
    refresh lie on the true energy curve: the slope through several of them is the average power.

    Attributes:
        changes: Moment [s] and energy [J] of each refresh.
        clocks: When the clock was read [s], and the clock [MHz].
        state: Of the GPU, when the counter was last refreshed.
        error: Why the counter cannot be read; None if it can.
    """

    def __init__(self, gpu: str) -> None:
        self._name = gpu
        self.changes: list[tuple[float, float]] = []
        self.clocks: list[tuple[float, int]] = []
        self.state = GpuState()
        self.error: GpuError | None = None

    def update(self) -> None:
        """Take in the refreshes up to now."""

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return moment [s] and energy [J] of the refreshes from ``start_s`` to ``end_s``."""
        self.update()
        if self.error is not None:
            raise self.error
        return [change for change in self.changes if start_s <= change[0] <= end_s]

    def reached_s(self, clock_mhz: int, start_s: float, end_s: float) -> float | None:
        """Return when, between two moments, the GPU was first at or a little below a clock [s]; None if it was not.

        The clock is read whenever the counter was refreshed.
        """
        self.update()
        for moment_s, read_mhz in self.clocks:
            if start_s <= moment_s <= end_s and -_BELOW <= read_mhz / clock_mhz - 1 <= _ABOVE:
                return moment_s
        return None

    def forget(self) -> None:
        """Drop the refreshes seen so far."""
        self.changes.clear()
        self.clocks.clear()

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two moments [W].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        inside = self.readings(start_s, end_s)
        if len(inside) < 3:
            raise GpuError(
                f"{self._name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Either it is refreshed too seldom, or its driver is too slow "
                "to answer."
            )
        (first_s, first_j), (last_s, last_j) = inside[0], inside[-1]
        return (last_j - first_j) / (last_s - first_s)


class CounterLog(Refreshes):
    """Reads the energy counter on a thread and records when it was refreshed."""

    def __init__(self, gpu: Gpu, timebase: Timebase = REAL_TIME) -> None:
        super().__init__(gpu.name)
        self._gpu = gpu
        self._time = timebase
        self._seen_s: deque[float] = deque(maxlen=6)
        self._last: tuple[float, float] | None = None
        self._stop = Flag(timebase)
        self._thread = timebase.thread(self._read_until_stopped, "perseus-energy")

    def __enter__(self) -> CounterLog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading, without waiting for it; harmless when called again."""
        self._stop.set()

    def close(self) -> None:
        """Stop reading, and wait until it has stopped."""
        self.stop()
        self._thread.join(_HANGS_S)

    def _read(self) -> None:
        """Read the counter once, and the clock whenever the counter was refreshed."""
        energy_j = self._gpu.energy_j()
        now_s = self._time.now_s()
        if self._last is not None and energy_j != self._last[1]:
            # It was refreshed at some moment between the two readings.
            self.changes.append(((self._last[0] + now_s) / 2, energy_j))
            self._seen_s.append(now_s)
            self.clocks.append((now_s, self._gpu.clock_mhz()))
            self.state = self._gpu.state
        self._last = now_s, energy_j

    def _next_reading_in_s(self) -> float:
        """Return how long to wait before the next reading [s]: not long while a refresh is expected.

        Every reading is a call of the driver, which the ranks of a node share.
        """
        if len(self._seen_s) < 3:
            return _OFTEN_S
        periods_s = [after - before for before, after in pairwise(self._seen_s)]
        period_s = statistics.median(periods_s)
        near_s = 2 * _OFTEN_S + max(abs(each_s - period_s) for each_s in periods_s)
        expected_in_s = self._seen_s[-1] + period_s - self._time.now_s()
        if abs(expected_in_s) <= near_s:
            return _OFTEN_S
        return _SELDOM_S if expected_in_s < 0 else max(_OFTEN_S, min(_SELDOM_S, expected_in_s - near_s))

    def _read_until_stopped(self) -> None:
        try:
            self._read()
            while not self._stop.wait(self._next_reading_in_s()):
                self._read()
        except GpuError as error:
            self.error = error
        except Exception as error:  # those who ask for readings know only the errors of a GPU
            self.error = GpuError(f"{self._gpu.name}: the energy counter cannot be read ({error!r}).")
