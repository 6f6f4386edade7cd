"""Interface of the training process to its GPU's clocks, which the agent of the node sets and reads.

The training process writes the number of an iteration's order and its marks into shared memory. Everything else is sent
as messages, without waiting for answers. Only before training does it wait for answers.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from perseus_ds.client.lease import Lease, SharedMemory
from perseus_ds.client.marks import Marks
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.energy_counter import Refreshes
from perseus_ds.protocol import messages
from perseus_ds.protocol.job_messages import FromClient
from perseus_ds.protocol.layout import PAUSED, POSITIONS, RankMemory
from perseus_ds.protocol.messages import Answer, Ask, Connect, Question, ServerStarted, StartServer, ToClient
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_ANSWERS_WITHIN_S, _SERVER_STARTS_WITHIN_S, _LOOK_S = 10.0, 120.0, 0.05


class AgentClocks:
    """Interface to the clocks of a rank's GPU, through its agent.

    Attributes:
        memory: Memory shared with the agent.
        mark_error: Last error of a mark, after which none is written until the next iteration. None if none failed.
    """

    def __init__(self, link: Lease, memory: RankMemory, marks: Marks, gpu: str, timebase: Timebase = REAL_TIME) -> None:
        self.memory = memory
        self.mark_error: GpuError | None = None
        self._writes_marks = True
        self._link = link
        self._marks = marks
        self._gpu = gpu
        self._time = timebase
        self._connect: Connect | None = None
        self._server: StartServer | None = None
        self._description: SharedMemory | None = None
        self._grants = link.grants
        self._positions = 0
        self._questions = 0
        self._inbox: list[ToClient] = []

    def follow(self, server: Connect) -> None:
        """Have the agent, and each later one, connect this rank to the job's server."""
        self._connect = server
        self._link.send(server)

    def start_server(self, host: str, port: int, description: bytes) -> ServerStarted:
        """Have the agent start the job's server, and wait until it listens or has failed.

        Each later agent receives the request as well, so that it starts another server if this one dies.

        Args:
            host: Name or address at which agents reach this node.
            port: Port to listen at. 0 for any.
            description: Description of the job.

        Returns:
            The answer for all ranks, without the server's secret key.

        Raises:
            GpuError: The agent is lost.
        """
        self._description = SharedMemory(len(description), "perseus-ds-job")
        self._description.view[: len(description)] = description
        request = StartServer(host, port, len(description))
        self._link.send(request, self._description.file)
        started: ServerStarted = self._awaited(ServerStarted, timeout_s=_SERVER_STARTS_WITHIN_S)
        self._server = msgspec.structs.replace(request, running=started)
        return msgspec.structs.replace(started, server_secret=b"")

    def send(self, message: FromClient) -> None:
        self._link.send(message)

    def received(self) -> list[ToClient]:
        """Return the messages received since the last call. Called between iterations."""
        self._inbox += self._link.received()
        if self._link.is_watched() and self._grants != self._link.grants:
            self._grants = self._link.grants
            if self._server is not None and self._description is not None:
                self._link.send(self._server, self._description.file)
            if self._connect is not None:
                self.follow(msgspec.structs.replace(self._connect, issued=self.memory.iteration))
        received, self._inbox = self._inbox, []
        return received

    def begin_iteration(self, order: int, positions: int) -> int:
        """Begin an iteration of an order, with marks at up to this number of positions, and return its number."""
        self._positions = max(self._positions, min(positions, POSITIONS))
        iteration = self.memory.begin_iteration(order)
        self._writes_marks = True
        try:
            self._marks.begin(iteration, self._positions)
        except GpuError as error:
            self._skip_marks(error)
        self._link.wake()
        return iteration

    def _skip_marks(self, error: GpuError) -> None:
        """Write no more marks in this iteration, and have the agent return to default clocks.

        The agent would wait for the missing marks, at the clock of the last one.
        """
        if self.mark_error is None:
            logger.warning("perseus: %s The GPU returns to default clocks, and the next iteration tries again.", error)
        self.mark_error = error
        self._writes_marks = False
        self.memory.unmarked = self.memory.iteration
        self._link.wake()

    def change_order(self, order: int) -> None:
        if self.memory.program(self.memory.iteration) != order:
            self.memory.change_program(order)
            self._link.wake()

    def mark(self, slot: int) -> None:
        """Mark that the device has reached a slot. See :class:`~perseus_ds.client.marks.Marks`."""
        try:
            if slot < 2 * POSITIONS and self._writes_marks:
                self._marks.mark(slot)
        except GpuError as error:
            self._skip_marks(error)

    def end_iteration(self, iteration: int) -> None:
        """End an iteration after all of it was issued."""
        self.memory.end_iteration()
        self.memory.idle_since_s = self._time.now_s()
        try:
            if self._writes_marks:
                self._marks.end(iteration)
        except GpuError as error:
            self._skip_marks(error)
        self._link.is_watched()  # starts another agent if there is none: the clock may be locked

    def may_idle(self) -> None:
        """Return to default clocks in 2 s, unless the iteration ends or an iteration begins before."""
        self._idle(self._time.now_s())

    def pause(self) -> None:
        """Return to default clocks until the next iteration begins."""
        self._idle(PAUSED)

    def _idle(self, since_s: float) -> None:
        self.memory.idle_since_s = since_s
        self._link.wake()
        self._link.is_watched()  # starts another agent if there is none: the clock may be locked

    def ask(self, question: Question, value: float = 0.0) -> Answer | messages.Refreshes:
        """Send a question to the agent, and wait for its answer. Called before training.

        Raises:
            GpuBusyError: The driver does not answer.
            GpuError: The agent has answered with an error, or there is no agent.
        """
        self._questions += 1
        self._link.send(Ask(self._questions, question, value))
        answer: Answer | messages.Refreshes = self._awaited(Answer, messages.Refreshes)
        while answer.number != self._questions:  # a late answer to an earlier question
            answer = self._awaited(Answer, messages.Refreshes)
        if answer.error:
            is_busy = isinstance(answer, Answer) and answer.is_busy
            raise (GpuBusyError if is_busy else GpuError)(answer.error)
        return answer

    def values(self, question: Question, value: float = 0.0) -> tuple[float, ...]:
        answer = self.ask(question, value)
        assert isinstance(answer, Answer)
        return answer.values

    def _awaited(self, *kinds: type, timeout_s: float = _ANSWERS_WITHIN_S) -> Any:
        end_s = self._time.now_s() + timeout_s
        while True:
            self._inbox += self._link.received()
            for message in self._inbox:
                if isinstance(message, kinds):
                    self._inbox.remove(message)
                    return message
            if not self._link.is_watched():
                raise GpuError("the agent, which resets the clocks if the job is killed, is gone")
            if self._time.now_s() >= end_s:
                raise GpuBusyError(f"the agent has not answered for {timeout_s:.0f} s")
            self._link.wait(_LOOK_S)

    def counter_log(self) -> CounterRecord:
        """Return a context manager that records refreshes of the energy counter. Used before training."""
        return CounterRecord(self, self._gpu)

    def wait(self, timeout_s: float) -> None:
        self._link.wait(timeout_s)

    def close(self) -> None:
        """Restore the default clock permanently. Has no effect when called again."""
        self._link.close()


class CounterRecord(Refreshes):
    """Refreshes of the energy counter, recorded by the agent."""

    def __init__(self, clocks: AgentClocks, gpu: str) -> None:
        super().__init__(gpu)
        self._clocks = clocks
        self._is_open = False

    def __enter__(self) -> CounterRecord:
        self._clocks.ask("start")
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._is_open = False
        self._clocks.ask("stop")

    def update(self) -> None:
        """Fetch the refreshes up to now."""
        while self._is_open:
            try:
                seen = self._clocks.ask("refreshes")
            except GpuError as error:
                self.error = error
                return
            assert isinstance(seen, messages.Refreshes)
            self.changes += seen.changes
            self.clocks += seen.clocks
            self.state = GpuState(seen.temperature_c, seen.power_state)
            if not seen.changes:
                return
