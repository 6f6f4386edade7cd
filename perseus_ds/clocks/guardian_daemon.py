"""The guardian, a process of its own that ranks start; their side, and what it is for, is in ``guardian.py``.

It imports neither torch nor DeepSpeed, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import socketserver
import sys
import syslog
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil

from perseus_ds.clocks import local_socket
from perseus_ds.clocks.lock_records import is_held, left_locks
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_FIRST_RANK_TIMEOUT_S = 10.0
_REGISTRATION_TIMEOUT_S = 30.0
_POLL_S = 0.2
_HUNG_S = 10.0
_RESTORE_ATTEMPTS = 3
_RETRY_S = 0.5
# After the last of these attempts, for about two minutes; pauses are shorter than a driver takes to count as hung.
_INSIST_AFTER_S = (1.0, 2.0, 4.0, *[8.0] * 14)


def open_gpu(address: str) -> Gpu:
    """Return the GPU of an address.

    Raises:
        GpuError: It cannot be opened.
    """
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.gpu.nvml import NvmlGpu, index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.gpu.zeus import open_address

        return open_address(identity)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:… or zeus:….")


class GuardianServer(local_socket.LocalServer):
    """Watches ranks, each on a thread of its own, because a driver call may hang."""

    timeout = _POLL_S

    def __init__(self, name: str, timebase: Timebase = REAL_TIME) -> None:
        """Listen.

        Raises:
            OSError: Another process listens there.
        """
        super().__init__(name, _Rank)
        self.time = timebase
        self._first_by_s: float | None = timebase.now_s() + _FIRST_RANK_TIMEOUT_S
        self._lock = threading.Lock()
        self._living: dict[object, tuple[str, ...]] = {}
        self._resetting_s: dict[object, float] = {}

    def serve(self) -> None:
        """Serve ranks until the last one is gone, or none came."""
        while self._is_needed():
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection."""
        try:
            return super().get_request()
        except OSError:  # too many files are open; what waits to be accepted still does later
            self.time.sleep(_POLL_S)
            raise

    @contextlib.contextmanager
    def living(self, rank: object, gpus: tuple[str, ...]) -> Iterator[None]:
        """Count a rank as living, until :meth:`end`, and then as left, until all is done for it."""
        with self._lock:
            self._living[rank] = gpus
            self._first_by_s = None
        try:
            yield
        finally:
            with self._lock:
                self._living.pop(rank, None)
                self._resetting_s.pop(rank, None)

    def end(self, rank: object) -> list[str]:
        """Count a rank as ended; returns its GPUs that no other rank has registered: their clocks must be reset."""
        with self._lock:
            gpus = self._living.pop(rank)
            self._resetting_s[rank] = self.time.now_s()
            return [gpu for gpu in gpus if not any(gpu in others for others in self._living.values())]

    def still_resetting(self, rank: object) -> None:
        """Count an ended rank as left for a while longer: the driver answers, and its clocks may not be reset yet."""
        with self._lock:
            self._resetting_s[rank] = self.time.now_s()

    def is_registered(self, gpu: str) -> bool:
        """Return whether a living rank may lock the GPU of an address."""
        with self._lock:
            return any(gpu in gpus for gpus in self._living.values())

    def _is_needed(self) -> bool:
        """Whether there is a living rank, or one whose clocks are being reset by a driver that does not hang."""
        now_s = self.time.now_s()
        with self._lock:
            if self._first_by_s is not None:
                return now_s < self._first_by_s
            return bool(self._living) or any(now_s - at_s <= _HUNG_S for at_s in self._resetting_s.values())


class _Rank(socketserver.BaseRequestHandler):
    """Watches a rank until it ends, then resets its clocks."""

    server: GuardianServer
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(_REGISTRATION_TIMEOUT_S)
        try:
            addresses = tuple(map(str, local_socket.receive(self.request)["gpus"]))
            gpus = {address: open_gpu(address) for address in addresses}
        except Exception as error:
            self._answer(str(error))
            return
        with self.server.living(self, addresses):
            self._answer(None)
            wait_for_end(self.request)
            tried = partial(self.server.still_resetting, self)
            errors = {address: restore(gpus[address], self.server.time, tried) for address in self.server.end(self)}
            for address in [address for address, error in errors.items() if error is None]:
                _forget(address)
            # Read by a rank that closes, not by a dead one.
            self._answer("; ".join(filter(None, errors.values())) or None)
            self._insist({address: gpus[address] for address, error in errors.items() if error})

    def _insist(self, refused: dict[str, Gpu]) -> None:
        """Go on trying to reset clocks that a driver has refused to reset.

        Not while a living process of this user has registered the GPU, or has a record of it: the clock is its own.
        """
        for pause_s in _INSIST_AFTER_S:
            if not refused:
                break
            self.server.time.sleep(pause_s)
            self.server.still_resetting(self)
            for address, gpu in tuple(refused.items()):
                if self.server.is_registered(address) or is_held(address):
                    continue
                if _refusal(gpu) is None:
                    _forget(address)
                    del refused[address]
                self.server.still_resetting(self)

    def _answer(self, error: str | None) -> None:
        with contextlib.suppress(OSError):
            local_socket.send(self.request, {"error": error, "pid": os.getpid()})


def wait_for_end(connection: socket.socket) -> None:
    """Return when the process at the other end of a connection has ended, or sends something.

    It counts as ended only when its last thread has: after ``kill -9`` its first thread may be a zombie while another
    one is still inside the driver, about to lock a clock. A zombie without threads, which nobody has waited for yet,
    has ended. A process in another pid namespace is seen by the connection alone.
    """
    pid, _ = local_socket.peer(connection)
    process: psutil.Process | None = None
    if pid:
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return
    while not select.select([connection], [], [], None if process is None else _POLL_S)[0]:
        if process is not None and _has_ended(process):
            return


def _has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not process.is_running() or (is_zombie and process.num_threads() <= 1)
    return True


def _forget(address: str) -> None:
    """Remove the records of dead processes that held a GPU, whose clock is reset."""
    for left in left_locks():
        if left.address == address:
            left.forget()


def _refusal(gpu: Gpu) -> str | None:
    """Reset a clock; return why the driver refused, None if it did not."""
    try:
        gpu.reset_clock()
    except GpuError as error:
        return str(error)
    return None


def restore(gpu: Gpu, timebase: Timebase, tried: Callable[[], None] = lambda: None) -> str | None:
    """Return a GPU to its default clock, in a few attempts, each of which is reported; return the last error."""
    refusal: str | None = None
    for attempt in range(_RESTORE_ATTEMPTS):
        timebase.sleep(_RETRY_S if attempt else 0)
        refusal = _refusal(gpu)
        tried()
        if refusal is None:
            return None
    syslog.syslog(syslog.LOG_ERR, f"perseus-ds guardian: clocks may stay locked, run `perseus-ds reset`: {refusal}")
    return refusal


def main() -> None:
    """Become the guardian of a name, unless another process is."""
    try:
        server = GuardianServer("\0" + sys.argv[1])
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
    server.serve()
