"""Energy of this rank's GPU in one iteration: two readings of its counter, which the training thread does not make."""

from __future__ import annotations

import math
from collections.abc import Callable

from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.gpu.driver_call import Answer, DriverCall
from perseus_ds.device.moments import Moment
from perseus_ds.errors import GpuBusyError, GpuError


def energy_at(moment: Moment, gpu: Gpu, driver: DriverCall) -> Answer:
    """Have the energy counter of a GPU read when it passes a moment; returns at once."""

    def read_j() -> float:
        moment.synchronize()
        moment.passed_s()  # the sooner it is asked, the better the moments after it are known
        return gpu.energy_j()

    return driver.start(read_j)


class EnergyUse:
    """See the module.

    Args:
        begun: The counter when the iteration began; None where it is not read.
        ended: The counter when it ended.
        on_error: Called when the driver refuses to read it.
    """

    def __init__(self, begun: Answer | None, ended: Answer | None, on_error: Callable[[Exception], None]) -> None:
        self._begun = begun
        self._ended = ended
        self._on_error = on_error
        self._used_j: float | None = None

    def is_known(self) -> bool:
        """Return whether both readings are there."""
        return all(answer is None or answer.is_there() for answer in (self._begun, self._ended))

    def used_j(self) -> float:
        """Wait for the driver and return the energy [J]; NaN where it cannot be read."""
        if self._used_j is None:
            self._used_j = self._read_j()
        return self._used_j

    def _read_j(self) -> float:
        if self._begun is None or self._ended is None:
            return math.nan
        try:
            begun_j = self._begun.value()
            return self._ended.value() - begun_j
        except GpuBusyError:  # for how long that is accepted, the supervision decides
            return math.nan
        except GpuError as error:
            self._on_error(error)
            return math.nan
