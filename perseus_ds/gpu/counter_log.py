"""Average power from an energy counter that is refreshed about every 100 ms."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu, GpuState
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_STOP_TIMEOUT_S = 3.0
_SHORTEST_POLL_S = 0.002
_LONGEST_POLL_S = 0.010
# A reading far above a lower clock means that the change is still pending. A limit may keep the GPU a little below.
_TOLERANCE_ABOVE, _TOLERANCE_BELOW = 0.02, 0.1


class Refreshes:
    """Refreshes of an energy counter.

    A counter refreshed every 100 ms does not show the energy of one 20 ms instruction, but its values right after a
    refresh lie on the true energy curve: the slope through several of them is the average power.

    Attributes:
        changes: Time [s] and energy [J] of each refresh.
        clocks: Time [s] and clock [MHz] of each reading of the clock.
        state: State of the GPU at the last refresh of the counter.
        error: Error that stopped the readings, or None.
    """

    def __init__(self, gpu: str) -> None:
        self._name = gpu
        self.changes: list[tuple[float, float]] = []
        self.clocks: list[tuple[float, int]] = []
        self.state = GpuState()
        self.error: GpuError | None = None

    def update(self) -> None:
        """Add the refreshes up to now."""

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return time [s] and energy [J] of the refreshes from ``start_s`` to ``end_s``."""
        self.update()
        if self.error is not None:
            raise self.error
        return [change for change in self.changes if start_s <= change[0] <= end_s]

    def reached_s(self, clock_mhz: int, start_s: float, end_s: float) -> float | None:
        """Return when the GPU first ran at about the given clock in a time window [s], or None.

        The clock is read at each refresh of the counter.
        """
        self.update()
        for moment_s, read_mhz in self.clocks:
            if start_s <= moment_s <= end_s and -_TOLERANCE_BELOW <= read_mhz / clock_mhz - 1 <= _TOLERANCE_ABOVE:
                return moment_s
        return None

    def forget(self, before_s: float) -> None:
        """Drop the refreshes before a time [s]."""
        self.changes = [change for change in self.changes if change[0] >= before_s]
        self.clocks = [reading for reading in self.clocks if reading[0] >= before_s]

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two points in time [W].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        inside = self.readings(start_s, end_s)
        if len(inside) < 3:
            raise GpuError(
                f"{self._name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Either its refresh period is too long, or the driver is too "
                "slow to answer. Measure for longer."
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
        """Start the thread that reads the counter."""
        self._thread.start()

    def stop(self) -> None:
        """Request the thread to stop, without waiting for it. May be called repeatedly."""
        self._stop.set()

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self.stop()
        self._thread.join(_STOP_TIMEOUT_S)

    def _read(self) -> None:
        """Read the counter once, and the clock if the counter was refreshed."""
        energy_j = self._gpu.energy_j()
        now_s = self._time.now_s()
        if self._last is not None and energy_j != self._last[1]:
            # The refresh took place between the two readings.
            self.changes.append(((self._last[0] + now_s) / 2, energy_j))
            self._seen_s.append(now_s)
            self.clocks.append((now_s, self._gpu.clock_mhz()))
            self.state = self._gpu.state
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
        try:
            self._read()
            while not self._stop.wait(self._next_reading_in_s()):
                self._read()
        except GpuError as error:
            self.error = error
        except Exception as error:  # callers of readings() expect only GpuError
            self.error = GpuError(f"{self._gpu.name}: the energy counter cannot be read ({error!r}).")
