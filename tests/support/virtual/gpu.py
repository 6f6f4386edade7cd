"""Simulated GPUs in virtual time with various faults."""

import bisect
import math
from contextlib import contextmanager

import numpy as np

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.simulation.gpu import SimulatedGpu

REFUSALS = {
    "driver error": GpuError("Locking the clock failed: unknown error (code 999)"),
    "driver busy": GpuBusyError("Locking the clock failed: the driver did not answer in time"),
    "no permission": GpuPermissionError("Locking the clock failed: changing clocks needs root or CAP_SYS_ADMIN"),
}
DRIVER_FAULTS = ("driver error", "driver busy", "no permission", "driver hangs", "counter fails")


def set_clock(actor, clock_mhz):
    """Request a clock, and return when the driver has accepted or refused it, and a refused one was reset."""
    actor.request(clock_mhz)
    actor._time.sleep(0.1)


class RecordingGpu(SimulatedGpu):
    """Records the clocks that were set, None for the default, and their times.

    Attributes:
        set_at: Clocks and times.
        refusal: An error raised instead of locking a clock.
        refusal_to_reset: An error raised instead of resetting the clock.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.set_at = []
        self.refusal = self.refusal_to_reset = None

    @property
    def clocks_set(self):
        return [clock_mhz for clock_mhz, _ in self.set_at]

    def lock_clock(self, clock_mhz):
        self._record(clock_mhz, self.refusal)
        super().lock_clock(clock_mhz)

    def reset_clock(self):
        self._record(None, self.refusal_to_reset)
        super().reset_clock()

    def _record(self, clock_mhz, refusal):
        if refusal is not None:
            raise refusal
        self.set_at.append((clock_mhz, self.timebase.now_s()))


class FaultyGpu(SimulatedGpu):
    """A GPU with a driver that fails between :meth:`begin` and :meth:`end`.

    Attributes:
        fault: One of :data:`DRIVER_FAULTS` or of :data:`REFUSALS`, or ``"counter stands still"``; None if it works.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.fault = None
        self._stands_at_j = 0.0
        self._works = self.timebase.condition()

    @property
    def is_at_default_clock(self):
        return self.locked_clock_mhz == self.model.top_clock_mhz

    def begin(self, fault):
        """Fail from now on."""
        self._stands_at_j = super().energy_j()
        self.fault = fault

    def end(self):
        """Recover from the fault."""
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


class AveragingGpu(SimulatedGpu):
    """A GPU with a counter that integrates a moving average of the power, as power readings do.

    Attributes:
        average_s: Window of the average [s]; a test may change it.
    """

    average_s = 1.0

    def __init__(self, model, *, timebase, counter_period_s=0.1, **settings):
        self._clock, self._refreshed_every_s = timebase, counter_period_s
        self._seen_s, self._seen_j = [], []
        super().__init__(model, timebase=timebase, counter_period_s=counter_period_s, **settings)

    def energy_j(self):
        self._seen_s.append(self._clock.now_s())
        self._seen_j.append(self.true_energy_j)
        at_s = math.floor(self._seen_s[-1] / self._refreshed_every_s) * self._refreshed_every_s
        first = max(0, bisect.bisect(self._seen_s, at_s - self.average_s) - 1)
        asked_s = np.linspace(at_s - self.average_s, at_s, 51)
        return float(np.interp(asked_s, self._seen_s[first:], self._seen_j[first:]).mean())


class OneAtATime:
    """A driver that serves one call at a time, as a context manager around each call."""

    def __init__(self, time):
        self._changed = time.condition()
        self._is_busy = False

    @contextmanager
    def __call__(self):
        with self._changed:
            while self._is_busy:
                self._changed.wait()
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify()
