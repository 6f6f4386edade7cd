"""The server of a job: receives the reports of ranks, decides, and sends them the runs that modes request.

All work of :class:`JobServer` is done when a message arrives or in :meth:`JobServer.tick`, and nothing blocks.
:mod:`perseus_ds.server.process` transfers the messages.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.profile import energy_note
from perseus_ds.artifacts.run_events import ClockNotReached, Failed, Recovered
from perseus_ds.artifacts.run_records import FILE_NAME
from perseus_ds.artifacts.run_savings import NO_ORDER
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.policy.commands import parse_command
from perseus_ds.policy.goal import check_deadline
from perseus_ds.policy.reports import RankReports
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol.job_messages import (
    LatencyTable,
    Measured,
    RankReport,
    Say,
    Spans,
    ToRank,
    ToServer,
    Welcome,
)
from perseus_ds.savings import Default
from perseus_ds.server import modes
from perseus_ds.server.frontiers import has_profile_of_an_earlier_run
from perseus_ds.server.iterations import Mode, Run, Seen
from perseus_ds.server.job import Job, with_permission
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.orders import Number, Orders
from perseus_ds.server.phases import BackOff, ModeContext
from perseus_ds.server.recorder import Recorder, TimelineLog
from perseus_ds.server.runs import UNPLANNED, RunSender
from perseus_ds.server.state import PlanState
from perseus_ds.server.under_plans import drift_of
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_FIRST_BACK_OFF = 10
_AT_DEFAULT_CLOCKS = None, None
"""The key of default clocks, as returned by :meth:`Run.clocks`."""
_MOST_OPEN = 64
"""Maximum number of iterations that wait for reports of ranks. The oldest ones are dropped."""
_MISSING_S, _MISSING_ITERATIONS = 10.0, 5
"""Time without a complete iteration, though training continues, after which reports count as missing. It has at least
this number of iterations."""
_MOST_AT_ONCE = 2
"""Maximum number of open iterations if all ranks report. Further ones begin when all ranks have ended earlier ones."""
_MOST_COUNTED_S = 2.0
"""Most time that counts between two calls of :meth:`JobServer.tick`. A server that was stopped for longer must process
what has arrived before it can know what is missing."""
_LAST_REPORTS_S = 1.5
"""Time for which a job that ends waits for reports after the first rank has left."""


class _KeptState(FileModel):
    """What a server keeps for a later start of the job. The parts that others restore are validated by these."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)
    job: str | None = None
    iteration: int | None = Field(None, ge=0)
    orders: dict[int, Number] = Field(default_factory=dict)
    measured: tuple[tuple[float, float, float] | None, ...] = ()
    control: dict[str, Any] | None = None
    plans: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class _OpenIteration:
    """An iteration that not all ranks have reported: by rank, its report, and its operations as they were sent."""

    reports: dict[int, RankReport] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)


