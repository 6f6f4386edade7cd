"""Moments in the GPU's own progress, and when they passed on the host's clock.

The training thread launches work ahead of the GPU, so a clock is requested for a moment that the GPU has not reached
yet. What has passed already is a moment as well: simulated GPUs and CUDA go through the same code.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from perseus_ds.timebase import Timebase


class Moment(Protocol):
    """A point in the GPU's own progress."""

    def synchronize(self) -> object:
        """Wait until the GPU has passed it."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def passed_s(self) -> float:
        """Return when the GPU passed it, on the host's clock [s]; only after it has."""


class PassedMoment:
    """A moment that is over.

    Args:
        at_s: When it was [s].
    """

    __slots__ = ("_at_s",)

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def passed_s(self) -> float:
        return self._at_s


class CudaEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self) -> object: ...

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time from this event to another [ms]."""


class CudaMoment:
    """The moment at which the GPU reaches an event.

    Args:
        event: The event; recorded.
        origin: The origin that its time is counted from.
    """

    __slots__ = ("_origin", "event")

    def __init__(self, event: CudaEvent, origin: CudaOrigin) -> None:
        self.event = event
        self._origin = origin

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return self.event.query()

    def passed_s(self) -> float:
        return self._origin.host_time_s(self.event)


class CudaOrigin:
    """The event at which an iteration begins on the GPU, from which its other events are counted.

    CUDA reports the time between two events, not when an event passed on the host's clock. A thread that finds an
    event passed finds it late, by the driver's call that it was busy with, and never early: the origin passed no later
    than any such time less the time between origin and event. The least of these is taken, over this iteration and
    the one before: in two iterations the two clocks do not diverge by much, and some events are found at once.

    Args:
        event: The event; recorded.
        before: The origin of the iteration before.
        timebase: The host's clock.
    """

    def __init__(self, event: CudaEvent, before: CudaOrigin | None, timebase: Timebase) -> None:
        self.event = event
        self._before = before
        self._time = timebase
        self._latest_s = math.inf
        if before is not None:
            before._before = None

    def host_time_s(self, event: CudaEvent) -> float:
        """Return when an event that has passed did so on the host's clock [s]."""
        now_s = self._time.now_s()
        if not self.event.query():  # on another stream, which is ahead
            return now_s
        since_s = self.since_s(event)
        self._latest_s = min(self._latest_s, now_s - since_s)
        return min(self._latest_s, self._by_the_iteration_before_s()) + since_s

    def since_s(self, event: CudaEvent) -> float:
        """Return the time from here to an event, both of which have passed [s]."""
        return self.event.elapsed_time(event) / 1e3

    def _by_the_iteration_before_s(self) -> float:
        before = self._before  # which the training thread may drop meanwhile
        return math.inf if before is None else before._latest_s + before.since_s(self.event)
