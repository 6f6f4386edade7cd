"""The Zeus device: the real package on the stub library, and a clear error where the package is missing.

Each case runs in a process of its own, because Zeus keeps the GPUs that it found first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stub_nvml.controller import StubNvml

VISIBLE = {"CUDA_VISIBLE_DEVICES": "2,1"}

USE = """
import sys
from perseus_ds.errors import GpuError
from perseus_ds.device.gpu.zeus import open_address, open_zeus_gpu
try:
    gpu = open_zeus_gpu(0)
    gpu.check_lock_permission()
    gpu.lock_clock(1200)
    again = open_address(gpu.address.partition(":")[2])
    print(again.index, again.clock_mhz(), gpu.energy_j() > 0, gpu.power_w())
    gpu.lock_clock(900)
except GpuError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(autouse=True)
def _no_zeusd(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT", "ZEUSD_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


def test_without_the_package_the_error_says_what_to_install(stub_nvml: StubNvml) -> None:
    done = stub_nvml.run("-c", f"import sys; sys.modules['zeus'] = None\n{USE}", environment=VISIBLE)
    assert done.returncode == 1
    assert "needs the package zeus" in done.stderr
    assert 'pip install "perseus-ds[zeus]"' in done.stderr


def test_zeus_locks_the_gpu_that_cuda_means(stub_nvml: StubNvml) -> None:
    done = stub_nvml.run("-c", USE, environment=VISIBLE)
    assert done.stdout == "2 1200 True 250.0\n", done.stderr
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 900, 0]


def test_a_missing_permission_points_to_zeusd(stub_nvml: StubNvml) -> None:
    stub_nvml.gpus[2].fail("reset_locked", "no_permission")
    done = stub_nvml.run("-c", USE, environment=VISIBLE)
    assert "GpuPermissionError: Resetting the clock of GPU 2" in done.stderr
    assert "ZEUSD_SOCK_PATH" in done.stderr


def test_a_zeusd_that_does_not_answer_is_reported(stub_nvml: StubNvml, tmp_path: Path) -> None:
    done = stub_nvml.run("-c", USE, environment={**VISIBLE, "ZEUSD_SOCK_PATH": str(tmp_path / "none.sock")})
    assert "Cannot reach Zeusd" in done.stderr
    assert stub_nvml.locked_clocks_mhz() == [0, 0, 0, 0]
