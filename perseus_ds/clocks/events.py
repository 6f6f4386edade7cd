"""Events in the GPU's own progress, and when they passed on the host's clock.

The training thread launches work ahead of the GPU, so a clock is requested for an event that the GPU has not reached
yet. What has passed already is an event as well: simulated GPUs and CUDA go through the same code.

While a thread captures a CUDA graph in CUDA's global mode, which is torch's default, calls such as the query of an
event fail on every other thread, and make the capture fail as well, unless that thread has chosen the relaxed mode.
torch has no function for that; the runtime that torch has loaded does.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from perseus_ds.timebase import Timebase

_POLL_S = 0.0005
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_EXCHANGE = ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode")


class DeviceEvent(Protocol):
    """A point in the GPU's own progress."""

    def synchronize(self) -> object:
        """Wait until the GPU has passed it."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def passed_s(self) -> float:
        """Return when the GPU passed it, on the host's clock [s]; only after it has."""

    def since_s(self, start: Any) -> float:
        """Return the time from another event of the same device to this one, both of which have passed [s]."""


class PassedEvent(float):
    """An event that is over, made of when it was [s]; a number, so that making one calls nothing written in Python."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def passed_s(self) -> float:
        return float(self)

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


class CudaOrigin(RecordedEvent):
    """The event at which an iteration begins on the GPU, from which its other events are counted.

    CUDA reports the time between two events, not when an event passed on the host's clock. A thread that finds an
    event passed finds it late, by the driver's call that it was busy with, and never early: the origin passed no later
    than any such time less the time between origin and event. The least of these is taken, over this iteration and
    the one before: in two iterations the two clocks do not diverge by much, and some events are found at once.

    Args:
        before: The origin of the iteration before.
    """

    def __init__(self, pool: EventPool, before: CudaOrigin | None, timebase: Timebase) -> None:
        super().__init__(pool)
        self._before = before
        self._time = timebase
        self._latest_s = math.inf
        if before is not None:
            before._before = None

    def passed_s(self) -> float:
        return self.host_time_s(self)

    def host_time_s(self, event: RecordedEvent) -> float:
        """Return when an event that has passed did so on the host's clock [s]."""
        now_s = self._time.now_s()
        if not self.query():  # on another stream, which is ahead
            return now_s
        since_s = event.since_s(self)
        self._latest_s = min(self._latest_s, now_s - since_s)
        before = self._before  # which the training thread may drop meanwhile
        by_before_s = math.inf if before is None else before._latest_s + self.since_s(before)
        return min(self._latest_s, by_before_s) + since_s


class CudaEvent(RecordedEvent):
    """An event of CUDA, whose time is known on the host's clock."""

    __slots__ = ("_origin",)

    def __init__(self, pool: EventPool, origin: CudaOrigin) -> None:
        self.event = pool.record()  # as super() does; one call less, since training makes two for each operation
        self._pool = pool
        self._origin = origin

    def passed_s(self) -> float:
        return self._origin.host_time_s(self)


def relax_stream_capture(runtime: Any = None) -> bool:
    """Choose the relaxed mode for the calling thread.

    Args:
        runtime: The library of the CUDA or HIP runtime; by default the one that torch has loaded.

    Returns:
        Whether the runtime did so. If not, captures in other threads fail where this thread uses CUDA meanwhile.
    """
    runtime = runtime or _loaded_runtime()
    exchange = next((found for name in _EXCHANGE if (found := getattr(runtime, name, None))), None)
    mode = ctypes.c_int(_RELAXED)
    return exchange is not None and bool(exchange(ctypes.byref(mode)) == 0)


def _loaded_runtime() -> ctypes.CDLL | None:
    for library, version in (("libcudart", torch.version.cuda), ("libamdhip64", torch.version.hip)):
        if version is not None:
            with suppress(OSError):
                return ctypes.CDLL(f"{library}.so.{version.partition('.')[0]}", mode=os.RTLD_NOLOAD)
    return None
