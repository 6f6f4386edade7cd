"""A simulated GPU whose driver misbehaves for as long as a trial wants it to."""

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.gpu.simulated import SimulatedGpu

REFUSALS = {
    "driver error": GpuError("Locking the clock failed: unknown error (code 999)"),
    "driver busy": GpuBusyError("Locking the clock failed: the driver did not answer in time"),
    "no permission": GpuPermissionError("Locking the clock failed: changing clocks needs root or CAP_SYS_ADMIN"),
}
DRIVER_FAULTS = (*REFUSALS, "driver hangs", "counter fails")


class FaultyGpu(SimulatedGpu):
    """See the module.

    Attributes:
        fault: One of :data:`DRIVER_FAULTS`, or ``"counter stands still"``; None for a driver that works. Set it by
            :meth:`begin` and :meth:`end`.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.fault = None
        self._stands_at_j = 0.0
        self._works = self._time.condition()

    @property
    def is_at_default_clock(self):
        return self._clock_mhz == self.model.top_clock_mhz

    def begin(self, fault):
        """Misbehave from now on."""
        self._stands_at_j = super().energy_j()
        self.fault = fault

    def end(self):
        """Work again."""
        with self._works:
            self.fault = None
            self._works.notify_all()

    def lock_clock(self, clock_mhz):
        self._answer()
        if self.fault in REFUSALS:
            raise REFUSALS[self.fault]
        super().lock_clock(clock_mhz)

    def reset_clock(self):
        self._answer()
        if self.fault == "no permission":
            raise REFUSALS[self.fault]
        super().reset_clock()

    def energy_j(self):
        self._answer()
        if self.fault == "counter fails":
            raise GpuError("Reading the energy counter failed: unknown error (code 999)")
        return self._stands_at_j if self.fault == "counter stands still" else super().energy_j()

    def _answer(self):
        with self._works:
            while self.fault == "driver hangs":
                self._works.wait()
