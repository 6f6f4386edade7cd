"""Drives a job's mode from one iteration boundary to the next: decisions, reports, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from perseus_ds.artifacts.run_records import FILE_NAME, Failed
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ConfigError, ConnectionLostError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.decisions import Assignment
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.policies import check_deadline
from perseus_ds.policy.reports import JobReport, RankReport, ReportExchange, shapes_number
from perseus_ds.policy.signals import SignalWatch
from perseus_ds.runtime.default_clocks import BackOff, after_a_fault, observe
from perseus_ds.runtime.devices import peak_memory_bytes
from perseus_ds.runtime.iterations import UNPLANNED, IterationMeasurement, NextIteration, NextPhase, Times
from perseus_ds.runtime.job import Job, ModeContext, RankContext
from perseus_ds.runtime.kinds import MEASURING
from perseus_ds.runtime.look_ahead import LookAhead
from perseus_ds.runtime.modes import mode_of
from perseus_ds.runtime.recorder import IterationContext, Recorder, TimelineLog
from perseus_ds.runtime.supervision import may_pass

logger = logging.getLogger("perseus_ds")
_LAST_REPORTS_S = 2.0
_POLL_S = 0.002
_BACK_OFF = 10


class ModeDriver:
    """Passes measurements to a mode, and holds its request for the next iteration.

    Attributes:
        next: The request for the next iteration.
        look_ahead: The lengths that the job gives for iterations to come.
        unsent: Returns the report of the last iteration, which is still to be sent once the device has done it; None
            where there is none.
    """

    def __init__(
        self,
        job: Job,
        rank: RankContext,
        recorder: Recorder,
        control: JobControl,
        *,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Start the job's mode. All ranks call this together.

        If the mode fails, ``on_error`` is called, and the job trains at default clocks.

        Raises:
            PerseusError: On all ranks, if a check fails on one.
        """
        self._rank = rank
        self._recorder = recorder
        self._control = control
        self._on_error = on_error
        self._exchange = ReportExchange(rank.communicator)
        info = job.info.model_copy(update={"streams": ScheduleStreams.of(job.schedule)})
        self._timelines = TimelineLog(
            rank.communicator, job.output_dir, gpu=rank.gpu.name, job=info, timebase=rank.timebase
        )
        self._ended: IterationContext | None = None
        self._ended_s: float | None = None
        self.unsent: Callable[[], tuple[RankReport, Assignment | None]] | None = None
        self._is_known: Callable[[], bool] = bool
        self._keep: Callable[[], None] | None = None
        self._keeps_timeline = False
        self._order: Hashable = None
        self._is_closed = False
        self.look_ahead = LookAhead(rank.communicator, recorder.say)
        context = ModeContext(job, rank, recorder, control, self.look_ahead)
        if job.config.mode in ("run", "auto"):
            _check_deadline(context)
            _follow_signals(context)
        self._start = partial(mode_of, context)
        self._back_off = BackOff(_BACK_OFF)
        self._mode = self._start()
        self.next: NextIteration = next(self._mode)

    def begin(self, order: Hashable, read: Callable[[], Schedule] | None) -> None:
        """Have the iteration that begins run what its order and lengths ask for; every rank must do so at once."""
        self._order = order
        self.look_ahead.begin()
        try:
            if self.next.of_order is not None:
                if order in self.next.new_orders:
                    self.send_report()
                self.next = self.next.of_order(order, read)
            if self.next.by_length is not None:
                self.next = self.next.by_length(self.next, self.look_ahead.outlook)
        except Exception as error:
            self._leave(error)

    def times(self) -> Times:
        """Return the operations to time in the next iteration. Called once, at its begin."""
        is_first_kind = not (self.next.by_shape or self.next.order)
        self._keeps_timeline = is_first_kind and self._timelines.wants(self.next.phase, self.next.plan)
        return "all" if self._keeps_timeline or self.next.by_shape else self.next.times

    def end_iteration(
        self, seen: IterationMeasurement, own: Mapping[str, Any], samples: int, *, is_last: bool = False
    ) -> None:
        """Record the previous iteration, which all ranks have reported, and request the next one.

        The iteration that has just ended is reported after the device has finished it, while the next one runs.

        Args:
            seen: This rank's measurement of the iteration that has just ended. Its reports are added here.
            own: Additional fields of this rank's report.
            samples: Number of samples that the job has seen after it.
            is_last: Whether the process ends. Then the wait for other ranks is short, and nothing is decided.
        """
        reports = self._received(timeout_s=_LAST_REPORTS_S if is_last else None)
        if reports is not None and reports.gives_lengths:
            self.look_ahead.use()
        self._record(reports)
        self._control.count_step()
        ran, ended = self.next, time.time()
        begun_s, ended_s = seen.host_s
        stopped_s = 0.0 if self._ended_s is None else begun_s - self._ended_s
        self._ended_s = ended_s
        seen.number, seen.stopped_s, seen.reports = self._control.steps, stopped_s, reports
        seen.ranks = self._exchange.ranks if reports is not None else None
        seen.order = self._order
        iteration = self.look_ahead.iteration
        seen.lengths = partial(self.look_ahead.lengths_of, iteration)
        if seen.failed:
            ran = replace(ran, plan=None, forecast=None)
        own = {**own, "gives_lengths": self.look_ahead.has_given, "planned": ran.plan is not None}
        if self._keeps_timeline:
            self._keep = partial(self._timelines.keep, ran, seen, peak_memory_bytes(self._rank.device))
        if reports is not None and reports.closed:
            self.observe()
        elif not is_last:
            self._advance(seen)
        is_over = self.next.phase != ran.phase
        next_phase = NextPhase(self.next.phase, 0.0) if is_over else self.next.next_phase
        # Records are written in groups. Until then they must not keep the events of their iteration from the pool.
        self._ended = IterationContext(
            seen.number, samples, ran.phase, ran.plan, ran.forecast, ran.order, ran.shape, ended, next_phase
        )
        self.unsent = partial(self._report, seen, own, self.next, iteration)
        self._is_known = seen.is_known
        # With aligned tails, ranks exchange other data within the next iteration, all at the same position.
        if self.next.aligns_tail or seen.is_known():
            self.send_report()

    def send_report_if_known(self) -> None:
        """Send the report of the last iteration if that requires no waiting."""
        if self._is_known():
            self.send_report()

    def send_report(self) -> None:
        """Send the report of the last iteration, unless it was sent. Waits for the device."""
        unsent, self.unsent = self.unsent, None
        try:
            if unsent is not None:
                self._exchange.send(*unsent())
        except ConnectionLostError as error:
            self._leave(error)

    def _report(
        self, seen: IterationMeasurement, own: Mapping[str, Any], following: NextIteration, iteration: int
    ) -> tuple[RankReport, Assignment | None]:
        try:
            reported = following.reported()
        except Exception as error:  # other ranks wait for this report
            self._on_error(error)
            reported = {}
        time_s, energy_j = seen.time_s, seen.energy_j
        status = self._rank.clocks.status  # now, after the device and the agent have done the iteration
        relative_time, relative_energy = self.look_ahead.relative(iteration)
        report = {
            **own,
            "relative_time": relative_time,
            "relative_energy": relative_energy,
            "time_s": time_s,
            "energy_j": energy_j,
            "limit_w": status.limit_w,
            "limit_mhz": status.limit_mhz,
            "shapes": shapes_number(self._rank.communicator.topology.rank, seen.shapes[1]),
            "closed": self._is_closed,
        }
        return RankReport(**{**report, **reported}), following.decided

    def _received(self, timeout_s: float | None = None) -> JobReport | None:
        """Return the reports of all ranks about the previous iteration, and record its timeline if requested.

        With a timeout [s], other ranks may have ended.
        """
        self.send_report()
        keep, self._keep = self._keep, None
        try:
            if keep is not None:
                keep()
            return self._exchange.received() if timeout_s is None else self._exchange.received_within(timeout_s)
        except ConnectionLostError as error:
            self._leave(error)
            return None

    def _leave(self, error: Exception) -> None:
        """End the mode because of an error. Training continues at default clocks, as on the other ranks."""
        self._on_error(error)
        self.observe()

    def choose(self, shape: float) -> bool:
        """Select the request for the shape of the first inputs. Return True if shapes have different requests."""
        choices = self.next.by_shape
        if choices:
            self.next = replace(choices.get(shape, UNPLANNED), order=self.next.order)
        return bool(choices)

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with the mode's :attr:`NextIteration.progress`.

        All ranks call this together.
        """
        self._record(self._received())
        self._control.progress = progress
        self._advance(progress)

    def observe(self) -> None:
        """End the mode and its processes, and return to default clocks."""
        self._mode.close()
        self._mode = observe()
        self.next = next(self._mode)

    def close(self) -> None:
        """End all activities, and record the last iteration if all ranks have reported it.

        All ranks end the mode together, after they have received this in the next reports, because they may wait for
        this rank.
        """
        self._is_closed = True
        self._rank.beside_training.close()
        self.look_ahead.close()
        end_s = self._rank.timebase.now_s() + _LAST_REPORTS_S
        while self.unsent is not None and not self._is_known() and self._rank.timebase.now_s() < end_s:
            self._rank.timebase.sleep(_POLL_S)
        self.send_report_if_known()
        self._record(self._exchange.received_within(_LAST_REPORTS_S))

    def _record(self, reports: JobReport | None) -> None:
        """Record the iteration that all ranks have reported, and the events sent with their reports."""
        self._recorder.add_events_of_others()
        ended, self._ended = self._ended, None
        ranks = self._exchange.ranks
        if reports is not None and ended is not None and ranks is not None:
            self._recorder.add(ended, ranks, reports.limits)
            if ended.phase not in MEASURING:
                forecast = ended.forecast
                slowdown = 1.0 if forecast is None else forecast.time_s / forecast.default_time_s
                self._control.kind_times.add((ended.order or 0, ended.shape or 0), reports.time_s / slowdown)

    def _advance(self, received: IterationMeasurement | Mapping[str, Any]) -> None:
        """Let the mode decide on the next iteration. Its errors never end training."""
        try:
            self.next = self._mode.send(received)
        except StopIteration:
            self.observe()
        except Exception as error:  # errors of Perseus are the same on all ranks
            logger.debug("perseus: the mode ended", exc_info=True)
            self._leave(error)
            if may_pass(error):
                self._mode = after_a_fault(self._start, self._back_off.next(self._control.steps))
                self.next = next(self._mode)


def _check_deadline(context: ModeContext) -> None:
    """Check that the policy's deadline has not passed.

    All ranks call this. A folder with records is that of a resumed
    job.

    Raises:
        ConfigError: On all ranks, if it has passed and the job is new.
    """
    job, rank = context.job, context.rank

    def check() -> None:
        try:
            check_deadline(job.config.policy, rank.timebase.date())
        except ConfigError as error:
            if not (job.output_dir / FILE_NAME).exists():
                raise
            context.recorder.say(f"{error} This job continues with the fastest plan")

    rank.communicator.computed_on_rank_0(check)


def _follow_signals(context: ModeContext) -> None:
    """Read the policy's signals on rank 0, and follow their files until the job ends. All ranks call this.

    Raises:
        SignalError: On all ranks, if a file cannot be used.
    """
    rank, recorder, control = context.rank, context.recorder, context.control

    def report(problem: str) -> None:
        logger.warning("perseus: %s", problem)
        recorder.event(Failed(event="signal", error=problem))

    def begin() -> None:
        control.signals = SignalWatch(rank.timebase, report)
        rank.beside_training.until_closed(control.signals.close)
        control.signals.follow(control.policy)

    rank.communicator.computed_on_rank_0(begin)
