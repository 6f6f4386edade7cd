"""The ranks that a guardian watches, and the GPUs that each of them may lock."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from perseus_ds.timebase import Timebase

_HUNG_S = 10.0


@dataclass(frozen=True)
class Registration:
    """A rank asks to be watched.

    Attributes:
        rank: The same text on all connections of one rank, and of no other one.
        gpus: Addresses of the GPUs that it may lock.
    """

    rank: str
    gpus: tuple[str, ...]


class GuardedRanks:
    """The ranks by their connections: there may be several of one rank, and the end of one is the end of the rank."""

    def __init__(self, timebase: Timebase) -> None:
        self._time = timebase
        self._lock = threading.Lock()
        self._living: dict[socket.socket, Registration] = {}
        self._ended_s: dict[socket.socket, float] = {}
        self.had_any = False

    @contextmanager
    def living(self, connection: socket.socket, registration: Registration) -> Iterator[None]:
        """Count a rank as living, until :meth:`end`, and then as left, until all is done for it."""
        with self._lock:
            self._living[connection] = registration
            self.had_any = True
        try:
            yield
        finally:
            with self._lock:
                self._living.pop(connection, None)
                self._ended_s.pop(connection, None)

    def end(self, connection: socket.socket) -> list[str]:
        """Count a rank as ended; returns its GPUs that no other rank has registered: their clocks must be reset."""
        with self._lock:
            ended = self._living.pop(connection)
            self._ended_s[connection] = self._time.now_s()
            others = [other for other in self._living.values() if other.rank != ended.rank]
            return [gpu for gpu in ended.gpus if not any(gpu in other.gpus for other in others)]

    def still_ending(self, connection: socket.socket) -> None:
        """Count an ended rank as left for a while longer: the driver answers, and its clocks may not be reset yet."""
        with self._lock:
            self._ended_s[connection] = self._time.now_s()

    def have_registered(self, gpu: str) -> bool:
        """Return whether a living rank may lock the GPU of an address."""
        with self._lock:
            return any(gpu in rank.gpus for rank in self._living.values())

    def copies(self) -> list[tuple[Registration, socket.socket]]:
        """Return the living ranks, each with a copy of its connection."""
        with self._lock:
            return [(registration, connection.dup()) for connection, registration in self._living.items()]

    @property
    def are_living(self) -> bool:
        """Whether there is a living rank."""
        return bool(self._living)

    @property
    def are_left(self) -> bool:
        """Whether there is a living rank, or one whose clocks are being reset by a driver that does not hang."""
        with self._lock:
            latest_s = max(self._ended_s.values(), default=float("-inf"))
            return bool(self._living) or self._time.now_s() - latest_s <= _HUNG_S
