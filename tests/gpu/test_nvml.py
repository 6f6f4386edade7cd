"""NVIDIA GPUs on the stub library: which GPU is opened, and errors that a user can encounter."""

import pynvml
import pytest

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device, index_of_uuid


@pytest.fixture
def gpu(stub_nvml_here):
    return NvmlGpu(1)


def test_a_cuda_device_is_found_among_all_gpus(stub_nvml_here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2b6")
    gpu = NvmlGpu(index_of_cuda_device(1))
    gpu.lock_clock(1200)
    assert stub_nvml_here.locked_clocks_mhz() == [0, 0, 1200, 0]


@pytest.mark.parametrize("error", ["gpu_is_lost", "no_permission", "unknown"])
def test_a_gpu_that_is_lost_or_forbidden_does_not_keep_others_from_being_found(stub_nvml_here, error):
    stub_nvml_here.gpus[1].fail("uuid", error)
    uuid = stub_nvml_here.gpus[2].uuid.decode()
    assert index_of_uuid(uuid) == index_of_cuda_device(0, uuid) == 2


def test_only_a_gpu_that_is_split_by_mig_is_refused(stub_nvml_here):
    stub_nvml_here.gpus[0].mig_enabled = 1
    with pytest.raises(GpuError, match="split into MIG"):
        NvmlGpu(0)
    assert NvmlGpu(1).index == 1
    stub_nvml_here.gpus[0].fail("mig_mode", "not_supported")
    assert NvmlGpu(0).index == 0


CALLS = {
    "set_locked": lambda gpu: gpu.lock_clock(1200),
    "reset_locked": lambda gpu: gpu.reset_clock(),
    "clock_info": lambda gpu: gpu.clock_mhz(),
    "energy": lambda gpu: gpu.energy_j(),
    "power": lambda gpu: gpu.power_w(),
    "reasons": lambda gpu: gpu.throttle_reasons(),
    "memory_clocks": lambda gpu: gpu.supported_clocks_mhz(),
    "graphics_clocks": lambda gpu: gpu.supported_clocks_mhz(),
}
REMEDIES = {
    "gpu_is_lost": "fell off the bus",
    "timeout": "did not answer in time",
    "not_supported": "lacks the function",
    "function_not_found": "driver is too old",
    "unknown": "nvidia-smi",
}


@pytest.mark.parametrize(
    ("function", "error"), [*((function, "gpu_is_lost") for function in CALLS), *(("energy", e) for e in REMEDIES)]
)
def test_an_error_names_the_gpu_and_a_remedy_and_may_be_over(gpu, stub_nvml_here, function, error):
    stub_nvml_here.gpus[1].fail(function, error)
    with pytest.raises(GpuError, match=rf"GPU 1 \(NVIDIA A100.*{REMEDIES[error]}") as caught:
        CALLS[function](gpu)
    assert not isinstance(caught.value, GpuPermissionError)
    stub_nvml_here.gpus[1].fail(function, "none")
    CALLS[function](gpu)


def test_a_lost_gpu_is_not_taken_for_one_without_energy_counter(gpu, stub_nvml_here):
    stub_nvml_here.gpus[1].fail("energy", "gpu_is_lost")
    with pytest.raises(GpuError, match="fell off the bus"):
        _ = gpu.has_energy_counter
    stub_nvml_here.gpus[1].fail("energy", "not_supported")
    assert not gpu.has_energy_counter
    assert NvmlGpu(0).has_energy_counter


@pytest.mark.parametrize("function", ["init", "count", "by_index", "driver_version"])
def test_a_failed_start_leaves_nothing_open(stub_nvml_here, function):
    before = stub_nvml_here.calls("init") - stub_nvml_here.calls("shutdown")
    stub_nvml_here.fail(function, "driver_not_loaded")
    with pytest.raises(GpuError, match="kernel driver is not loaded"):
        NvmlGpu(index_of_cuda_device(0))
    failed_inits = 1 if function == "init" else 0
    assert stub_nvml_here.calls("init") - stub_nvml_here.calls("shutdown") - before == failed_inits


def test_a_closed_gpu_refuses_calls(gpu):
    gpu.close()
    gpu.close()
    with pytest.raises(GpuError, match="is closed"):
        gpu.reset_clock()


OPEN = """
import sys
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
try:
    NvmlGpu(0)
except GpuError as error:
    sys.exit(str(error))
"""


def test_a_missing_library_is_reported(stub_nvml, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    done = stub_nvml.run("-c", OPEN, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "libnvidia-ml.so.1 was not found: install the NVIDIA driver" in done.stderr


def test_a_pynvml_of_another_package_is_reported(stub_nvml, tmp_path):
    """It precedes NVIDIA's on the path."""
    codes = [f"{name} = {value}" for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")]
    (tmp_path / "pynvml.py").write_text("\n".join(["class NVMLError(Exception): ...", "def nvmlInit(): ...", *codes]))
    done = stub_nvml.run("-c", OPEN, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "is not NVIDIA's binding. Run `pip uninstall pynvml`" in done.stderr


def test_a_driver_that_times_out_is_busy(stub_nvml_here):
    """A call to a busy driver is tried again, any other error is not."""
    gpu = NvmlGpu(1)
    for error, is_busy in (("timeout", True), ("not_supported", False)):
        stub_nvml_here.gpus[1].fail("set_locked", error)
        with pytest.raises(GpuError) as caught:
            gpu.lock_clock(1200)
        assert isinstance(caught.value, GpuBusyError) is is_busy
    stub_nvml_here.gpus[1].fail("set_locked", "none")
    gpu.close()


def _on_a_superchip(stub, *, hides_gpu_power, module_w=180.0, counter_leaves_module_out=False):
    """Make the first GPU one of 300 W on a module with a processor, such as GH200."""
    gpu = stub.gpus[0]
    gpu.has_processor, gpu.hides_gpu_power, gpu.power_w, gpu.module_w = 1, hides_gpu_power, 300.0, module_w
    gpu.counter_leaves_module_out = counter_leaves_module_out
    gpu.average_power_w = 480.0  # without a scope, the driver reports the power of the module
    return gpu


@pytest.mark.parametrize(
    ("changes", "power_w", "whole_module"),
    [
        ({"hides_gpu_power": False}, 300.0, True),
        ({"hides_gpu_power": False, "counter_leaves_module_out": True}, 300.0, False),
        ({"hides_gpu_power": True}, 480.0, True),
        ({"hides_gpu_power": True, "counter_leaves_module_out": True}, 480.0, False),
        ({"hides_gpu_power": False, "module_w": 0.0}, 300.0, None),  # the module's power is not reported
        ({"hides_gpu_power": False, "module_w": 2.0}, 300.0, None),  # two readings of the same power
    ],
)
def test_power_is_the_gpus_and_energy_says_whether_it_is_the_modules(
    stub_nvml_here, stub_time, changes, power_w, whole_module
):
    _on_a_superchip(stub_nvml_here, **changes)
    gpu = NvmlGpu(0, stub_time)
    assert gpu.power_w() == power_w
    assert gpu.settings["whole_module"] is whole_module
    assert NvmlGpu(1, stub_time).settings["whole_module"] is False, "a GPU of its own"


def test_an_energy_that_is_integrated_from_the_modules_power_is_the_modules(stub_nvml_here, stub_time):
    _on_a_superchip(stub_nvml_here, hides_gpu_power=True).has_energy_counter = 0
    assert NvmlGpu(0, stub_time).settings["whole_module"] is True


def test_settings_are_known_without_a_reading_of_power(stub_nvml_here, stub_time):
    gpu = _on_a_superchip(stub_nvml_here, hides_gpu_power=True)
    gpu.fail("power", "not_supported")
    settings = NvmlGpu(0, stub_time).settings
    assert (settings["power_limit_w"], settings["whole_module"]) == (400, None)


def test_the_power_limit_of_a_gpu_is_not_that_of_its_module(stub_nvml_here, stub_time):
    gpu = _on_a_superchip(stub_nvml_here, hides_gpu_power=False)
    gpu.enforced_power_limit_w = 2900.0
    gpu.set_field(pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, 1_400_000)
    assert NvmlGpu(0, stub_time).power_limit_w() == 1400.0
    assert NvmlGpu(1, stub_time).power_limit_w() == 400.0


def test_the_state_is_what_the_driver_reports(stub_nvml_here):
    gpu = NvmlGpu(1)
    assert gpu.state == GpuState(temperature_c=None, power_state="P0")
    stub_nvml_here.gpus[1].temperature_c, stub_nvml_here.gpus[1].power_state = 61, 2
    assert gpu.state == GpuState(temperature_c=61.0, power_state="P2")


def test_power_is_the_gpus_average_if_its_current_power_is_hidden(stub_nvml_here, stub_time):
    gpu = _on_a_superchip(stub_nvml_here, hides_gpu_power=True)
    gpu.set_field(pynvml.NVML_FI_DEV_POWER_AVERAGE, 290_000)
    assert NvmlGpu(0, stub_time).power_w() == 290.0


def test_a_locked_memory_clock_is_part_of_the_settings(stub_nvml_here, stub_time):
    stub_nvml_here.gpus[0].locked_memory_clock_mhz = 1215
    locked, usual = NvmlGpu(0, stub_time), NvmlGpu(1, stub_time)
    assert (locked.settings["memory_clock_mhz"], usual.settings["memory_clock_mhz"]) == (1215, 1593)
    (notice,) = locked.administrator_settings
    assert notice.startswith("its memory clock is 1215 MHz of 1593: plans are valid only for this memory clock.")
    assert usual.administrator_settings == []


def test_the_memory_clock_of_an_idle_state_is_not_that_of_training(stub_nvml_here, stub_time):
    gpu = stub_nvml_here.gpus[0]
    gpu.power_state, gpu.locked_memory_clock_mhz = 8, 405
    assert NvmlGpu(0, stub_time).settings["memory_clock_mhz"] is None
    assert NvmlGpu(0, stub_time).administrator_settings == []
