"""Collectives between all ranks and rank 0 that run during training.

Rank 0 serves a key-value store of torch, separate from that of the job. All ranks connect to it over TCP. In an
*exchange*, each rank writes its data to its own key. Rank 0 reads all of them, computes one answer and writes it to
another key. A thread of Perseus waits for the answer, so neither the training thread nor a GPU stream is involved. All
other collectives are exchanges for which the training thread waits.

A rank that loses its connection or waits too long reports this in the store, and rank 0 ends the store. Then all ranks
lose their connections, return to default clocks, and continue training. At an orderly end, the last rank that needs the
store ends it in the same way.

Any process that can reach the store's port may write to it. Therefore data that ranks unpickle is signed with a key
that rank 0 has distributed by the job's own collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import math
import os
import pickle
import queue
import resource
import secrets
import socket
import statistics
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from perseus_ds.errors import ConnectionLostError, PerseusError
from perseus_ds.timebase import Timebase

T = TypeVar("T")
Numbers: TypeAlias = npt.NDArray[np.float64]
Reduce: TypeAlias = Callable[[Numbers, list[Any]], T]
"""Called with the numbers of all ranks, shape (ranks, numbers), and the value of each or None. Returns the answer."""
# Running ranks, which a collective of the job has shown to be present, connect within this time.
_SETUP_TIMEOUT = timedelta(minutes=3)
# Threads of Perseus wait until rank 0 ends the store. Training threads have a shorter limit.
_NO_TIMEOUT = timedelta(days=365)
_CONNECT_S = 10.0
_SLICE_S = 1.0
_LONGEST_WAIT_S = 1800.0
# How long a process that ends waits: rank 0 for others that need its store, others for what is under way.
_RANK_0_ENDS_S, _RANK_ENDS_S = 5.0, 1.0
# Name of the first channel, and key of the reason why rank 0 ends the store (empty at an orderly end).
_FIRST, _END = "perseus", "perseus/end"
_SIGNATURE = 32  # bytes
_BARRIERS = 5
# Files that a process may have open in addition to connections.
_OTHER_FILES = 512
_THIS_NODE = ("localhost", "127.0.0.1", "::1")
logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class PipelineTopology:
    """Position of this rank in the job.

    Attributes:
        pipeline: Global ranks of this rank's pipeline, first stage first.
        data_parallel_rank: Number of the pipeline of this rank.
        data_parallel: Number of pipelines.
        stage_peers: Global ranks that share this rank's stage by tensor parallelism, including this rank.
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
        """True if this rank belongs to rank 0's pipeline, which is the one displayed."""
        return 0 in self.pipeline

    @property
    def tensor_parallel(self) -> int:
        return max(1, len(self.stage_peers))


