"""Numbers of all ranks to rank 0, and its answer back, while training goes on.

Rank 0 serves a key-value store of torch, beside the job's own; every rank is connected with it, over a CPU's network.
In an *exchange*, each rank writes what it has to a key of its own; rank 0 reads all of them, computes one answer and
writes it to another key. A thread of Perseus waits for the answer: the training thread has no part in it, and no GPU
stream is used. All other collectives are exchanges for whose answer the training thread waits.

A rank that loses its connection, or waits too long, says so in the store, and rank 0 ends the store: so all ranks lose
their connections, fall back to default clocks, and train on. At an orderly end, the last rank that needs the store no
more says so instead.

Whoever reaches the store's port may write to it. What ranks unpickle is therefore signed with a key that rank 0 has
given to all ranks by the job's own collectives.
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
"""Called with the numbers of all ranks, shape (ranks, numbers), and the value of each or None; returns the answer."""
# Ranks that are all there, which a collective of the job has shown, are connected within this time.
_SETUP_TIMEOUT = timedelta(minutes=3)
# Threads wait until rank 0 ends the store; training threads wait less long.
_NO_TIMEOUT = timedelta(days=365)
_CONNECT_S = 10.0
_SLICE_S = 1.0
_LONGEST_WAIT_S = 90.0
# How long a process that ends waits: rank 0 for others that need its store, others for what is under way.
_RANK_0_ENDS_S, _RANK_ENDS_S = 5.0, 1.0
# The first channel, and the key that has why rank 0 ends the store, empty at an orderly end.
_FIRST, _END = "perseus", "perseus/end"
_SIGNATURE = 32  # bytes
_BARRIERS = 5
# Beside connections: files of a process.
_OTHER_FILES = 512
_THIS_NODE = ("localhost", "127.0.0.1", "::1")
logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class PipelineTopology:
    """Position of this rank in the job.

    Attributes:
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


class Communicator:
    """Collectives among the ranks of a job; every rank makes it, and calls each method, at the same time.

    Once a connection is lost, all methods raise a ``ConnectionLostError``, on all ranks.

    Attributes:
        pipeline_of_rank: On rank 0, the data-parallel pipeline of each rank; elsewhere empty.
    """

    def __init__(
        self,
        topology: PipelineTopology | Callable[[Communicator], PipelineTopology],
        channel: StoreChannel | None = None,
    ) -> None:
        """Connect this rank with rank 0; its position may be found by asking all ranks."""
        self._channel = channel or StoreChannel(Connection.of_job())
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        # When each was made, by this node's clock, and its line.
        self._events: deque[tuple[float, bytes]] = deque()
        self._received: deque[tuple[float, bytes]] = deque()
        self.topology = topology if isinstance(topology, PipelineTopology) else topology(self)
        self.pipeline_of_rank = np.array(self.gather(self.topology.data_parallel_rank), dtype=np.int64)

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.rank == 0

    @property
    def is_connected(self) -> bool:
        """Whether the job has not ended its process groups."""
        return dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, an empty list elsewhere."""
        values: list[T] = []
        self._all(value, values.extend)
        return values

    def computed_on_rank_0(self, compute: Callable[[], T]) -> T:
        """Return, on all ranks, what rank 0 computes; what it raises is raised on all: an ``OSError`` as it is."""
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
        """Call a function on every rank and return its value; what the first one raises is raised on all."""
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
        """Return the value of the first rank that has one, on all ranks; None if none has."""
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
        """Return how much this rank's time is ahead of its pipeline's first rank's [s]: ranks leave a barrier together.

        Every rank of the pipeline must ask at once.
        """
        moments_s = []
        for _ in range(_BARRIERS):
            self.pipeline_gather(None)
            moments_s.append(timebase.now_s())
        first_s = self.pipeline_gather(moments_s)[0]
        return statistics.median(own_s - their_s for own_s, their_s in zip(moments_s, first_s, strict=True))

    def start_exchange(self, numbers: Sequence[float], reduce: Callable[[Numbers], T]) -> Pending[T | None]:
        """Begin to send every rank's numbers to rank 0, and its answer back; events of this rank go with them.

        Args:
            numbers: Of this rank, as many as of every other.
            reduce: On rank 0, computes the answer, on a thread of Perseus. The answer is None where that fails.
        """

        def reduced(numbers: Numbers, events: list[list[tuple[float, bytes]] | None]) -> T:
            now_s = time.monotonic()
            self._received.extend((now_s - age_s, line) for of_rank in events for age_s, line in of_rank or ())
            return reduce(numbers)

        return self._channel.exchange(numbers, _ages_of(self._events) or None, reduced)

    def open_channel(self) -> StoreChannel:
        """Return a channel for exchanges that may be under way at the same time as others."""
        return self._channel.another()

    def send_event(self, line: bytes) -> None:
        """Send a line to rank 0 with the next exchange; from any thread."""
        self._events.append((time.monotonic(), line.strip()))

    def received_events(self) -> list[tuple[float, bytes]]:
        """Return, on rank 0, the age [s] and the line of each event that has come since this was last called."""
        return _ages_of(self._received)

    def _all(self, value: Any, reduce: Callable[[list[Any]], T], among: Sequence[int] = ()) -> T:
        return self._channel.exchange([], value, lambda _, values: reduce(values), among).result()


def _ages_of(events: deque[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Take events, and return the age [s] and the line of each."""
    now_s = time.monotonic()
    taken = [events.popleft() for _ in range(len(events))]
    return [(now_s - made_s, line) for made_s, line in taken]


