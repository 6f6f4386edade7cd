"""Times the operations of an iteration on the device of the engine, between events.

There are two kinds of devices: the host (by its clock) and CUDA (by events that are read after the device has passed
them). An event of the host has already passed and has the same interface, so that both devices share their code.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Span
from perseus_ds.timebase import REAL_TIME, Timebase

_POLL_S = 0.0005


class DeviceEvent(Protocol):
    """A point in the progress of the device."""

    def synchronize(self) -> object: ...

    def query(self) -> bool: ...

    def since_s(self, start: Any) -> float:
        """Return the time from another event of the same device to this one [s]. Both must have passed."""


class PassedEvent(float):
    """An event that has passed, stored as its time [s]. A ``float``, because that is fast to create."""

    __slots__ = ()

    def synchronize(self) -> None: ...

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

    Creating and destroying an event can contend for the context's lock for milliseconds. The events must not be
    blocking ones: an H100 accepted 28 launches in advance with two of these after each, and 512 with others
    (docs/evidence.md). ``stream`` returns the stream on which to record, and is None for the current stream of the
    current device.
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


Mark: TypeAlias = tuple[Operation, DeviceEvent, DeviceEvent]
"""An operation, its start and its end."""


class FinishedIteration:
    """An iteration that has been issued, but that the device may not have finished yet.

    Its time and operations are known after its end event has passed.
    """

    def __init__(
        self, start: DeviceEvent, end: DeviceEvent, marks: Sequence[Mark], replay: Replay | None = None
    ) -> None:
        self.end = end
        self._start = start
        self._marks = marks
        self._replay = replay

    def is_over(self) -> bool:
        return self.end.query()

    def time_s(self) -> float:
        """Wait for the device and return the duration of the iteration [s]."""
        self.end.synchronize()
        return self.end.since_s(self._start)

    def after_s(self, end: DeviceEvent) -> float:
        """Wait for the device and return the time from the end of an earlier iteration to the start of this one [s]."""
        self.end.synchronize()
        return self._start.since_s(end)

    def spans(self) -> list[Span]:
        """Wait for the device and return the iteration's operations."""
        self.end.synchronize()
        start = self._start
        spans = [Span(operation, begun.since_s(start), ended.since_s(start)) for operation, begun, ended in self._marks]
        return spans if self._replay is None else self._replay.followed_by(spans)


class GraphTimes:
    """Times operations in a CUDA graph with events that each replay records again.

    Attributes:
        marks: The operations, and the events at which they begin and end.
        last: The last replay with requested times. None before the first one.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self.marks: list[tuple[Operation, Any, Any]] = []
        self.last: Replay | None = None

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        """Time an operation while it is captured."""
        begun = self._event()
        yield
        self.marks.append((operation, begun, self._event()))


class Replay:
    """Times of the operations in one replay of a graph. They must be read before the next replay begins."""

    def __init__(self, graph: GraphTimes, start: Any, over: DeviceEvent) -> None:
        self._graph = graph
        self._start = start
        self._over = over
        self._spans: list[Span] | None = None

    def spans(self) -> list[Span]:
        """Return the operations in the graph. Waits for the device the first time."""
        if self._spans is None:
            self._over.synchronize()
            of_start = self._start.event
            self._spans = [
                Span(operation, of_start.elapsed_time(begun) / 1e3, of_start.elapsed_time(ended) / 1e3)
                for operation, begun, ended in self._graph.marks
            ]
        return self._spans

    def followed_by(self, after: list[Span]) -> list[Span]:
        """Return the operations in the graph and those issued after it, with the two parts of a tail joined."""
        spans = self.spans()
        if not (spans and after and _is_tail(spans[-1].operation) and _is_tail(after[0].operation)):
            return spans + after
        rest = after[0]
        return [*spans[:-1], Span(rest.operation, spans[-1].start_s, rest.end_s), *after[1:]]


class Execution(ABC):
    """Times the operations of this rank, which do not overlap.

    Attributes:
        replay: Times of the graph that is replayed in this iteration. None without one, or if they are not needed.
    """

    replay: Replay | None = None
    _start: DeviceEvent
    _begun: DeviceEvent

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def start_iteration(self) -> DeviceEvent:
        """Begin an iteration and return the event of its start on the device."""
        self._marks = []
        self.replay = None
        self._start = self.event()
        return self._start

    def finish_iteration(self) -> FinishedIteration:
        """End the current iteration after all of it has been issued. Does not wait for the device."""
        return FinishedIteration(self._start, self.event(), self._marks, self.replay)

    def graph_times(self) -> GraphTimes | None:
        """Return the timer of operations in a CUDA graph during capture. None if they cannot be timed."""
        return None

    def replayed(self, graph: GraphTimes) -> None:
        """Time the operations of a graph whose replay has just been issued."""
        self.replay = graph.last = Replay(graph, self._start, self.event())

    def begin(self, operation: Operation) -> DeviceEvent:
        self._begun = begun = self.event()
        return begun

    def end(self, operation: Operation) -> DeviceEvent:
        ended = self.event()
        self._marks.append((operation, self._begun, ended))
        return ended

    @abstractmethod
    def event(self) -> DeviceEvent:
        """Return an event that passes when the device has finished all work issued so far."""


class HostExecution(Execution):
    """Operations that have ended when their call returns."""

    def __init__(self, timebase: Timebase = REAL_TIME) -> None:
        super().__init__()
        self._time = timebase
        self._now_s = timebase.now_s

    def event(self) -> DeviceEvent:
        return PassedEvent(self._now_s())


class CudaExecution(Execution):
    """Operations that the host only launches, timed by events on the current stream of the device."""

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        wait: Callable[[Any], object] = wait_by_polling,
    ) -> None:
        super().__init__()
        self._cuda = cuda
        self._device = cuda.current_device() if device.index is None else device.index
        self._pool = EventPool(lambda: cuda.Event(enable_timing=True), wait)
        self._find_stream()

    def start_iteration(self) -> DeviceEvent:
        self._find_stream()
        return super().start_iteration()

    def _find_stream(self) -> None:
        """Record events on the current stream of the rank's device, even if another device is the current one."""
        # Looking up a stream takes longer than recording on that of the current device.
        is_current = self._cuda.current_device() == self._device
        self._pool.stream = None if is_current else lambda: self._cuda.current_stream(self._device)

    def event(self) -> RecordedEvent:
        return RecordedEvent(self._pool)

    def graph_times(self) -> GraphTimes | None:
        if torch.version.hip is not None:
            return None
        try:
            self._cuda.Event(enable_timing=True, external=True)
        except TypeError:  # an older torch
            return None
        return GraphTimes(self._external_event)

    def _external_event(self) -> Any:
        event = self._cuda.Event(enable_timing=True, external=True)
        event.record(self._cuda.current_stream(self._device))
        return event


def _is_tail(operation: Operation) -> bool:
    return isinstance(operation, Compute) and operation.instruction.kind is Kind.TAIL
