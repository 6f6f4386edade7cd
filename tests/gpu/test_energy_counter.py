"""Energy of a GPU without an energy counter, on the stub driver in virtual time."""

import pytest
from virtual.gpu import AveragingGpu
from virtual.time import VirtualTime

from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import PowerIntegrator, answer_to_a_step, with_energy
from perseus_ds.gpu.nvml import NvmlGpu


def test_a_gpu_with_a_counter_is_taken_as_it_is(stub_nvml_here, stub_time):
    gpu = NvmlGpu(0)
    assert with_energy(gpu, stub_time) is gpu
    gpu.close()


def test_the_power_of_a_virtual_gpu_without_counter_is_integrated(stub_nvml_here, stub_time):
    stub_nvml_here.gpus[0].has_energy_counter = 0
    gpu = with_energy(NvmlGpu(0), stub_time)
    assert isinstance(gpu, PowerIntegrator)
    assert gpu.name.startswith("NVIDIA")
    assert gpu.has_energy_counter
    stub_time.sleep(10.0)
    assert gpu.energy_j() == pytest.approx(2500.0, rel=0.003)
    stub_nvml_here.gpus[0].power_w = 100.0
    stub_time.sleep(10.0)
    assert gpu.energy_j() == pytest.approx(3500.0, rel=0.003)
    gpu.close()
    assert stub_nvml_here.calls("init") == stub_nvml_here.calls("shutdown")


def test_power_of_the_moment_is_integrated_where_the_driver_tells_it_rather_than_an_average(stub_nvml_here, stub_time):
    stub_nvml_here.gpus[0].has_energy_counter = 0
    stub_nvml_here.gpus[0].average_power_w = 100.0
    gpu = with_energy(NvmlGpu(0), stub_time)
    stub_time.sleep(10.0)
    assert gpu.energy_j() == pytest.approx(2500.0, rel=0.003)
    gpu.close()
    stub_nvml_here.gpus[0].fail("fields", "function_not_found")
    gpu = NvmlGpu(0)
    assert gpu.power_w() == 100.0, "an older driver reports only the average"
    gpu.close()


def test_power_that_cannot_be_read_is_reported_to_who_asks_for_energy(stub_nvml_here, stub_time):
    stub_nvml_here.gpus[0].has_energy_counter = 0
    gpu = with_energy(NvmlGpu(0), stub_time)
    stub_nvml_here.gpus[0].fail("power", "gpu_is_lost")
    stub_time.sleep(1.0)
    with pytest.raises(GpuError, match="fell off the bus"):
        gpu.energy_j()
    gpu.close()


@pytest.mark.parametrize(("average_s", "settle_s"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("period_s", [0.02, 0.1])
def test_how_long_a_counter_tells_what_was_drawn_before_a_step_is_found(period_s, average_s, settle_s):
    time = VirtualTime()
    gpu = AveragingGpu.named("a100-sxm", timebase=time, counter_period_s=period_s)
    gpu.average_s = average_s
    gpu.run_for(3.0)
    load_w = gpu.true_energy_j / 3.0
    answer = answer_to_a_step(gpu, load_w, time)
    assert answer.period_s == pytest.approx(period_s, abs=0.002)
    assert 0.85 * settle_s - period_s <= answer.settle_s <= settle_s + 0.001


def test_a_counter_that_is_hardly_ever_refreshed_has_no_period():
    time = VirtualTime()
    gpu = AveragingGpu.named("a100-sxm", timebase=time, counter_period_s=5.0)
    assert answer_to_a_step(gpu, 300.0, time).period_s is None
