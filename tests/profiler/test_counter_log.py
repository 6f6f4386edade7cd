"""Average power from a counter that is refreshed only now and then."""

import time

import pytest

from perseus_ds.device.gpu.simulated import DEVICES, SimulatedGpu
from perseus_ds.errors import GpuError
from perseus_ds.profiler.counter_log import CounterLog


def test_power_is_the_slope_through_the_counters_changes():
    gpu = SimulatedGpu(DEVICES["a100-sxm"], counter_period_s=0.05)
    with CounterLog(gpu) as log:
        begin_s = time.perf_counter()
        time.sleep(0.4)
        assert log.power_w(begin_s, time.perf_counter()) == pytest.approx(83.64, rel=0.05)


def test_too_few_refreshes_are_an_error_that_says_what_to_do():
    gpu = SimulatedGpu(DEVICES["a100-sxm"], counter_period_s=60.0)
    with CounterLog(gpu) as log:
        time.sleep(0.02)
        with pytest.raises(GpuError, match=r"only 0 times .*max_window_s longer"):
            log.power_w(0.0, time.perf_counter())


def test_an_error_of_the_gpu_reaches_who_asks():
    class LostGpu(SimulatedGpu):
        def energy_j(self):
            raise GpuError("GPU is lost")

    with CounterLog(LostGpu(DEVICES["a100-sxm"])) as log:
        time.sleep(0.02)
        with pytest.raises(GpuError, match="GPU is lost"):
            log.power_w(0.0, 1.0)
