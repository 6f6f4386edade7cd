"""The same tests for NVML GPUs (on the stub library) and simulated ones, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from virtual.time import VirtualTime

from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.device_models import DEVICES
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device
from perseus_ds.gpu.simulated import SimulatedGpu

LATENCY_S = 0.02
PERIOD_S = 0.05


@pytest.fixture(params=["nvml", "simulated"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def now(kind: str, request: pytest.FixtureRequest) -> VirtualTime:
    return VirtualTime() if kind == "simulated" else request.getfixturevalue("stub_time")


@pytest.fixture
def gpu(kind: str, now: VirtualTime, request: pytest.FixtureRequest) -> Iterator[Gpu]:
    if kind == "simulated":
        made: Gpu = SimulatedGpu(DEVICES["a100-sxm"], lock_latency_s=LATENCY_S, counter_period_s=PERIOD_S, timebase=now)
    else:
        stub = request.getfixturevalue("stub_nvml_here")
        stub.gpus[2].lock_latency_s = LATENCY_S
        stub.gpus[2].counter_period_s = PERIOD_S
        made = NvmlGpu(index_of_cuda_device(2))
    yield made
    made.close()


@pytest.fixture
def forbidden_gpu(kind: str, request: pytest.FixtureRequest) -> Gpu:
    """A GPU without permission to change its clock."""
    if kind == "simulated":
        return SimulatedGpu(DEVICES["a100-sxm"], may_lock=False)
    stub = request.getfixturevalue("stub_nvml_here")
    for function in ("set_locked", "reset_locked"):
        stub.gpus[2].fail(function, "no_permission")
    return NvmlGpu(index_of_cuda_device(2))


def test_its_name_tells_whether_it_is_simulated(gpu: Gpu) -> None:
    assert gpu.simulated == ("simulated" in gpu.name)
    assert gpu.simulated == (gpu.driver is None)


def test_its_clocks_ascend_without_repetition(gpu: Gpu) -> None:
    clocks = gpu.supported_clocks_mhz()
    assert len(clocks) > 10
    assert list(clocks) == sorted(set(clocks))


def test_every_supported_clock_can_be_locked_and_read_back(gpu: Gpu) -> None:
    for clock_mhz in gpu.supported_clocks_mhz()[::16]:
        gpu.lock_clock(clock_mhz)
        assert gpu.clock_mhz() == clock_mhz


def test_a_reset_returns_to_the_default(gpu: Gpu) -> None:
    assert gpu.clock_mhz() == gpu.supported_clocks_mhz()[-1]
    gpu.lock_clock(gpu.supported_clocks_mhz()[0])
    gpu.reset_clock()
    gpu.reset_clock()
    assert gpu.clock_mhz() == gpu.supported_clocks_mhz()[-1]


def test_setting_a_clock_takes_the_drivers_time(gpu: Gpu, now: VirtualTime) -> None:
    began_s = now.now_s()
    gpu.lock_clock(gpu.supported_clocks_mhz()[3])
    assert now.now_s() - began_s == pytest.approx(LATENCY_S)


@pytest.mark.parametrize("clock_mhz", [0, 1, 1201, 99_999])
def test_an_unsupported_clock_is_refused_and_changes_nothing(gpu: Gpu, clock_mhz: int) -> None:
    before_mhz = gpu.clock_mhz()
    with pytest.raises(GpuError, match=f"{clock_mhz} MHz"):
        gpu.lock_clock(clock_mhz)
    assert gpu.clock_mhz() == before_mhz


def test_energy_is_power_times_time_in_steps_of_the_counter(gpu: Gpu, now: VirtualTime) -> None:
    readings = []
    for _ in range(1000):
        now.sleep(0.002)
        readings.append((now.now_s(), gpu.energy_j()))
    steps = [after for before, after in pairwise(readings) if after[1] != before[1]]
    assert all(after[1] >= before[1] for before, after in pairwise(readings))
    assert len(steps) in (39, 40)
    (first_s, first_j), (last_s, last_j) = steps[0], steps[-1]
    assert (last_j - first_j) / (last_s - first_s) == pytest.approx(gpu.power_w(), rel=0.01)


def test_without_permission_the_error_says_what_to_do(forbidden_gpu: Gpu) -> None:
    for change in (lambda: forbidden_gpu.lock_clock(1200), forbidden_gpu.reset_clock):
        with pytest.raises(GpuPermissionError, match=r"root.*CAP_SYS_ADMIN.*zeusd"):
            change()
    assert forbidden_gpu.clock_mhz() == 1410


def test_temperature_and_power_state_are_told_or_unknown(gpu: Gpu) -> None:
    temperature_c, power_state = gpu.state.temperature_c, gpu.state.power_state
    assert temperature_c is None or 0 < temperature_c < 120
    assert power_state is None or power_state.startswith("P")
    assert (power_state is not None) or not gpu.simulated
