"""Opens the GPU a rank computes on, and what times operations on it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Literal

import torch

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.lease import Lease
from perseus_ds.client.marks import marks_of
from perseus_ds.client.memory import SharedMemory
from perseus_ds.clocks.timers import CudaExecution, Execution, HostExecution, SimulatedExecution
from perseus_ds.errors import ConfigError, GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.ranks import Communicator
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.job import Job

logger = logging.getLogger("perseus_ds")
_LOG_BYTES = 2**15


def open_gpu(config: PerseusConfig, device: torch.device, *, rank: int, local_rank: int) -> Gpu:
    """Open the GPU that a rank computes on, or the simulated one that the config asks for.

    Args:
        config: The ``perseus`` block.
        device: Where the rank's tensors live.
        rank: Global rank.
        local_rank: Rank on this node; names the GPU where the device does not.

    Raises:
        ConfigError: There is nothing to open for tensors on this device.
        GpuError: There is no such GPU, or its driver is missing.
    """
    gpu = driver_of(config, device, rank=rank, local_rank=local_rank)
    if config.device == "auto" and isinstance(gpu, SimulatedGpu) and rank == 0:
        logger.warning(
            "perseus: no GPU, so GPUs are SIMULATED (%s): training is real, times and energies are not. "
            'Set "device": "simulated" to hide this notice.',
            config.simulated.gpu,
        )
    if isinstance(gpu, NvmlGpu):
        for setting in gpu.administrator_settings:
            logger.warning("perseus: rank %d, %s: %s", rank, gpu, setting)
        if gpu.settings.whole_module:
            told = "its energy counter covers the whole module, processor included, and so do all energies and savings."
            logger.warning("perseus: rank %d, %s: %s", rank, gpu, told)
    return gpu


def clocks_of(gpu: Gpu, device: torch.device) -> AgentClocks:
    """Return the clocks of this rank's GPU; the node's agent is started if there is none.

    Raises:
        GpuError: No agent can use the GPU, or the GPU cannot write marks.
    """
    assert gpu.address is not None, "an agent can open it"
    lease = Lease(gpu.address, files=gpu.files if isinstance(gpu, SimulatedGpu) else ())
    try:
        marks = marks_of(device, lease.shared, lease.memory)
    except GpuError:
        lease.close()
        raise
    return AgentClocks(lease, lease.memory, marks, gpu.name)


def execution_on(gpu: Gpu, device: torch.device, config: PerseusConfig) -> Execution:
    """Return what times operations on a GPU."""
    if isinstance(gpu, SimulatedGpu):
        return SimulatedExecution(gpu, transfer_s=config.simulated.transfer_s, tail_s=config.simulated.tail_s)
    return CudaExecution(device) if device.type == "cuda" else HostExecution()


def with_permission(job: Job, gpu: Gpu, communicator: Communicator) -> Job:
    """Return the job as it may run: where auto mode cannot set the clocks of all ranks, it observes.

    A process may lack the permission, and a virtual GPU the clocks. Every rank must ask at once.

    Raises:
        GpuError: On all ranks, if one cannot set clocks and the job does without in no case.
    """
    config = job.config
    if config.mode == "observe":
        return job

    def refusal() -> GpuError | None:
        try:
            gpu.check_lock_permission()
            gpu.supported_clocks_mhz()
        except GpuError as error:
            if config.needs_clocks:
                raise
            return error
        return None

    problem = communicator.first_not_none(communicator.raise_on_all_ranks(refusal))
    if problem is None:
        return job
    if communicator.is_rank_0:
        logger.warning(
            "perseus: %s This job trains at default clocks, and its time and energy are recorded, as in mode "
            '"observe". With "required": true this is an error.',
            problem,
        )
    return replace(job, config=config.model_copy(update={"mode": "observe"}))


def driver_of(config: PerseusConfig, device: torch.device, *, rank: int, local_rank: int) -> Gpu:
    """Open the same as :func:`open_gpu`, without notices of what it is, and without energies if it counts none."""
    kind = _kind_of(device) if config.device == "auto" else config.device
    if kind == "zeus":
        from perseus_ds.gpu.zeus import open_zeus_gpu

        return open_zeus_gpu(*_device_of(device, local_rank))
    if kind == "nvml":
        ordinal, uuid, _ = _device_of(device, local_rank)
        return NvmlGpu(index_of_cuda_device(ordinal, uuid))
    settings = config.simulated.model_dump(exclude={"longest_instruction_s", "flops_per_s", "transfer_s", "tail_s"})
    work, clock = (SharedMemory(_LOG_BYTES, f"perseus-ds-{log}") for log in ("work", "clock"))
    gpu = SimulatedGpu.shared(work.view, clock.view, seed=rank, **settings)
    gpu.files = work.file, clock.file
    gpu.address = f"{gpu.address}#{os.getpid()}.{work.file}"  # another one may have the same settings
    return gpu


def _kind_of(device: torch.device) -> Literal["nvml", "zeus", "simulated"]:
    """Return what to open for tensors on a device: AMD's GPUs, which torch calls ``cuda`` too, through Zeus.

    Raises:
        ConfigError: Clocks of such a device cannot be set, and simulating others would slow training down.
    """
    if device.type == "cuda":
        return "nvml" if torch.version.hip is None else "zeus"
    if device.type == "cpu":
        return "simulated"
    raise ConfigError(
        f"perseus.device: \"auto\" knows NVIDIA's and AMD's GPUs, and this job computes on {device.type!r}. Set "
        '"enabled": false to train without Perseus, or "device": "simulated" to try it with simulated GPUs, which '
        "makes every pass as long as theirs."
    )


def _device_of(device: torch.device, local_rank: int) -> tuple[int, str | None, str | None]:
    """Return CUDA's or HIP's number of this rank's GPU, and its UUID (CUDA) and PCI address if they are known."""
    if device.type != "cuda":
        return max(0, local_rank), None, None
    index = device.index if device.index is not None else torch.cuda.current_device()
    known = torch.cuda.get_device_properties(index)
    # What HIP reports as a UUID is not written as amdsmi writes it.
    uuid = None if torch.version.hip else str(getattr(known, "uuid", "")) or None
    domain, bus, slot = (getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return index, uuid, None
    return index, uuid, f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors of this process have taken on its GPU; None if they are on none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
