"""NVIDIA GPUs on the stub library: GPU selection, and every error that a user can encounter."""

from __future__ import annotations

import threading
from pathlib import Path

import pynvml
import pytest
from stub_nvml.controller import StubNvml

from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device, index_of_uuid


@pytest.fixture
def gpu(stub_nvml_here: StubNvml) -> NvmlGpu:
    return NvmlGpu(1)


@pytest.mark.parametrize(("visible", "cuda_index", "index"), [(None, 2, 2), ("3,1", 1, 1), ("GPU-1,GPU-2b6", 1, 2)])
def test_a_cuda_device_is_found(
    stub_nvml_here: StubNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, cuda_index: int, index: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = NvmlGpu(index_of_cuda_device(cuda_index))
    gpu.lock_clock(1200)
    assert stub_nvml_here.locked_clocks_mhz() == [1200 * (position == index) for position in range(4)]


def test_cudas_own_uuid_wins(stub_nvml_here: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    uuid = stub_nvml_here.gpus[3].uuid.decode().removeprefix("GPU-")
    assert NvmlGpu(index_of_cuda_device(0, uuid)).index == 3
    assert NvmlGpu(index_of_uuid(uuid[:6])).index == 3


def test_a_gpu_split_by_mig_is_refused(stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[0].mig_enabled = 1
    with pytest.raises(GpuError, match="split into MIG"):
        NvmlGpu(index_of_cuda_device(0))
    assert NvmlGpu(index_of_cuda_device(1)).index == 1


@pytest.mark.parametrize("error", ["gpu_is_lost", "no_permission", "unknown"])
def test_a_gpu_that_is_lost_or_forbidden_does_not_keep_others_from_being_found(
    stub_nvml_here: StubNvml, error: str
) -> None:
    stub_nvml_here.gpus[1].fail("uuid", error)
    uuid = stub_nvml_here.gpus[2].uuid.decode()
    assert NvmlGpu(index_of_uuid(uuid)).index == NvmlGpu(index_of_cuda_device(0, uuid)).index == 2


def test_a_gpu_that_knows_no_mig_is_fine(stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[0].fail("mig_mode", "not_supported")
    assert NvmlGpu(index_of_cuda_device(0)).index == 0


ACTIONS = {
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


@pytest.mark.parametrize("function", ACTIONS)
@pytest.mark.parametrize("error", REMEDIES)
def test_every_call_says_what_failed_where_and_what_to_do(
    gpu: NvmlGpu, stub_nvml_here: StubNvml, function: str, error: str
) -> None:
    stub_nvml_here.gpus[1].fail(function, error)
    with pytest.raises(GpuError, match=REMEDIES[error]) as caught:
        ACTIONS[function](gpu)
    assert "GPU 1 (NVIDIA A100" in str(caught.value)
    assert not isinstance(caught.value, GpuPermissionError)
    stub_nvml_here.gpus[1].fail(function, "none")
    ACTIONS[function](gpu)


def test_the_check_of_the_permission_says_how_to_get_it(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[1].fail("reset_locked", "no_permission")
    with pytest.raises(GpuPermissionError, match=r"CAP_SYS_ADMIN.*--cap-add SYS_ADMIN.*zeusd"):
        gpu.check_lock_permission()


def test_the_permission_check_leaves_the_clock_alone(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    gpu.check_lock_permission()
    assert stub_nvml_here.locked_clocks_mhz() == [0, 0, 0, 0]
    assert stub_nvml_here.gpus[1].calls("set_locked") == 0


@pytest.mark.parametrize("function", ["init", "count", "by_index", "driver_version"])
def test_a_failed_start_leaves_nothing_open(stub_nvml_here: StubNvml, function: str) -> None:
    before = stub_nvml_here.calls("init") - stub_nvml_here.calls("shutdown")
    stub_nvml_here.fail(function, "driver_not_loaded")
    with pytest.raises(GpuError, match="kernel driver is not loaded"):
        NvmlGpu(index_of_cuda_device(0))
    failed_inits = 1 if function == "init" else 0
    assert stub_nvml_here.calls("init") - stub_nvml_here.calls("shutdown") - before == failed_inits


def test_a_gpu_without_energy_counter_says_so(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[1].has_energy_counter = 0
    assert not gpu.has_energy_counter
    assert NvmlGpu(0).has_energy_counter
    with pytest.raises(GpuError, match=r"Reading the energy counter of GPU 1.*lacks the function"):
        gpu.energy_j()


def test_a_lost_gpu_is_not_taken_for_one_without_counter(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[1].fail("energy", "gpu_is_lost")
    with pytest.raises(GpuError, match="fell off the bus"):
        _ = gpu.has_energy_counter


def test_throttle_reasons_have_names(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    assert gpu.throttle_reasons() == ()
    stub_nvml_here.gpus[1].throttle_reasons = 0x4 | 0x40
    assert gpu.throttle_reasons() == ("sw_power_cap", "hw_thermal_slowdown")


def test_a_closed_gpu_refuses_calls(gpu: NvmlGpu) -> None:
    gpu.close()
    gpu.close()
    with pytest.raises(GpuError, match="is closed"):
        gpu.reset_clock()


def test_a_hung_call_stops_only_its_own_thread(gpu: NvmlGpu, stub_nvml_here: StubNvml) -> None:
    stub_nvml_here.gpus[1].hang("set_locked")
    worker = threading.Thread(target=gpu.lock_clock, args=(1200,), daemon=True)
    worker.start()
    for _ in range(50):
        gpu.energy_j()
        gpu.clock_mhz()
    assert worker.is_alive()
    stub_nvml_here.gpus[1].hang("set_locked", False)
    worker.join(60)
    assert not worker.is_alive()
    assert stub_nvml_here.gpus[1].locked_clock_mhz == 1200


OPEN = """
import sys
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device
try:
    print(NvmlGpu(index_of_cuda_device(0)).driver)
except GpuError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_gpus_are_opened_by_many_threads_at_once(stub_nvml: StubNvml) -> None:
    """As the agent does for ranks that start together. NVML is thread-safe, so the stub must be."""
    program = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from perseus_ds.gpu.nvml import NvmlGpu\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    list(pool.map(lambda n: NvmlGpu(n % 4).close(), range(400)))\n"
    )
    done = stub_nvml.run("-c", program)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_reported(stub_nvml: StubNvml, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libnvidia-ml.so.1").write_text("not a library")
    done = stub_nvml.run("-c", OPEN, environment={"LD_LIBRARY_PATH": str(broken)})
    assert done.returncode == 1
    assert "libnvidia-ml.so.1 was not found: install the NVIDIA driver" in done.stderr


def test_a_foreign_pynvml_is_reported(stub_nvml: StubNvml, tmp_path: Path) -> None:
    """It precedes NVIDIA's on the path."""
    codes = [f"{name} = {value}" for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")]
    text = "\n".join(["class NVMLError(Exception): pass", "def nvmlInit(): pass", *codes])
    (tmp_path / "pynvml.py").write_text(text, encoding="utf-8")
    done = stub_nvml.run("-c", OPEN, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "is not NVIDIA's binding. Run `pip uninstall pynvml`" in done.stderr
