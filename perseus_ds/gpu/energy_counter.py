"""The energy counter: how often it is refreshed, how late it follows a step, and what takes its place without one."""

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
# A call on the clocks' thread that takes longer would be taken for a driver that hangs.
_LONGEST_ANSWER_S = 2.5
_STEADY_REFRESHES = 8
# Powers are alike within this share of the step, or of themselves.
_LEFT_OF_A_STEP, _VARIES = 0.05, 0.05


@dataclass(frozen=True)
class CounterAnswer:
    """How an energy counter answers to the end of a load.

    Attributes:
        period_s: How often it is refreshed [s]; None if that was not seen.
        settle_s: How long it still counts what was drawn before [s]: about a second where it adds up averages.
    """

    period_s: float | None
    settle_s: float


class PowerIntegrator:
    """A GPU whose energy is integrated from its power readings on a thread; in all else the GPU itself.

    Less exact than a counter: boards average the power they report, some over a second.

    Args:
        gpu: A GPU before Volta, or a virtual one, that has no counter.
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

    def energy_j(self) -> float:
        """Return the energy used since this began [J].

        Raises:
            GpuError: Power could not be read.
        """
        if self._error is not None:
            raise self._error
        return self._energy_j

    def close(self) -> None:
        """Stop reading, and release the driver."""
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
    """Return a GPU that reports its energy, whether it has a counter or not."""
    return gpu if gpu.has_energy_counter else PowerIntegrator(gpu, timebase=timebase)


def counter_period_s(gpu: Gpu, duration_s: float = 1.0, timebase: Timebase = REAL_TIME) -> float | None:
    """Return how often the energy counter is refreshed [s]; None if fewer than two refreshes were seen.

    Args:
        gpu: The GPU; while it draws power, its counter changes at every refresh.
        duration_s: How long to read the counter [s].
        timebase: The GPU's timebase.

    Raises:
        GpuError: The counter is missing, or the driver refused.
    """
    return _period_s(list(_refreshes(gpu, duration_s, timebase)))


def answer_to_a_step(gpu: Gpu, before_w: float, timebase: Timebase = REAL_TIME) -> CounterAnswer:
    """Read the counter of a GPU whose load has just ended, until the power that it tells is steady.

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
    # Up to a period passes before the first refresh, however fast the counter is.
    return CounterAnswer(period_s, max(0.0, seen[_steady_from(seen, before_w)][0] - begin_s - period_s))


def _steady_from(seen: Sequence[tuple[float, float]], before_w: float) -> int:
    """Return the first refresh after which all powers are alike, compared with the step to the last ones."""
    powers_w = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.pairwise(seen)]
    last_w = statistics.fmean(powers_w[-_STEADY_REFRESHES:])
    tolerance_w = max(_LEFT_OF_A_STEP * abs(before_w - last_w), _VARIES * last_w)
    return max((n + 1 for n, power_w in enumerate(powers_w) if abs(power_w - last_w) > tolerance_w), default=0)


def _refreshes(gpu: Gpu, duration_s: float, timebase: Timebase) -> Iterator[tuple[float, float]]:
    """Yield when the counter was refreshed [s], and its value then [J]."""
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
