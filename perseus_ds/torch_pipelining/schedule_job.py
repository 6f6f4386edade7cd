"""The job of a schedule of torch as the runtime needs it: the order of all ranks, topology, model and versions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from perseus_ds.distributed import Communicator
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.runtime.build import open_together, profile_info
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime
from perseus_ds.torch_pipelining.order import read_order, stages_of
from perseus_ds.torch_pipelining.topology import RankGroups


def make_runtime(schedule: Any, config: PerseusConfig, groups: RankGroups, others: Sequence[str]) -> PerseusRuntime:
    """Make the runtime of a schedule that is about to train; every rank must do so at once.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining``.
        config: The ``perseus`` block.
        groups: Of this rank.
        others: Models of the other engines of this process.

    Raises:
        PerseusError: On all ranks, what went wrong on one.
    """
    communicator = Communicator(groups.topology)
    order = _order_of_all_ranks(communicator, schedule)
    device = torch.device(stages_of(schedule)[0].device)
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    gpu, timers = open_together(communicator, config, device, local_rank=local_rank)
    info = profile_info(order, gpu, communicator.topology, libraries=(), model=model_name(schedule))
    return PerseusRuntime(
        Job(config, order, info, _fingerprint(schedule), (model_name(schedule), *others)),
        communicator=communicator,
        gpu=gpu,
        timers=timers,
        device=device,
    )


def model_name(schedule: Any) -> str:
    """Return the class of the model's part in the first stage of this rank."""
    return type(stages_of(schedule)[0].submod).__name__


def _order_of_all_ranks(communicator: Communicator, schedule: Any) -> Schedule:
    """Return what each rank of this pipeline has read of its own part of the schedule.

    Raises:
        ScheduleError: On all ranks, what went wrong on one.
    """
    read: list[Schedule] = []
    communicator.together(lambda: read.append(read_order(schedule)))
    order = read[0]
    streams = communicator.pipeline_gather(order.ranks[communicator.topology.pipeline_rank])
    return Schedule(order.name, order.micro_batches, tuple(streams))


def _fingerprint(schedule: Any) -> str:
    """Return a text that changes with whatever the times of this rank's instructions depend on."""
    content = [
        (
            stage.stage_index,
            [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in stage.submod.named_parameters()],
            [type(layer).__name__ for layer in stage.submod.modules()],
        )
        for stage in stages_of(schedule)
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()
