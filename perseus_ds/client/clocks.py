"""The training process's side of its GPU's clocks, which the agent of the node sets and reads.

Training writes the number of an iteration's program and its marks into shared memory, and reads the status and the
energies that the agent has written there. Whatever is not needed at once is a message. Only questions that a mode asks
while it measures are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from perseus_ds.client.marks import Marks
from perseus_ds.errors import GpuBusyError, GpuError, PerseusError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.counter_log import Refreshes
from perseus_ds.protocol import messages
from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.protocol.layout import (
    DEFAULT_CLOCKS,
    DRIVER_HANGS_S,
    PAUSED,
    POSITIONS,
    ClockStatus,
    IterationEnergy,
    RankMemory,
)
from perseus_ds.protocol.messages import (
    Answer,
    Ask,
    ClockRefused,
    Failed,
    Latencies,
    Program,
    Question,
    Refused,
    SetProfiledLimit,
    ToClient,
    ToClocks,
    WatchDefaultClocks,
)
from perseus_ds.timebase import REAL_TIME, Timebase

_LEAST_S = 0.001
_MOST_SPANS = 2500
_CLOSED = "the clock was restored for good, and the GPU is not read any more"


class Link(Protocol):
    """The connection to the agent, which may be lost and made again.

    Attributes:
        grants: Number of agents that have granted the lease.
    """

    grants: int

    def send(self, message: ToClocks) -> None:
        """Send a message without waiting; it is lost if there is no agent."""

    def received(self) -> list[ToClient]:
        """Return the messages that have come."""

    def wake(self) -> None:
        """Have the agent look at the memory."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the agent may have told something, at most for some time [s]."""

    @property
    def answers(self) -> bool:
        """Whether the agent has looked at this rank lately."""

    @property
    def looked_s(self) -> float:
        """When the agent last looked at this rank [s]."""

    def problem(self) -> GpuError | None:
        """Return why there is no agent, if it is gone for long; start another one if it is gone."""

    def close(self, timeout_s: float = 3.0) -> bool:
        """End the lease; return whether the agent has restored the default clock."""


