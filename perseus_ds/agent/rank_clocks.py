"""Controls the clocks of one rank's GPU for the job's server.

A :class:`RankClocks` receives the messages of the server and of the client, and completes the rank's reports.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from perseus_ds.agent.actor import ChangedFromOutside, CounterFailed, GpuActor, GpuNews
from perseus_ds.agent.timeline import EndedIteration, Timeline
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.energy_counter import CounterLog
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol.layout import DRIVER_HANGS_S, RankMemory
from perseus_ds.protocol.messages import CounterRefreshed, LogCounter, ToClient, ToClocks
from perseus_ds.timebase import REAL_TIME, Timebase

_STATE_EVERY_S = 1.0
"""Interval of reading the state of the GPU, because temperatures change within seconds."""
_MOST_HELD = 64


class RankClocks:
    """Follows the marks of a rank, and completes its reports.

    Attributes:
        timeline: The timeline of the rank's iterations.
    """

    def __init__(
        self,
        actor: GpuActor,
        memory: RankMemory,
        to_client: Callable[[ToClient], None],
        to_server: Callable[[msg.ToServer], None],
        timebase: Timebase = REAL_TIME,
        *,
        on_record: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the iteration that the rank begins next, at default clocks.

        Args:
            actor: The actor of the rank's GPU, which is open.
            memory: Shared memory of the rank.
            to_client: Sends a message to the client without waiting. Thread-safe.
            to_server: Sends a message to the job's server without waiting. Thread-safe.
            timebase: Timebase of the marks.
            on_record: Called on another thread when the GPU has finished an iteration. :meth:`update` should follow.
        """
        assert actor.gpu is not None
        self._actor = actor
        self._gpu = actor.gpu
        self._to_client = to_client
        self._to_server = to_server
        self._time = timebase
        self.timeline = Timeline(memory, actor, on_record, timebase)
        self._latencies = actor.readback.latencies
        actor.listeners.append(self._tell)
        # Messages that are sent after the GPU has finished earlier work, and the times at which they were received.
        self._held: deque[tuple[msg.Report | msg.Left, float]] = deque()
        self._before = msg.ClockStatus()
        self._client_log: CounterLog | None = None
        # The log for the server, and the orders for which the server requests one.
        self._log: CounterLog | None = None
        self._logged: set[int] = set()
        self._is_revoked = False
        self._missed = actor.missed
        self._state, self._state_due_s = GpuState(), -math.inf
        self._read_state_if_due()

    def update(self) -> None:
        """Complete reports, and check the driver. Called after each iteration of the GPU, and ten times a second."""
        if not self._is_revoked:  # a probe sets a clock
            self._actor.update()
        self._read_state_if_due()
        if (latencies := self._actor.readback.latencies) is not self._latencies:
            self._latencies = latencies
            self._to_server(latencies)
            for follow in self.timeline.add_again():
                self._send_follow(follow)
        self._complete()

    def receive_from_server(self, message: msg.ToRank) -> None:
        """Handle a message of the server, or forward it to the client."""
        if isinstance(message, msg.Follow):
            self._send_follow(self.timeline.add(message))
            self._log_if_requested(message)
        elif isinstance(message, msg.WatchDefaultClocks):
            self._actor.watch_default_clocks()
        elif isinstance(message, msg.SetProfiledLimit):
            self._actor.readback.limits.profiled_w = message.power_w
        else:
            self._to_client(message)

    def receive_from_client(self, message: ToClocks) -> None:
        """Handle a message of the client without waiting for the driver, or forward it to the server."""
        if isinstance(message, msg.Report | msg.Left):
            if len(self._held) < _MOST_HELD:
                self._held.append((message, self._time.now_s()))
                self._complete()
        elif isinstance(message, LogCounter):
            self._log_for_client(message.is_on)
        else:
            self._to_server(message)

    def forget_server(self) -> None:
        """Return to default clocks, because the server is lost."""
        self.timeline.forget()
        self._stop_log()

    def revoke(self) -> None:
        """Set no more clocks. The caller resets the current one."""
        if not self._is_revoked:
            self._is_revoked = True
            self.timeline.revoke()
            self._to_server(msg.RankFailed("this process received a termination signal, and its clock was reset"))

    @property
    def has_reports(self) -> bool:
        """True if there are reports that wait for a reading of the energy counter."""
        return bool(self._held)

    def leave(self) -> None:
        """Stop setting clocks and reading the GPU, without waiting for the driver. The caller resets the clock."""
        self._complete(waits=False)
        self._stop_log()
        self._actor.stop_log(self._client_log)
        self.timeline.revoke()
        if self._tell in self._actor.listeners:
            self._actor.listeners.remove(self._tell)

    def _tell(self, news: GpuNews) -> None:
        if isinstance(news, ChangedFromOutside):
            self._to_client(msg.Say(self._changed_in_words(news), warns=True))
        elif isinstance(news, CounterFailed):
            text = (
                f"perseus: {news.error}. The energy of {self._gpu} is unknown, and its clock follows plans as before."
            )
            self._to_client(msg.Say(text, warns=True))
        else:
            self._to_server(news)

    def _changed_in_words(self, news: ChangedFromOutside) -> str:
        return (
            f"perseus: the clock of {self._gpu} was changed from outside {news.times} times: {news.clock_mhz:.0f} MHz "
            f"were set, and {news.reached_mhz:.0f} MHz are read. Perseus sets it again only when the plan changes it. "
            "Usual causes are `nvidia-smi -rgc` or `-lgc` in a script of the site, `dcgmi config --enforce`, Slurm's "
            "`--gpu-freq`, and power managers."
        )

    def _send_follow(self, follow: msg.Follow) -> None:
        """Send the client what it needs of a program."""
        program = msgspec.structs.replace(follow.program, spans_s=())
        self._to_client(msgspec.structs.replace(follow, program=program))

    def _log_if_requested(self, follow: msg.Follow) -> None:
        if follow.logs_energy:
            self._logged.add(follow.program.number)
        else:
            self._logged.discard(follow.program.number)
        if self._logged and self._log is None:
            self._log = CounterLog(self._gpu, self._time)
            self._actor.start_log(self._log)
        elif not self._logged:
            self._stop_log()

    def _stop_log(self) -> None:
        self._logged.clear()
        self._actor.stop_log(self._log)
        self._log = None

    def _complete(self, *, waits: bool = True) -> None:
        """Send the reports of iterations that the GPU has finished."""
        while self._held:
            message, received_s = self._held[0]
            if isinstance(message, msg.Report):
                record = self.timeline.record_of(message.iteration)
                if record is None and waits and self._time.now_s() - received_s < DRIVER_HANGS_S:
                    return
                self._to_server(self._completed(message, record or EndedIteration(math.nan, math.nan, self._before)))
            else:
                self._to_server(message)
            self._held.popleft()

    def _completed(self, report: msg.Report, record: EndedIteration) -> msg.RankReport:
        before, status = self._before, record.status
        self._before = status
        has_failed = self._actor.health.has_failed or self._is_revoked
        # A fault has passed before this report.
        is_unknown, self._missed = self._actor.missed != self._missed and not has_failed, self._actor.missed
        refreshes = clocks = b""
        if (log := self._log) is not None:
            changes, read = log.changes, log.clocks
            log.changes, log.clocks = [], []
            refreshes = array("d", [value for change in changes for value in change]).tobytes()
            clocks = array("d", [float(value) for each in read for value in each]).tobytes()
        status = msgspec.structs.replace(
            status,
            changes=max(0, status.changes - before.changes),  # a record that was missing has the latest status
            skips=max(0, status.skips - before.skips),
        )
        if self._is_revoked:
            status = msgspec.structs.replace(status, asked_mhz=math.nan, reached_mhz=math.nan)
        return msg.RankReport(
            report,
            serial=-1 if is_unknown else self.timeline.serial_of(report.iteration),
            begun_s=record.begun_s,
            energy_j=record.energy_j,
            status=status,
            has_failed=has_failed,
            refreshes=refreshes,
            clocks=clocks,
            temperature_c=self._state.temperature_c,
            power_state=self._state.power_state,
        )

    def _read_state_if_due(self) -> None:
        now_s = self._time.now_s()
        if now_s < self._state_due_s:
            return
        self._state_due_s = now_s + _STATE_EVERY_S
        if not self._actor.call(self._read_state):
            self._state = GpuState()  # the driver does not answer

    def _read_state(self) -> None:
        """Read the state of the GPU. Called on the actor's thread."""
        try:
            self._state = self._gpu.state
        except GpuError:
            self._state = GpuState()

    def _log_for_client(self, is_on: bool) -> None:
        """Send the client each refresh of the energy counter, or no more of them."""
        self._actor.stop_log(self._client_log)
        self._client_log = None
        if is_on:
            log = CounterLog(self._gpu, self._time, on_refresh=lambda: self._send_refreshes(log))
            self._client_log = log
            self._actor.start_log(log)

    def _send_refreshes(self, log: CounterLog) -> None:
        """Send the client new refreshes. Called on the actor's thread."""
        for time_s, energy_j in log.changes:
            self._to_client(CounterRefreshed(time_s, energy_j))
        log.changes, log.clocks = [], []
        if log.error is not None:
            self._to_client(CounterRefreshed(error=str(log.error)))
