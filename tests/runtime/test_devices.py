"""Which GPU a job opens, and what is said of it; what goes wrong on one rank is raised on all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipelines import one_f_one_b
from virtual.job import LoneCommunicator, VirtualJob

from perseus_ds.agent.controller import ClockController
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.errors import ConfigError, GpuError, GpuPermissionError
from perseus_ds.gpu import zeus
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.gpu.opening import find_gpu
from perseus_ds.runtime import devices, runtime
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.devices import gpu_of, open_gpu, with_permission
from perseus_ds.runtime.job import Job


@pytest.mark.parametrize(("limit_w", "warnings"), [(400.0, 0), (300.0, 1)])
def test_a_power_limit_below_the_default_is_said_at_the_start_of_a_job(stub_of_agents, caplog, limit_w, warnings):
    stub_of_agents.gpus[0].power_limit_w = limit_w
    gpu = open_gpu(parse_block({"device": "nvml"}), torch.device("cpu"), rank=5, local_rank=0)
    gpu.close()
    assert caplog.text.count("rank 5, GPU 0") == warnings
    assert caplog.text.count("its power limit is 300 W of 400 W: plans are computed for this limit") == warnings


def test_plans_are_kept_for_the_settings_of_all_gpus_and_jobs_are_told_apart_without_them(stub_of_agents):
    def keys(*limits_w):
        infos = []
        for gpu, limit_w in zip(stub_of_agents.gpus, limits_w, strict=False):
            gpu.enforced_power_limit_w = limit_w
            opened = open_gpu(parse_block({"device": "nvml"}), torch.device("cpu"), rank=0, local_rank=len(infos))
            infos.append(ProfileInfo(gpu=opened.name, settings=opened.settings))
            opened.close()

        class TwoRanks(LoneCommunicator):
            def gather(self, own):
                return [own] if not isinstance(own, dict) else [info.settings.model_dump() for info in infos]

        job = Job(parse_block({}), one_f_one_b(ranks=1, micro_batches=1), infos[0])
        return job.profile_key(TwoRanks()), job.started(TwoRanks(), "A100").job

    assert keys(400, 400) == keys(400, 400)
    profile_key, job_key = keys(400, 300)
    assert profile_key != keys(400, 400)[0]
    assert job_key == keys(400, 400)[1], "jobs under different limits can be compared"


@pytest.mark.parametrize("device", ["xpu", "hpu", "npu"])
def test_no_gpu_is_simulated_for_a_job_that_computes_on_another_accelerator(device, monkeypatch):
    class Device:
        type = device
        index = 0

    with pytest.raises(ConfigError, match=f"computes on '{device}'"):
        open_gpu(parse_block({}), Device(), rank=0, local_rank=0)
    assert open_gpu(parse_block({"device": "simulated"}), Device(), rank=0, local_rank=0).simulated
    assert open_gpu(parse_block({}), torch.device("cpu"), rank=0, local_rank=0).simulated


def test_amds_gpus_are_opened_through_zeus(monkeypatch):
    opened = []
    monkeypatch.setattr(torch.version, "hip", "6.2")
    known = SimpleNamespace(uuid="66306363-3837", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    monkeypatch.setattr(devices, "LeasedGpu", lambda place, **_: opened.append(place))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6,7")
    gpu_of(parse_block({}), torch.device("cuda", 3), rank=0, local_rank=0)
    monkeypatch.setattr(zeus, "open_zeus_gpu", lambda *place: opened.append(place))
    find_gpu(opened[0])
    assert opened[1] == (3, None, "0000:c1:00.0", {"HIP_VISIBLE_DEVICES": "4,5,6,7"})


def test_auto_mode_observes_where_it_may_not_set_clocks(tmp_path, caplog):
    job = VirtualJob(tmp_path, mode="auto", gpu={"may_lock": False})
    assert set(job.train(5)) == {"observe"}
    assert len(job.close()) == 5
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "this process may not set clocks" in warning
    assert 'With "required": true this is an error' in warning


@pytest.mark.parametrize("function", ["reset_locked", "memory_clocks"])
def test_auto_mode_observes_where_a_virtual_gpu_has_no_clocks_to_set(stub_of_agents, tmp_path, caplog, function):
    stub_of_agents.gpus[0].fail(function, "not_supported")
    gpu = open_gpu(parse_block({"device": "nvml"}), torch.device("cpu"), rank=0, local_rank=0)
    job = Job(parse_block({}), one_f_one_b(ranks=1, micro_batches=1), ProfileInfo())
    block = {"mode": "auto", "output_dir": str(tmp_path)}
    assert with_permission(replace(job, config=parse_block(block)), gpu, LoneCommunicator()).config.mode == "observe"
    assert "lacks the function" in caplog.text
    with pytest.raises(GpuError, match="lacks the function"):
        with_permission(replace(job, config=parse_block({**block, "required": True})), gpu, LoneCommunicator())
    gpu.close()


@pytest.mark.parametrize("block", [{"mode": "auto", "required": True}, {"mode": "profile"}])
def test_a_job_that_cannot_do_without_clocks_ends_before_training(tmp_path, block):
    with pytest.raises(GpuPermissionError, match="may not set clocks"):
        VirtualJob(tmp_path, gpu={"may_lock": False}, **block)
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("function", ["memory_clocks", "graphics_clocks"])
def test_a_gpu_whose_driver_lists_no_clocks_is_observed(stub_nvml_here, function):
    for gpu in stub_nvml_here.gpus:
        gpu.fail(function, "not_supported")
    gpu = NvmlGpu(0)
    clocks = ClockController(gpu, pytest.fail)
    clocks.watch_default_clocks()
    assert clocks.call(gpu.energy_j).value() > 0
    clocks.close()
    gpu.close()


def test_a_gpu_that_cannot_be_opened_is_told_to_all_ranks(monkeypatch, tmp_path):
    """Ranks are connected first; a rank that raised alone would leave the others waiting for it."""
    done = []

    class Communicator(LoneCommunicator):
        def raise_on_all_ranks(self, function):
            done.append("raised on all ranks")
            return function()

    def open_gpu(*_, **__):
        done.append("open")
        raise GpuError("no such GPU")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(runtime, "Communicator", lambda place: Communicator())
    monkeypatch.setattr(runtime, "open_gpu", open_gpu)
    block = {"mode": "observe", "output_dir": str(tmp_path)}
    with pytest.raises(GpuError, match="no such GPU"):
        runtime.PerseusRuntime.for_loop(block, one_f_one_b(ranks=1, micro_batches=2), pipeline=[0])
    assert done == ["raised on all ranks", "raised on all ranks", "open"]
