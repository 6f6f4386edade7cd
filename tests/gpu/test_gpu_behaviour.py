"""The same tests for NVML GPUs (on the stub library) and simulated ones, in virtual time."""

from itertools import pairwise

import pytest
from virtual.time import VirtualTime

from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.simulation.device_models import DEVICES
from perseus_ds.simulation.gpu import SimulatedGpu

LATENCY_S = 0.02
PERIOD_S = 0.05


@pytest.fixture(params=["nvml", "simulated"])
def kind(request):
    return request.param


@pytest.fixture
def now(kind, request):
    return VirtualTime() if kind == "simulated" else request.getfixturevalue("stub_time")


@pytest.fixture
def gpu(kind, now, request):
    if kind == "simulated":
        made = SimulatedGpu(DEVICES["a100-sxm"], lock_latency_s=LATENCY_S, counter_period_s=PERIOD_S, timebase=now)
    else:
        stub = request.getfixturevalue("stub_nvml_here")
        stub.gpus[2].lock_latency_s = LATENCY_S
        stub.gpus[2].counter_period_s = PERIOD_S
        made = NvmlGpu(2)
    yield made
    made.close()


@pytest.fixture
def forbidden_gpu(kind, request):
    """A GPU without permission to change its clock."""
    if kind == "simulated":
        return SimulatedGpu(DEVICES["a100-sxm"], may_lock=False)
    stub = request.getfixturevalue("stub_nvml_here")
    for function in ("set_locked", "reset_locked"):
        stub.gpus[2].fail(function, "no_permission")
    return NvmlGpu(2)


def test_its_name_shows_whether_it_is_simulated(gpu):
    assert gpu.simulated == ("simulated" in gpu.name) == (gpu.driver is None)


def test_every_supported_clock_can_be_locked_and_reset(gpu, now):
    clocks_mhz = gpu.supported_clocks_mhz()
    assert list(clocks_mhz) == sorted(set(clocks_mhz))
    assert gpu.clock_mhz() == clocks_mhz[-1]
    gpu.check_lock_permission()
    for clock_mhz in clocks_mhz[::16]:
        began_s = now.now_s()
        gpu.lock_clock(clock_mhz)
        assert now.now_s() - began_s == pytest.approx(LATENCY_S), "the driver's time"
        assert gpu.clock_mhz() == clock_mhz
    for _ in range(2):
        gpu.reset_clock()
        assert gpu.clock_mhz() == clocks_mhz[-1]


def test_an_unsupported_clock_is_refused_and_changes_nothing(gpu):
    gpu.lock_clock(1200)
    with pytest.raises(GpuError, match="1201 MHz"):
        gpu.lock_clock(1201)
    assert gpu.clock_mhz() == 1200


def test_energy_is_power_times_time_in_steps_of_the_counter(gpu, now):
    readings = []
    for _ in range(1000):
        now.sleep(0.002)
        readings.append((now.now_s(), gpu.energy_j()))
    steps = [after for before, after in pairwise(readings) if after[1] != before[1]]
    assert all(after[1] >= before[1] for before, after in pairwise(readings))
    assert len(steps) in (39, 40)
    (first_s, first_j), (last_s, last_j) = steps[0], steps[-1]
    assert (last_j - first_j) / (last_s - first_s) == pytest.approx(gpu.power_w(), rel=0.01)


def test_without_permission_the_error_states_the_remedy(forbidden_gpu):
    for change in (lambda: forbidden_gpu.lock_clock(1200), forbidden_gpu.reset_clock):
        with pytest.raises(GpuPermissionError, match=r"root.*CAP_SYS_ADMIN.*zeusd"):
            change()
    with pytest.raises(GpuPermissionError):
        forbidden_gpu.check_lock_permission()
    assert forbidden_gpu.clock_mhz() == 1410