class JobServer:
    """Decides for all ranks of a job.

    Attributes:
        next: Run of the following iterations, as requested by the job's mode.
        has_ended: Whether the job has ended and all records are written.
        is_over: Whether all ranks have left in addition.
    """

    def __init__(
        self,
        job: Job,
        send: Callable[[int, ToRank], None],
        *,
        state: Mapping[str, Any] | None = None,
        epoch: int = 0,
        timebase: Timebase = REAL_TIME,
        worker: Callable[..., OptimizeWorker] = OptimizeWorker,
    ) -> None:
        """Check what can be checked before training.

        Args:
            job: The job.
            send: Sends a message to a rank. Called from any thread.
            state: State of an earlier start of the job, as returned by :meth:`state`, if there is one.
            epoch: Number of earlier servers of the running job.
            timebase: Timebase of the server.
            worker: Computes plans in another process.

        Raises:
            PerseusError: The job cannot be trained as configured.
        """
        self.job, self._warning = with_permission(job)
        self._notes: list[str] = []
        config, first = self.job.config, self.job.facts[0]
        self._send = send
        self._time = timebase
        self._is_renewed = epoch > 0
        self.recorder = Recorder(
            self.job.output_dir,
            simulated=self.job.simulated,
            energy_note=energy_note(self.job.info.settings),
            send=lambda message: send(0, message),
            steps_per_print=first.steps_per_print,
            has_monitor=first.has_monitor,
            is_quiet=config.log_level == "warning",
        )
        info = self.job.info.model_copy(update={"streams": ScheduleStreams.of(self.job.schedule)})
        self._timelines = TimelineLog(self.job.output_dir, gpu=first.gpu.name, job=info, warn=self.recorder.warn)
        self.control = JobControl(config.goal, self.job.info.data_parallel or 1, self._status, timebase)
        self.control.record, self.control.announce = self.recorder.event, self.recorder.announce
        self._pipelines = np.array([place.pipeline for place in self.job.places])
        self.orders = Orders(self.job, self._send_all, self.recorder, reads=config.mode in ("auto", "profile"))
        self.plan_state = PlanState()
        self._context = ModeContext(
            self.job, self.orders, self.plan_state, self.recorder, self.control, self._send_for_mode, timebase, worker
        )
        self.runs = RunSender(self._context, self._timelines, epoch << 32)  # agents know serials of earlier servers
        self._profiled_limit = msg.SetProfiledLimit(None)
        self._open: defaultdict[int, _OpenIteration] = defaultdict(_OpenIteration)
        self._completed = 0
        self._missing_s = 0.0  # time for which reports of ranks have been missing
        self._ticked_s = timebase.now_s()
        # Pairs of an iteration, and the difference between steps and iterations after it.
        self._step_offsets: deque[tuple[int, int]] = deque(maxlen=_MOST_OPEN)
        self.control.steps = first.steps or 0
        self._step_offsets.append((0, self.control.steps))
        self._back_off = BackOff(_FIRST_BACK_OFF)
        self._was_at_default_clocks = False
        self._left_s: float | None = None
        self.is_over = False
        self.has_ended = False
        self._check()
        self._mode: Mode | None = None
        self.next = UNPLANNED
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            kept = _KeptState.model_validate(state)
        except ValidationError as error:
            logger.warning("perseus: the state of an earlier start cannot be read (%r); the job begins anew.", error)
            return
        if kept.job != self.job.key or kept.control is None:
            return
        has_same_goal = self.control.restore(kept.control)
        has_same_orders = self.orders.restore(kept.orders)
        if has_same_orders and self.plan_state.load(kept.plans) and not has_same_goal:
            self.plan_state.begin_trial()
            self.plan_state.resting = 0
        for rank, measured in enumerate(kept.measured):
            if measured is not None and rank < self.job.world_size and self.job.states[rank].measured is None:
                self.job.states[rank].measured = Measured(*measured)
        if self._is_renewed and kept.iteration is not None:  # ranks continue to count
            self._completed = kept.iteration
        elif (steps := self.job.facts[0].steps) is not None:
            self.control.steps = steps
        self._step_offsets.append((self._completed, self.control.steps - self._completed))

    def _check(self) -> None:
        config = self.job.config
        modes.check(self._context)
        if config.mode in ("run", "auto"):
            try:
                check_deadline(config.goal, self._time.date())
            except ConfigError as error:
                if not (self.job.output_dir / FILE_NAME).exists():
                    raise
                self._notes.append(f"{error} This job continues under the fastest plan")

    def welcome(self) -> Welcome:
        """Return what all ranks have to know and to measure before training."""
        mode = self.job.config.mode
        known = has_profile_of_an_earlier_run(self.job) or all(
            state.measured is not None and math.isfinite(state.measured.blocking_power_w) for state in self.job.states
        )
        measures_power = mode == "profile" or (mode == "auto" and not known)
        return Welcome(
            measures_power=measures_power,
            measures_counter=mode in ("run", "auto") and not measures_power,
        )

    def start(self) -> None:
        """Record the start of the job, and start its mode."""
        self.recorder.start(self.job.started(self.orders.first.number))
        if self._warning:
            self.recorder.warn(self._warning)
        for note in self._notes:
            self.recorder.say(note)
        self.control.record_goal()
        self._mode = modes.mode_of(self._context)
        self._advance(None)

    def state(self) -> dict[str, Any]:
        """Return the state to keep for a later start of the job, as plain values."""
        return {
            "owner": self.job.owner,
            "job": self.job.key,
            "iteration": self._completed,
            "orders": self.orders.numbers,
            "measured": [
                msgspec.structs.astuple(state.measured) if state.measured else None for state in self.job.states
            ],
            "control": self.control.state(),
            "plans": self.plan_state.dump(),
        }

    def receive(self, rank: int, message: ToServer) -> None:  # noqa: PLR0912  # one case for each message
        """Process a message from a rank or its agent."""
        if not 0 <= rank < self.job.world_size or self.is_over:
            return
        state = self.job.states[rank]
        match message:
            case RankReport():
                self._add_report(rank, message)
            case Spans():
                if message.iteration > self._completed:
                    contents = self._open[message.iteration].contents
                    contents[rank] = contents.get(rank, b"") + message.content
            case msg.ClockRefused():
                fields = msgspec.structs.asdict(message)
                self.recorder.event(ClockNotReached(rank=rank, **fields))
            case LatencyTable():
                state.latencies = message
            case msg.RankFailed():
                text = f"perseus: {message.error}. Training continues at default clocks."
                self._send(rank, Say(text, warns=True))
                self.recorder.event(Failed(rank=rank, error=message.error))
            case msg.RankRecovered():
                text = "perseus: the fault has passed. This rank runs under plans again."
                self._send(rank, Say(text, warns=True))
                self.recorder.event(Recovered(rank=rank))
            case msg.ScheduleRead():
                order = self.orders.add_schedule(rank, message)
                if order is not None:
                    self.runs.send_order(order.number)
            case msg.Worked():
                state.flops = message.passes
            case Measured():
                state.measured = _with_what_is_kept(message, state.measured)
            case msg.Steps() | msg.MoreSteps():
                self._change_steps(message)
            case msg.Command():
                try:
                    self.control.carry_out(parse_command(json.loads(message.content)))
                except (PerseusError, ValueError) as error:
                    self.recorder.warn(str(error))
            case msg.Joined():
                state.is_here, state.has_left = True, False  # its agent was stopped, if it had left
                state.was_killed = False
                self.runs.issued = max(self.runs.issued, message.issued)
                if (
                    self._left_s is not None
                    and not self.has_ended
                    and not any(other.has_left for other in self.job.states)
                ):
                    self._left_s = None
                self.resend(rank)
            case msg.Left():
                state.has_left, state.is_here = True, False
                state.was_killed = message.killed
                if self._left_s is None:
                    self._left_s = self._time.now_s()

    def tick(self) -> None:
        """Do everything that is due without a message."""
        now_s = self._time.now_s()
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        if self._left_s is None:
            self._check_missing_reports(min(passed_s, _MOST_COUNTED_S))
        if self._left_s is None or self.is_over:
            return
        late_s = now_s - self._left_s
        all_left = all(state.has_left for state in self.job.states)
        if not self.has_ended and (all_left or late_s > _LAST_REPORTS_S):
            self.has_ended = True
            self._close_mode()
            self.recorder.close(killed=any(state.was_killed for state in self.job.states))
            self._send(0, msg.Summarised())
        self.is_over = all_left

    # Iterations.

    def _add_report(self, rank: int, message: RankReport) -> None:
        state, number = self.job.states[rank], message.report.iteration
        self.runs.issued = max(self.runs.issued, message.report.issued)
        state.late_s, state.default_mhz = message.status.late_s, message.status.default_mhz
        state.memory_bytes = max(state.memory_bytes, message.report.memory_bytes)
        if number <= self._completed:
            return  # a duplicate, or later than a complete one
        reports, contents = self._open[number].reports, self._open[number].contents
        reports.setdefault(rank, message)
        if len(reports) == self.job.world_size:
            self._completed = number
            self._missing_s = 0.0
            self._forget(number)
            try:
                self._complete(number, [reports[of] for of in range(len(reports))], contents)
            except Exception as error:  # errors of decisions must not stop training
                self.has_failed(error)
        elif len(self._open) > _MOST_OPEN:
            self._forget(min(self._open))

    def _check_missing_reports(self, passed_s: float) -> None:
        """Return all ranks to default clocks if training continues but reports of some ranks no longer arrive."""
        if len(self._open) <= _MOST_AT_ONCE:
            self._missing_s = 0.0
            return
        self._missing_s += passed_s
        iteration_s = self.runs.time_s
        without_s = _MOST_AT_ONCE * iteration_s + self._missing_s
        if self.next.is_at_default_clocks or without_s <= max(_MISSING_S, _MISSING_ITERATIONS * iteration_s):
            return
        reports = self._open[min(self._open)].reports
        missing = [rank for rank in range(self.job.world_size) if rank not in reports]
        ranks = f"rank {missing[0]}" + (f" and {len(missing) - 1} other ranks" if len(missing) > 1 else "")
        self.has_failed(PerseusError(f"reports of {ranks} no longer arrive"))

    def _forget(self, number: int) -> None:
        """Discard reports of iterations up to ``number``. No more reports of earlier ones are expected."""
        for earlier in [each for each in self._open if each <= number]:
            del self._open[earlier]

    def _change_steps(self, message: msg.Steps | msg.MoreSteps) -> None:
        """Change the number of training steps, from the iteration after that of the message on."""
        if isinstance(message, msg.Steps):
            self._step_offsets.append((message.after, message.steps - message.after))
            self.control.steps = message.steps
        else:
            _, offset = self._step_offsets[-1]
            self._step_offsets.append((message.after, offset + message.steps))
            self.control.add_steps(message.steps)

    def _step_of(self, iteration: int) -> int:
        """Return the training step of an iteration. Reports may arrive after a later correction of the count."""
        found = self._step_offsets[0][1]
        for after, offset in self._step_offsets:
            if after < iteration:
                found = offset
        return iteration + found

    def _complete(self, number: int, messages: list[RankReport], contents: Mapping[int, bytes]) -> None:
        first = messages[0].report
        run = self.runs.ran(messages)
        order = self.orders.occurs(first.key)
        streams = self.orders.streams_of(first.key)
        seen = Seen(
            number=self._step_of(number),
            iteration=number,
            run=run,
            ranks=RankReports(messages, self._pipelines, self.job.counts_energy),
            messages=messages,
            contents=contents,
            streams=[streams[place.pipeline_rank] for place in self.job.places] if streams else [],
            ended=first.ended,
            order=order,
        )
        default = self._default_clocks(seen)
        self.control.count_step(seen.number)
        self.runs.time_s = seen.time_s
        if order is not None:
            self.plan_state.default.count(order.number)
        if run is not None and number % run.every == 0:
            seen.drift = drift_of(self.job, seen, self.plan_state.default)
        recorded = run or self.runs.known.get(first.serial) or UNPLANNED
        if messages[0].has_failed:
            recorded = Run(recorded.phase, next_phase=recorded.next_phase)  # without its plan
        self.recorder.add(seen, recorded, default, self.plan_state.trial.recorded())
        if run is not None and order is self.orders.first:
            self._timelines.add(seen, run, self.job)
        for rank in self.runs.behind(number, messages):
            self.resend(rank)
        if not self.has_ended and self._left_s is None:
            self._advance(seen)

    def _default_clocks(self, seen: Seen) -> Default | None:
        """Return what default clocks take for the order of an iteration, and learn from it if it ran at these.

        The first iteration after a change of clocks may begin at the previous ones.
        """
        order, run, known = seen.order, seen.run, self.plan_state.default
        number = NO_ORDER if order is None else order.number
        was_at_default_clocks = self._was_at_default_clocks
        is_at_default_clocks = run is not None and run.clocks(number) == _AT_DEFAULT_CLOCKS
        self._was_at_default_clocks = is_at_default_clocks and not seen.job_report.failed
        if order is None:
            return None
        known.set_passes(number, order.passes)
        if was_at_default_clocks and self._was_at_default_clocks:
            known.add(number, seen.time_s, seen.job_report.energy_j, seen.size)
        return known.of(number, seen.size)

    def _advance(self, seen: Seen | None) -> None:
        """Pass an iteration to the job's mode, or None to start it, and send the run that it requests."""
        if self._mode is None:
            return
        try:
            self.next = self._mode.send(seen)  # type: ignore[arg-type]  # None begins it
        except Exception as error:  # errors of decisions must not stop training
            self.has_failed(error)
            return
        self.runs.send(self.next)

    def _close_mode(self) -> None:
        """End the mode. Iterations then run at default clocks."""
        if self._mode is not None:
            self._mode.close()
        self._mode, self.next = None, UNPLANNED

    def _send_all(self, message: ToRank) -> None:
        for rank in range(self.job.world_size):
            self._send(rank, message)

    def resend(self, rank: int) -> None:
        """Send all orders, the run and requests to a rank, to which a message may have been lost."""
        self._send(rank, self.orders.message())
        for key in self.orders.requested:
            self._send(rank, msg.ReadSchedule(key))
        self.runs.resend(rank)
        if self._profiled_limit.power_w is not None:
            self._send(rank, self._profiled_limit)

    def _send_for_mode(self, rank: int, message: ToRank) -> None:
        if isinstance(message, msg.SetProfiledLimit):
            self._profiled_limit = message
        self._send(rank, message)

    def has_failed(self, error: Exception) -> None:
        """Record that the job's mode has failed, and restart it after a number of iterations."""
        logger.debug("perseus: the mode ended", exc_info=error)
        text = str(error).rstrip(".") or type(error).__name__
        iterations = self._back_off.next(self.control.steps)
        self.recorder.fail(Failed(error=str(error)), f"{text}. Training continues at default clocks.")
        self._close_mode()
        self._mode = modes.after_fault(self._context, iterations)
        self._advance(None)

    def fall_behind(self) -> None:
        """Continue at default clocks for some iterations, because reports are not processed in time."""
        if self.next.phase != "observe":
            ranks = self.job.world_size
            self.has_failed(PerseusError(f"the job's server cannot process the reports of {ranks} ranks in time"))

    def _status(self) -> dict[str, Any]:
        """Return the facts of the job, its next run and the record of its last iteration."""
        last, following = self.recorder.last, self.next
        facts = self.recorder.facts().model_dump(mode="json")
        now = {"phase": following.phase, "next": dict(following.status), "last": last.model_dump() if last else {}}
        return facts | now


def _with_what_is_kept(measured: Measured, kept: Measured | None) -> Measured:
    """Complete measurements that lack the blocking power with those of an earlier start."""
    if kept is None or math.isfinite(measured.blocking_power_w):
        return measured
    return Measured(measured.period_s, kept.settle_s, kept.blocking_power_w)
