"""The guardian itself: ``python -m perseus_ds.device.guardian_daemon NAME``.

The ranks' side of it is :mod:`perseus_ds.device.guardian_client`.

It imports neither torch nor DeepSpeed, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import syslog
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from perseus_ds.device.guardian_client import peer
from perseus_ds.errors import GpuError

_FIRST_RANK_TIMEOUT_S = 10.0
_POLL_S = 0.2
_RESTORE_ATTEMPTS = 3
_RETRY_S = 0.5
_HUNG_S = 10.0


class _Resettable(Protocol):
    def reset_clock(self) -> None: ...


def _open(address: str) -> _Resettable:
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.device.gpu.nvml import NvmlGpu
        from perseus_ds.device.gpu.nvml_lookup import index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.device.gpu.zeus import open_address

        return open_address(identity)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:… or zeus:….")


class _Process:
    """Another process, told from a later one of the same id by when it started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = self._status()[2]

    def _status(self) -> tuple[str, int, str]:
        """Return state, number of threads and start time; see proc(5)."""
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return "X", 0, ""
        return fields[0], int(fields[17]), fields[19]

    def is_gone(self) -> bool:
        state, threads, started = self._status()
        # The first thread may be dead while another one still is inside the driver, about to lock a clock.
        return started != self._started or (state in "ZX" and threads <= 1)


class _Guarded:
    """How many living ranks have registered each GPU."""

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
        ended_s: When the rank was seen to be gone (monotonic) [s]; None before.
    """

    def __init__(self, connection: socket.socket, guarded: _Guarded) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self._guarded = guarded
        self.ended_s: float | None = None

    def run(self) -> None:
        with self._connection:
            pid, uid = peer(self._connection)
            if uid != os.getuid():
                return
            try:
                process = _Process(pid) if pid else None  # The id is 0 if the rank is in another pid namespace.
                addresses = set(json.loads(self._connection.makefile("rb").readline())["gpus"])
                gpus = {address: _open(address) for address in addresses}
            except Exception as error:
                self._answer(str(error))
                return
            self._guarded.add(addresses)
            self._answer(None)
            self._wait(process)
            self.ended_s = time.monotonic()
            errors = [_restore(gpus[address]) for address in self._guarded.remove(addresses)]
            self._answer("; ".join(filter(None, errors)) or None)  # Heard by a rank that closes, not by a dead one.

    def _wait(self, process: _Process | None) -> None:
        """Return when the rank closes its connection, says that it will, or is gone."""
        while not select.select([self._connection], [], [], _POLL_S)[0]:
            if process is not None and process.is_gone():
                return

    def _answer(self, error: str | None) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps({"error": error, "pid": os.getpid()}).encode() + b"\n")

    def is_pending(self) -> bool:
        """Whether there is still something to wait for."""
        hangs = self.ended_s is not None and time.monotonic() - self.ended_s > _HUNG_S
        return self.is_alive() and not hangs


def _restore(gpu: _Resettable) -> str | None:
    """Return a GPU to its default clock; returns what went wrong, or None."""
    error_text = ""
    for attempt in range(_RESTORE_ATTEMPTS):
        time.sleep(_RETRY_S if attempt else 0)
        try:
            gpu.reset_clock()
            return None
        except GpuError as error:
            error_text = str(error)
    syslog.syslog(syslog.LOG_ERR, f"perseus-ds guardian: clocks may stay locked, run `perseus-ds reset`: {error_text}")
    return error_text


def guard(listener: socket.socket) -> None:
    """Serve ranks until the last one is gone, or none came."""
    guarded = _Guarded()
    watches: list[_Watch] = []
    listener.settimeout(_POLL_S)
    first_by_s = time.monotonic() + _FIRST_RANK_TIMEOUT_S
    had_ranks = False
    while watches or (not had_ranks and time.monotonic() < first_by_s):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            watches.append(_Watch(connection, guarded))
            watches[-1].start()
            had_ranks = True
        watches = [watch for watch in watches if watch.is_pending()]


def main() -> None:
    """Become the guardian of a name, unless another process is."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + sys.argv[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return  # Another rank was faster.
        raise
    listener.listen(128)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ.pop(variable, None)  # The ranks may each see another part of the node's GPUs.
    if os.fork():
        return  # The guardian proper is an orphan: killing the job's process tree does not find it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    guard(listener)


if __name__ == "__main__":
    main()
