"""The clocks of one rank's GPU in the agent: does what the rank's client asks for."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.agent.controller import ClockController
from perseus_ds.agent.follower import Follower
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.counter_log import CounterLog
from perseus_ds.gpu.energy_counter import answer_to_a_step, counter_period_s
from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, RankMemory
from perseus_ds.protocol.messages import (
    Answer,
    Ask,
    Failed,
    Latencies,
    Program,
    Refreshes,
    SetProfiledLimit,
    ToClient,
    ToClocks,
    WatchDefaultClocks,
)
from perseus_ds.timebase import REAL_TIME, Timebase

_MOST_REFRESHES = 1000
"""In one message."""
_MOST_LOGS, _LONGEST_PERIOD_S = 16, 10.0


class RankClocks:
    """Sets the clock of a GPU, reads it, and follows the marks of the rank that computes on it."""

    def __init__(
        self,
        gpu: Gpu,
        memory: RankMemory,
        send: Callable[[ToClient], None],
        timebase: Timebase = REAL_TIME,
        *,
        may_lock: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin with the iteration that the rank begins next.

        Args:
            gpu: The rank's GPU, open.
            memory: What the rank shares.
            send: Sends a message to the client, from any thread, without waiting for it.
            timebase: The time of marks.
            may_lock: Asked before each clock is set.
        """
        self._gpu = gpu
        self._send = send
        self._time = timebase
        self._clocks = ClockController(gpu, self._fail, send, timebase=timebase, memory=memory, may_lock=may_lock)
        self._follower = Follower(
            gpu,
            memory,
            self._clocks,
            on_error=self._fail,
            on_latencies=self._tell_latencies,
            timebase=timebase,
        )
        self._logs: dict[float, CounterLog] = {}

    def wake(self) -> None:
        """Look at the rank's memory at once."""
        self._clocks.wake()

    def look(self) -> float:
        """Look for marks, and return how long until to look again [s]."""
        return self._follower.look()

    def receive(self, message: ToClocks) -> None:
        """Do what the client asks for, without waiting for the driver."""
        if isinstance(message, Program):
            if 0 <= message.number < DEFAULT_CLOCKS:
                self._follower.add(message)
        elif isinstance(message, WatchDefaultClocks):
            self._clocks.watch_default_clocks()
        elif isinstance(message, SetProfiledLimit):
            self._clocks.readback.limits.profiled_w = message.power_w
        elif message.question == "start":
            if len(self._logs) >= _MOST_LOGS:
                self._logs.pop(next(iter(self._logs))).stop()
            self._logs[message.number] = log = CounterLog(self._gpu, self._time)
            log.start()
            self._send(Answer(message.number))
        elif message.question == "refreshes":
            self._send_refreshes(message)
        elif message.question == "stop":
            if (stopped := self._logs.pop(message.value, None)) is not None:
                stopped.stop()
            self._send(Answer(message.number))
        else:
            self._ask_driver(message)

    def take_over(self) -> None:
        """Assume that another agent has locked the clock.

        It is called before anything is received.
        """
        self._clocks.take_over()

    @property
    def is_calling(self) -> bool:
        """Whether a call of the driver is under way."""
        return self._clocks.is_calling

    def leave(self) -> None:
        """Set no clock and read nothing any more, without waiting for the driver."""
        self._stop_logs()
        self._follower.end()
        self._clocks.leave()

    def close(self) -> None:
        """Restore the default clock for good.

        The energy of iterations that have begun is still read.
        """
        self._stop_logs()
        self._clocks.close()

    def _stop_logs(self) -> None:
        for log in self._logs.values():
            log.stop()

    def _ask_driver(self, asked: Ask) -> None:
        def answer() -> None:
            values: tuple[float, ...] = ()
            error: Exception | None = None
            try:
                values = self._do(asked)
            except Exception as raised:  # of any kind: the client waits for an answer
                error = raised
            self._answer(asked, values, error)

        call = self._clocks.call(answer)
        if call.is_over and not call.has_worked:  # it was refused
            self._answer(asked, (), self._clocks.problem)

    def _answer(self, asked: Ask, values: tuple[float, ...], error: Exception | None) -> None:
        text = "" if error is None else str(error)
        self._send(Answer(asked.number, values, text, isinstance(error, GpuBusyError)))

    def _do(self, asked: Ask) -> tuple[float, ...]:
        if asked.question == "probe":
            self._clocks.try_driver()
            return ()
        if asked.question == "period":
            return (counter_period_s(self._gpu, min(asked.value, _LONGEST_PERIOD_S), self._time) or 0.0,)
        answer = answer_to_a_step(self._gpu, asked.value, self._time)
        return answer.period_s or 0.0, answer.settle_s

    def _send_refreshes(self, asked: Ask) -> None:
        number = asked.number
        if (log := self._logs.get(asked.value)) is None:  # another agent had recorded them
            self._send(Refreshes(number, (), (), error="the energy counter is not recorded"))
            return
        changes, clocks = log.changes[:_MOST_REFRESHES], log.clocks[:_MOST_REFRESHES]
        del log.changes[: len(changes)], log.clocks[: len(clocks)]
        state, error = log.state, "" if log.error is None else str(log.error)
        self._send(Refreshes(number, tuple(changes), tuple(clocks), state.temperature_c, state.power_state, error))

    def _tell_latencies(self, latencies: LatencyTable) -> None:
        self._send(Latencies(tuple((*key, tuple(seen_s)) for key, seen_s in latencies.samples_s.items())))

    def _fail(self, error: Exception) -> None:
        self._send(Failed(str(error), isinstance(error, GpuError | OSError)))
