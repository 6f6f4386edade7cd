"""The guardian, a process of its own (:mod:`perseus_ds.device.guardian_process`).

The ranks' side, and what it is for, is :mod:`perseus_ds.device.guardian_client`. It imports neither torch nor
DeepSpeed, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import syslog
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from perseus_ds.device import local_socket
from perseus_ds.device.guarded_ranks import GuardedRanks, Registration
from perseus_ds.device.guardian_peer import Peer
from perseus_ds.device.guardian_process import other_name
from perseus_ds.device.lock_records import is_held, left_locks
from perseus_ds.device.watched_process import WatchedProcess
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_FIRST_RANK_TIMEOUT_S = 10.0
_REGISTRATION_TIMEOUT_S = 30.0
_POLL_S = 0.2
_RESTORE_ATTEMPTS = 3
_RETRY_S = 0.5
# After the last of these attempts, for about two minutes; pauses are shorter than a driver takes to count as hung.
_INSIST_AFTER_S = (1.0, 2.0, 4.0, *[8.0] * 14)


class Resettable(Protocol):
    """A GPU as far as a guardian needs it."""

    def reset_clock(self) -> None: ...


def open_gpu(address: str) -> Resettable:
    """Return the GPU of an address.

    Raises:
        GpuError: It cannot be opened.
    """
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.device.gpu.nvml import NvmlGpu
        from perseus_ds.device.gpu.nvml_lookup import index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.device.gpu.zeus import open_address

        return open_address(identity)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:… or zeus:….")


class _Service:
    """Serves ranks and the other guardian, each on a thread of its own, because a driver call may hang."""

    def __init__(self, ranks: GuardedRanks, timebase: Timebase) -> None:
        self._ranks = ranks
        self._time = timebase

    def start(self, connection: socket.socket) -> None:
        """Serve the process at the other end of a connection."""
        self._on_thread(self._serve, connection)

    def _on_thread(self, serve: Callable[..., None], connection: socket.socket, *arguments: object) -> None:
        def run() -> None:
            with connection:
                serve(connection, *arguments)

        threading.Thread(target=run, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        if local_socket.peer(connection)[1] != os.getuid():
            return
        connection.settimeout(_REGISTRATION_TIMEOUT_S)
        try:
            message, handed_over = local_socket.receive_with_sockets(connection)
            is_guardian = "ranks" in message
            ranks = [Registration(rank["rank"], tuple(rank["gpus"])) for rank in message.get("ranks", [message])]
            if is_guardian and len(handed_over) != len(ranks):
                raise ValueError(f"{len(ranks)} ranks with {len(handed_over)} connections")
        except Exception as error:
            _answer(connection, str(error))
            return
        if is_guardian:
            for rank, its_connection in zip(ranks, handed_over, strict=True):
                self._on_thread(self._guard, its_connection, rank, False)
            connection.settimeout(None)
            connection.recv(1)  # returns when the other guardian has ended
        else:
            self._guard(connection, ranks[0], waits_for_answer=True)

    def _guard(self, connection: socket.socket, rank: Registration, waits_for_answer: bool) -> None:
        """Watch a rank until it ends, then reset its clocks."""
        pid, _ = local_socket.peer(connection)
        with contextlib.closing(WatchedProcess(pid)) as process, self._ranks.living(connection, rank):
            problem = None
            try:
                gpus = {address: open_gpu(address) for address in rank.gpus}
            except Exception as error:
                problem = str(error)
            if waits_for_answer:
                _answer(connection, problem)
            if problem is None:
                process.wait_until_gone_or_readable(connection)
                ended = self._ranks.end(connection)
                tried = partial(self._ranks.still_ending, connection)
                errors = {address: restore(gpus[address], self._time, tried) for address in ended}
                for address in [address for address, error in errors.items() if error is None]:
                    _forget(address)
                # Read by a rank that closes, not by a dead one.
                _answer(connection, "; ".join(filter(None, errors.values())) or None)
                self._insist(connection, {address: gpus[address] for address, error in errors.items() if error})

    def _insist(self, connection: socket.socket, refused: dict[str, Resettable]) -> None:
        """Go on trying to reset clocks that a driver has refused to reset.

        Not while a living process of this user has registered the GPU, or has a record of it: the clock is its own.
        """
        for pause_s in _INSIST_AFTER_S:
            if not refused:
                break
            self._time.sleep(pause_s)
            self._ranks.still_ending(connection)
            for address, gpu in tuple(refused.items()):
                if self._ranks.have_registered(address) or is_held(address):
                    continue
                if _refusal(gpu) is None:
                    _forget(address)
                    del refused[address]
                self._ranks.still_ending(connection)


def _answer(connection: socket.socket, error: str | None) -> None:
    with contextlib.suppress(OSError):
        local_socket.send(connection, {"error": error, "pid": os.getpid()})


def _forget(address: str) -> None:
    """Remove the records of dead processes that held a GPU, whose clock is reset."""
    for left in left_locks():
        if left.address == address:
            left.forget()


def _refusal(gpu: Resettable) -> str | None:
    """Reset a clock; return why the driver refused, None if it did not."""
    try:
        gpu.reset_clock()
    except GpuError as error:
        return str(error)
    return None


def restore(gpu: Resettable, timebase: Timebase, tried: Callable[[], None] = lambda: None) -> str | None:
    """Return a GPU to its default clock, in a few attempts.

    Args:
        gpu: The GPU.
        timebase: The time to live in.
        tried: Called after each attempt: the driver does not hang.

    Returns:
        The last error; None if the clock is the default one.
    """
    refusal: str | None = None
    for attempt in range(_RESTORE_ATTEMPTS):
        timebase.sleep(_RETRY_S if attempt else 0)
        refusal = _refusal(gpu)
        tried()
        if refusal is None:
            return None
    syslog.syslog(syslog.LOG_ERR, f"perseus-ds guardian: clocks may stay locked, run `perseus-ds reset`: {refusal}")
    return refusal


def guard(listener: socket.socket, ranks: GuardedRanks, timebase: Timebase = REAL_TIME) -> None:
    """Serve ranks, and the other guardian, until the last rank is gone, or none came."""
    service = _Service(ranks, timebase)
    listener.settimeout(_POLL_S)
    first_by_s = timebase.now_s() + _FIRST_RANK_TIMEOUT_S
    while ranks.are_left or (not ranks.had_any and timebase.now_s() < first_by_s):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # too many files are open; what waits to be accepted still does later
            timebase.sleep(_POLL_S)
            continue
        connection.setblocking(True)
        try:
            service.start(connection)
        except RuntimeError:  # too many threads; who asked tries again
            connection.close()
            timebase.sleep(_POLL_S)


def main() -> None:
    """Become the guardian of a name, unless another process is."""
    name = "\0" + sys.argv[1]
    try:
        listener = local_socket.listen(name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return  # Another rank has started it already.
        raise
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ.pop(variable, None)  # Each rank may see another part of the node's GPUs.
    if os.fork():
        return  # The guardian is the child, an orphan: it is not in the job's process tree.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    ranks = GuardedRanks(REAL_TIME)
    REAL_TIME.thread(Peer(other_name(name), ranks, REAL_TIME).watch, "perseus-peer").start()
    guard(listener, ranks)


if __name__ == "__main__":
    main()
