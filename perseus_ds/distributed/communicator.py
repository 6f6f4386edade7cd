"""Collectives among the ranks of a job."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from perseus_ds.distributed.exchange import Answers, PendingAnswer, start_exchange
from perseus_ds.distributed.groups import GlooGroup
from perseus_ds.distributed.topology import PipelineTopology
from perseus_ds.distributed.tree import Tree
from perseus_ds.errors import PerseusError

T = TypeVar("T")
logger = logging.getLogger("perseus_ds")


class Communicator:
    """Collectives among all ranks of the job; every rank must make it at the same time.

    No rank is connected with all others, and none but rank 0 gets a value of each.

    Attributes:
        topology: Position of this rank.
        world_size: Number of ranks.
        pipeline_of_rank: On rank 0, the data-parallel pipeline of each rank; elsewhere empty.
    """

    def __init__(self, topology: PipelineTopology) -> None:
        """Connect this rank with others of the job, and with those of its pipeline.

        Args:
            topology: Position of this rank.

        Raises:
            PerseusError: Ranks cannot be connected; the message says what to set.
        """
        self.topology = topology
        self.world_size = dist.get_world_size()
        _wait_for_all_ranks()
        self._name = _next_name(self.world_size)
        # All ranks make these groups in one order, so that none waits for another in a circle.
        self._tree = self._tree_of("all", range(self.world_size))
        # What is under way at any time has groups of its own: others are used in an order that all ranks know.
        self._exchanges = self._tree_of("exchanges", range(self.world_size))
        self._last: PendingAnswer | None = None
        pipeline = sorted(topology.pipeline)
        self._pipeline = GlooGroup(pipeline, f"{self._name}/pipeline") if len(pipeline) > 1 else None
        places = self.gather((topology.pipeline_rank, topology.data_parallel_rank))
        self.pipeline_of_rank = np.array([pipeline for _, pipeline in places], dtype=np.int64)
        self._place_of_rank = self.from_first(lambda: np.array([place for place, _ in places], dtype=np.int16))

    def _tree_of(self, name: str, ranks: Sequence[int]) -> Tree:
        return Tree(ranks, self.topology.rank, lambda some, level: GlooGroup(some, f"{self._name}/{name}/{level}"))

    @cached_property
    def _stage(self) -> Tree:
        """The ranks that have this rank's stage; connected when they first ask each other for something."""
        same = self._place_of_rank == self._place_of_rank[self.topology.rank]
        return self._tree_of("stage", np.flatnonzero(same).tolist())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.topology.rank == 0

    @property
    def is_connected(self) -> bool:
        """Whether the job has not ended its process groups."""
        return dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, an empty list elsewhere."""
        values = self._tree.combine([value], lambda parts: list(itertools.chain.from_iterable(parts)))
        return values if self.is_first else []

    def from_first(self, make: Callable[[], T]) -> T:
        """Return, on all ranks, what rank 0 makes.

        Raises:
            PerseusError: What rank 0 raised, on all ranks, so that all of them continue alike.
            OSError: Likewise.
        """
        made: Any = None
        if self.is_first:
            try:
                made = make()
            except (PerseusError, OSError) as error:
                made = error
            except Exception as error:
                logger.debug("perseus: unexpected", exc_info=True)
                made = PerseusError(f"{type(error).__name__}: {error}")
        made = self._tree.broadcast(made)
        if isinstance(made, Exception):
            raise made
        return made  # type: ignore[no-any-return]

    def together(self, check: Callable[[], object]) -> None:
        """Run a check on every rank; if it fails on one, it fails on all.

        Raises:
            PerseusError: What the first rank that failed raised.
        """
        problem: PerseusError | None = None
        try:
            check()
        except PerseusError as error:
            problem = error
        except Exception as error:
            logger.debug("perseus: unexpected", exc_info=True)
            problem = PerseusError(f"{type(error).__name__}: {error}")
        found = self.first_of(problem)
        if found is not None:
            raise found

    def first_of(self, value: T | None) -> T | None:
        """Return the value of the first rank that has one, on all ranks; None if none has."""
        return self.agree(value, lambda values: next((found for found in values if found is not None), None))

    def all_max(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self.agree(value, max)

    def all_sum(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        return self.agree(value, sum)

    def agree(self, value: T, combined: Callable[[list[T]], T]) -> T:
        """Return, on all ranks, what their values combine to.

        Args:
            value: Of this rank.
            combined: Combines values of ranks one after the other, in order; called for some at a time.
        """
        return self._tree.broadcast(self._tree.combine(value, combined))

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

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._tree.barrier()

    def start_exchange(self, numbers: Sequence[float], answers: Answers, width: int) -> PendingAnswer:
        """Begin to send every rank's numbers to rank 0, and its answers back, while training goes on.

        Args:
            numbers: Of this rank, as many as of every other.
            answers: On rank 0, makes the answers, on a thread of torch.
            width: Numbers of the answer to a rank.
        """
        if self._last is not None:
            self._last.settle()  # its messages and these must not mix
        self._last = start_exchange(self._exchanges, numbers, answers, width)
        return self._last


def _wait_for_all_ranks() -> None:
    """Wait for all ranks as long as the job's own collectives may take: some begin to train minutes after others."""
    devices = [torch.cuda.current_device()] if "nccl" in dist.get_backend() else None
    dist.barrier(device_ids=devices)


def _next_name(world_size: int) -> str:
    """Return the same name on all ranks, another one each time that all ask for it."""
    asked = dist.distributed_c10d._get_default_store().add("perseus", 1)
    return str((asked - 1) // world_size)
