"""Connects ranks by gloo, over the network interface that NCCL was told to use."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from perseus_ds.distributed.connections import Connections
from perseus_ds.errors import PerseusError

T = TypeVar("T")
# A rank may be late for its next iteration by as much as the job's own collectives allow; Perseus does not end the job.
_TIMEOUT = timedelta(days=7)
# To connect ranks that are all there, which the job's own collective has shown before.
_SETUP_TIMEOUT = timedelta(minutes=3)
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class GlooGroup:
    """Some ranks, all of which make it at once; values go to the first of them and come from it.

    It is none of torch's registered groups: those are named by how many a process has, which differs from rank to rank.

    Attributes:
        is_first: Whether this rank is the first one.
        connections: That it uses.
    """

    def __init__(self, ranks: Sequence[int], name: str, connections: Connections) -> None:
        """Connect them.

        Args:
            ranks: Global ranks, in ascending order.
            name: Another one for each group that this rank is in.
            connections: Of this rank; all methods raise :class:`~perseus_ds.errors.ConnectionLostError` once one of
                them is lost.

        Raises:
            PerseusError: They cannot be connected; the message says what to set.
        """
        place = ranks.index(dist.get_rank())
        self.is_first = place == 0
        self._size = len(ranks)
        self._group = _connect(f"perseus/{name}/{ranks[0]}", place, len(ranks))
        self.connections = connections
        connections.add(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on the first, an empty list elsewhere."""
        content, sizes = self._with_sizes(value)
        received = self._gather(_of_size(content, max(sizes))).wait()
        return [_loaded(content[:size]) for content, size in zip(received, sizes, strict=False)]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        content, sizes = self._with_sizes(value)
        received = self._all_gather(_of_size(content, max(sizes)))
        return [_loaded(content[:size]) for content, size in zip(received, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value."""
        content = _dumped(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size = self._broadcast(torch.tensor([len(content)]))
        if not self.is_first:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(content)
        return value if self.is_first else _loaded(content)

    def barrier(self) -> None:
        """Wait for all of them."""
        options = _with_timeout(c10d.BarrierOptions())
        self._begin(lambda: self._group.barrier(options), None).wait()

    def start_gather(self, numbers: torch.Tensor) -> Underway[list[torch.Tensor]]:
        """Begin to gather numbers, as many of each rank; on the first rank the result has them all."""
        return self._gather(numbers)

    def start_scatter(self, numbers: Sequence[torch.Tensor], shape: Sequence[int]) -> Underway[torch.Tensor]:
        """Begin to scatter numbers of a shape; on the first rank, those for each rank are given."""
        own = torch.empty(tuple(shape), dtype=torch.float64)
        options = _with_timeout(c10d.ScatterOptions())
        options.rootRank = 0
        sent = [list(numbers)] if self.is_first else []
        return self._begin(lambda: self._group.scatter([own], sent, options), own)

    def _with_sizes(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """Return a value as bytes, and how many the values of all ranks have."""
        content = _dumped(value)
        return content, list(map(int, self._all_gather(torch.tensor([len(content)]))))

    def _gather(self, own: torch.Tensor) -> Underway[list[torch.Tensor]]:
        received = [torch.empty_like(own) for _ in range(self._size)] if self.is_first else []
        options = _with_timeout(c10d.GatherOptions())
        options.rootRank = 0
        into = [received] if self.is_first else []
        return self._begin(lambda: self._group.gather(into, [own], options), received)

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(own) for _ in range(self._size)]
        options = _with_timeout(c10d.AllgatherOptions())  # type: ignore[attr-defined]
        return self._begin(lambda: self._group.allgather([received], [own], options), received).wait()

    def _broadcast(self, values: torch.Tensor) -> torch.Tensor:
        options = _with_timeout(c10d.BroadcastOptions())
        options.rootRank = 0
        return self._begin(lambda: self._group.broadcast([values], options), values).wait()

    def _begin(self, begin: Callable[[], Any], result: T) -> Underway[T]:
        self.connections.check()
        return Underway(begin(), result, self.connections)


def _with_timeout(options: Any) -> Any:
    options.timeout = _TIMEOUT
    return options


def _dumped(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _loaded(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())


def _of_size(content: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=content.dtype)
    padded[: len(content)] = content
    return padded


class Underway(Generic[T]):
    """A collective that was begun.

    Args:
        work: As torch returns it.
        result: Complete once it is over.
        connections: That it uses.
    """

    def __init__(self, work: Any, result: T, connections: Connections) -> None:
        self._work = work
        self._result = result
        self._connections = connections

    def is_over(self) -> bool:
        """Return whether there is nothing left to wait for."""
        return bool(self._work.is_completed())

    def wait(self) -> T:
        """Wait until it is over.

        Raises:
            ConnectionLostError: What is waited for may never come.
        """
        if not self.is_over():
            self._connections.wait(self._is_over_within)
        return self._result_of(self._work.wait)

    def then(self, follow: Callable[[Callable[[], T]], None]) -> None:
        """Call a function on a thread of torch once it is over; what it is given returns the result or raises."""
        self._work.get_future().then(lambda future: follow(lambda: self._result_of(future.value)))

    def _is_over_within(self, timeout_s: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:  # it takes longer, or it has failed
            return self.is_over()
        return True

    def _result_of(self, end: Callable[[], object]) -> T:
        try:
            end()
        except RuntimeError as error:
            raise self._connections.lose(error) from error
        return self._result


def _connect(name: str, place: int, size: int) -> Any:
    """Return a group on gloo, which only its members make; no NCCL communicator is split.

    Raises:
        PerseusError: They cannot be connected.
    """
    store = _Addresses(c10d.PrefixStore(name, c10d._get_default_store()), size)
    with _interface_of_nccl():
        try:
            return dist.ProcessGroupGloo(store, place, size, _SETUP_TIMEOUT)
        except (RuntimeError, OSError) as error:
            used = os.environ.get(_GLOO) or "the one that this host's name resolves to"
            raise PerseusError(
                f"rank {dist.get_rank()} cannot be connected with the others by gloo, over the network interface "
                f"{used}: {str(error).splitlines()[0]}. Set {_GLOO}, on every node, to the interface by which nodes "
                "reach each other; `ip -brief address` lists them."
            ) from error


class _Addresses(c10d.Store):
    """A store as gloo uses it to connect a group: asked for the address of one rank, it gets those of all at once.

    The job's store answers all ranks of the job one after the other, so the number of questions decides how long that
    takes.

    Args:
        store: Of the group.
        size: Number of ranks; keys end with the place of one.
    """

    def __init__(self, store: c10d.Store, size: int) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._known.get(key) or self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = _SETUP_TIMEOUT) -> None:
        if self._known.keys() >= set(keys):
            return
        device, _, place = keys[0].rpartition("/")
        of_all = [f"{device}/{place}" for place in range(self._size)] if place.isdigit() else keys
        self._store.wait(of_all, timeout)
        self._known |= zip(of_all, self._store.multi_get(of_all), strict=True)


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
