"""The guardian: ``python -m perseus_ds.device.guardian_daemon NAME``.

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
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from perseus_ds.device import local_socket
from perseus_ds.device.lock_records import left_locks
from perseus_ds.device.watched_process import WatchedProcess
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_FIRST_RANK_TIMEOUT_S = 10.0
_REGISTRATION_TIMEOUT_S = 30.0
_POLL_S = 0.2
_RESTORE_ATTEMPTS = 3
_RETRY_S = 0.5
_HUNG_S = 10.0


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


class _Guarded:
    """Counts the living ranks that have registered each GPU."""

    def __init__(self) -> None:
        self._ranks: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, addresses: Iterable[str]) -> None:
        with self._lock:
            self._ranks.update(addresses)

    def remove(self, addresses: Iterable[str]) -> list[str]:
        """Return those that no other rank has registered."""
        with self._lock:
            self._ranks.subtract(addresses)
            return [address for address in addresses if self._ranks[address] <= 0]


class _Watch(threading.Thread):
    """Watches one rank from its registration to its end; a thread, because a driver call may hang.

    Attributes:
        ended_s: When the rank was seen to be gone [s]; None before.
    """

    def __init__(self, connection: socket.socket, guarded: _Guarded, timebase: Timebase) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self._guarded = guarded
        self._time = timebase
        self.ended_s: float | None = None

    def run(self) -> None:
        with self._connection:
            pid, uid = local_socket.peer(self._connection)
            if uid != os.getuid():
                return
            with contextlib.closing(WatchedProcess(pid)) as process:
                self._guard(process)

    def _guard(self, process: WatchedProcess) -> None:
        try:
            self._connection.settimeout(_REGISTRATION_TIMEOUT_S)
            addresses = set(local_socket.receive(self._connection)["gpus"])
            gpus = {address: open_gpu(address) for address in addresses}
        except Exception as error:
            self._answer(str(error))
            return
        self._guarded.add(addresses)
        self._answer(None)
        process.wait_until_gone_or_readable(self._connection)
        self.ended_s = self._time.now_s()
        errors = [self._restore(address, gpus[address]) for address in self._guarded.remove(addresses)]
        self._answer("; ".join(filter(None, errors)) or None)  # Read by a rank that closes, not by a dead one.

    def _restore(self, address: str, gpu: Resettable) -> str | None:
        error = restore(gpu, self._time)
        if error is None:
            for left in left_locks():
                if left.address == address:
                    left.forget()
        return error

    def _answer(self, error: str | None) -> None:
        with contextlib.suppress(OSError):
            local_socket.send(self._connection, {"error": error, "pid": os.getpid()})

    def is_pending(self) -> bool:
        """Whether there is still something to wait for."""
        hangs = self.ended_s is not None and self._time.now_s() - self.ended_s > _HUNG_S
        return self.is_alive() and not hangs


def restore(gpu: Resettable, timebase: Timebase) -> str | None:
    """Return a GPU to its default clock, in a few attempts; returns the last error, or None."""
    error_text = ""
    for attempt in range(_RESTORE_ATTEMPTS):
        timebase.sleep(_RETRY_S if attempt else 0)
        try:
            gpu.reset_clock()
            return None
        except GpuError as error:
            error_text = str(error)
    syslog.syslog(syslog.LOG_ERR, f"perseus-ds guardian: clocks may stay locked, run `perseus-ds reset`: {error_text}")
    return error_text


def guard(listener: socket.socket, timebase: Timebase = REAL_TIME) -> None:
    """Serve ranks until the last one is gone, or none came."""
    guarded = _Guarded()
    watches: list[_Watch] = []
    listener.settimeout(_POLL_S)
    first_by_s = timebase.now_s() + _FIRST_RANK_TIMEOUT_S
    had_ranks = False
    while watches or (not had_ranks and timebase.now_s() < first_by_s):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            watches.append(_Watch(connection, guarded, timebase))
            watches[-1].start()
            had_ranks = True
        watches = [watch for watch in watches if watch.is_pending()]


def main() -> None:
    """Become the guardian of a name, unless another process is."""
    try:
        listener = local_socket.listen("\0" + sys.argv[1])
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
    guard(listener)


if __name__ == "__main__":
    main()
