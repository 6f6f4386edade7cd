"""Communication between the ranks of a job, on separate CPU groups so that no GPU stream is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from perseus_ds.errors import PerseusError

T = TypeVar("T")
# A rank may be late for its next iteration by as much as the job's own collectives allow; Perseus does not end the job.
_TIMEOUT = timedelta(days=7)
_POLL_S = 0.002
logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class PipelineTopology:
    """Position of this rank in the job.

    Attributes:
        rank: Global rank.
        pipeline: Global ranks of this rank's pipeline, first stage first.
        data_parallel_rank: Which pipeline.
        data_parallel: Number of pipelines.
        stage_peers: Global ranks that share this rank's stage by tensor parallelism, itself included.
    """

    rank: int
    pipeline: tuple[int, ...]
    data_parallel_rank: int = 0
    data_parallel: int = 1
    stage_peers: tuple[int, ...] = ()

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline, 0 first."""
        return self.pipeline.index(self.rank)

    @property
    def pipeline_ranks(self) -> int:
        return len(self.pipeline)

    @property
    def tensor_parallel(self) -> int:
        return max(1, len(self.stage_peers))


class Pending:
    """Numbers of all ranks that are being sent."""

    def __init__(self, work: Any, received: list[torch.Tensor]) -> None:
        self._work = work
        self._received = received

    def result(self) -> torch.Tensor:
        """Wait for them; shape (ranks, values)."""
        self._work.wait()
        return torch.stack(self._received)

    def is_there_within(self, timeout_s: float) -> bool:
        """Wait for them for some time [s]; return whether they are there."""
        deadline_s = time.monotonic() + timeout_s
        while not self._work.is_completed():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True


class Communicator:
    """Collectives among all ranks of the job; every rank must make it at the same time."""

    def __init__(self, topology: PipelineTopology) -> None:
        self.topology = topology
        self.world_size = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._stage_group: Any = None
        peers: list[tuple[int, ...]] = [()] * self.world_size
        dist.all_gather_object(peers, topology.stage_peers, group=self._group)
        if any(len(p) > 1 for p in peers):
            groups = [list(p) for p in sorted(set(peers))]
            self._stage_group, _ = dist.new_subgroups_by_enumeration(groups, timeout=_TIMEOUT, backend="gloo")

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
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, gathered, dst=0, group=self._group)
        return gathered or []

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def from_first(self, make: Callable[[], T]) -> T:
        """Return, on all ranks, what rank 0 makes.

        Raises:
            PerseusError: What rank 0 raised, on all ranks, so that all of them continue alike.
            OSError: Likewise.
        """
        box: list[Any] = [None]
        if self.is_first:
            try:
                box = [make()]
            except (PerseusError, OSError) as error:
                box = [error]
            except Exception as error:
                logger.debug("perseus: unexpected", exc_info=True)
                box = [PerseusError(f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(box, src=0, group=self._group)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]  # type: ignore[no-any-return]

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
        for found in self.all_gather(problem):
            if found is not None:
                raise found

    def all_max(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return _max(value, self._group)

    def stage_max(self, value: float) -> float:
        """Return the largest value among the ranks that share this rank's stage."""
        return value if self._stage_group is None else _max(value, self._stage_group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._group)

    def start_all_gather(self, values: list[float]) -> Pending:
        """Begin to send every rank's numbers to all, while training goes on."""
        ours = torch.tensor(values, dtype=torch.float64)
        received = [torch.empty_like(ours) for _ in range(self.world_size)]
        return Pending(dist.all_gather(received, ours, group=self._group, async_op=True), received)

    def all_gather_numbers(self, values: list[float]) -> torch.Tensor:
        """Return every rank's numbers, shape (ranks, values)."""
        ours = torch.tensor(values, dtype=torch.float64)
        result = [torch.empty_like(ours) for _ in range(self.world_size)]
        dist.all_gather(result, ours, group=self._group)
        return torch.stack(result)


def _max(value: float, group: Any) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return float(tensor)
