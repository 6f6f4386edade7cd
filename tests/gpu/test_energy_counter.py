"""Average power from a counter that is refreshed rarely, and energy of GPUs without one, in virtual time."""

import math
from itertools import pairwise

import pytest
from virtual.gpu import AveragingGpu

from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import CounterLog, CounterRefreshes, answer_to_a_step, with_energy
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES
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
    with pytest.raises(GpuError, match=r"only 2 times .* 3 are needed"):
        log.power_w(end_s + 0.01, end_s + 0.22)


@pytest.mark.parametrize("error", [GpuError("input/output error"), OSError(5, "input/output error")])
def test_an_error_while_reading_is_raised_as_an_error_of_the_gpu(now, error):
    class FailingGpu(SimulatedGpu):
        def energy_j(self):
            raise error

    failures = []
    with CounterLog(FailingGpu(A100, timebase=now), now, on_refresh=lambda: failures.append(now.now_s())) as log:
        now.sleep(0.02)
        with pytest.raises(GpuError, match="input/output error"):
            log.power_w(0.0, 1.0)
    assert (len(failures), log.due_s) == (1, math.inf), "it is reported once, and the counter is not read again"


def test_energies_are_read_while_the_clock_has_no_reading(now):
    class ClocklessGpu(SimulatedGpu):
        def clock_mhz(self):
            raise GpuError("the driver reports 'N/A'")

    with CounterLog(ClocklessGpu(A100, timebase=now), now) as log:
        begin_s = now.now_s()
        now.sleep(2.0)
        assert log.power_w(begin_s, now.now_s()) == pytest.approx(83.64, rel=0.01)
        assert log.reached_s(1410, begin_s, now.now_s()) is None


def test_a_clock_is_reached_if_it_is_a_little_lower_because_of_a_limit():
    """A reading far above it is the previous clock. It is looked for only in the time of the measurement."""
    found = CounterRefreshes("a GPU")
    found.changes = [(0.5, 40.0), (1.5, 120.0)]
    found.clocks = [(0.5, 1200), (1.0, 1260), (1.5, 1000), (2.0, 1110), (2.5, 1200)]
    assert found.reached_s(1200, 0.8, 3.0) == 2.0
    assert found.reached_s(1200, 0.8, 1.8) is None
    found.forget(1.0)
    assert (found.readings(0.0, 3.0), found.reached_s(1200, 0.0, 3.0)) == ([(1.5, 120.0)], 2.0)


class CountingGpu(SimulatedGpu):
    """Counts the readings of its counter."""

    readings = 0

    def energy_j(self):
        self.readings += 1
        return super().energy_j()


class IrregularGpu(CountingGpu):
    """A GPU whose counter is refreshed after 0.1 s and 0.14 s in turns, until it stands still."""

    stands_still_from_s = math.inf

    def energy_j(self):
        super().energy_j()
        pairs, rest_s = divmod(min(self.timebase.now_s(), self.stands_still_from_s), 0.24)
        return 2 * pairs + (rest_s >= 0.1)


def test_refreshes_that_come_early_are_not_missed_and_a_counter_that_stands_still_is_read_rarely(now):
    gpu = IrregularGpu(A100, timebase=now)
    with CounterLog(gpu, now) as log:
        now.sleep(1.0)
        begin_s = now.now_s()
        now.sleep(9.0)
        gpu.stands_still_from_s, gpu.readings = now.now_s(), 0
        now.sleep(10.0)
    moments = [moment for moment, _ in log.readings(begin_s, gpu.stands_still_from_s)]
    periods_s = [after - before for before, after in pairwise(moments)]
    assert len(periods_s) == pytest.approx(9.0 / 0.12, abs=2)
    assert all(min(abs(each_s - 0.1), abs(each_s - 0.14)) <= 0.0021 for each_s in periods_s)
    assert gpu.readings <= 10.0 / 0.010 + 100


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
    gpu.energy_j()  # at the beginning of its average
    gpu.begin_work(COMPUTE_BOUND)
    gpu.finish_work(3.0)
    gpu.energy_j()
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
    seen += [(0.6 + 0.1 * n, 94.0 + 8 * n) for n in range(8)]
    assert answer_to_a_step(seen[:2], 300.0, 0.0) is None
    assert [count for count in range(3, 14) if answer_to_a_step(seen[:count], 300.0, 0.0).is_steady] == [10, 11, 12, 13]
    answer = answer_to_a_step(seen, 300.0, 0.0)
    assert (answer.settle_s, answer.power_w) == (pytest.approx(0.3), pytest.approx(80.0))
