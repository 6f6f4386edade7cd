"""Average power from a counter that is refreshed rarely, and energy of GPUs without one, in virtual time."""

import pytest
from virtual.gpu import AveragingGpu

from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import CounterLog, answer_to_a_step, with_energy
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.simulation.device_models import DEVICES
from perseus_ds.simulation.gpu import SimulatedGpu

A100 = DEVICES["a100-sxm"]


def test_power_is_known_for_any_part_of_the_time(now):
    gpu = SimulatedGpu(A100, timebase=now)
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
    with pytest.raises(GpuError, match=r"only 0 times .* 3 are needed"):
        log.power_w(end_s + 0.01, end_s + 0.02)


@pytest.mark.parametrize("error", [GpuError("input/output error"), OSError(5, "input/output error")])
def test_an_error_while_reading_is_raised_as_an_error_of_the_gpu(now, error):
    class FailingGpu(SimulatedGpu):
        def energy_j(self):
            raise error

    with CounterLog(FailingGpu(A100, timebase=now), now) as log:
        now.sleep(0.02)
        with pytest.raises(GpuError, match="input/output error"):
            log.power_w(0.0, 1.0)


def test_energies_are_read_while_the_clock_has_no_reading(now):
    class ClocklessGpu(SimulatedGpu):
        def clock_mhz(self):
            raise GpuError("the driver reports 'N/A'")

    with CounterLog(ClocklessGpu(A100, timebase=now), now) as log:
        begin_s = now.now_s()
        now.sleep(2.0)
        assert log.power_w(begin_s, now.now_s()) == pytest.approx(83.64, rel=0.01)
        assert log.reached_s(1410, begin_s, now.now_s()) is None


class CountingGpu(SimulatedGpu):
    """Counts the readings of its counter."""

    readings = 0

    def energy_j(self):
        self.readings += 1
        return super().energy_j()


@pytest.mark.parametrize("period_s", [0.02, 0.25])
def test_the_counter_is_read_rarely_unless_a_refresh_is_due(now, period_s):
    gpu = CountingGpu(A100, counter_period_s=period_s, timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(10 * period_s)
        begin_s, gpu.readings = now.now_s(), 0
        now.sleep(10.0)
    moments = [moment for moment, _ in log.readings(begin_s, now.now_s())]
    assert len(moments) == pytest.approx(10.0 / period_s, abs=1)
    off_s = [abs(moment - round(moment / period_s) * period_s) for moment in moments]
    assert max(off_s) <= 0.00101, "a refresh is dated to the middle of the 2 ms in which it is seen"
    assert gpu.readings <= 10.0 / 0.010 + 4 * len(moments)


def test_power_is_integrated_on_a_gpu_without_counter(stub_nvml_here, stub_time):
    stub_nvml_here.gpus[0].has_energy_counter = 0
    stub_nvml_here.gpus[0].average_power_w = 100.0  # the current power is known too, and preferred
    gpu = with_energy(NvmlGpu(0), stub_time)
    assert gpu.has_energy_counter
    stub_time.sleep(10.0)
    assert gpu.energy_j() == pytest.approx(2500.0, rel=0.003)
    stub_nvml_here.gpus[0].power_w = 100.0
    stub_time.sleep(10.0)
    assert gpu.energy_j() == pytest.approx(3500.0, rel=0.003)
    stub_nvml_here.gpus[0].fail("power", "gpu_is_lost")
    stub_time.sleep(1.0)
    with pytest.raises(GpuError, match="fell off the bus"):
        gpu.energy_j()
    gpu.close()
    assert stub_nvml_here.calls("init") == stub_nvml_here.calls("shutdown")


def test_an_older_driver_reports_only_average_power(stub_nvml_here):
    stub_nvml_here.gpus[0].average_power_w = 100.0
    stub_nvml_here.gpus[0].fail("fields", "function_not_found")
    assert NvmlGpu(0).power_w() == 100.0


@pytest.mark.parametrize(("average_s", "period_s"), [(0.0, 0.1), (0.5, 0.02), (1.0, 0.1)])
def test_the_time_for_which_a_counter_includes_earlier_power_is_measured(now, period_s, average_s):
    gpu = AveragingGpu.named("a100-sxm", timebase=now, counter_period_s=period_s)
    gpu.average_s = average_s
    gpu.run_for(3.0)
    ended_s = now.now_s()
    with CounterLog(gpu, now) as log:
        now.sleep(3.0)
    answer = answer_to_a_step(log.changes, gpu.true_energy_j / 3.0, ended_s)
    assert answer.period_s == pytest.approx(period_s, abs=0.002)
    assert 0.85 * average_s - period_s <= answer.settle_s <= average_s + 0.001
    assert answer.power_w == pytest.approx(gpu.model.blocking_power_w, rel=0.01)
    assert answer.is_steady


def test_a_counter_is_not_steady_after_a_few_refreshes_and_unknown_after_two():
    # The load of 300 W has ended at 0 s, and the counter integrates averages over 0.5 s.
    seen = [(0.1, 27.0), (0.2, 49.0), (0.3, 66.0), (0.4, 78.0), (0.5, 86.0)]
    assert answer_to_a_step(seen[:2], 300.0, 0.0) is None
    assert not answer_to_a_step(seen, 300.0, 0.0).is_steady
    seen += [(0.6 + 0.1 * n, 94.0 + 8 * n) for n in range(8)]
    answer = answer_to_a_step(seen, 300.0, 0.0)
    assert answer.is_steady
    assert (answer.settle_s, answer.power_w) == (pytest.approx(0.3), pytest.approx(80.0))
