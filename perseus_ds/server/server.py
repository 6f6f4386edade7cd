"""Decides for one job: receives the reports of ranks, and sends them the runs that modes request.

All work is done when a message arrives or in :meth:`JobServer.tick`, which is called after messages have arrived, and
nothing blocks. Messages are transferred by :mod:`perseus_ds.server.process`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.run_records import FILE_NAME, ClockRefused, Failed, Recovered
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer.lengths import LengthsWorker
from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.policy.policies import check_deadline, parse_order
from perseus_ds.policy.reports import LimitConditions, RankReports, shapes_number
from perseus_ds.policy.signals import SignalWatch
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol.description import JobDescription, Welcome
from perseus_ds.protocol.job_messages import Follow, Measured, RankReport, Say, Spans, Times, ToRank, ToServer
from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.server import modes
from perseus_ds.server.context import ModeContext
from perseus_ds.server.default_clocks import BackOff
from perseus_ds.server.frontiers import has_frontier_of_an_earlier_run
from perseus_ds.server.iterations import Run, Seen
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.kinds import MEASURING, UNPLANNED, Kind, Kinds
from perseus_ds.server.look_ahead import LookAhead
from perseus_ds.server.recorder import Recorder, TimelineLog
from perseus_ds.server.under_plans import drift_of
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_FIRST_BACK_OFF = 10
_MOST_RUNS = 512
_MOST_OPEN = 64
"""Maximum number of iterations that wait for reports of ranks. The oldest ones are dropped."""
_KNOWN_AFTER_S = 5.0
"""Time in which a message reaches all ranks, even on a busy machine."""
_LAST_REPORTS_S = 1.5
"""Time for which a job that ends waits for reports after the first rank has left."""
_RESENT_EVERY = 10
"""Number of iterations between two messages to a rank that does not follow the last run."""


@dataclass
class _Sent:
    """The run last sent for a kind, and the one before it, for which plans may still arrive."""

    serial: int
    key: tuple[Any, ...]
    follows: Callable[[int, int], Follow]
    wanted: Run
    from_iteration: int
    before: _Sent | None = None


class JobServer:
    """Decides for all ranks of a job.

    Attributes:
        job: The job.
        control: The user's control of the job.
        recorder: Records iterations and events.
        look_ahead: Lengths of future iterations.
        has_ended: Whether the job has ended and all records are written.
        is_over: Whether all ranks have left in addition.
    """

    def __init__(
        self,
        description: JobDescription,
        send: Callable[[int, ToRank], None],
        *,
        state: Mapping[str, Any] | None = None,
        epoch: int = 0,
        timebase: Timebase = REAL_TIME,
        worker: Callable[..., OptimizeWorker] = OptimizeWorker,
        lengths_worker: Callable[..., LengthsWorker] = LengthsWorker,
    ) -> None:
        """Check what can be checked before training.

        Args:
            description: Description of the job.
            send: Sends a message to a rank.
            state: State of an earlier start of the job, as returned by :meth:`state`, if there is one.
            epoch: Number of earlier servers of the running job.
            timebase: Timebase of the server.
            worker: Computes plans in another process.
            lengths_worker: Plans iterations of given lengths in another process.

        Raises:
            PerseusError: The job cannot be trained as configured.
        """
        self.job, self._warning = _with_permission(Job.of(description))
        self._notes: list[str] = []
        config, first = self.job.config, self.job.facts[0]
        self._send = send
        self._time = timebase
        self._is_renewed = epoch > 0
        self.recorder = Recorder(
            self.job.output_dir,
            simulated=self.job.simulated,
            send=lambda message: send(0, message),
            steps_per_print=first.steps_per_print,
            has_monitor=first.has_monitor,
        )
        info = self.job.info.model_copy(update={"streams": ScheduleStreams.of(self.job.schedule)})
        self._timelines = TimelineLog(self.job.output_dir, gpu=first.gpu, job=info, warn=self.recorder.warn)
        self.control = JobControl(config.policy, self.job.info.data_parallel or 1, self._status, timebase)
        self.control.record = self.recorder.event
        pipelines = 1 + max(place.pipeline for place in self.job.places)
        self.look_ahead = LookAhead(pipelines, self.recorder.say, lengths_worker)
        self._context = ModeContext(
            self.job, self.recorder, self.control, self.look_ahead, self._send_for_mode, timebase, worker
        )
        self._serial = epoch << 32  # agents still know the serials of earlier servers
        self._runs: dict[int, Run] = {0: UNPLANNED}
        self._sent: dict[int, _Sent] = {}
        self._profiled_limit = msg.SetProfiledLimit(None)
        # By rank, the iteration after which the runs were sent again.
        self._resent_after: dict[int, int] = {}
        # By iteration, the reports and operations of the ranks that have sent them.
        self._open: dict[int, tuple[dict[int, RankReport], dict[int, bytes]]] = {}
        self._completed = 0
        self._issued = 0  # number of the last iteration that a rank is known to have begun
        self._time_s = 0.0  # of the last iteration
        self._conditions = LimitConditions()
        # The number of steps that the engine has done before the first iteration.
        self._steps_before = self.control.steps = first.steps or 0
        self._back_off = BackOff(_FIRST_BACK_OFF)
        self._backs_off_until = 0  # an iteration
        self._left_s: float | None = None
        self.is_over = False
        self.has_ended = False
        self._check()
        self._kinds = Kinds(self._context, self._send_run, self.has_failed)
        self._state: Mapping[str, Any] | None = None  # of an earlier start of the job
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        kept, issued = state.get("control"), state.get("iteration")
        if state.get("job") != self.job.started().job or not isinstance(kept, Mapping):
            return
        same_policy = self.control.restore(kept)
        self.control.progress = state.get("progress") or {} if same_policy else {}
        self._state = state
        for rank, measured in enumerate(state.get("measured") or ()):
            if measured is not None and rank < self.job.world_size and self.job.states[rank].measured is None:
                self.job.states[rank].measured = Measured(*measured)
        self._steps_before = self.control.steps
        if self._is_renewed and isinstance(issued, int):  # ranks continue to count
            self._completed = issued
            self._steps_before -= issued
            self._kinds.first_key = state.get("first_order")
        elif (steps := self.job.facts[0].steps) is not None:
            self._steps_before = self.control.steps = steps

    def _check(self) -> None:
        config = self.job.config
        modes.check(self._context)
        if config.mode in ("run", "auto"):
            try:
                check_deadline(config.policy, self._time.date())
            except ConfigError as error:
                if not (self.job.output_dir / FILE_NAME).exists():
                    raise
                self._notes.append(f"{error} This job continues under the fastest plan")
            self.control.signals = SignalWatch(self._time, self._signal_has_failed)
            self.control.signals.follow(self.control.policy)

    def _signal_has_failed(self, problem: str) -> None:
        self.recorder.warn(problem)
        self.recorder.event(Failed(event="signal", error=problem))

    def welcome(self) -> Welcome:
        """Return what all ranks have to measure before training."""
        mode = self.job.config.mode
        known = has_frontier_of_an_earlier_run(self.job) or all(
            state.measured is not None and math.isfinite(state.measured.blocking_power_w) for state in self.job.states
        )
        measures_power = mode == "profile" or (mode == "auto" and not known)
        return Welcome(
            measures_power=measures_power,
            measures_counter=mode in ("run", "auto") and not measures_power,
        )

    def start(self) -> None:
        """Record the start of the job, and start its mode."""
        self.recorder.start(self.job.started())
        if self._warning:
            self.recorder.warn(self._warning)
        for note in self._notes:
            self.recorder.say(note)
        self.control.record_policy()
        self._kinds.begin(self._state)

    @property
    def next(self) -> Run:
        """Run of the following iterations, if they are of the latest kind."""
        return self._kinds.latest.wanted

    def state(self) -> dict[str, Any]:
        """Return the state to keep for a later start of the job, as plain values."""
        progress = self._kinds.progress()
        return {
            "job": self.job.started().job,
            "iteration": self._completed,
            "first_order": self._kinds.first_key,
            "measured": [
                msgspec.structs.astuple(state.measured) if state.measured else None for state in self.job.states
            ],
            "control": self.control.state(),
            "progress": progress or dict(self.control.progress),
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
                    contents = self._open.setdefault(message.iteration, ({}, {}))[1]
                    contents[rank] = contents.get(rank, b"") + message.content
            case msg.ClockRefused():
                fields = msgspec.structs.asdict(message)
                self.recorder.event(ClockRefused(rank=rank, **fields))
            case LatencyTable():
                state.latencies = message
            case msg.RankFailed():
                text = f"perseus: {message.error}. Training continues at default clocks."
                self._send(rank, Say(text, warns=True))
                self.recorder.event(Failed(rank=rank, error=message.error))
            case msg.RankRecovered():
                text = "perseus: the driver works again. This rank runs under plans again."
                self._send(rank, Say(text, warns=True))
                self.recorder.event(Recovered(rank=rank))
            case msg.Lengths():
                pipeline = self.job.places[rank].pipeline
                self.look_ahead.give(message.iteration, pipeline, message.lengths, self._issued)
            case msg.ScheduleRead():
                self._kinds.add_schedule(rank, message)
            case msg.Worked():
                state.flops = message.passes
            case Measured():
                state.measured = _with_what_is_kept(message, state.measured)
            case msg.Steps():
                self._steps_before = message.steps - message.after
                self.control.steps = message.steps
            case msg.Command():
                try:
                    self.control.carry_out(parse_order(json.loads(message.content)))
                except (PerseusError, ValueError) as error:
                    self.recorder.warn(str(error))
            case msg.Joined():
                state.is_here, state.has_left = True, False  # its agent was stopped, if it had left
                self._issued = max(self._issued, message.issued)
                if (
                    self._left_s is not None
                    and not self.has_ended
                    and not any(other.has_left for other in self.job.states)
                ):
                    self._left_s = None
                self.resend(rank)
            case msg.Left():
                state.has_left, state.is_here = True, False
                if self._left_s is None:
                    self._left_s = self._time.now_s()

    def tick(self) -> None:
        """Do everything that is due without a message."""
        if not self._backs_off:
            self._plan_ahead()
        if self._left_s is None or self.is_over:
            return
        late_s = self._time.now_s() - self._left_s
        all_left = all(state.has_left for state in self.job.states)
        if not self.has_ended and (all_left or late_s > _LAST_REPORTS_S):
            self.has_ended = True
            self._kinds.close()
            self.look_ahead.close()
            if self.control.signals is not None:
                self.control.signals.close()
            self.recorder.close()
            self._send(0, msg.Summarised())
        self.is_over = all_left

    # Iterations.

    def _add_report(self, rank: int, message: RankReport) -> None:
        state, number = self.job.states[rank], message.report.iteration
        self._issued = max(self._issued, message.report.issued)
        state.late_s, state.default_mhz = message.late_s, message.default_mhz
        state.memory_bytes = max(state.memory_bytes, message.report.memory_bytes)
        if number <= self._completed:
            return  # a duplicate, or later than a complete one
        reports, contents = self._open.setdefault(number, ({}, {}))
        reports.setdefault(rank, message)
        if len(reports) == self.job.world_size:
            self._completed = number
            self._forget(number)
            try:
                self._complete(number, [reports[of] for of in range(len(reports))], contents)
            except Exception as error:  # errors of decisions must not stop training
                self.has_failed(error)
        elif len(self._open) > _MOST_OPEN:
            self._forget(min(self._open))

    def _forget(self, number: int) -> None:
        """Discard reports of iterations up to ``number``. No more reports of earlier ones are expected."""
        self._open = {each: found for each, found in self._open.items() if each > number}

    def _complete(self, number: int, messages: list[RankReport], contents: Mapping[int, bytes]) -> None:
        first = messages[0].report
        key = first.key
        # A rank whose client and agent followed different serials ran neither.
        run = self._run_of({m.serial if m.serial == m.report.serial else -1 for m in messages})
        ranks = self._ranks_of(messages)
        seen = Seen(
            number=self._steps_before + number,
            iteration=number,
            run=run,
            ranks=ranks,
            messages=messages,
            contents=contents,
            streams=self._kinds.streams_of(key) or (self.job.schedule.ranks if number == 1 else ()),
            pipeline_ranks=[place.pipeline_rank for place in self.job.places],
            ended=first.ended,
            conditions=self._conditions.add(float(ranks.time_s.max()), ranks.limits),
            relative=self.look_ahead.relative(number),
        )
        self.control.count_step(seen.number)
        self._time_s = seen.time_s
        if run is not None and number % run.every == 0:
            seen.drift = drift_of(self.job, seen)
        kind, order, shape = self._kinds.route(seen, key)
        if kind is not None:
            is_missed = kind.wanted.by_length and (run is None or run is UNPLANNED)
            self.look_ahead.has_ended(number, kind.context.job.order, is_missed=is_missed)
        recorded = run or self._runs.get(messages[0].report.serial) or UNPLANNED
        if messages[0].has_failed:
            recorded = Run(recorded.phase, next_phase=recorded.next_phase)  # without its plan
        self.recorder.add(seen, recorded, order, shape)
        if run is not None and run.phase not in MEASURING:
            forecast = run.forecast
            slowdown = 1.0 if forecast is None else forecast.time_s / forecast.default_time_s
            self.control.kind_times.add((order or 0, shape or 0), seen.time_s / slowdown)
        if run is not None and not (order or shape):
            self._timelines.add(seen, run, self.job)
        if kind is not None:
            self._resend_to_those_behind(kind, number, messages)
            if not self.has_ended and self._left_s is None:
                self._kinds.advance(kind, seen)

    def _ranks_of(self, messages: list[RankReport]) -> RankReports:
        def by_rank(figure: str) -> npt.NDArray[np.float64]:
            return np.array([*map(attrgetter(figure), messages)], np.float64)

        return RankReports(
            pipeline=np.array([place.pipeline for place in self.job.places]),
            time_s=by_rank("report.time_s"),
            energy_j=by_rank("energy_j"),
            clock_changes=by_rank("changes"),
            clock_skips=by_rank("skips"),
            failed=by_rank("has_failed"),
            asked_mhz=by_rank("asked_mhz"),
            reached_mhz=by_rank("reached_mhz"),
            computed_s=by_rank("report.computed_s"),
            tail_s=by_rank("report.tail_s"),
            limit_w=by_rank("limit_w"),
            limit_mhz=by_rank("limit_mhz"),
            shapes=np.array([shapes_number(rank, m.report.shapes) for rank, m in enumerate(messages)], np.float64),
        )

    def _run_of(self, serials: set[int]) -> Run | None:
        """Return the run for the serials that clients and agents followed. None if they differ."""
        runs = [self._runs.get(serial) for serial in sorted(serials)]
        known = [run for run in runs if run is not None]
        if len(known) < len(runs) or len({run.clocks for run in known}) > 1:
            return None
        return known[0]

    def _send_run(self, kind: Kind) -> None:
        """Send the run that a kind requests to the ranks, for the next iterations that none can have begun."""
        number, wanted, job = kind.number, kind.wanted, kind.context.job
        times, every = wanted.times, wanted.every
        if kind is self._kinds.first and not wanted.by_length and self._timelines.wants(wanted):
            times, every = "all", 1
        key = (*wanted.key, times, every)
        sent = self._sent.get(number)
        if sent is not None and sent.key == key:
            self._runs[sent.serial] = sent.wanted = wanted  # its next phase or status may differ
            return
        serial, from_iteration = self._new_serial(wanted), self._from_iteration()
        follows = self._follows(number, wanted, job, serial, times=times, every=every)
        before = None if sent is None else replace(sent, before=None)
        self._sent[number] = _Sent(serial, key, follows, wanted, from_iteration, before)
        for rank, state in enumerate(job.states):
            if state.is_here:
                self._send(rank, follows(rank, from_iteration))
        if wanted.by_length:
            for iteration in self.look_ahead.plans_of(kind.context.job.order):
                if iteration >= from_iteration:
                    self._send_planned(kind, iteration)

    def _new_serial(self, wanted: Run) -> int:
        """Return a new serial, by which ranks report what they ran."""
        self._serial += 1
        self._runs[self._serial] = wanted
        if len(self._runs) > _MOST_RUNS:
            kept = {0, *(sent.serial for sent in self._sent.values())}
            del self._runs[next(serial for serial in self._runs if serial not in kept)]
        return self._serial

    def _follows(
        self, number: int, wanted: Run, job: Job, serial: int, *, times: Times, every: int
    ) -> Callable[[int, int], Follow]:
        """Return a function that creates the message for a rank, given its first iteration."""
        programs: dict[Any, msg.Program] = {}
        shown_after = max(2, math.ceil(_KNOWN_AFTER_S / self._time_s)) if self._time_s else 2
        profiled = set(job.profiled)

        def follow(rank: int, from_iteration: int) -> Follow:
            place = job.places[rank]
            plan = None if wanted.plans is None else wanted.plans.assignment.plans[place.pipeline]
            plan = place.pipeline if wanted.by_length else plan
            if (program := programs.get((plan, place.pipeline_rank))) is None:
                program = wanted.program(number, place.pipeline, place.pipeline_rank, job.schedule)
                programs[plan, place.pipeline_rank] = program
            measured: Times = times if rank in profiled else wanted.otherwise
            return Follow(
                program,
                serial,
                from_iteration,
                from_iteration + shown_after,
                wanted.phase,
                wanted.plan,
                measured,
                every,
                wanted.otherwise,
                wanted.logs_energy and rank in profiled,
                0 if wanted.by_length else None,
            )

        return follow

    def _plan_ahead(self) -> None:
        """Request plans for iterations with known lengths, and send new plans to the ranks."""
        for order, iteration in self.look_ahead.new_plans(self._issued):
            for kind in self._kinds.kinds():
                if kind.context.job.order == order:
                    self._send_planned(kind, iteration)

    def _send_planned(self, kind: Kind, iteration: int) -> None:
        """Send the plan for one iteration, if it is planned by length and no rank has begun it."""
        sent = self._sent.get(kind.number)
        if sent is not None and iteration < sent.from_iteration:
            sent = sent.before
        plan = self.look_ahead.plans_of(kind.context.job.order).get(iteration)
        if sent is None or not sent.wanted.by_length or plan is None or iteration <= self._issued:
            return
        run = sent.wanted.with_lengths(plan)
        follows = self._follows(
            kind.number, run, kind.context.job, self._new_serial(run), times=run.times, every=run.every
        )
        for rank, state in enumerate(self.job.states):
            if state.is_here:
                self._send(rank, msgspec.structs.replace(follows(rank, iteration), only_iteration=iteration))

    @property
    def files(self) -> list[int]:
        """File descriptors that are readable when :meth:`tick` has something to do."""
        return [] if self._backs_off else self.look_ahead.files

    @property
    def _backs_off(self) -> bool:
        """True if the mode has failed and has not been restarted yet."""
        return self._completed < self._backs_off_until

    def _from_iteration(self) -> int:
        """Return the first iteration that no rank begins before it receives a message sent now.

        Ranks begin the next iteration without waiting for an answer to their report.
        """
        issued = self._issued
        return issued + 2 if issued else 1

    def _resend_to_those_behind(self, kind: Kind, number: int, messages: list[RankReport]) -> None:
        """Send the runs again to ranks that did not follow the last run of a kind."""
        sent = self._sent.get(kind.number)
        if sent is None or sent.wanted.by_length or number <= sent.from_iteration + 1:
            return
        for rank, message in enumerate(messages):
            is_behind = not message.serial == message.report.serial == sent.serial
            if is_behind and number >= self._resent_after.get(rank, -_RESENT_EVERY) + _RESENT_EVERY:
                self._resent_after[rank] = number
                self.resend(rank)

    def resend(self, rank: int) -> None:
        """Send all kinds, their runs and requests to a rank, to which a message may have been lost."""
        self._send(rank, self._kinds.orders_for(rank))
        for key in self._kinds.requested:
            self._send(rank, msg.ReadSchedule(key))
        from_iteration = self._from_iteration()
        for sent in self._sent.values():
            self._send(rank, sent.follows(rank, from_iteration))
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
        self._backs_off_until = self._completed + iterations
        self.recorder.warn(f"{text}. Training continues at default clocks.")
        self.recorder.event(Failed(error=str(error)))
        self._kinds.restart(iterations)

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


def _with_permission(job: Job) -> tuple[Job, str]:
    """Replace auto mode by observe mode if clocks of a rank cannot be set, and return a warning.

    A process may lack the permission, and a virtual GPU the clocks.
    """
    config = job.config
    problem = next((facts.no_permission for facts in job.facts if facts.no_permission), "")
    if config.mode != "auto" or not problem:
        return job, ""
    warning = (
        f"{problem} This job trains at default clocks, and its time and energy are recorded, as in mode "
        '"observe". With "required": true this is an error.'
    )
    return replace(job, config=config.model_copy(update={"mode": "observe"})), warning
