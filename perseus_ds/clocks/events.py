"""Events on the device, between which time is measured.

An event that has already passed has the same interface, so that simulated GPUs and CUDA share their code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

_POLL_S = 0.0005


class DeviceEvent(Protocol):
    """A point in the progress of the device."""

    def synchronize(self) -> object:
        """Wait until the device has passed the event."""

    def query(self) -> bool:
        """Return True if the device has passed the event."""

    def since_s(self, start: Any) -> float:
        """Return the time from another event of the same device to this one [s]. Both must have passed."""


class PassedEvent(float):
    """An event that has passed, stored as its time [s]. A ``float``, because that is fast to create."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Return immediately, because the event has passed."""

    def query(self) -> bool:
        return True

    def since_s(self, start: PassedEvent) -> float:
        return self - start


def wait_by_polling(event: torch.cuda.Event) -> None:
    """Wait until the GPU has passed an event.

    Unlike the driver's function, this does not keep a core busy.
    """
    while not event.query():
        time.sleep(_POLL_S)


class EventPool:
    """Reuses CUDA events that are no longer referenced.

    Creating and destroying an event can contend for the context's lock for milliseconds.

    Args:
        create: Creates an event. It must not be a blocking one: an H100 accepted 28 launches in advance with two
            blocking events after each, and 512 with an event that is not blocking (docs/evidence.md).
        wait: Waits for an event.

    Attributes:
        stream: Returns the stream on which to record. None for the current stream of the current device.
    """

    def __init__(self, create: Callable[[], torch.cuda.Event], wait: Callable[[torch.cuda.Event], object]) -> None:
        self._create = create
        self.wait = wait
        self.stream: Callable[[], torch.cuda.Stream] | None = None
        self.free: deque[torch.cuda.Event] = deque()

    def record(self) -> torch.cuda.Event:
        """Record an event and return it. The caller must append it to :attr:`free` after use."""
        try:
            event = self.free.popleft()
        except IndexError:
            event = self._create()
        if self.stream is None:
            event.record()
        else:
            event.record(self.stream())
        return event


class RecordedEvent:
    """An event of a pool. It returns to the pool when this object is deleted, on any thread."""

    __slots__ = ("_pool", "event")

    def __init__(self, pool: EventPool) -> None:
        self.event = pool.record()
        self._pool = pool

    def __del__(self) -> None:
        self._pool.free.append(self.event)

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self._pool.wait(self.event)

    def since_s(self, start: RecordedEvent) -> float:
        return float(start.event.elapsed_time(self.event)) / 1e3
