"""Builds the parts of a rank's runtime."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.runtime.config import PerseusConfig, parse_block
from perseus_ds.runtime.devices import execution_on, open_gpu
from perseus_ds.runtime.job import Job


def open_together(
    communicator: Communicator, config: PerseusConfig, device: torch.device, *, local_rank: int
) -> tuple[Gpu, Execution]:
    """Open the GPU of each rank; every rank must do so at once.

    Args:
        communicator: All ranks.
        config: The ``perseus`` block.
        device: Where the rank's tensors live.
        local_rank: Rank on this node; names the GPU where the device does not.

    Returns:
        The GPU, and what times operations on it.

    Raises:
        PerseusError: On all ranks, what went wrong on one.
    """
    opened: list[tuple[Gpu, Execution]] = []

    def open_one() -> None:
        gpu = open_gpu(config, device, rank=communicator.topology.rank, local_rank=local_rank)
        opened.append((gpu, execution_on(gpu, device, config)))

    communicator.together(open_one)
    return opened[0]


def profile_info(
    schedule: Schedule,
    gpu: Gpu,
    topology: PipelineTopology,
    *,
    libraries: Sequence[str],
    model: str | None = None,
    micro_batch_size: int | None = None,
) -> ProfileInfo:
    """Return what a profile of the job says of it.

    Args:
        schedule: The operations of every rank of a pipeline in one iteration.
        gpu: Of this rank.
        topology: Place of this rank in the job.
        libraries: Packages that train, besides torch, whose versions matter.
        model: The class of the model.
        micro_batch_size: Samples of a micro-batch, where it is known.
    """
    return ProfileInfo(
        simulated=gpu.simulated,
        gpu=gpu.name,
        driver=gpu.driver,
        schedule=schedule.name,
        stages=schedule.num_stages,
        pipeline_ranks=topology.pipeline_ranks,
        data_parallel=topology.data_parallel,
        tensor_parallel=topology.tensor_parallel,
        micro_batches=schedule.micro_batches,
        micro_batch_size=micro_batch_size,
        model=model,
        versions={name: importlib.metadata.version(name) for name in (*libraries, "torch", "perseus-ds")},
    )


def loop_parts(
    block: Mapping[str, Any],
    schedule: Schedule,
    *,
    pipeline: Sequence[int],
    data_parallel_rank: int,
    data_parallel: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the arguments of :class:`PerseusRuntime` for a training loop on ``torch.distributed``.

    Args:
        block: A ``perseus`` block.
        schedule: The operations of every rank of a pipeline in one iteration.
        pipeline: Global ranks of this rank's pipeline, first stage first.
        data_parallel_rank: Which pipeline.
        data_parallel: Number of pipelines.
        device: Where the rank's tensors live.

    Raises:
        ConfigError: The block is wrong, or its mode needs an engine.
        PerseusError: On all ranks: the GPU of one cannot be opened.
    """
    config = parse_block(block)
    if config.mode == "profile":
        raise ConfigError(
            'perseus.mode: "profile" repeats passes, which only an engine can. Use "auto", which profiles while it '
            "trains."
        )
    rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    communicator = Communicator(PipelineTopology(rank, tuple(pipeline), data_parallel_rank, data_parallel))
    opened: list[tuple[Gpu, Execution, Job]] = []

    def open_all() -> None:
        gpu = open_gpu(config, device, rank=rank, local_rank=local_rank)
        info = profile_info(schedule, gpu, communicator.topology, libraries=())
        opened.append((gpu, execution_on(gpu, device, config), Job(config, schedule, info)))

    communicator.together(open_all)
    ((gpu, timers, job),) = opened
    return {"job": job, "communicator": communicator, "gpu": gpu, "timers": timers, "device": device}
