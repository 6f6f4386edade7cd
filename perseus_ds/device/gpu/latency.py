"""Measures how often a GPU's energy counter is refreshed, and how long a change of its clock takes."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from perseus_ds.device.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_SETTLE_TIMEOUT_S = 1.0
_CLOCKS_TRIED = 5
_POLL_S = 5e-4


def counter_period_s(gpu: Gpu, duration_s: float = 1.0, timebase: Timebase = REAL_TIME) -> float | None:
    """Return how often the energy counter is refreshed [s]; None if fewer than two refreshes were seen.

    Args:
        gpu: The GPU; while it draws power, its counter changes at every refresh.
        duration_s: How long to read the counter [s].
        timebase: The GPU's timebase.

    Raises:
        GpuError: The counter is missing, or the driver refused.
    """
    end_s = timebase.now_s() + duration_s
    last_j = gpu.energy_j()
    changes_s: list[float] = []
    while (now_s := timebase.now_s()) < end_s:
        energy_j = gpu.energy_j()
        if energy_j != last_j:
            last_j = energy_j
            changes_s.append(now_s)
        timebase.sleep(_POLL_S)
    if len(changes_s) < 2:
        return None
    return statistics.median(after - before for before, after in itertools.pairwise(changes_s))


@dataclass(frozen=True)
class LockLatency:
    """How long a change of the clock takes.

    Attributes:
        call_s: Median time of the driver's call [s].
        settle_s: Median time from the call's start until the clock read is the one asked for [s]; None if one
            was not within a second (an idle GPU or one at a limit may stay below).
    """

    call_s: float
    settle_s: float | None


def lock_latency(gpu: Gpu, timebase: Timebase = REAL_TIME) -> LockLatency:
    """Lock a few clocks of the upper half in turn, and return to the default clock.

    Raises:
        GpuPermissionError: This process may not lock clocks.
        GpuError: The driver refused.
    """
    clocks = gpu.supported_clocks_mhz()
    upper = clocks[len(clocks) // 2 :]
    tried = upper[:: max(1, len(upper) // _CLOCKS_TRIED)][-_CLOCKS_TRIED:]
    calls_s: list[float] = []
    settled_s: list[float | None] = []
    try:
        for clock_mhz in tried:
            began_s = timebase.now_s()
            gpu.lock_clock(clock_mhz)
            calls_s.append(timebase.now_s() - began_s)
            settled_s.append(_wait_for_clock(gpu, clock_mhz, began_s, timebase))
            if settled_s[-1] is None:
                break
    finally:
        gpu.reset_clock()
    settled = [settle_s for settle_s in settled_s if settle_s is not None]
    settle_s = statistics.median(settled) if len(settled) == len(tried) else None
    return LockLatency(statistics.median(calls_s), settle_s)


def _wait_for_clock(gpu: Gpu, clock_mhz: int, began_s: float, timebase: Timebase) -> float | None:
    while (passed_s := timebase.now_s() - began_s) < _SETTLE_TIMEOUT_S:
        if gpu.clock_mhz() == clock_mhz:
            return passed_s
        timebase.sleep(_POLL_S)
    return None
