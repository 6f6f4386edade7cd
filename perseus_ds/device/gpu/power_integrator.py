"""Energy of GPUs without an energy counter, integrated from power readings."""

from __future__ import annotations

from typing import Any

from perseus_ds.device.gpu.base import Gpu
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase


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
