"""Average power from an energy counter that is refreshed about every 100 ms; and what a GPU draws while it waits."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu, GpuState
from perseus_ds.ranks import PipelineTopology
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_HANGS_S = 3.0
_OFTEN_S = 0.002
_SELDOM_S = 0.010
# A lower clock that comes late is not reached yet; a limit may keep the GPU a little below a clock, off and on.
_ABOVE, _BELOW = 0.02, 0.1


class CounterLog:
    """Reads the energy counter on a thread and records when it was refreshed.

    A counter refreshed every 100 ms does not show the energy of one 20 ms instruction, but its values right after a
    refresh lie on the true energy curve: the slope through several of them is the average power.

    Attributes:
        state: Of the GPU, when the counter was last refreshed.
    """

    def __init__(self, gpu: Gpu, timebase: Timebase = REAL_TIME) -> None:
        self._gpu = gpu
        self._time = timebase
        self._seen_s: deque[float] = deque(maxlen=6)
        self._changes: list[tuple[float, float]] = []
        self._clocks: list[tuple[float, int]] = []
        self.state = GpuState()
        self._last: tuple[float, float] | None = None
        self._stop = Flag(timebase)
        self._error: GpuError | None = None
        self._thread = timebase.thread(self._read_until_stopped, "perseus-energy")

    def __enter__(self) -> CounterLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; harmless when called again."""
        self._stop.set()
        self._thread.join(_HANGS_S)

    def readings(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return moment [s] and energy [J] of the refreshes from ``start_s`` to ``end_s``."""
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

    def power_w(self, start_s: float, end_s: float) -> float:
        """Return the average power between two moments [W].

        Raises:
            GpuError: The counter was refreshed fewer than three times in between.
        """
        inside = self.readings(start_s, end_s)
        if len(inside) < 3:
            raise GpuError(
                f"{self._gpu.name}: the energy counter was refreshed only {len(inside)} times in "
                f"{end_s - start_s:.2f} s, 3 are needed. Either it is refreshed too seldom, or its driver is too slow "
                "to answer."
            )
        (first_s, first_j), (last_s, last_j) = inside[0], inside[-1]
        return (last_j - first_j) / (last_s - first_s)

    def _read(self) -> None:
        """Read the counter once, and the clock whenever the counter was refreshed."""
        energy_j = self._gpu.energy_j()
        now_s = self._time.now_s()
        if self._last is not None and energy_j != self._last[1]:
            # It was refreshed at some moment between the two readings.
            self._changes.append(((self._last[0] + now_s) / 2, energy_j))
            self._seen_s.append(now_s)
            self._clocks.append((now_s, self._gpu.clock_mhz()))
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
            self._error = error
        except Exception as error:  # those who ask for readings know only the errors of a GPU
            self._error = GpuError(f"{self._gpu.name}: the energy counter cannot be read ({error!r}).")


def measure_blocking_power_w(
    gpu: Gpu,
    topology: PipelineTopology,
    device: torch.device,
    *,
    settle_s: float,
    window_s: float,
    timebase: Timebase = REAL_TIME,
) -> float:
    """Return this rank's power while it waits for another one [W]; all ranks of the job must call this.

    The ranks wait in a collective, first for the first ranks of their pipelines, which come late, and then for all
    others. Each is measured for some refreshes of the energy counter, after a time in which the counter still tells
    what was drawn before.

    Raises:
        GpuError: It could not be measured; raised only after all ranks have waited.
    """
    late_s = settle_s + window_s
    if topology.pipeline_ranks == 1:  # it never waits; idling comes closest
        return _power_w(gpu, lambda: timebase.sleep(late_s), settle_s, timebase)
    power_w: float | None = None
    problem: GpuError | None = None
    for is_first_late in (True, False):
        if is_first_late == (topology.pipeline_rank == 0):
            timebase.sleep(late_s)
            _wait_for_all(device)
        else:
            try:
                power_w = _power_w(gpu, lambda: _wait_for_all(device), settle_s, timebase)
            except GpuError as error:
                problem = error
    if problem is not None:
        raise problem
    assert power_w is not None
    return power_w


def _power_w(gpu: Gpu, wait: Callable[[], None], settle_s: float, timebase: Timebase) -> float:
    """Return the average power while this rank waits, but for the first seconds of it [W]."""
    with CounterLog(gpu, timebase) as log:
        begin_s = timebase.now_s() + settle_s
        wait()
        return log.power_w(begin_s, timebase.now_s())


def _wait_for_all(device: torch.device) -> None:
    """Wait for all ranks in a collective of the job's own communicator; sending to one rank would make another."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
