"""The energy counter: how often it is refreshed, and one from power readings for GPUs that have none."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_POLL_S = 5e-4


class PowerIntegrator:
    """A GPU whose energy is integrated from its power readings on a thread; in all else the GPU itself.

    Less exact than a counter: boards average the power they report, some over a second.

    Args:
        gpu: A GPU before Volta, or a virtual one, that has no counter.
        period_s: How often power is read [s].
        timebase: Its timebase.
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
