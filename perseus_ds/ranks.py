"""Numbers of all ranks to rank 0, and its answer back, while training goes on.

Rank 0 serves a key-value store of torch, beside the job's own; every rank is connected with it, over a CPU's network.
In an *exchange*, each rank appends what it has to one key, and the last one says that all are there. Rank 0 then
computes one answer and writes it to another key. A thread of Perseus waits for the answer: the training thread has no
part in it, and no GPU stream is used. All other collectives are exchanges for whose answer the training thread waits.

A rank that loses its connection, or waits too long, says so in the store, and rank 0 ends the store: so all ranks lose
their connections, fall back to default clocks, and train on. At an orderly end, every rank says when it has the last
answer, and rank 0 serves the store until all of them have.

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
import struct
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from perseus_ds.errors import ConnectionLostError, PerseusError
from perseus_ds.timebase import Timebase

T = TypeVar("T")
Numbers: TypeAlias = npt.NDArray[np.float64]
Reduce: TypeAlias = Callable[[Numbers, list[bytes]], T]
"""Called with the numbers of all ranks, shape (ranks, numbers), and the bytes of each; returns the answer."""
# Ranks that are all there, which a collective of the job has shown, are connected within this time.
_SETUP_TIMEOUT = timedelta(minutes=3)
# Threads wait until rank 0 ends the store; training threads wait less long.
_NO_TIMEOUT = timedelta(days=365)
_CONNECT_S = 10.0
# Short, so that handlers of signals run while the training thread waits.
_SLICE_S = 1.0
_LONGEST_WAIT_S = 90.0
# How long a process that ends waits: rank 0 for others that need its store, others to say that they need it no more.
_RANK_0_ENDS_S, _RANK_ENDS_S = 5.0, 1.0
_LOST = "perseus/lost"
_FRAME = struct.Struct("<II")  # rank, bytes
_SIGNATURE = 32  # bytes
_BARRIERS = 5
# Beside connections: files of a process.
_OTHER_FILES = 512
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

    Once a connection is lost, all methods raise :class:`~perseus_ds.errors.ConnectionLostError`, on all ranks.

    Attributes:
        pipeline_of_rank: On rank 0, the data-parallel pipeline of each rank; elsewhere empty.
    """

    def __init__(
        self,
        topology: PipelineTopology | Callable[[Communicator], PipelineTopology],
        channel: StoreChannel | None = None,
    ) -> None:
        """Connect this rank with rank 0; its position may be found by asking all ranks.

        Raises:
            PerseusError: Ranks cannot be connected; the message says what to set.
        """
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
        self._all(pickle.dumps(value), lambda found: values.extend(map(pickle.loads, found)))
        return values

    def computed_on_rank_0(self, compute: Callable[[], T]) -> T:
        """Return, on all ranks, what rank 0 computes.

        Raises:
            PerseusError: What rank 0 raised, on all ranks, so that all of them continue alike.
            OSError: Likewise.
        """
        computed: Any = None
        if self.is_rank_0:
            try:
                computed = compute()
            except Exception as error:
                computed = error if isinstance(error, OSError) else _known(error)
        computed = self._all(b"", lambda _: computed)
        if isinstance(computed, Exception):
            raise computed
        return computed  # type: ignore[no-any-return]

    def raise_on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call a function on every rank and return its value; if it fails on one, it fails on all.

        Raises:
            PerseusError: What the first rank that failed raised.
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
        """Return the value of the first rank that has one, on all ranks; None if none has."""
        content = b"" if value is None else pickle.dumps(value)
        first: bytes = self._all(content, lambda contents: next(filter(None, contents), b""))
        return pickle.loads(first) if first else None

    def all_max(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self._channel.exchange([value], b"", lambda numbers, _: float(numbers.max())).result()

    def all_sum(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        return self._channel.exchange([value], b"", lambda numbers, _: float(numbers.sum())).result()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._all(b"", lambda _: None)

    def pipeline_gather(self, value: T) -> list[T]:
        """Return the value of every rank of this rank's pipeline, first stage first."""
        return self._all(
            pickle.dumps(value), lambda contents: list(map(pickle.loads, contents)), self.topology.pipeline
        )

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
        now_s = time.monotonic()
        content = b"\n".join(b"%.3f %s" % (now_s - made_s, line) for made_s, line in _taken(self._events))

        def reduced(numbers: Numbers, contents: list[bytes]) -> T:
            now_s = time.monotonic()
            for line in b"\n".join(filter(None, contents)).splitlines():
                age_s, _, event = line.partition(b" ")
                self._received.append((now_s - float(age_s), event))
            return reduce(numbers)

        return self._channel.exchange(numbers, content, reduced)

    def open_channel(self) -> StoreChannel:
        """Return a channel for exchanges that may be under way at the same time as others."""
        return self._channel.another()

    def send_event(self, line: bytes) -> None:
        """Send a line to rank 0 with the next exchange; from any thread."""
        self._events.append((time.monotonic(), line.strip()))

    def received_events(self) -> list[tuple[float, bytes]]:
        """Return, on rank 0, the age [s] and the line of each event that has come since this was last called."""
        now_s = time.monotonic()
        return [(now_s - made_s, line) for made_s, line in _taken(self._received)]

    def _all(self, content: bytes, reduce: Callable[[list[bytes]], T], among: Sequence[int] = ()) -> T:
        return self._channel.exchange([], content, lambda _, contents: reduce(contents), among).result()


def _taken(events: deque[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    return [events.popleft() for _ in range(len(events))]


def _known(error: Exception) -> PerseusError:
    """Return an error that the other ranks can raise too."""
    if isinstance(error, PerseusError):
        return error
    logger.debug("perseus: unexpected", exc_info=True)
    return PerseusError(f"{type(error).__name__}: {error}")


class Connection:
    """Of this rank with the store that rank 0 serves.

    Args:
        address: Host and port of the store.
        server: The store, on rank 0.
        longest_wait_s: After which a training thread that waits for other ranks gives the connection up [s].
        secret: The same on all ranks: signs what they send.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: tuple[str, int],
        server: Any = None,
        *,
        longest_wait_s: float = _LONGEST_WAIT_S,
        secret: bytes = b"",
    ) -> None:
        self._secret = secret
        self.rank = rank
        self.world_size = world_size
        self._address = address
        self._server = server
        self.longest_wait_s = longest_wait_s
        self._cause = ""

    @classmethod
    def of_job(cls) -> Connection:
        """Serve a store on rank 0 of a job whose process groups are there; every rank must do so at once.

        Raises:
            PerseusError: On all ranks: rank 0 cannot serve it.
        """
        rank, world_size, server = dist.get_rank(), dist.get_world_size(), None
        served: list[Any] = [None]
        if rank == 0:
            try:
                _allow_files(world_size + _OTHER_FILES)
                host = os.environ.get("MASTER_ADDR") or socket.gethostname()
                server = _store(host, 0, is_master=True)
                served = [(host, server.port, secrets.token_bytes())]
            except (RuntimeError, OSError) as error:
                served = [PerseusError(f"rank 0 cannot serve a key-value store: {_first_line(error)}")]
        dist.broadcast_object_list(served)
        if isinstance(served[0], PerseusError):
            raise served[0]
        host, port, secret = served[0]
        # Before the job's own collectives, which wait for ranks that wait here, end the job.
        longest_wait_s = min(_LONGEST_WAIT_S, _timeout_s() / 2)
        return cls(rank, world_size, (host, port), server, longest_wait_s=longest_wait_s, secret=secret)

    def open(self) -> Any:
        """Return a client of the store.

        Raises:
            PerseusError: It cannot be reached; the message says what to set.
        """
        self.check()
        host, port = self._address
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

    def signed(self, key: str, rank: int, content: bytes) -> bytes:
        """Return what a rank sends by a key, with the job's signature."""
        return hmac.digest(self._secret, b"%s %d %s" % (key.encode(), rank, content), "sha256") + content

    def verified(self, key: str, rank: int, signed: bytes) -> bytes:
        """Return what a rank has sent by a key.

        Raises:
            ConnectionLostError: It is of somebody else.
        """
        content = signed[_SIGNATURE:]
        if not hmac.compare_digest(self.signed(key, rank, content), signed):
            raise ConnectionLostError(f"what rank {rank} seems to have sent is not signed by this job")
        return content

    def check(self) -> None:
        """Raise a :class:`~perseus_ds.errors.ConnectionLostError` if it is lost."""
        if self._cause:
            raise ConnectionLostError(self._cause)

    def wait(self, future: futures.Future[Any]) -> None:
        """Wait for what other ranks send.

        Raises:
            ConnectionLostError: It may never come: another rank has lost its connection, or it takes too long.
        """
        waited_s, slice_s = 0.0, min(_SLICE_S, self.longest_wait_s / 2)
        while not (future.done() or futures.wait([future], slice_s).done):  # the first costs hardly anything
            waited_s += slice_s  # not by the clock: a scheduler may stop all ranks for hours
            self.check()
            if self._server is not None and self._server.check([_LOST]):
                raise self.lose(self._server.get(_LOST).decode())
            if waited_s > self.longest_wait_s:
                raise self.lose(f"rank {self.rank}: nothing has arrived for {waited_s:.0f} s")

    def leave(self, store: Any, name: str) -> None:
        """Say that this rank needs a channel no more; on rank 0, return when no other rank does."""
        left = f"{name}/left"
        if store.add(left, 1) == self.world_size:
            store.set(f"{left}/all", b"1")
        if self.rank == 0:
            store.wait([f"{left}/all"], _NO_TIMEOUT)

    def cut(self) -> None:
        """End all calls to the store that are under way, by breaking this process's connections with it."""
        self._cause = self._cause or "this process ends"
        for found in psutil.Process().net_connections("tcp"):
            if found.raddr and found.raddr.port == self._address[1]:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def lose(self, cause: object) -> ConnectionLostError:
        """Give up the connection, so that all other ranks lose theirs; return the error that says so."""
        if not self._cause:
            told = _first_line(cause) if self.rank == 0 else f"rank {self.rank}: {_first_line(cause)}"
            self._cause = f"a connection between ranks is lost ({told})"
            self._server = None  # its only reference: the connections of all ranks are closed
            if self.rank > 0:
                _begin_thread(self, partial(self._tell, told))
        return ConnectionLostError(self._cause)

    def _tell(self, cause: str) -> None:
        """Tell rank 0, by a new connection."""
        with contextlib.suppress(OSError, RuntimeError):  # rank 0 has ended the store, or cannot be reached any more
            socket.create_connection(self._address, _CONNECT_S).close()  # torch says much about ports that are closed
            _store(*self._address).set(_LOST, cause)


class StoreChannel:
    """Carries one collective after the other by a client of the store, and a thread that waits for them.

    Every rank begins the same ones in the same order.
    """

    def __init__(self, connection: Connection, name: str = "perseus") -> None:
        """Connect the client; each channel of a connection has a name of its own.

        Raises:
            PerseusError: The store cannot be reached.
        """
        self.rank, self.world_size = connection.rank, connection.world_size
        self._connection = connection
        self._name = name
        self._store = connection.open()
        self._channels = 0
        self._exchanges: Counter[str] = Counter()
        self._tasks: _Tasks = queue.SimpleQueue()
        _begin_thread(connection, partial(_work, self._tasks, connection, self._store, name), self._tasks)
        weakref.finalize(self, self._tasks.put, None)

    def exchange(
        self, numbers: Sequence[float], content: bytes, reduce: Reduce[T], among: Sequence[int] = ()
    ) -> Pending[T]:
        """Begin an exchange.

        Args:
            numbers: Of this rank, as many as of every other.
            content: Any bytes.
            reduce: On the first of the ranks, computes the answer; it is None where that fails.
            among: Ranks that take part, this one included; all if empty.

        Raises:
            ConnectionLostError: The connection is lost.
        """
        self._connection.check()
        ranks = among or range(self.world_size)
        group = f"{self._name}/{ranks[0]}-{ranks[-1]}"
        self._exchanges[group] += 1
        number, connection, future = self._exchanges[group], self._connection, futures.Future[T]()

        def run() -> None:
            try:
                signed = content and connection.signed(f"{group}/{number}", self.rank, content)
                contribute(self._store, group, number, rank=self.rank, ranks=ranks, numbers=numbers, content=signed)
                future.set_result(self._answer(group, number, ranks, reduce))
            except Exception as error:  # the store is gone, or the connection with it
                future.set_exception(connection.lose(error))

        self._tasks.put(run)
        return Pending(future, connection)

    def another(self) -> StoreChannel:
        """Return a channel whose collectives do not wait for those of this one."""
        self._channels += 1
        return StoreChannel(self._connection, f"{self._name}/{self._channels}")

    def _answer(self, group: str, number: int, ranks: Sequence[int], reduce: Reduce[T]) -> T:
        store, connection, key = self._store, self._connection, f"{group}/{number}"
        if self.rank != ranks[0]:
            signed = connection.verified(key, ranks[0], store.get(f"{key}/answer"))
            return pickle.loads(zlib.decompress(signed))  # type: ignore[no-any-return]
        rows, signed_by_rank = collected(store, group, number, len(ranks))
        contents = {rank: connection.verified(key, rank, signed) for rank, signed in signed_by_rank.items()}
        answer: Any = None
        try:
            answer = reduce(rows, [contents.get(rank, b"") for rank in ranks])
        except Exception:  # the other ranks wait for their answers
            logger.exception("perseus: unexpected")
        compressed = zlib.compress(pickle.dumps(answer), 1)
        send_answer(store, group, number, connection.signed(key, self.rank, compressed), had_contents=bool(contents))
        return answer  # type: ignore[no-any-return]


class Pending(Generic[T]):
    """A collective that is under way."""

    def __init__(self, future: futures.Future[T], connection: Connection) -> None:
        self._future = future
        self._connection = connection

    def result(self) -> T:
        """Wait until it is over; raises what :meth:`Connection.wait` raises."""
        self._connection.wait(self._future)
        return self._future.result()

    def is_over_within(self, timeout_s: float) -> bool:
        """Wait for it for some time [s]; return whether there is nothing left to wait for."""
        return bool(futures.wait([self._future], timeout_s).done)


# What ranks append to is used by all exchanges of a group, one after the other: each call of the store is a round trip.


def contribute(
    store: Any, group: str, number: int, *, rank: int, ranks: Sequence[int], numbers: Sequence[float], content: bytes
) -> None:
    """Append what a rank has to what the others have, and say so if it is the last one."""
    if content:
        store.append(f"{group}/contents", _FRAME.pack(rank, len(content)) + content)
    store.append(f"{group}/rows", np.array([rank, len(content), *numbers], np.float64).tobytes())
    if store.add(f"{group}/count", 1) == number * len(ranks):
        store.set(f"{group}/{number}/all", b"1")


def collected(store: Any, group: str, number: int, size: int) -> tuple[Numbers, dict[int, bytes]]:
    """Wait for so many ranks; return the numbers of all, in their order, and by rank the bytes, of those with any."""
    store.get(f"{group}/{number}/all")
    rows: Numbers = np.frombuffer(store.get(f"{group}/rows")).reshape(size, -1)
    rows = rows[np.argsort(rows[:, 0])]
    contents, begin = {}, 0
    frames = store.get(f"{group}/contents") if rows[:, 1].any() else b""
    while begin < len(frames):
        rank, length = _FRAME.unpack_from(frames, begin)
        begin += _FRAME.size + length
        contents[rank] = frames[begin - length : begin]
    return rows[:, 2:], contents


def send_answer(store: Any, group: str, number: int, answer: bytes, *, had_contents: bool) -> None:
    """Write the answer for all ranks, which then append for the next exchange to what is empty again."""
    emptied = [f"{group}/rows", *([f"{group}/contents"] if had_contents else [])]
    store.multi_set([*emptied, f"{group}/{number}/answer"], [*(b"" for _ in emptied), answer])
    store.delete_key(f"{group}/{number}/all")
    # All ranks have had the answer before if they have begun this exchange.
    store.delete_key(f"{group}/{number - 1}/answer")


def _work(tasks: _Tasks, connection: Connection, store: Any, name: str) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it has the channel, which ends this thread when nobody else has it
    with contextlib.suppress(RuntimeError):  # the store is gone
        connection.leave(store, name)


_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
_threads: dict[threading.Thread, tuple[Connection, _Tasks | None]] = {}


def _begin_thread(connection: Connection, work: Callable[[], None], tasks: _Tasks | None = None) -> None:
    """Run what calls the store on a thread that is ended before the interpreter ends."""

    def run() -> None:
        try:
            work()
        finally:
            del _threads[thread]

    thread = threading.Thread(target=run, name="perseus-ranks", daemon=True)
    _threads[thread] = connection, tasks
    thread.start()


@atexit.register
def _end_threads() -> None:
    """End all threads: one that comes back from a call of torch while the interpreter ends aborts the process."""
    threads = [(thread, *about) for thread, about in list(_threads.items()) if thread.is_alive()]
    for _, _, tasks in threads:
        if tasks is not None:
            tasks.put(None)
    now_s = time.monotonic()
    for thread, connection, _ in threads:
        end_s = now_s + (_RANK_ENDS_S if connection.rank else _RANK_0_ENDS_S)
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            connection.cut()
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
