"""Interface of the training process to its GPU's clocks, which the agent of the node sets and reads.

The training process writes the number of an iteration's order and its marks into shared memory. Everything else is sent
as messages, without waiting for answers. Only the start of the job's server is waited for.
"""

from __future__ import annotations

import logging

import msgspec

from perseus_ds.client.lease import Lease, SharedMemory
from perseus_ds.client.marks import Marks
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.protocol.job_messages import FromClient
from perseus_ds.protocol.layout import PAUSED, POSITIONS, RankMemory
from perseus_ds.protocol.messages import (
    Connect,
    CounterRefreshed,
    LogCounter,
    ServerStarted,
    StartServer,
    ToClient,
)
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_SERVER_STARTS_WITHIN_S, _LOOK_S = 120.0, 0.05


class AgentClocks:
    """Interface to the clocks of a rank's GPU, through its agent.

    Attributes:
        memory: Memory shared with the agent.
        mark_error: Last error of a mark, after which none is written until the next iteration. None if none failed.
    """

    def __init__(self, link: Lease, memory: RankMemory, marks: Marks, timebase: Timebase = REAL_TIME) -> None:
        self.memory = memory
        self.mark_error: GpuError | None = None
        self._writes_marks = True
        self._link = link
        self._marks = marks
        self._time = timebase
        self._connect: Connect | None = None
        self._server: StartServer | None = None
        self._description: SharedMemory | None = None
        self._grants = link.grants
        self._positions = 0
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
            GpuError: The agent is lost, or the server does not start.
        """
        self._description = SharedMemory(len(description), "perseus-ds-job")
        self._description.view[: len(description)] = description
        request = StartServer(host, port, len(description))
        self._link.send(request, self._description.file)
        started = self._await_server()
        self._server = msgspec.structs.replace(request, running=started)
        return msgspec.structs.replace(started, server_secret=b"")

    def _await_server(self) -> ServerStarted:
        end_s = self._time.now_s() + _SERVER_STARTS_WITHIN_S
        while True:
            self._inbox += self._link.received()
            for message in self._inbox:
                if isinstance(message, ServerStarted):
                    self._inbox.remove(message)
                    return message
            if not self._link.is_watched():
                raise GpuError("the agent, which resets the clocks if the job is killed, is gone")
            if self._time.now_s() >= end_s:
                raise GpuBusyError(f"the job's server has not started within {_SERVER_STARTS_WITHIN_S:.0f} s")
            self._link.wait(_LOOK_S)

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

    def change_program(self, number: int) -> None:
        if self.memory.program(self.memory.iteration) != number:
            self.memory.change_program(number)
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

    def log_counter(self, is_on: bool) -> None:
        """Have the agent send each refresh of the energy counter, or no more of them. Used before training."""
        self._link.send(LogCounter(is_on))

    def refreshes(self) -> list[tuple[float, float]]:
        """Return time [s] and energy [J] of the refreshes of the energy counter that were received since the last call.

        Raises:
            GpuError: The counter cannot be read.
        """
        self._inbox += self._link.received()
        found = [message for message in self._inbox if isinstance(message, CounterRefreshed)]
        self._inbox = [message for message in self._inbox if not isinstance(message, CounterRefreshed)]
        for message in found:
            if message.error:
                raise GpuError(message.error)
        return [(message.time_s, message.energy_j) for message in found]

    def wait(self, timeout_s: float) -> None:
        self._link.wait(timeout_s)

    def close(self) -> None:
        """Restore the default clock permanently. Has no effect when called again."""
        self._link.close()
