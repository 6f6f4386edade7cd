"""Notices the end of another process, however it ends."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress

import psutil

_POLL_S = 0.2


class WatchedProcess:
    """Another process of this node, given by its id.

    A process counts as gone only when its last thread has ended: after ``kill -9`` its first thread may be a zombie
    while another one is still inside the driver, about to lock a clock. A zombie without threads, which nobody has
    waited for yet, is gone. A later process with the same id is not this one. A pid file descriptor has exactly these
    properties; where the kernel (before 5.3) or a container's system call filter refuses one, psutil is polled.
    """

    def __init__(self, pid: int, open_descriptor: Callable[[int], int] = os.pidfd_open) -> None:
        """Begin to watch.

        Args:
            pid: Its id; 0 if it is in another pid namespace. Then its end cannot be seen.
            open_descriptor: Opens a pid file descriptor.
        """
        self._descriptor: int | None = None
        self._process: psutil.Process | None = None
        self._was_gone = False
        if pid == 0:
            return
        try:
            self._descriptor = open_descriptor(pid)
        except ProcessLookupError:
            self._was_gone = True
        except OSError:
            self._watch_by_polling(pid)

    def _watch_by_polling(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._was_gone = True

    def is_gone(self) -> bool:
        """Return whether the process has ended, with all its threads."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], 0)[0])
        if self._process is None:
            return self._was_gone
        with suppress(psutil.NoSuchProcess):
            is_zombie = self._process.status() == psutil.STATUS_ZOMBIE
            return not self._process.is_running() or (is_zombie and self._process.num_threads() <= 1)
        return True

    def wait_until_gone_or_readable(self, connection: socket.socket) -> None:
        """Return when the process is gone, or there is something to read from a connection (its end included)."""
        watched: list[int | socket.socket] = [connection]
        if self._descriptor is not None:
            watched.append(self._descriptor)
        timeout_s = None if self._process is None else _POLL_S
        while not self.is_gone() and not select.select(watched, [], [], timeout_s)[0]:
            pass

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