class Asked:
    """A question to the agent."""

    def __init__(self, clocks: AgentClocks, number: int) -> None:
        self._clocks = clocks
        self._number = number
        self._grants = clocks.grants
        self._answer: Answer | messages.Refreshes | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or an error."""
        if self._answer is None:
            self._answer = self._clocks.take_answer(self._number)
        if self._answer is None and self._clocks.grants != self._grants:
            self._answer = Answer(self._number, error="the agent was replaced before it answered")
        return self._answer is not None

    @property
    def has_worked(self) -> bool:
        """Whether there is an answer."""
        return self.is_over and self._answer is not None and not self._answer.error

    def answer(self) -> Answer | messages.Refreshes:
        """Wait for the answer.

        Raises:
            GpuBusyError: The driver does not answer.
            GpuError: The agent's, or there is no agent.
        """
        while not self.is_over:
            if (problem := self._clocks.problem) is not None:
                raise problem
            self._clocks.wait()
        assert self._answer is not None
        if self._answer.error:
            is_busy = isinstance(self._answer, Answer) and self._answer.is_busy
            raise (GpuBusyError if is_busy else GpuError)(self._answer.error)
        return self._answer

    def values(self) -> tuple[float, ...]:
        """Wait for the answer and return its values; errors are those of :meth:`answer`."""
        answer = self.answer()
        assert isinstance(answer, Answer)
        return answer.values


class AgentClocks:
    """See the module.

    Attributes:
        memory: What the rank shares with its agent.
        latencies: How late clocks follow their requests; replaced when one of them is another.
        on_error: Called by :meth:`poll` if the agent cannot set clocks or read the energy counter.
        on_refusal: Called by :meth:`poll` if the GPU does not reach a clock.
    """

    def __init__(
        self,
        link: Link,
        memory: RankMemory,
        marks: Marks,
        gpu: str,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Begin at default clocks.

        Args:
            link: To the agent.
            memory: What the rank shares with it.
            marks: Writes the marks.
            gpu: Product name of the GPU.
            timebase: The time of marks.
        """
        self.memory = memory
        self.latencies = LatencyTable()
        self.on_error: Callable[[Exception], None] = lambda error: None
        self.on_refusal: Callable[[ClockRefused], None] = lambda refusal: None
        self._link = link
        self._marks = marks
        self._gpu = gpu
        self._time = timebase
        self._grants = link.grants
        self._numbers: dict[Program, int] = {}
        self._positions = 0
        self._questions = 0
        self._answers: dict[int, Answer | messages.Refreshes] = {}
        self._profiled_w: float | None = None
        self.is_closed = False
        self._has_marks = True

    @property
    def grants(self) -> int:
        """Number of agents that have granted the lease."""
        return self._link.grants

    @property
    def status(self) -> ClockStatus:
        """What the agent did to the clock, and read of it."""
        return self.memory.status

    @property
    def failing_s(self) -> float:
        """How long the driver has not answered, or has been too busy to set a clock [s]; else 0.

        It is as of the agent's last look at this rank: an agent that does not run now says nothing of the driver.
        """
        since_s = self.memory.busy_since_s
        return max(0.0, self._link.looked_s - since_s) if since_s else 0.0

    @property
    def problem(self) -> GpuError | None:
        """Why clocks cannot be set, if they cannot."""
        if self.is_closed:
            return GpuError(_CLOSED)
        if self.memory.is_revoked:
            return GpuError("this process received a termination signal, and its clock was reset")
        if (problem := self._link.problem()) is not None:
            return problem
        self._renew()
        if (failing_s := self.failing_s) >= DRIVER_HANGS_S:
            return GpuBusyError(f"the driver has not answered for {failing_s:.0f} s")
        return None

    def program(self, program: Program) -> int:
        """Return the number of a program, which is sent to the agent the first time.

        Args:
            program: The program; its own number is ignored. Without a clock, it is that of default clocks.
        """
        if program.first_mhz is None and not program.clocks_mhz:
            return DEFAULT_CLOCKS
        if (number := self._numbers.get(program)) is None:
            number = len(self._numbers) % DEFAULT_CLOCKS
            if len(self._numbers) >= DEFAULT_CLOCKS:
                self._numbers.clear()
                number = 0
            self._numbers[program] = number
            self._positions = min(max(self._positions, len(program.clocks_mhz)), POSITIONS)
            self._send_program(program, number)
        return number

    def begin_iteration(self, program: int) -> int:
        """Begin an iteration under a program; return its number."""
        iteration = self.memory.begin_iteration(program)
        try:
            if self._has_marks:
                self._marks.begin(iteration, self._positions)
        except GpuError as error:
            self._lose_marks(error)
        self._link.wake()
        return iteration

    def change_program(self, program: int) -> None:
        """Run the rest of the iteration under another program; from any thread."""
        if self.memory.program(self.memory.iteration) != program:
            self.memory.change_program(program)
            self._link.wake()

    def mark(self, slot: int) -> None:
        """Mark that the device has reached a slot; see :class:`~perseus_ds.client.marks.Marks`."""
        try:
            if slot < 2 * POSITIONS and self._has_marks:
                self._marks.mark(slot)
        except GpuError as error:
            self._lose_marks(error)

    def end_iteration(self, iteration: int) -> None:
        """End an iteration, all of which was issued."""
        self.memory.end_iteration()
        self.memory.idle_since_s = self._time.now_s()
        try:
            if self._has_marks:
                self._marks.end(iteration)
        except GpuError as error:
            self._lose_marks(error)

    def _lose_marks(self, error: GpuError) -> None:
        """Go on without marks, as after an error of CUDA, which ends training anyhow."""
        self._has_marks = False
        self.on_error(AgentError(str(error)))

    def may_idle(self) -> None:
        """Return to default clocks unless an iteration begins within 2 s."""
        self._idle(self._time.now_s())

    def pause(self) -> None:
        """Return to default clocks until the next iteration begins."""
        self._idle(PAUSED)

    def _idle(self, since_s: float) -> None:
        self.memory.idle_since_s = since_s
        self.memory.on_mark()
        self._link.wake()
        self._link.problem()  # starts another agent if there is none: the clock may be locked

    def recorded(self, iteration: int, *, waits: bool = False) -> IterationEnergy | None:
        """Return what the agent has recorded of an iteration; None if it has not yet.

        Args:
            iteration: The iteration's number.
            waits: Whether to wait for the agent, for 3 s at most.
        """
        if not self._has_marks:
            return IterationEnergy()
        end_s = self._time.now_s() + DRIVER_HANGS_S
        while (recorded := self.memory.recorded(iteration)) is None and waits:
            if self.problem is not None or not self._link.answers or self._time.now_s() >= end_s:
                return IterationEnergy()
            self.wait()
        return IterationEnergy() if recorded is None and self.is_closed else recorded

    def probe(self) -> Asked:
        """Have the driver lock and reset a clock and read the counter once. If it does, clocks are set again."""
        return self.ask("probe")

    def ask(self, question: Question, value: float = 0.0) -> Asked:
        """Ask the agent; returns at once."""
        self._questions += 1
        self._link.send(Ask(self._questions, question, value))
        return Asked(self, self._questions)

    def watch_default_clocks(self) -> None:
        """Report, like a clock that is not reached, a limit that keeps the GPU down at default clocks."""
        self._link.send(WatchDefaultClocks())

    def set_profiled_limit(self, power_w: float | None) -> None:
        """Set the power limit with which the present one is compared [W]; None for the one that is read next."""
        self._profiled_w = power_w
        self._link.send(SetProfiledLimit(power_w))

    def counter_log(self) -> CounterRecord:
        """Return a record of the energy counter's refreshes, made while it is entered."""
        return CounterRecord(self, self._gpu)

    def poll(self) -> None:
        """Take in what the agent has sent; between iterations."""
        for message in self._link.received():
            if isinstance(message, Answer | messages.Refreshes):
                self._answers[message.number] = message
            elif isinstance(message, Failed):
                self.on_error((GpuError if message.may_pass else AgentError)(message.error))
            elif isinstance(message, ClockRefused):
                self.on_refusal(message)
            elif isinstance(message, Latencies):
                self.latencies = LatencyTable({(mhz, rises): seen_s for mhz, rises, seen_s in message.samples_s})
            elif isinstance(message, Refused):
                self.on_error(GpuError(message.error))
        self._renew()

    def _renew(self) -> None:
        """Tell another agent what the one before knew."""
        if self._grants != self._link.grants:
            self._grants = self._link.grants
            for program, number in self._numbers.items():
                self._send_program(program, number)
            if self._profiled_w is not None:
                self._link.send(SetProfiledLimit(self._profiled_w))

    def take_answer(self, number: int) -> Answer | messages.Refreshes | None:
        """Return the answer to a question, once, if it has come."""
        if number not in self._answers:
            self.poll()
        return self._answers.pop(number, None)

    def wait(self) -> None:
        """Wait until the agent may have told something, or the driver counts as hanging; take it in."""
        self._link.wait(max(_LEAST_S, DRIVER_HANGS_S - self.failing_s))
        self.poll()

    def close(self) -> None:
        """Restore the default clock for good; harmless when called again."""
        self.is_closed = True
        self._link.close()

    def _send_program(self, program: Program, number: int) -> None:
        # Without the times of its instructions a long one has no early requests, and fits into a message.
        spans_s = program.spans_s if len(program.spans_s) <= _MOST_SPANS else ()
        self._link.send(Program(number, program.first_mhz, program.clocks_mhz[:POSITIONS], spans_s, program.time_s))


class AgentError(PerseusError):
    """An error of the agent that is none of the GPU or its driver, and does not pass."""


class CounterRecord(Refreshes):
    """Refreshes of the energy counter as the agent records them."""

    def __init__(self, clocks: AgentClocks, gpu: str) -> None:
        super().__init__(gpu)
        self._clocks = clocks
        self._is_open = False
        self._number = 0

    def __enter__(self) -> CounterRecord:
        self._number = self._clocks.ask("start").answer().number
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; harmless when called again."""
        if self._is_open:
            self.update()
            self._is_open = False
            self._clocks.ask("stop", self._number)

    def update(self) -> None:
        """Take in the refreshes up to now."""
        while self._is_open:
            try:
                seen = self._clocks.ask("refreshes", self._number).answer()
            except GpuError as error:
                self.error = error
                return
            assert isinstance(seen, messages.Refreshes)
            self.changes += seen.changes
            self.clocks += seen.clocks
            self.state = GpuState(seen.temperature_c, seen.power_state)
            if not seen.changes:
                return
