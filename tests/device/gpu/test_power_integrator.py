"""Energy of a GPU without an energy counter, on the real binding and the stub driver."""

import pytest

PROGRAM = """
import time
from perseus_ds.device.gpu.power_integrator import PowerIntegrator, with_energy
from perseus_ds.device.gpu.nvml import NvmlGpu

gpu = with_energy(NvmlGpu(0))
print(type(gpu).__name__, gpu.name, gpu.has_energy_counter)
begin_s, begin_j = time.perf_counter(), gpu.energy_j()
time.sleep(0.5)
print((gpu.energy_j() - begin_j) / (time.perf_counter() - begin_s) / gpu.power_w())
gpu.close()
"""


def test_a_virtual_gpu_without_counter_has_its_power_added_up(make_stub_nvml):
    stub = make_stub_nvml(1)
    stub.gpus[0].has_energy_counter = 0
    done = stub.run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    kind, ratio = done.stdout.splitlines()
    assert kind.startswith("PowerIntegrator NVIDIA")
    assert float(ratio) == pytest.approx(1.0, rel=0.2)
