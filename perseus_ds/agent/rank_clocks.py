"""Controls the clocks of one rank's GPU for the job's server, and completes the rank's reports."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from perseus_ds.agent.controller import ClockController
from perseus_ds.agent.fallback import Fallback
from perseus_ds.agent.follower import Follower
from perseus_ds.errors import GpuBusyError
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.energy_counter import CounterLog, answer_to_a_step, counter_period_s
from perseus_ds.protocol.job_messages import (
    Follow,
    Latencies,
    Left,
    RankFailed,
    RankReport,
    Report,
    SetProfiledLimit,
    ToRank,
    ToServer,
    WatchDefaultClocks,
)
from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, DRIVER_HANGS_S, ClockStatus, IterationEnergy, RankMemory
from perseus_ds.protocol.messages import Answer, Ask, Refreshes, ToClient, ToClocks
from perseus_ds.timebase import REAL_TIME, Timebase

_MOST_REFRESHES = 1000
"""Maximum number of refreshes in one message."""
_MOST_LOGS, _LONGEST_PERIOD_S = 16, 10.0
_MOST_HELD = 64


class _Held(NamedTuple):
    """A message that is sent after the GPU has finished earlier work."""

    message: Report | Left
    received_s: float


class RankClocks:
    """Sets the clock of a GPU, reads it, and follows the marks of the rank that computes on it."""

    def __init__(
        self,
        gpu: Gpu,
        memory: RankMemory,
        send: Callable[[ToClient], None],
        tell: Callable[[ToServer], None],
        timebase: Timebase = REAL_TIME,
        *,
        may_lock: Callable[[], bool] = lambda: True,
        on_record: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the iteration that the rank begins next, at default clocks.

        Args:
            gpu: The rank's GPU, open.
            memory: Shared memory of the rank.
            send: Sends a message to the client without waiting. Thread-safe.
            tell: Sends a message to the job's server without waiting. Thread-safe.
            timebase: Timebase of the marks.
            may_lock: Called before each clock is set, and returns whether it may be set.
            on_record: Called on another thread when the GPU has finished an iteration, so that :meth:`look` is called.
        """
        self._gpu = gpu
        self._memory = memory
        memory.on_record = on_record
        self._send = send
        self._tell = tell
        self._time = timebase
        self._clocks = ClockController(gpu, self._fail, tell, timebase=timebase, memory=memory, may_lock=may_lock)
        self._fallback = Fallback(self._clocks, timebase, tell)
        self._follower = Follower(
            gpu,
            memory,
            self._clocks,
            on_error=self._fail,
            on_latencies=self._tell_latencies,
            timebase=timebase,
        )
        self._held: deque[_Held] = deque()
        self._before = ClockStatus()
        self._logs: dict[float, CounterLog] = {}
        # The log for the server, and the orders for which the server requests one.
        self._log: CounterLog | None = None
        self._logged: set[int] = set()
        self._was_revoked = False
        self._missed = 0

    def wake(self) -> None:
        """Read the rank's shared memory immediately."""
        self._clocks.wake()

    def look(self) -> float:
        """Look for marks, complete reports, and return the time until the next call [s]."""
        next_s = self._follower.look()
        self._fallback.look()
        if self._memory.is_revoked and not self._was_revoked:
            self._was_revoked = True
            self._tell(RankFailed("this process received a termination signal, and its clock was reset"))
        self._complete()
        return next_s

    def obey(self, message: ToRank) -> None:
        """Handle a message of the server, or forward it to the client."""
        if isinstance(message, Follow):
            if not 0 <= message.program.number < DEFAULT_CLOCKS:
                return
            self._follower.add(message)
            self._log_if_asked(message)
            program = msgspec.structs.replace(message.program, spans_s=())
            self._send(msgspec.structs.replace(message, program=program))
        elif isinstance(message, WatchDefaultClocks):
            self._clocks.watch_default_clocks()
        elif isinstance(message, SetProfiledLimit):
            self._clocks.readback.limits.profiled_w = message.power_w
        else:
            self._send(message)

    def receive(self, message: ToClocks) -> None:
        """Handle a message of the client without waiting for the driver, or forward it to the server."""
        if isinstance(message, Report | Left):
            if len(self._held) < _MOST_HELD:
                self._held.append(_Held(message, self._time.now_s()))
                self._complete()
        elif not isinstance(message, Ask):
            self._tell(message)
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

        Must be called before the first message is received.
        """
        self._clocks.take_over()

    def forget_server(self) -> None:
        """Return to default clocks, because the server is lost."""
        self._follower.forget()
        self._stop_log()

    @property
    def is_calling(self) -> bool:
        """True during a call of the driver."""
        return self._clocks.is_calling

    @property
    def has_reports(self) -> bool:
        """True if there are reports whose energy has not been read yet."""
        return bool(self._held)

    def leave(self) -> None:
        """Stop setting clocks and reading the GPU, without waiting for the driver."""
        self._complete(waits=False)
        self._stop_logs()
        self._follower.end()
        self._clocks.leave()

    def close(self) -> None:
        """Restore the default clock permanently.

        The energy of iterations that have begun is still read.
        """
        self._complete(waits=False)
        self._stop_logs()
        self._clocks.close()

    def _stop_logs(self) -> None:
        self._stop_log()
        for log in self._logs.values():
            log.stop()

    def _log_if_asked(self, follow: Follow) -> None:
        """Record refreshes of the energy counter while the server requests them for an order."""
        if follow.logs_energy:
            self._logged.add(follow.program.number)
        else:
            self._logged.discard(follow.program.number)
        if self._logged and self._log is None:
            self._log = CounterLog(self._gpu, self._time)
            self._log.start()
        elif not self._logged:
            self._stop_log()

    def _stop_log(self) -> None:
        self._logged.clear()
        if self._log is not None:
            self._log.stop()
            self._log = None

    def _complete(self, *, waits: bool = True) -> None:
        """Send the reports of iterations that the GPU has finished."""
        while self._held:
            message, received_s = self._held[0]
            if isinstance(message, Report):
                recorded = self._memory.recorded(message.iteration)
                if recorded is None and waits and self._time.now_s() - received_s < DRIVER_HANGS_S:
                    return
                self._tell(self._completed(message, recorded or IterationEnergy()))
            else:
                self._tell(message)
            self._held.popleft()

    def _completed(self, report: Report, recorded: IterationEnergy) -> RankReport:
        before, status, is_revoked = self._before, self._memory.status, self._memory.is_revoked
        self._before = status
        has_failed = self._fallback.is_in_force or is_revoked
        # A fault has passed before this report.
        is_unknown, self._missed = self._clocks.missed != self._missed and not has_failed, self._clocks.missed
        refreshes = clocks = b""
        log, state = self._log, self._gpu_state()
        if log is not None:
            changes, read = log.changes, log.clocks
            log.changes, log.clocks = [], []
            refreshes = array("d", [value for change in changes for value in change]).tobytes()
            clocks = array("d", [float(value) for each in read for value in each]).tobytes()
        return RankReport(
            report,
            serial=-1 if is_unknown else self._follower.serial_of(report.iteration),
            begun_s=recorded.begun_s,
            energy_j=recorded.energy_j,
            changes=max(0.0, status.changes - before.changes),
            skips=max(0.0, status.overtaken - before.overtaken),
            asked_mhz=math.nan if is_revoked else status.asked_mhz,
            reached_mhz=math.nan if is_revoked else status.reached_mhz,
            limit_w=status.limit_w,
            limit_mhz=status.limit_mhz,
            late_s=status.late_s,
            default_mhz=status.default_mhz,
            has_failed=has_failed,
            refreshes=refreshes,
            clocks=clocks,
            **state,
        )

    def _gpu_state(self) -> dict[str, Any]:
        if self._log is None:
            return {}
        return {"temperature_c": self._log.state.temperature_c, "power_state": self._log.state.power_state}

    def _ask_driver(self, asked: Ask) -> None:
        def answer() -> None:
            values: tuple[float, ...] = ()
            error: Exception | None = None
            try:
                values = self._do(asked)
            except Exception as raised:  # the client waits for an answer
                error = raised
            self._answer(asked, values, error)

        call = self._clocks.call(answer)
        if call.is_over and not call.has_worked:  # it was refused
            self._answer(asked, (), self._clocks.problem)

    def _answer(self, asked: Ask, values: tuple[float, ...], error: Exception | None) -> None:
        text = "" if error is None else str(error)
        self._send(Answer(asked.number, values, text, isinstance(error, GpuBusyError)))

    def _do(self, asked: Ask) -> tuple[float, ...]:
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
        self._tell(Latencies(tuple((*key, tuple(seen_s)) for key, seen_s in latencies.samples_s.items())))

    def _fail(self, error: Exception) -> None:
        self._fallback.begin(error)
