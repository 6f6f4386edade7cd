"""Where a rank stands in a job whose pipelines are process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from perseus_ds.errors import ConfigError
from perseus_ds.ranks import Communicator, PipelineTopology

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankGroups:
    """The groups of this rank.

    Attributes:
        pipeline: Global ranks of its pipeline, first stage first.
        data_parallel: Those that train the same stages on other data; None where every pipeline has data of its own.
    """

    pipeline: Ranks
    data_parallel: Ranks | None

    @classmethod
    def of(cls, pipeline: Any, data_parallel: Any) -> RankGroups:
        """Read them.

        Args:
            pipeline: Process group or one-dimensional ``DeviceMesh`` of this rank's pipeline; None for all ranks.
            data_parallel: The same of the ranks that train the same stages on other data. None: every pipeline trains
                on data of its own.

        Raises:
            ConfigError: This rank is not in its own groups.
        """
        rank, ours = dist.get_rank(), ranks_of(pipeline)
        copies = None if data_parallel is None else ranks_of(data_parallel)
        if rank not in ours or (copies is not None and rank not in copies):
            raise ConfigError(
                f"perseus: rank {rank} is not in its own pipeline {ours} or data_parallel group {copies}."
            )
        return cls(ours, copies)

    def topology(self, all_ranks: Communicator) -> PipelineTopology:
        """Return this rank's place in the job; every rank must ask at the same time."""
        rank, ours, copies = all_ranks.rank, self.pipeline, self.data_parallel
        at, number = ours.index(rank), -1 if copies is None else sorted(copies).index(rank)
        rows = all_ranks.gather((at, number, ours[0]))
        places = all_ranks.computed_on_rank_0(lambda: np.array(rows, dtype=np.int32))
        if copies is None:
            pipelines = np.unique(places[:, 2]).tolist()
            return PipelineTopology(rank, ours, pipelines.index(ours[0]), len(pipelines))
        # Pipelines at the same place in their data-parallel groups share their stages, by tensor parallelism and the
        # like.
        peers = tuple(np.flatnonzero((places[:, :2] == (at, number)).all(axis=1)).tolist())
        return PipelineTopology(rank, ours, number, len(copies), peers if len(peers) > 1 else ())


def ranks_of(group: Any) -> Ranks:
    """Return the global ranks of a process group or one-dimensional ``DeviceMesh``, in its order; None: all ranks."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
