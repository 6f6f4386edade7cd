"""How a GPU's energy counter and clock lock behave in time."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from perseus_ds.device.gpu.base import Gpu

_SETTLE_TIMEOUT_S = 1.0
_CLOCKS_TRIED = 5


def counter_period_s(gpu: Gpu, duration_s: float = 1.0) -> float | None:
    """Return how often the energy counter is refreshed [s]; None if it did not move twice.

    Args:
        gpu: Whose counter to watch; drawing power it moves at every refresh.
        duration_s: How long to watch [s].

    Raises:
        GpuError: The counter is missing, or the driver refused.
    """
    end_s = time.monotonic() + duration_s
    last_j = gpu.energy_j()
    changes_s: list[float] = []
    while (now_s := time.monotonic()) < end_s:
        energy_j = gpu.energy_j()
        if energy_j != last_j:
            last_j = energy_j
            changes_s.append(now_s)
        time.sleep(5e-4)
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


def lock_latency(gpu: Gpu) -> LockLatency:
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
            began_s = time.monotonic()
            gpu.lock_clock(clock_mhz)
            calls_s.append(time.monotonic() - began_s)
            settled_s.append(_wait_for_clock(gpu, clock_mhz, began_s))
            if settled_s[-1] is None:
                break
    finally:
        gpu.reset_clock()
    settled = [settle_s for settle_s in settled_s if settle_s is not None]
    settle_s = statistics.median(settled) if len(settled) == len(tried) else None
    return LockLatency(statistics.median(calls_s), settle_s)


def _wait_for_clock(gpu: Gpu, clock_mhz: int, began_s: float) -> float | None:
    while (passed_s := time.monotonic() - began_s) < _SETTLE_TIMEOUT_S:
        if gpu.clock_mhz() == clock_mhz:
            return passed_s
        time.sleep(5e-4)
    return None
