"""Marks and times the operations of an iteration, one by one or captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.timers import Execution, GraphTimes
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation
from perseus_ds.protocol.job_messages import Follow, Times
from perseus_ds.protocol.layout import DEFAULT_CLOCKS

T = TypeVar("T")
_Slots: TypeAlias = tuple[int | None, int | None]
"""Slots of an instruction's start and end, each None if the agent does not await it."""
_UNMARKED: _Slots = (None, None)
NOTHING: AbstractContextManager[None] = nullcontext()
"""No-op context for operations that are not measured and change no clock."""


class Work(Protocol):
    """What makes operations take as long as a GPU needs for them that is not there.

    Attributes:
        flops: Floating-point operations of each kind of pass so far.
    """

    flops: dict[Hashable, int]

    @property
    def is_calibrated(self) -> bool:
        """True if passes take as long as on that GPU."""

    def calibrate(self, seconds_per_flop: float, flops: Mapping[Hashable, int]) -> None:
        """Set the time of a floating-point operation [s], and the operations of passes of which others have more."""

    def within(
        self, measured: AbstractContextManager[None], operation: Operation, inputs: Hashable = None
    ) -> AbstractContextManager[None]:
        """Return the context of an operation, whose work is done within the context that measures it."""


def times_of(follow: Follow, iteration: int) -> Times:
    """Return the times that are measured in an iteration."""
    return follow.otherwise if iteration % follow.every else follow.times


def _instructions_of(stream: tuple[Operation, ...]) -> list[Instruction]:
    return [operation.instruction for operation in stream if isinstance(operation, Compute)]


def _slots_of(instructions: list[Instruction], awaited: Iterable[int]) -> dict[Instruction, _Slots]:
    """Return the slots of the instructions with awaited marks."""
    slots: dict[Instruction, _Slots] = {}
    for slot in awaited:
        position, is_end = divmod(slot, 2)
        if position < len(instructions):
            instruction = instructions[position]
            start, end = slots.get(instruction, _UNMARKED)
            slots[instruction] = (start, slot) if is_end else (slot, end)
    return slots


class OperationHooks:
    """One context manager for all operations, which do not overlap. Creating one for each is slower.

    It times and marks those for which the server and the program of the iteration ask.
    """

    def __init__(self, timers: Execution, clocks: AgentClocks) -> None:
        self._timers = timers
        self._clocks = clocks
        self._mark = clocks.mark
        # Awaited slots of instructions, and those of the last iteration in the order of execution. Most iterations are
        # alike, and comparing objects is faster than looking them up.
        self._slots: dict[Instruction, _Slots] = {}
        self._ran: list[tuple[Instruction, _Slots | None]] = []
        self._next = 0
        self._stream: tuple[Operation, ...] = ()
        self._followed: Follow | None = None
        # The last stream of which the places of operations were requested, and these places.
        self._placed: tuple[tuple[Operation, ...], dict[Operation, int]] = (), {}
        # The current operation, if it is timed, and the slots of its start and end, if they are marked.
        self._timed: Operation | None = None
        self._marked = _UNMARKED
        self._times_passes = self._times_all = True

    def start_iteration(self, follow: Follow, iteration: int, stream: tuple[Operation, ...]) -> None:
        """Begin to mark and time an iteration according to a message."""
        self._next = 0
        times = times_of(follow, iteration)
        self._times_passes = times != "none"
        self._times_all = times == "all"
        if follow is not self._followed or stream is not self._stream:
            self._slots = _slots_of(_instructions_of(stream), follow.slots)
            self._ran = []
            self._followed, self._stream = follow, stream
        self._timers.start_iteration()
        self._clocks.begin_iteration(follow.program.number, len(follow.program.clocks_mhz))

    def places_of(self, stream: tuple[Operation, ...]) -> Mapping[Operation, int]:
        """Return the place of each operation in a stream."""
        if stream is not self._placed[0]:
            self._placed = stream, {operation: place for place, operation in enumerate(stream)}
        return self._placed[1]

    def around(self, operation: Operation) -> AbstractContextManager[None]:
        """Return the context manager for an operation. It is a no-op if the operation is not timed or marked."""
        if type(operation) is not Compute:
            if not self._times_all:
                return NOTHING
            self._timed, self._marked = operation, _UNMARKED
            return self
        slots: _Slots | None = None
        if self._slots:
            place, ran, instruction = self._next, self._ran, operation.instruction
            self._next = place + 1
            if place < len(ran) and ran[place][0] is instruction:
                slots = ran[place][1]
            else:
                slots = self._slots.get(instruction)
                ran[place:] = [(instruction, slots)]
        if slots is None and not self._times_passes:
            return NOTHING
        self._timed, self._marked = operation if self._times_passes else None, slots or _UNMARKED
        return self

    def replay(self, captured: CapturedIteration, replay: Callable[[], T]) -> T:
        """Execute the passes of this iteration by replaying a graph."""
        if self._slots:
            instructions = _instructions_of(self._stream)
            if instructions != captured.instructions[: len(instructions)]:
                self._clocks.change_program(DEFAULT_CLOCKS)  # the graph's marks are those of another order
        if captured.times.last is not None:
            captured.times.last.spans()  # this replay overwrites them
        replayed = replay()
        if self._times_passes:
            self._timers.replayed(captured.times)
        return replayed

    def __enter__(self) -> None:
        """Begin to mark and time an operation."""
        slot = self._marked[0]
        if slot is not None:
            self._mark(slot)
        if self._timed is not None:
            self._timers.begin(self._timed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish marking and timing an operation."""
        if self._timed is not None:
            self._timers.end(self._timed)
        slot = self._marked[1]
        if slot is not None:
            self._mark(slot)


class CapturedIteration:
    """The operations of an iteration, which are captured and not executed.

    A graph marks the same slots in each replay, under any plan. So every instruction is marked, and its position is its
    place in the order in which instructions were captured.
    """

    def __init__(self, clocks: AgentClocks, times: GraphTimes) -> None:
        self.instructions: list[Instruction] = []
        self.tokens = 0
        self.times = times
        self._clocks = clocks

    def add_tokens(self, count: int) -> None:
        """Count tokens in the inputs of each replay."""
        self.tokens += count

    @contextmanager
    def operation(self, operation: Operation, inputs: Hashable = None) -> Iterator[None]:
        """Context manager for capturing one operation. See ``PerseusRuntime.operation``."""
        if not isinstance(operation, Compute):
            with self.times.around(operation):
                yield
            return
        instruction, position = operation.instruction, len(self.instructions)
        self.instructions.append(instruction)
        self._clocks.mark(2 * position)
        with self.times.around(operation):
            yield
        if instruction.kind is not Kind.TAIL:  # it ends after the graph
            self._clocks.mark(2 * position + 1)

    @property
    def tail_stage(self) -> int | None:
        """Stage of the tail, which begins after all passes were captured. None if some were not."""
        last = self.instructions[-1] if self.instructions else None
        return last.stage if last is not None and last.kind is Kind.TAIL else None