class Communicator:
    """Collectives among the ranks of a job. All ranks construct it and call its methods together.

    After a connection is lost, all methods raise a ``ConnectionLostError`` on all ranks.

    Attributes:
        pipeline_of_rank: On rank 0, the data-parallel pipeline of each rank. Empty on other ranks.
    """

    def __init__(
        self,
        topology: PipelineTopology | Callable[[Communicator], PipelineTopology],
        channel: StoreChannel | None = None,
    ) -> None:
        """Connect this rank to rank 0. The topology may be computed with collectives."""
        self._channel = channel or StoreChannel(Connection.of_job())
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        # Time of each event by this node's clock, and its line.
        self._events: deque[tuple[float, bytes]] = deque()
        self._received: deque[tuple[float, bytes]] = deque()
        self.topology = topology if isinstance(topology, PipelineTopology) else topology(self)
        self.pipeline_of_rank = np.array(self.gather(self.topology.data_parallel_rank), dtype=np.int64)

    @property
    def is_rank_0(self) -> bool:
        """True on rank 0, which writes files and prints for the job."""
        return self.rank == 0

    @property
    def is_connected(self) -> bool:
        """True while the job's process groups exist."""
        return dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on the others."""
        values: list[T] = []
        self._all(value, values.extend)
        return values

    def computed_on_rank_0(self, compute: Callable[[], T]) -> T:
        """Return the result of rank 0's computation on all ranks. Its exception is raised on all ranks.

        An ``OSError`` keeps its type.
        """
        computed: Any = None
        if self.is_rank_0:
            try:
                computed = compute()
            except Exception as error:
                computed = error if isinstance(error, OSError) else _known(error)  # a full disk may pass
        computed = self._all(None, lambda _: computed)
        if isinstance(computed, Exception):
            raise computed
        return computed  # type: ignore[no-any-return]

    def raise_on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call a function on every rank and return its value.

        The first rank's exception is raised on all ranks.
        """
        problem: PerseusError | None = None
        try:
            value = function()
        except Exception as error:
            problem = _known(error)
        found = self.first_not_none(problem)
        if found is not None:
            raise found
        return value

    def first_not_none(self, value: T | None) -> T | None:
        """Return, on all ranks, the value of the first rank that has one. None if no rank has one."""
        return self._all(value, lambda values: next((found for found in values if found is not None), None))

    def all_max(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self._channel.exchange([value], None, lambda numbers, _: float(numbers.max())).result()

    def all_sum(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        return self._channel.exchange([value], None, lambda numbers, _: float(numbers.sum())).result()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._all(None, lambda _: None)

    def pipeline_gather(self, value: T) -> list[T]:
        """Return the value of every rank of this rank's pipeline, first stage first."""
        return self._all(value, list, self.topology.pipeline)

    def ahead_s(self, timebase: Timebase) -> float:
        """Return how far this rank's clock is ahead of that of its pipeline's first rank [s].

        All ranks of the pipeline call this together. It relies on ranks leaving a barrier at the same time.
        """
        moments_s = []
        for _ in range(_BARRIERS):
            self.pipeline_gather(None)
            moments_s.append(timebase.now_s())
        first_s = self.pipeline_gather(moments_s)[0]
        return statistics.median(own_s - their_s for own_s, their_s in zip(moments_s, first_s, strict=True))

    def start_exchange(self, numbers: Sequence[float], reduce: Callable[[Numbers], T]) -> Pending[T | None]:
        """Start to send numbers to rank 0, which computes an answer for all ranks.

        Pending events are sent too.

        Args:
            numbers: Numbers of this rank, of the same length on all ranks.
            reduce: Computes the answer on rank 0, on a thread of Perseus. If it fails, the answer is None.
        """

        def reduced(numbers: Numbers, events: list[list[tuple[float, bytes]] | None]) -> T:
            now_s = time.monotonic()
            self._received.extend((now_s - age_s, line) for of_rank in events for age_s, line in of_rank or ())
            return reduce(numbers)

        return self._channel.exchange(numbers, _ages_of(self._events) or None, reduced)

    def open_channel(self) -> StoreChannel:
        """Return a channel for exchanges that may run in parallel to others."""
        return self._channel.another()

    def send_event(self, line: bytes) -> None:
        """Send a line to rank 0 with the next exchange. Thread-safe."""
        self._events.append((time.monotonic(), line.strip()))

    def received_events(self) -> list[tuple[float, bytes]]:
        """Return, on rank 0, the age [s] and the line of each event received since the last call."""
        return _ages_of(self._received)

    def _all(self, value: Any, reduce: Callable[[list[Any]], T], among: Sequence[int] = ()) -> T:
        return self._channel.exchange([], value, lambda _, values: reduce(values), among).result()


def _ages_of(events: deque[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Remove all events and return the age [s] and the line of each."""
    now_s = time.monotonic()
    taken = [events.popleft() for _ in range(len(events))]
    return [(now_s - made_s, line) for made_s, line in taken]


def _known(error: Exception) -> PerseusError:
    """Return an error that other ranks can raise too."""
    if isinstance(error, PerseusError):
        return error
    logger.debug("perseus: unexpected", exc_info=True)
    return PerseusError(f"{type(error).__name__}: {error}")


@dataclass
class Connection:
    """Connection of this rank to the store that rank 0 serves.

    Attributes:
        address: Host and port of the store.
        secret: Key that all ranks share, with which they sign their data.
        cause: Reason for the loss of the connection. Empty while connected.
        longest_wait_s: Maximum time for which a training thread waits for other ranks [s].
    """

    rank: int
    world_size: int
    address: tuple[str, int]
    secret: bytes = field(default=b"", repr=False)
    cause: str = ""
    longest_wait_s: float = _LONGEST_WAIT_S
    _server: Any = None

    @classmethod
    def of_job(cls) -> Connection:
        """Serve a store on rank 0 of a job with initialised process groups, and connect.

        All ranks call this together.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        server = None
        served: list[Any] = [None]
        if rank == 0:
            try:
                _allow_files(world_size + _OTHER_FILES)
                host = os.environ.get("MASTER_ADDR") or socket.gethostname()
                server = _store(host, 0, is_master=True)
                served = [((host, server.port), secrets.token_bytes(), socket.gethostname())]
            except (RuntimeError, OSError) as error:
                served = [PerseusError(f"rank 0 cannot serve a key-value store: {_first_line(error)}")]
        dist.broadcast_object_list(served)
        if isinstance(served[0], PerseusError):
            raise served[0]
        (host, port), secret, node = served[0]
        # On a single node, launchers set MASTER_ADDR to an address that is different on each node.
        address = (node if host in _THIS_NODE and node != socket.gethostname() else host, port)
        # Shorter than the timeout of the job's own collectives, which would end the job.
        longest_wait_s = min(_LONGEST_WAIT_S, _timeout_s() / 2)
        connection = cls(rank, world_size, address, secret, longest_wait_s=longest_wait_s)
        if server is not None:
            connection.serve(server)
        return connection

    def serve(self, server: Any) -> None:
        """Keep the store on rank 0 until a rank requests its end."""
        self._server = server
        _Thread(self, partial(self._keep_until_end, self.open()))

    def _keep_until_end(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, or a connection is broken
            self._end(store.get(_END).decode())

    def open(self) -> Any:
        """Return a client of the store. If it cannot be reached, the error describes what to set."""
        self.check()
        host, port = self.address
        try:
            store = _store(host, port)
        except RuntimeError as error:
            raise PerseusError(
                f"rank {self.rank} cannot connect to rank 0 at {host}:{port}: {_first_line(error)}. Set "
                "MASTER_ADDR, on every node, to an address of rank 0's node that all nodes reach, and let them "
                "connect with any port there."
            ) from error
        store.set_timeout(_NO_TIMEOUT)
        return store

    def seal(self, key: str, value: Any) -> bytes:
        """Return a signed value for a key."""
        content = zlib.compress(pickle.dumps(value), 1)
        return self._signature(key, content) + content

    def unseal(self, key: str, sealed: bytes) -> Any:
        """Return the value of a key. Raises an error if it is not signed."""
        signature, content = sealed[:_SIGNATURE], sealed[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(key, content)):
            raise ConnectionLostError(f"the value of {key} is not signed by this job")
        return pickle.loads(zlib.decompress(content))

    def _signature(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self.secret, f"{key} ".encode() + content, "sha256")

    def check(self) -> None:
        """Raise a :class:`~perseus_ds.errors.ConnectionLostError` if the connection is lost."""
        if self.cause:
            raise ConnectionLostError(self.cause)

    def lose(self, cause: object) -> ConnectionLostError:
        """Give up the connection, also for all other ranks, and return the error to raise."""
        if not self.cause:
            said = f"rank {self.rank}: {_first_line(cause)}"
            self._end(said)
            if self.rank > 0:
                _Thread(self, partial(self._say, said))
        return ConnectionLostError(self.cause)

    def _end(self, said: str) -> None:
        """End the store on rank 0. Record the cause, unless this is the orderly end."""
        if said:
            self.cause = self.cause or f"a connection between ranks is lost ({said})"
        self._server = None  # its only reference: the connections of all ranks are closed

    def cut(self) -> None:
        """End all pending calls to the store by breaking this process's connections to it."""
        self._end("this process ends")
        host, port = self.address
        peers = set()
        with contextlib.suppress(OSError):
            peers = {address[0] for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # not a socket, or one without a peer
                found = socket.socket(fileno=int(name))
                try:
                    if found.family != socket.AF_UNIX:
                        peer = found.getpeername()
                        if peer[1] == port and str(peer[0]).removeprefix("::ffff:") in peers:
                            found.shutdown(socket.SHUT_RDWR)
                finally:
                    found.detach()

    def _say(self, cause: str) -> None:
        """Request rank 0 to end the store, over a new connection."""
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, or cannot be reached
            socket.create_connection(self.address, _CONNECT_S).close()  # torch logs a lot about closed ports
            _store(*self.address).set(_END, cause)


class StoreChannel:
    """Runs collectives one after the other with its own client of the store and its own thread.

    All ranks start the same collectives in the same order.
    """

    def __init__(self, connection: Connection, name: str = _FIRST) -> None:
        """Connect the client. Each channel of a connection has its own name."""
        self.rank, self.world_size = connection.rank, connection.world_size
        self._connection = connection
        self._name = name
        self._store = connection.open()
        self._channels = 0
        self._exchanges: Counter[str] = Counter()
        self._tasks: _Tasks = queue.SimpleQueue()
        _Thread(connection, partial(_work, self._tasks, connection, self._store, name), self._tasks)
        weakref.finalize(self, self._tasks.put, None)

    def exchange(
        self, numbers: Sequence[float], value: Any, reduce: Reduce[T], among: Sequence[int] = ()
    ) -> Pending[T]:
        """Start an exchange.

        Args:
            numbers: Numbers of this rank, of the same length on all ranks.
            value: Any value that can be pickled. None costs nothing.
            reduce: Computes the answer on the first of the ranks. If it fails, the answer is None.
            among: Ranks that participate, including this one. All ranks if empty.
        """
        self._connection.check()
        ranks = among or range(self.world_size)
        group = f"{self._name}/{ranks[0]}-{ranks[-1]}"
        self._exchanges[group] += 1
        number, connection, future = self._exchanges[group], self._connection, futures.Future[T]()
        before, own, answer = (
            f"{group}/{number - 1}/answer",
            f"{group}/{number}/{self.rank}",
            f"{group}/{number}/answer",
        )
        row = np.array(numbers, np.float64).tobytes()

        def run() -> None:
            try:
                self._store.set(own, row if value is None else row + connection.seal(own, value))
                if self.rank == ranks[0]:
                    answered = self._reduced([f"{group}/{number}/{rank}" for rank in ranks], len(row), reduce)
                    self._store.set(answer, connection.seal(answer, answered))
                    # All ranks have read it, otherwise they would not have started this exchange.
                    self._store.delete_key(before)
                else:
                    answered = connection.unseal(answer, self._store.get(answer))
                self._store.delete_key(own)
                future.set_result(answered)
            except Exception as error:  # the store or the connection is lost
                future.set_exception(connection.lose(error))

        self._tasks.put(run)
        return Pending(future, connection)

    def another(self) -> StoreChannel:
        """Return a channel with collectives that do not wait for those of this one."""
        self._channels += 1
        return StoreChannel(self._connection, f"{self._name}/{self._channels}")

    def _reduced(self, keys: Sequence[str], row: int, reduce: Reduce[T]) -> Any:
        """Wait for the data of all ranks, which starts with ``row`` bytes of numbers, and return the answer."""
        brought = self._store.multi_get(keys)
        rows = np.frombuffer(b"".join(content[:row] for content in brought)).reshape(len(keys), -1)
        sealed = zip(keys, (content[row:] for content in brought), strict=True)
        values = [self._connection.unseal(key, content) if content else None for key, content in sealed]
        try:
            return reduce(rows, values)
        except Exception:  # the other ranks wait for their answers
            logger.exception("perseus: unexpected")
            return None


class Pending(Generic[T]):
    """A collective in progress."""

    def __init__(self, future: futures.Future[T], connection: Connection) -> None:
        self._future = future
        self._connection = connection

    def result(self) -> T:
        """Wait for the answer. Raises an error if a connection is lost or after the maximum waiting time."""
        longest_wait_s = self._connection.longest_wait_s
        waited_s, slice_s = 0.0, min(_SLICE_S, longest_wait_s / 2)
        while True:
            try:
                return self._future.result(slice_s)
            except futures.TimeoutError:
                waited_s += slice_s  # not by the clock, because a scheduler may suspend all ranks for hours
            if waited_s > longest_wait_s:
                raise self._connection.lose(f"nothing has arrived for {waited_s:.0f} s")

    def is_over_within(self, timeout_s: float) -> bool:
        """Wait for at most the given time [s]. Return True if the collective has ended."""
        return bool(futures.wait([self._future], timeout_s).done)


_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def _work(tasks: _Tasks, connection: Connection, store: Any, name: str) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it references the channel, and deleting the channel ends this thread
    with contextlib.suppress(RuntimeError):  # the store is gone
        if name == _FIRST and not connection.cause and store.add("perseus/left", 1) == connection.world_size:
            store.set(_END, b"")


class _Thread(threading.Thread):
    """Thread that calls the store. It must end before the interpreter: otherwise torch aborts the process."""

    def __init__(self, connection: Connection, work: Callable[[], None], tasks: _Tasks | None = None) -> None:
        super().__init__(target=work, name="perseus-ranks", daemon=True)
        self.connection, self.tasks = connection, tasks
        self.start()


@atexit.register
def _end_threads() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    for thread in threads:
        if thread.tasks is not None:
            thread.tasks.put(None)
    now_s = time.monotonic()
    for thread in threads:
        end_s = now_s + (_RANK_ENDS_S if thread.connection.rank else _RANK_0_ENDS_S)
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            thread.connection.cut()
            thread.join(_RANK_ENDS_S)


def _allow_files(count: int) -> None:
    """Raise the limit of open files of this process if possible. Each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _store(host: str, port: int, *, is_master: bool = False) -> Any:
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=is_master, wait_for_workers=False, timeout=_SETUP_TIMEOUT)


def _timeout_s() -> float:
    """Return the timeout of the job's own collectives [s]."""
    try:
        device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
        backend = c10d._get_default_group()._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError, ValueError):
        return math.inf


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