def _known(error: Exception) -> PerseusError:
    """Return an error that the other ranks can raise too."""
    if isinstance(error, PerseusError):
        return error
    logger.debug("perseus: unexpected", exc_info=True)
    return PerseusError(f"{type(error).__name__}: {error}")


@dataclass
class Connection:
    """Of this rank with the store that rank 0 serves.

    Attributes:
        address: Host and port of the store.
        secret: The same on all ranks: signs what they send.
        cause: Why it is lost; empty while it is there.
        longest_wait_s: After which a training thread that waits for other ranks gives it up [s].
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
        """Serve a store on rank 0 of a job whose process groups are there; every rank must do so at once."""
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
        # Launchers of one node set MASTER_ADDR to an address that means another node elsewhere.
        address = (node if host in _THIS_NODE and node != socket.gethostname() else host, port)
        # Before the job's own collectives, which wait for ranks that wait here, end the job.
        longest_wait_s = min(_LONGEST_WAIT_S, _timeout_s() / 2)
        connection = cls(rank, world_size, address, secret, longest_wait_s=longest_wait_s)
        if server is not None:
            connection.serve(server)
        return connection

    def serve(self, server: Any) -> None:
        """Keep the store, on rank 0, until a rank says that it is to end."""
        self._server = server
        _Thread(self, partial(self._keep_until_end, self.open()))

    def _keep_until_end(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, or a connection of this process is broken
            self._end(store.get(_END).decode())

    def open(self) -> Any:
        """Return a client of the store; where it cannot be reached, the error says what to set."""
        self.check()
        host, port = self.address
        try:
            store = _store(host, port)
        except RuntimeError as error:
            raise PerseusError(
                f"rank {self.rank} cannot be connected with rank 0 at {host}:{port}: {_first_line(error)}. Set "
                "MASTER_ADDR, on every node, to an address of rank 0's node that all nodes reach, and let them "
                "connect with any port there."
            ) from error
        store.set_timeout(_NO_TIMEOUT)
        return store

    def seal(self, key: str, value: Any) -> bytes:
        """Return what is written to a key: a value, with the job's signature."""
        content = zlib.compress(pickle.dumps(value), 1)
        return self._signature(key, content) + content

    def unseal(self, key: str, sealed: bytes) -> Any:
        """Return the value in what was written to a key; it is an error if that is not signed."""
        signature, content = sealed[:_SIGNATURE], sealed[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(key, content)):
            raise ConnectionLostError(f"what is in {key} is not signed by this job")
        return pickle.loads(zlib.decompress(content))

    def _signature(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self.secret, f"{key} ".encode() + content, "sha256")

    def check(self) -> None:
        """Raise a :class:`~perseus_ds.errors.ConnectionLostError` if it is lost."""
        if self.cause:
            raise ConnectionLostError(self.cause)

    def lose(self, cause: object) -> ConnectionLostError:
        """Give up the connection, so that all other ranks lose theirs; return the error that says so."""
        if not self.cause:
            said = f"rank {self.rank}: {_first_line(cause)}"
            self._end(said)
            if self.rank > 0:
                _Thread(self, partial(self._say, said))
        return ConnectionLostError(self.cause)

    def _end(self, said: str) -> None:
        """End the store, on rank 0, and note why the connection is lost, unless this is the orderly end."""
        if said:
            self.cause = self.cause or f"a connection between ranks is lost ({said})"
        self._server = None  # its only reference: the connections of all ranks are closed

    def cut(self) -> None:
        """End all calls to the store that are under way, by breaking this process's connections with it."""
        self._end("this process ends")
        host, port = self.address
        peers = set()
        with contextlib.suppress(OSError):
            peers = {address[0] for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or one without a peer
                found = socket.socket(fileno=int(name))
                try:
                    if found.family != socket.AF_UNIX:
                        peer = found.getpeername()
                        if peer[1] == port and str(peer[0]).removeprefix("::ffff:") in peers:
                            found.shutdown(socket.SHUT_RDWR)
                finally:
                    found.detach()

    def _say(self, cause: str) -> None:
        """Have rank 0 end the store, by a new connection."""
        with contextlib.suppress(OSError, RuntimeError):  # it has, or cannot be reached any more
            socket.create_connection(self.address, _CONNECT_S).close()  # torch says much about ports that are closed
            _store(*self.address).set(_END, cause)


class StoreChannel:
    """Carries one collective after the other by a client of the store, and a thread that waits for them.

    Every rank begins the same ones in the same order.
    """

    def __init__(self, connection: Connection, name: str = _FIRST) -> None:
        """Connect the client; each channel of a connection has a name of its own, the first one the default."""
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
        """Begin an exchange.

        Args:
            numbers: Of this rank, as many as of every other.
            value: Anything that can be pickled; None costs nothing.
            reduce: On the first of the ranks, computes the answer; it is None where that fails.
            among: Ranks that take part, this one included; all if empty.
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
                    # All ranks have had it, or they would not have begun this exchange.
                    self._store.delete_key(before)
                else:
                    answered = connection.unseal(answer, self._store.get(answer))
                self._store.delete_key(own)
                future.set_result(answered)
            except Exception as error:  # the store is gone, or the connection with it
                future.set_exception(connection.lose(error))

        self._tasks.put(run)
        return Pending(future, connection)

    def another(self) -> StoreChannel:
        """Return a channel whose collectives do not wait for those of this one."""
        self._channels += 1
        return StoreChannel(self._connection, f"{self._name}/{self._channels}")

    def _reduced(self, keys: Sequence[str], row: int, reduce: Reduce[T]) -> Any:
        """Wait for what all ranks bring, which begins with so many bytes of numbers; return the answer."""
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
    """A collective that is under way."""

    def __init__(self, future: futures.Future[T], connection: Connection) -> None:
        self._future = future
        self._connection = connection

    def result(self) -> T:
        """Wait until it is over; it is an error where a rank has lost its connection, or it takes too long."""
        longest_wait_s = self._connection.longest_wait_s
        waited_s, slice_s = 0.0, min(_SLICE_S, longest_wait_s / 2)
        while True:
            try:
                return self._future.result(slice_s)
            except futures.TimeoutError:
                waited_s += slice_s  # not by the clock: a scheduler may stop all ranks for hours
            if waited_s > longest_wait_s:
                raise self._connection.lose(f"nothing has arrived for {waited_s:.0f} s")

    def is_over_within(self, timeout_s: float) -> bool:
        """Wait for it for some time [s]; return whether there is nothing left to wait for."""
        return bool(futures.wait([self._future], timeout_s).done)


_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def _work(tasks: _Tasks, connection: Connection, store: Any, name: str) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it has the channel, which ends this thread when nobody else has it
    with contextlib.suppress(RuntimeError):  # the store is gone
        if name == _FIRST and not connection.cause and store.add("perseus/left", 1) == connection.world_size:
            store.set(_END, b"")


class _Thread(threading.Thread):
    """Calls the store, and is ended before the interpreter is: torch aborts a process that ends during its calls."""

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
    """Let this process have so many files open, if it may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _store(host: str, port: int, *, is_master: bool = False) -> Any:
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=is_master, wait_for_workers=False, timeout=_SETUP_TIMEOUT)


def _timeout_s() -> float:
    """Return how long the job's own collectives may take."""
    try:
        device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
        backend = c10d._get_default_group()._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError, ValueError):
        return math.inf


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
