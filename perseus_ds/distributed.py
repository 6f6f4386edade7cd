"""Communication between the ranks of a job, on separate CPU groups so that no GPU stream is used."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from perseus_ds.errors import PerseusError

T = TypeVar("T")
# A rank may be late for its next iteration by as much as the job's own collectives allow; Perseus does not end the job.
_TIMEOUT = timedelta(days=7)
# To connect ranks that are all there, which the job's own collective has shown before.
_SETUP_TIMEOUT = timedelta(minutes=3)
_POLL_S = 0.002
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
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
    def is_shown(self) -> bool:
        """Whether this rank is in the pipeline whose operations are shown for all: rank 0's."""
        return 0 in self.pipeline

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
        """Connect this rank with all others, and with those of its pipeline and of its stage.

        Args:
            topology: Position of this rank.

        Raises:
            PerseusError: Ranks cannot be connected; the message says what to set.
        """
        self.topology = topology
        self.world_size = dist.get_world_size()
        _wait_for_all_ranks()
        self._group: Any = _connect(None)
        places = self.all_gather(topology.pipeline_rank)
        # All ranks make their pipeline's group before their stage's, so that none waits for another in a circle.
        self._pipeline_group: Any = self._among(topology.pipeline)
        self._stage_group: Any = self._among(
            [rank for rank, place in enumerate(places) if place == places[topology.rank]]
        )

    def _among(self, ranks: Sequence[int]) -> Any:
        """Return the group of some ranks, this one included; None if there is no other."""
        if len(ranks) == self.world_size:
            return self._group
        return _connect(sorted(ranks)) if len(ranks) > 1 else None

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
        """Return the largest value among the ranks that have this rank's stage, in all pipelines."""
        return value if self._stage_group is None else _max(value, self._stage_group)

    def pipeline_gather(self, value: T) -> list[T]:
        """Return the value of every rank of this rank's pipeline, first stage first."""
        if self._pipeline_group is None:
            return [value]
        gathered: list[Any] = [None] * self.topology.pipeline_ranks
        dist.all_gather_object(gathered, value, group=self._pipeline_group)
        by_rank = dict(zip(sorted(self.topology.pipeline), gathered, strict=True))
        return [by_rank[rank] for rank in self.topology.pipeline]

    def pipeline_barrier(self) -> None:
        """Wait for the ranks of this rank's pipeline."""
        if self._pipeline_group is not None:
            dist.barrier(group=self._pipeline_group)

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


def _wait_for_all_ranks() -> None:
    """Wait for all ranks as long as the job's own collectives may take: some begin to train minutes after others."""
    devices = [torch.cuda.current_device()] if "nccl" in dist.get_backend() else None
    dist.barrier(device_ids=devices)


def _connect(ranks: Sequence[int] | None) -> Any:
    """Return a group of some ranks on gloo, None for all; only its members make it, and no NCCL communicator is split.

    Raises:
        PerseusError: They cannot be connected.
    """
    local: dict[str, Any] = {} if ranks is None else {"ranks": list(ranks), "use_local_synchronization": True}
    with _interface_of_nccl():
        try:
            group = dist.new_group(backend="gloo", timeout=_SETUP_TIMEOUT, **local)
        except (RuntimeError, OSError) as error:
            used = os.environ.get(_GLOO) or "the one that this host's name resolves to"
            raise PerseusError(
                f"rank {dist.get_rank()} cannot be connected with the others by gloo, over the network interface "
                f"{used}: {str(error).splitlines()[0]}. Set {_GLOO}, on every node, to the interface by which nodes "
                "reach each other; `ip -brief address` lists them."
            ) from error
    dist.distributed_c10d._set_pg_timeout(_TIMEOUT, group)
    return group


@contextmanager
def _interface_of_nccl() -> Iterator[None]:
    """Let gloo use the interface that NCCL was told to use, unless gloo was told one of its own."""
    wanted = os.environ.get(_NCCL, "")
    if os.environ.get(_GLOO) or not wanted:
        yield
        return
    chosen = gloo_interface(wanted, _interfaces())
    if chosen is None:
        yield
        return
    os.environ[_GLOO] = chosen
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _interfaces() -> list[str]:
    """Return the network interfaces of this host that have an address and are up, the local one last."""
    states = psutil.net_if_stats()
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup and any(a.family.name.startswith("AF_INET") for a in addresses)
    ]
    return sorted(names, key=lambda name: name == "lo")


def gloo_interface(nccl_socket_ifname: str, interfaces: Sequence[str]) -> str | None:
    """Return the first interface that a value of ``NCCL_SOCKET_IFNAME`` permits; None if none is permitted.

    Args:
        nccl_socket_ifname: Prefixes of names, separated by commas; after ``=`` whole names, after ``^`` what is not
            permitted.
        interfaces: Names.
    """
    excludes = nccl_socket_ifname.startswith("^")
    rest = nccl_socket_ifname.removeprefix("^")
    whole = rest.startswith("=")
    names = [name.split(":")[0] for name in rest.removeprefix("=").split(",") if name]
    for interface in interfaces:
        named = any(interface == name if whole else interface.startswith(name) for name in names)
        if named != excludes:
            return interface
    return None
