"""The energy counter of a GPU: its refresh period and its delay after a step of the load.

GPUs without a counter get a :class:`PowerIntegrator`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_POLL_S = 5e-4
# A call that takes longer would be reported as a driver that hangs.
_LONGEST_ANSWER_S = 2.5
_STEADY_REFRESHES = 8
# Powers count as equal if they differ by less than this share of the step, or of the power.
_STEP_TOLERANCE, _POWER_TOLERANCE = 0.05, 0.05


@dataclass(frozen=True)
class CounterAnswer:
    """Response of an energy counter to the end of a load.

    Attributes:
        period_s: Refresh period [s]. None if fewer than two refreshes were seen.
        settle_s: Time for which the counter still includes power drawn before the step [s]. About a second if it
            integrates averages.
    """

    period_s: float | None
    settle_s: float


class PowerIntegrator:
    """Wraps a GPU without an energy counter and integrates its power readings on a thread.

    This is less exact than a counter: boards average the power that they report, some over a second.

    Args:
        gpu: A GPU without a counter: older than Volta, or virtual.
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
        """Return the energy used since the thread started [J].

        Raises:
            GpuError: Power could not be read.
        """
        if self._error is not None:
            raise self._error
        return self._energy_j

    def close(self) -> None:
        """Stop the thread and release the driver."""
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

    Args:
        gpu: The GPU. While it draws power, its counter changes at every refresh.
        duration_s: Time for which the counter is read [s].
        timebase: The GPU's timebase.

    Raises:
        GpuError: The counter is missing, or the driver refused.
    """
    return _period_s(list(_refreshes(gpu, duration_s, timebase)))


def answer_to_a_step(gpu: Gpu, before_w: float, timebase: Timebase = REAL_TIME) -> CounterAnswer:
    """Read the counter of a GPU after its load has ended, until the power derived from it is steady.

    Raises:
        GpuError: The counter is missing, or the driver refused.
    """
    begin_s = timebase.now_s()
    seen: list[tuple[float, float]] = []
    for refresh in _refreshes(gpu, _LONGEST_ANSWER_S, timebase):
        seen.append(refresh)
        if len(seen) > _STEADY_REFRESHES and _steady_from(seen, before_w) <= len(seen) - 1 - _STEADY_REFRESHES:
            break
    period_s = _period_s(seen)
    if period_s is None:
        return CounterAnswer(None, 0.0)
    # Even without a delay the first refresh can take a whole period.
    return CounterAnswer(period_s, max(0.0, seen[_steady_from(seen, before_w)][0] - begin_s - period_s))


def _steady_from(seen: Sequence[tuple[float, float]], before_w: float) -> int:
    """Return the index of the first refresh after which the power no longer changes."""
    powers_w = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.pairwise(seen)]
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


def _period_s(refreshes: Sequence[tuple[float, float]]) -> float | None:
    periods_s = [after[0] - before[0] for before, after in itertools.pairwise(refreshes)]
    return statistics.median(periods_s) if periods_s else None
