"""The GPU that a rank opens, and warnings about it."""

from types import SimpleNamespace

import pytest
import torch
from run_log import wait_until

from perseus_ds.agent.actor import GpuActor
from perseus_ds.agent.gpu_records import UnrecordedGpu
from perseus_ds.client import devices
from perseus_ds.client.devices import gpu_of, open_gpu_of_rank
from perseus_ds.config import parse_block
from perseus_ds.errors import ConfigError
from perseus_ds.gpu import find_gpu, zeus
from perseus_ds.gpu.nvml import NvmlGpu


@pytest.mark.parametrize(("limit_w", "warnings"), [(400.0, 0), (300.0, 1)])
def test_a_power_limit_below_the_default_is_said_at_the_start_of_a_job(stub_of_agents, caplog, limit_w, warnings):
    stub_of_agents.gpus[0].power_limit_w = limit_w
    gpu = open_gpu_of_rank(parse_block({"device": "nvml"}), torch.device("cpu"), rank=5, local_rank=0)
    gpu.close()
    assert caplog.text.count("rank 5, GPU 0") == warnings
    assert caplog.text.count("its power limit is 300 W of 400 W: plans are computed for this limit") == warnings


IDLE, POWER_CAP, APPLICATION_CLOCK = 0x1, 0x4, 0x2


@pytest.mark.parametrize(
    ("locked_mhz", "reasons", "mode", "notices"),
    [
        (900, 0, "auto", 1),
        (900, APPLICATION_CLOCK, "run", 1),
        (900, IDLE, "auto", 0),
        (900, POWER_CAP, "auto", 0),
        (900, 0, "observe", 0),
        (0, 0, "auto", 0),
    ],
)
def test_a_clock_that_a_site_has_locked_is_not_removed_silently(
    stub_of_agents, caplog, locked_mhz, reasons, mode, notices
):
    gpu = stub_of_agents.gpus[0]
    gpu.locked_clock_mhz, gpu.throttle_reasons = locked_mhz, reasons
    block = {"device": "nvml", "mode": mode, **({"frontier": "any"} if mode == "run" else {})}
    opened = open_gpu_of_rank(parse_block(block), torch.device("cpu"), rank=5, local_rank=0)
    assert caplog.text.count(f"its clock was locked at {locked_mhz} MHz before the job") == notices
    assert gpu.locked_clock_mhz == (locked_mhz if mode == "observe" else 0)
    opened.close()


def test_a_clock_below_the_highest_one_that_does_not_rise_was_not_locked(stub_of_agents, caplog):
    """For example, a board that does not reach its highest clock."""
    stub_of_agents.gpus[0].limit_clock_mhz = 1200
    open_gpu_of_rank(parse_block({"device": "nvml", "mode": "auto"}), torch.device("cpu"), rank=5, local_rank=0).close()
    assert "before the job" not in caplog.text


def test_a_gpu_is_kept_busy_while_its_lease_is_waited_for_if_its_clock_is_reset(monkeypatch, stub_of_agents):
    """A locked clock does not show on an idle GPU."""
    seconds = []
    monkeypatch.setattr(devices.LeasedGpu, "compute", lambda gpu, device, time_s: seconds.append((device, time_s)))
    device = torch.device("cpu")
    open_gpu_of_rank(parse_block({"device": "nvml", "mode": "observe"}), device, rank=0, local_rank=0).close()
    assert not seconds
    open_gpu_of_rank(parse_block({"device": "nvml", "mode": "auto"}), device, rank=0, local_rank=0).close()
    assert {each for each, _ in seconds} == {device}


@pytest.mark.parametrize("device", ["xpu", "hpu", "npu"])
def test_no_gpu_is_simulated_for_a_job_that_computes_on_another_accelerator(device, monkeypatch):
    class Device:
        type = device
        index = 0

    with pytest.raises(ConfigError, match=f"computes on '{device}'"):
        open_gpu_of_rank(parse_block({}), Device(), rank=0, local_rank=0)
    assert open_gpu_of_rank(parse_block({"device": "simulated"}), Device(), rank=0, local_rank=0).simulated
    assert open_gpu_of_rank(parse_block({}), torch.device("cpu"), rank=0, local_rank=0).simulated


def test_amds_gpus_are_opened_through_zeus(monkeypatch):
    opened = []
    monkeypatch.setattr(torch.version, "hip", "6.2")
    known = SimpleNamespace(uuid="66306363-3837", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    monkeypatch.setattr(devices, "LeasedGpu", lambda place, device, **_: opened.append(place))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    gpu_of(parse_block({}), torch.device("cuda", 3), rank=0, local_rank=0)
    monkeypatch.setattr(zeus, "open_zeus_gpu", lambda *place: opened.append(place))
    find_gpu(opened[0])
    assert opened[1] == (3, None, "0000:c1:00.0", {"HIP_VISIBLE_DEVICES": "4,5,6,7"})


@pytest.mark.parametrize("function", ["memory_clocks", "graphics_clocks"])
def test_a_gpu_whose_driver_lists_no_clocks_is_observed(stub_nvml_here, function):
    for gpu in stub_nvml_here.gpus:
        gpu.fail(function, "not_supported")
    gpu = NvmlGpu(0)
    actor = GpuActor(UnrecordedGpu("stub"), lambda: gpu)
    actor.listeners.append(pytest.fail)
    wait_until(lambda: actor.gpu is not None, "the GPU is open")
    actor.watch_default_clocks()
    read_j = []
    actor.call(lambda: read_j.append(gpu.energy_j()))
    wait_until(lambda: read_j, "a reading of the counter")
    actor.close()
