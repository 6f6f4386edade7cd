"""Times the operations of an iteration on the device of the engine, between events.

There are three kinds of devices: the host (by its clock), CUDA (by events that are read after the device has passed
them) and a simulated GPU (by the host's clock, where each instruction takes the time that the simulated GPU needs). An
event of the host has already passed and has the same interface, so that all devices share their code.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from perseus_ds.gpu.device_models import MEMORY_BOUND
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Operation, Span
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
        needs_all: Whether untimed operations must be reported as well.
        replay: Times of the graph that is replayed in this iteration. None without one, or if they are not needed.
    """

    needs_all = False
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


_aten = torch.ops.aten
# PyTorch counts only attention kernels for GPUs. The CPU kernel takes the same arguments and does the same work.
_FLOPS_OF = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of kernels without changing the choice of kernels.

    PyTorch's ``FlopCounterMode`` decomposes composite operators, which could change results. Code under
    ``torch.compile`` compiles as it does without a counter. Of its kernels, only separate matrix products are counted.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = _FLOPS_OF.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


class SimulatedExecution(HostExecution):
    """Instructions that are computed for real and end when the simulated GPU has done the same work.

    The work of an instruction relative to the others follows from the floating-point operations of its kernels when it
    first ran on inputs of the same shapes. Before :meth:`calibrate`, instructions are not stretched. Transfers and the
    tail take ``transfer_s`` and ``tail_s`` in addition to their real time.

    Attributes:
        seconds_per_flop: Time of a floating-point operation at the top clock [s]. None before :meth:`calibrate`.
        flops: Floating-point operations of each kind of pass so far.
        input_shapes: Shapes of the inputs of the next forward, if known, and of the other passes of its micro-batch.
    """

    needs_all = True

    def __init__(
        self, gpu: SimulatedGpu, *, transfer_s: float = 0.0, tail_s: float = 0.0, timebase: Timebase = REAL_TIME
    ) -> None:
        super().__init__(timebase)
        self._gpu = gpu
        self._transfer_s = transfer_s
        self._tail_s = tail_s
        self._tail_done = False
        self.seconds_per_flop: float | None = None
        self.input_shapes: Hashable = None
        self._shapes: dict[tuple[int, int], Hashable] = {}
        self.flops: dict[Hashable, int] = {}
        self._running: Hashable = None
        self._counter: FlopCounter | None = None

    def calibrate(self, seconds_per_flop: float, flops: Mapping[Hashable, int] = MappingProxyType({})) -> None:
        """Set the time of a floating-point operation at the top clock [s].

        ``flops`` are those of passes for which another rank, which runs in step with this one, has more.
        """
        self.seconds_per_flop = seconds_per_flop
        self.flops.update({key: count for key, count in flops.items() if key in self.flops})

    def start_iteration(self) -> DeviceEvent:
        self._tail_done = False
        return super().start_iteration()

    def begin(self, operation: Operation) -> DeviceEvent:
        if _is_pass(operation):
            self._gpu.begin_work()
            self._running = self._key(operation.instruction)
            if self._running not in self.flops:
                self._counter = FlopCounter()
                self._counter.__enter__()  # type: ignore[no-untyped-call]
        return super().begin(operation)

    def end(self, operation: Operation) -> DeviceEvent:
        if _is_pass(operation):
            if self._counter is not None:
                self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self.flops[self._running] = self._counter.flops
                self._counter = None
            self._gpu.finish_work(self.flops[self._running] * (self.seconds_per_flop or 0.0))
        elif self.seconds_per_flop is not None:
            self._stretch_rest(operation)
        return super().end(operation)

    def _key(self, instruction: Instruction) -> Hashable:
        work = instruction.stage, instruction.micro_batch
        if instruction.kind is Kind.FORWARD:
            self._shapes[work] = self.input_shapes
        return instruction.stage, instruction.kind, self._shapes.get(work)

    def _stretch_rest(self, operation: Operation) -> None:
        if isinstance(operation, Exchange):
            self._time.sleep(self._transfer_s + self._gpu.transfer_delay_s)
        elif isinstance(operation, Compute) and self._tail_s and not self._tail_done:
            # The tail consists of several commands. All of its simulated work is done after the first one.
            self._tail_done = True
            self._gpu.begin_work(MEMORY_BOUND)
            self._gpu.finish_work(self._tail_s)


def _is_pass(operation: Operation) -> TypeGuard[Compute]:
    return isinstance(operation, Compute) and operation.instruction.kind is not Kind.TAIL


def _is_tail(operation: Operation) -> bool:
    return isinstance(operation, Compute) and operation.instruction.kind is Kind.TAIL
