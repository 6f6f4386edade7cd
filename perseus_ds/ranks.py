"""What the ranks of a job tell each other, on a CPU group of their own so that no GPU stream is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where this rank stands.

    Attributes:
        rank: Global rank.
        pipeline_rank: Position in its pipeline, 0 first.
        pipeline_ranks: Ranks per pipeline.
        data_parallel_rank: Which pipeline.
        data_parallel: Number of pipelines.
        tensor_parallel: Ranks that share a stage.
    """

    rank: int
    pipeline_rank: int
    pipeline_ranks: int
    data_parallel_rank: int = 0
    data_parallel: int = 1
    tensor_parallel: int = 1


class Ranks:
    """Collectives among all ranks of the job."""

    def __init__(self, place: Place) -> None:
        """Make the group; every rank must do so at the same time."""
        self.place = place
        self.world_size = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and speaks for all."""
        return self.place.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, gathered, dst=0, group=self._group)
        return gathered

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value everywhere."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[return-value]

    def all_max(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return float(tensor)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._group)

    def start_all_gather(self, values: list[float]) -> Callable[[], torch.Tensor]:
        """Start to exchange a few numbers in the background.

        Returns:
            A function that waits for the result, shape (ranks, values).
        """
        ours = torch.tensor(values, dtype=torch.float64)
        result = [torch.empty_like(ours) for _ in range(self.world_size)]
        work = dist.all_gather(result, ours, group=self._group, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return torch.stack(result)

        return finish
