"""Opens the GPU a rank computes on, and what times operations on it."""

from __future__ import annotations

import logging

import torch

from perseus_ds.device.gpu.base import Gpu, counts_whole_module
from perseus_ds.device.gpu.nvml import NvmlGpu
from perseus_ds.device.gpu.nvml_lookup import index_of_cuda_device
from perseus_ds.device.gpu.power_integrator import with_energy
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.gpu.simulated_conditions import OneAtATimeOnNode
from perseus_ds.device.stream_capture import captures_to_avoid
from perseus_ds.device.timers import CudaExecution, Execution, HostExecution, SimulatedExecution
from perseus_ds.runtime.config import PerseusConfig

logger = logging.getLogger("perseus_ds")


def open_gpu(config: PerseusConfig, device: torch.device, *, rank: int, local_rank: int) -> Gpu:
    """Open the GPU that a rank computes on, or the simulated one that the config asks for.

    Args:
        config: The ``perseus`` block.
        device: Where the rank's tensors live.
        rank: Global rank.
        local_rank: Rank on this node; names the GPU where the device does not.

    Raises:
        GpuError: There is no such GPU, or its driver is missing.
    """
    gpu = _open_bare_gpu(config, device, rank, local_rank)
    if isinstance(gpu, NvmlGpu):
        for setting in gpu.administrator_settings:
            logger.warning("perseus: rank %d, %s: %s", rank, gpu, setting)
        if counts_whole_module(gpu.name):
            told = "its energy counter covers the whole Grace-Hopper module, and so do all energies and savings."
            logger.warning("perseus: rank %d, %s: %s", rank, gpu, told)
    return with_energy(gpu)


def execution_on(gpu: Gpu, device: torch.device, config: PerseusConfig) -> Execution:
    """Return what times operations on a GPU."""
    if isinstance(gpu, SimulatedGpu):
        return SimulatedExecution(gpu, transfer_s=config.simulated.transfer_s, tail_s=config.simulated.tail_s)
    return CudaExecution(device, captures=captures_to_avoid()) if device.type == "cuda" else HostExecution()


def _open_bare_gpu(config: PerseusConfig, device: torch.device, rank: int, local_rank: int) -> Gpu:
    if config.device == "zeus":
        from perseus_ds.device.gpu.zeus import open_zeus_gpu

        return open_zeus_gpu(*_cuda_device(device, local_rank))
    if config.device == "nvml" or (config.device == "auto" and device.type == "cuda"):
        return NvmlGpu(index_of_cuda_device(*_cuda_device(device, local_rank)))
    if config.device == "auto" and rank == 0:
        logger.warning(
            "perseus: no CUDA GPU, so GPUs are SIMULATED (%s): training is real, times and energies are not. "
            'Set "device": "simulated" to hide this notice.',
            config.simulated.gpu,
        )
    settings = config.simulated
    return SimulatedGpu.named(
        settings.gpu,
        lock_latency_s=settings.lock_latency_s,
        lock_latency=settings.lock_latency,
        counter_period_s=settings.counter_period_s,
        time_noise=settings.time_noise,
        power_noise=settings.power_noise,
        conditions=settings.conditions,
        driver_queue=OneAtATimeOnNode() if "lock-contention" in settings.conditions else None,
        may_lock=settings.may_lock,
        seed=rank,
    )


def _cuda_device(device: torch.device, local_rank: int) -> tuple[int, str | None]:
    """Return CUDA's index of this rank's GPU, and its UUID where CUDA tells it."""
    if device.type != "cuda":
        return max(0, local_rank), None
    index = device.index if device.index is not None else torch.cuda.current_device()
    return index, str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) or None
