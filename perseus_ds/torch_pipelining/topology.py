"""Where a rank stands in a job whose pipelines are process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from perseus_ds.distributed import PipelineTopology
from perseus_ds.errors import ConfigError

Ranks = tuple[int, ...]


def find_topology(pipeline: Any, data_parallel: Any) -> PipelineTopology:
    """Return this rank's place in the job; every rank must ask at the same time.

    Args:
        pipeline: Process group or one-dimensional ``DeviceMesh`` of this rank's pipeline; None for all ranks.
        data_parallel: The same of the ranks that train the same stages on other data. None: every pipeline trains on
            data of its own.

    Raises:
        ConfigError: The groups do not fit each other.
    """
    rank = dist.get_rank()
    ours = ranks_of(pipeline)
    copies = None if data_parallel is None else ranks_of(data_parallel)
    if rank not in ours or (copies is not None and rank not in copies):
        raise ConfigError(f"perseus: rank {rank} is not in its own pipeline {ours} or data_parallel group {copies}.")
    places: list[Any] = [None] * dist.get_world_size()
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(places, (ours, copies), group=group)
    dist.destroy_process_group(group)
    pipelines = sorted({place[0] for place in places})
    if copies is None:
        return PipelineTopology(rank, ours, pipelines.index(ours), len(pipelines))
    # Pipelines at the same place in their data-parallel groups share their stages, by tensor parallelism and the like.
    at = ours.index(rank)
    number = sorted(copies).index(rank)
    peers = tuple(
        other
        for other, (theirs, their_copies) in enumerate(places)
        if theirs.index(other) == at and sorted(their_copies).index(other) == number
    )
    return PipelineTopology(rank, ours, number, len(copies), peers if len(peers) > 1 else ())


def ranks_of(group: Any) -> Ranks:
    """Return the global ranks of a process group or one-dimensional ``DeviceMesh``, in its order; None: all ranks."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
