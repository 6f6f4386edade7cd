"""A simulated GPU whose energy counter adds up powers that are averaged over the past, as power readings are."""

import math

import numpy as np

from perseus_ds.gpu.device_models import COMPUTE_BOUND
from perseus_ds.gpu.simulated import SimulatedGpu


class AveragingGpu(SimulatedGpu):
    """See the module.

    Attributes:
        average_s: Over how long powers are averaged [s]; a test may change it.
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
        return float(np.interp(np.linspace(at_s - self.average_s, at_s, 51), self._seen_s, self._seen_j).mean())

    def run_for(self, seconds):
        """Compute for some time, and look at the counter before and after."""
        self.energy_j()
        self.begin_work(COMPUTE_BOUND)
        self.finish_work(seconds)
        self.energy_j()
