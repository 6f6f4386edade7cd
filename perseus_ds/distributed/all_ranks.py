"""Collectives among all ranks of a job."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from perseus_ds.distributed.connections import Connections
from perseus_ds.distributed.exchange import Answers, Exchanges, PendingAnswer, Widths, start_exchange
from perseus_ds.distributed.groups import GlooGroup
from perseus_ds.distributed.messages import Messages
from perseus_ds.distributed.tree import Tree
from perseus_ds.errors import PerseusError

T = TypeVar("T")
logger = logging.getLogger("perseus_ds")


class AllRanks:
    """All ranks of the job, as a tree; every rank must make it, and call each method, at the same time.

    No rank is connected with all others, and none but rank 0 gets a value of each. Exchanges and other collectives
    share the tree: one that waits begins when the last exchange is over, which each rank must have begun. Once a
    connection is lost, all methods raise :class:`~perseus_ds.errors.ConnectionLostError`, on all ranks.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        messages: Of this rank to rank 0; they go with the exchanges.
    """

    def __init__(self) -> None:
        """Connect this rank with others of the job.

        Raises:
            PerseusError: Ranks cannot be connected; the message says what to set.
        """
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.messages = Messages()
        _wait_for_all_ranks()
        self._name = _next_name(self.world_size)
        self._connections = Connections(self._name)
        self._tree = self._tree_of("all", range(self.world_size))
        self._exchange: PendingAnswer | None = None
        self._connected = 0

    def _tree_of(self, name: str, ranks: Sequence[int]) -> Tree:
        return Tree(ranks, self.rank, partial(self._group_of, name))

    def _group_of(self, tree: str, ranks: Sequence[int], level: str) -> GlooGroup:
        return GlooGroup(ranks, f"{self._name}/{tree}/{level}", self._connections)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.rank == 0

    @property
    def is_connected(self) -> bool:
        """Whether the job has not ended its process groups."""
        return dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, an empty list elsewhere."""
        values = self._settled().combine([value], lambda parts: list(itertools.chain.from_iterable(parts)))
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
        made = self._settled().broadcast(made)
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
        tree = self._settled()
        return tree.broadcast(tree.combine(value, combined))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._settled().barrier()

    def start_exchange(self, numbers: Sequence[float], answers: Answers, widths: Widths) -> PendingAnswer:
        """Begin to send every rank's numbers to rank 0, and its answers back, while training goes on.

        Args:
            numbers: Of this rank, as many as of every other.
            answers: On rank 0, makes the answers, on a thread of torch.
            widths: Of an answer, and of what is sent with the numbers.
        """
        self._exchange = start_exchange(self._settled(), numbers, answers, widths, self.messages)
        return self._exchange

    def more_exchanges(self) -> Exchanges:
        """Connect all ranks for exchanges that may be under way at the same time as others."""
        self._connected += 1
        return Exchanges(self._tree_of(f"exchanges/{self._connected}", range(self.world_size)))

    def _settled(self) -> Tree:
        """Return the tree once nothing is under way on it: messages of two collectives must not mix."""
        if self._exchange is not None:
            self._exchange.settle()
        return self._tree


def _wait_for_all_ranks() -> None:
    """Wait for all ranks as long as the job's own collectives may take: some begin to train minutes after others."""
    devices = [torch.cuda.current_device()] if "nccl" in dist.get_backend() else None
    dist.barrier(device_ids=devices)


def _next_name(world_size: int) -> str:
    """Return the same name on all ranks, another one each time that all ask for it."""
    asked = dist.distributed_c10d._get_default_store().add("perseus", 1)
    return str((asked - 1) // world_size)
