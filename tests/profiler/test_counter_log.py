"""Average power from a counter that is refreshed every 100 ms or so; in virtual time."""

import math

import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.errors import GpuError
from perseus_ds.profiler.counter_log import CounterLog


@pytest.fixture
def now():
    return VirtualTime()


def test_power_is_the_slope_through_the_counters_refreshes(now):
    gpu = SimulatedGpu(DEVICES["a100-sxm"], timebase=now)
    with CounterLog(gpu, now) as log:
        begin_s = now.now_s()
        now.sleep(1.95)
        power = log.power(begin_s, now.now_s())
    assert power.watts == pytest.approx(83.64, rel=0.002)
    assert power.clock_mhz == 1410
    assert len(log.readings(begin_s, now.now_s())) == 19


def test_power_is_told_for_any_part_of_the_time(now):
    gpu = SimulatedGpu(DEVICES["a100-sxm"], timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(1.0)
        gpu.begin_work()
        begin_s = now.now_s()
        now.sleep(1.0)
        end_s = now.now_s()
        gpu.finish_work(0.0)
        now.sleep(1.0)
    assert log.power_w(begin_s + 0.01, end_s) == pytest.approx(475.0, rel=0.01)
    assert log.power_w(end_s + 0.01, now.now_s()) == pytest.approx(83.64, rel=0.01)


def test_the_error_says_how_much_power_varies(now):
    gpu = SimulatedGpu(DEVICES["a100-sxm"], power_noise=0.1, seed=3, timebase=now)
    with CounterLog(gpu, now) as log:
        begin_s = now.now_s()
        for _ in range(100):
            gpu.begin_work()
            gpu.finish_work(0.1)
        power = log.power(begin_s, now.now_s())
    assert power.relative_error == pytest.approx(0.1 / math.sqrt(100), rel=0.3)


def test_too_few_refreshes_are_an_error_that_says_what_to_do(now):
    gpu = SimulatedGpu(DEVICES["a100-sxm"], counter_period_s=60.0, timebase=now)
    with CounterLog(gpu, now) as log:
        begin_s = now.now_s()
        now.sleep(0.02)
        with pytest.raises(GpuError, match=r"only 0 times .*max_window_s longer"):
            log.power_w(begin_s, now.now_s())


def test_an_error_of_the_gpu_reaches_who_asks(now):
    class LostGpu(SimulatedGpu):
        def energy_j(self):
            raise GpuError("GPU is lost")

    with CounterLog(LostGpu(DEVICES["a100-sxm"], timebase=now), now) as log:
        now.sleep(0.02)
        with pytest.raises(GpuError, match="GPU is lost"):
            log.power_w(0.0, 1.0)


def test_an_unknown_error_reaches_who_asks_as_one_of_the_gpu(now):
    class OddGpu(SimulatedGpu):
        def energy_j(self):
            raise OSError(5, "input/output error")

    with CounterLog(OddGpu(DEVICES["a100-sxm"], timebase=now), now) as log:
        now.sleep(0.02)
        with pytest.raises(GpuError, match=r"cannot be read.*input/output error"):
            log.power_w(0.0, 1.0)


class CountingGpu(SimulatedGpu):
    """Counts the readings of its counter."""

    readings = 0

    def energy_j(self):
        self.readings += 1
        return super().energy_j()


@pytest.mark.parametrize("period_s", [0.02, 0.1, 0.25])
def test_the_counter_is_read_seldom_but_when_a_refresh_is_due(now, period_s):
    gpu = CountingGpu(DEVICES["a100-sxm"], counter_period_s=period_s, timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(10 * period_s)
        begin_s, gpu.readings = now.now_s(), 0
        now.sleep(10.0)
    moments = [moment for moment, _ in log.readings(begin_s, now.now_s())]
    assert len(moments) == pytest.approx(10.0 / period_s, abs=1)
    assert max(moment % period_s for moment in moments) <= 0.00201, "each refresh is seen within 2 ms"
    assert gpu.readings <= 10.0 / 0.010 + 4 * len(moments)


def test_a_counter_whose_refreshes_become_irregular_is_read_often_enough(now):
    gpu = CountingGpu(DEVICES["a100-sxm"], timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(2.0)
        gpu._counter_period_s = 0.083
        now.sleep(1.0)
        begin_s = now.now_s()
        now.sleep(2.0)
        assert log.power_w(begin_s, now.now_s()) == pytest.approx(83.64, rel=0.005)
