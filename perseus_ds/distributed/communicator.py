"""Collectives among the ranks of a job, of a pipeline and of a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import numpy as np

from perseus_ds.distributed.all_ranks import AllRanks
from perseus_ds.distributed.topology import PipelineTopology
from perseus_ds.distributed.tree import Tree

T = TypeVar("T")


class Communicator(AllRanks):
    """Collectives among ranks of the job; every rank must make it at the same time.

    Attributes:
        topology: Position of this rank.
        pipeline_of_rank: On rank 0, the data-parallel pipeline of each rank; elsewhere empty.
    """

    def __init__(self, topology: PipelineTopology | Callable[[AllRanks], PipelineTopology]) -> None:
        """Connect this rank with others of the job, and with those of its pipeline.

        Args:
            topology: Position of this rank; or what finds it, by asking all ranks.

        Raises:
            PerseusError: Ranks cannot be connected; the message says what to set.
        """
        super().__init__()
        self.topology = topology if isinstance(topology, PipelineTopology) else topology(self)
        pipeline = sorted(self.topology.pipeline)
        self._pipeline = self._group_of("pipeline", pipeline, "all") if len(pipeline) > 1 else None
        places = self.gather((self.topology.pipeline_rank, self.topology.data_parallel_rank))
        self.pipeline_of_rank = np.array([pipeline for _, pipeline in places], dtype=np.int64)
        self._place_of_rank = self.from_first(lambda: np.array([place for place, _ in places], dtype=np.int16))

    @cached_property
    def _stage(self) -> Tree:
        """The ranks that have this rank's stage; connected when they first ask each other for something."""
        same = self._place_of_rank == self._place_of_rank[self.rank]
        return self._tree_of("stage", np.flatnonzero(same).tolist())

    def stage_max(self, value: float) -> float:
        """Return the largest value among the ranks that have this rank's stage, in all pipelines."""
        return self._stage.broadcast(self._stage.combine(value, max))

    def pipeline_gather(self, value: T) -> list[T]:
        """Return the value of every rank of this rank's pipeline, first stage first."""
        if self._pipeline is None:
            return [value]
        by_rank = dict(zip(sorted(self.topology.pipeline), self._pipeline.all_gather(value), strict=True))
        return [by_rank[rank] for rank in self.topology.pipeline]

    def pipeline_barrier(self) -> None:
        """Wait for the ranks of this rank's pipeline."""
        if self._pipeline is not None:
            self._pipeline.barrier()
