"""Events in the GPU's own progress, between which time is measured.

What has passed already is an event as well: simulated GPUs and CUDA go through the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

_POLL_S = 0.0005


class DeviceEvent(Protocol):
    """A point in the GPU's own progress."""

    def synchronize(self) -> object:
        """Wait until the GPU has passed it."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def since_s(self, start: Any) -> float:
        """Return the time from another event of the same device to this one, both of which have passed [s]."""


class PassedEvent(float):
    """An event that is over, made of when it was [s]; a number, so that making one calls nothing written in Python."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def since_s(self, start: PassedEvent) -> float:
        return self - start


def wait_by_polling(event: torch.cuda.Event) -> None:
    """Wait until the GPU has passed an event, without keeping a core busy as the driver's own function does."""
    while not event.query():
        time.sleep(_POLL_S)


class EventPool:
    """Events of CUDA that are recorded again once nobody refers to them any more.

    Creating and destroying one can contend for the context's lock for milliseconds.

    Args:
        create: Makes an event. Not a blocking one: an H100 accepted 28 launches in advance with two blocking events
            after each, and 512 with an event that is not blocking (docs/evidence.md).
        wait: Waits for an event.

    Attributes:
        stream: Returns the stream on which to record; None for the current stream of the current device.
    """

    def __init__(self, create: Callable[[], torch.cuda.Event], wait: Callable[[torch.cuda.Event], object]) -> None:
        self._create = create
        self.wait = wait
        self.stream: Callable[[], torch.cuda.Stream] | None = None
        self.free: deque[torch.cuda.Event] = deque()

    def record(self) -> torch.cuda.Event:
        """Return an event that is recorded now, and that :attr:`free` is to get back."""
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
    """An event of a pool, to which it returns when this object is gone; on whichever thread that is."""

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
