"""Average power from a counter that is refreshed about every 100 ms, in virtual time."""

import pytest

from perseus_ds.errors import GpuError
from perseus_ds.gpu.device_models import DEVICES
from perseus_ds.gpu.energy_counter import CounterLog
from perseus_ds.gpu.simulated import SimulatedGpu


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


def test_too_few_refreshes_are_an_error(now):
    gpu = SimulatedGpu(DEVICES["a100-sxm"], counter_period_s=60.0, timebase=now)
    with CounterLog(gpu, now) as log:
        begin_s = now.now_s()
        now.sleep(0.02)
        with pytest.raises(GpuError, match=r"only 0 times .* 3 are needed"):
            log.power_w(begin_s, now.now_s())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GpuError("GPU is lost"), "GPU is lost"),
        (OSError(5, "input/output error"), "cannot be read.*input/output error"),
    ],
)
def test_an_error_while_reading_reaches_who_asks_as_one_of_the_gpu(now, error, message):
    class FailingGpu(SimulatedGpu):
        def energy_j(self):
            raise error

    with CounterLog(FailingGpu(DEVICES["a100-sxm"], timebase=now), now) as log:
        now.sleep(0.02)
        with pytest.raises(GpuError, match=message):
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
    off_s = [abs(moment - round(moment / period_s) * period_s) for moment in moments]
    assert max(off_s) <= 0.00101, "a refresh is dated to the middle of the 2 ms in which it is seen"
    assert gpu.readings <= 10.0 / 0.010 + 4 * len(moments)


def test_a_counter_whose_refreshes_become_irregular_is_read_often_enough(now):
    gpu = CountingGpu(DEVICES["a100-sxm"], timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(2.0)
        gpu.counter_period_s = 0.083
        now.sleep(1.0)
        begin_s = now.now_s()
        now.sleep(2.0)
        assert log.power_w(begin_s, now.now_s()) == pytest.approx(83.64, rel=0.005)
