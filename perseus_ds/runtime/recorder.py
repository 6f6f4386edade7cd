"""Makes the job's records from the ranks' reports, for ``run.jsonl``, DeepSpeed's monitor and the terminal."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from perseus_ds.artifacts.printable import log_printable, printable
from perseus_ds.artifacts.rank_report import RankReports
from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_file import from_line, to_line
from perseus_ds.artifacts.run_records import (
    MOST_FAILED_RANKS,
    Ended,
    IterationRecord,
    PlanJudged,
    ProfileWritten,
    Record,
    Started,
)
from perseus_ds.distributed import Communicator
from perseus_ds.policy.assignment import Forecast
from perseus_ds.policy.plan_proof import Comparison
from perseus_ds.report.live.facts import JobFacts
from perseus_ds.report.live.progress import JobLog, JobProgress
from perseus_ds.runtime.job_lines import describe
from perseus_ds.runtime.phases import Outlook
from perseus_ds.runtime.rank_figures import RankFigures
from perseus_ds.runtime.record_writer import RecordWriter

logger = logging.getLogger("perseus_ds")
logger.addFilter(log_printable)  # warnings of all modules quote files
_MONITOR_TAGS = {
    "iteration_time_s": "time_s",
    "iteration_energy_j": "energy_j",
    "average_power_w": "power_w",
    "plan": "plan",
    "saved": "saved",
    "late": "late",
    "drift": "drift",
    "clock_changes": "clock_changes",
    "clock_skips": "clock_skips",
}
_UNDER_PLANS = ("run", "pause")


class Monitor(Protocol):
    """DeepSpeed's monitor, or anything like it."""

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None: ...


@dataclass(frozen=True)
class IterationContext:
    """An iteration as rank 0 knows it before the reports of all ranks are there.

    Attributes:
        number: Training step, 1 first.
        samples: Samples seen by the job so far, the monitor's x-axis.
        phase: As in ``run.jsonl``.
        shape: Number of the shape of its inputs; None where all shapes run alike.
        plan: The plan of this rank's pipeline, as a place on the frontier; None without a plan.
        forecast: What the profile promised for the whole job; None without a plan.
        ended: When it ended [Unix seconds].
        outlook: What follows its phase.
    """

    number: int
    samples: int
    phase: str
    shape: int | None = None
    plan: int | None = None
    forecast: Forecast | None = None
    ended: float = 0.0
    outlook: Outlook | None = None


class Recorder:
    """Records iterations and events on rank 0; other ranks send it their events with their reports.

    Records are made on a thread of their own where nobody on the training thread needs them.
    """

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        *,
        simulated: bool,
        monitor: Monitor | None = None,
        steps_per_print: int | None = None,
    ) -> None:
        """Begin to record; every rank must do so at the same time.

        Args:
            communicator: All ranks.
            directory: The job's output folder.
            simulated: Whether GPUs are simulated.
            monitor: DeepSpeed's.
            steps_per_print: How often to print an iteration; None for never.
        """
        self._last: IterationRecord | None = None
        self._communicator = communicator
        self._simulated = simulated
        self._monitor = monitor if getattr(monitor, "enabled", True) else None
        self._steps_per_print = steps_per_print
        self._log = JobLog(directory.resolve().name)
        self._progress = JobProgress()
        self._writer = RecordWriter(directory, self._log, self._progress.add) if communicator.is_first else None
        self._before_start: list[Event] = []
        self._has_started = False
        self._summarised = 0
        self._drift: float | None = None
        self._by_rank = RankFigures()

    def start(self, event: Started) -> None:
        """Record that the job starts, all its checks being passed, and then what happened meanwhile."""
        self._has_started = True
        for waiting in (event, *self._before_start):
            self.event(waiting)
        self._before_start.clear()

    def event(self, event: Event) -> None:
        """Record an event of the job; on rank 0 only, from any thread."""
        if self._writer is None:
            return
        event = event.model_copy(update={"time": event.time or time.time(), "simulated": self._simulated})
        if self._has_started:
            self._writer.write(event)
        else:
            self._before_start.append(event)

    def own_event(self, event: Event) -> None:
        """Record an event of this rank, from any thread; another rank than 0 sends it to rank 0."""
        if self._communicator.is_first:
            self.event(event)
        else:
            self._communicator.messages.add(to_line(event).encode())

    def profile_written(self, path: Path, **figures: float) -> None:
        """Record that a profile was measured, with its cost; see :class:`ProfileWritten`."""
        rounded = {name: round(value, 3) for name, value in figures.items()}
        self.event(ProfileWritten.model_validate({"path": str(path), **rounded}))

    def plan_judged(self, plan: int | None, comparison: Comparison, *, kept: bool) -> None:
        """Record how a plan compares with default clocks, and say whether it stays."""
        figures = {name: round(value, 5) for name, value in asdict(comparison).items()}
        self.event(PlanJudged.model_validate({"plan": plan, "wins": kept, **figures}))
        verdict = f"plan {plan} against iterations at default clocks of this job: {comparison}"
        if kept:
            self.say(verdict)
        else:
            self.say(f"{verdict}. It does not win: training goes on at default clocks")

    def add(self, iteration: IterationContext, reports: RankReports) -> None:
        """Record an iteration that all ranks have reported; on rank 0 only."""
        if self._writer is None:
            return
        if self._monitor is not None:
            record = self._of_job(iteration, reports)
            self._writer.write_soon(lambda: record)
            self._tell_monitor(record, iteration.samples)
        else:
            self._writer.write_soon(partial(self._of_job, iteration, reports))
        if self._steps_per_print and iteration.number % self._steps_per_print == 0 and (last := self.last):
            self._print(last)

    @property
    def last(self) -> IterationRecord | None:
        """The record of the last iteration; None before the first one. From any thread."""
        if self._writer is not None:
            self._writer.flush()
        return self._last

    def add_events_of_others(self) -> None:
        """Record the events that other ranks have sent; on rank 0 only."""
        if self._writer is None:
            return
        for age_s, line in self._communicator.messages.take_all():
            self._writer.write_soon(partial(self._of_other, line, time.time() - age_s))

    def _of_other(self, line: bytes, at: float) -> Record:
        # Clocks of nodes may be minutes apart: rank 0's tells the time of all records.
        return from_line(line).model_copy(update={"time": at, "simulated": self._simulated})

    def close(self) -> None:
        """Print time, energy and saving of the training in one line, record them, and wait until all is written."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._progress.total.iterations > self._summarised:
            self._summarised = self._progress.total.iterations
            ended = Ended(simulated=self._simulated, plans=self._progress.plans, **asdict(self._progress.total))
            self.say(describe(ended))
            self.event(ended)
        self._writer.flush()

    def facts(self) -> JobFacts:
        """Return the facts of the job, over all its starts; on rank 0, from any thread."""
        return self._log.facts(time.time())

    def say(self, text: str) -> None:
        """Print something for the whole job; on rank 0 only."""
        if not self._communicator.is_first:
            return
        with contextlib.suppress(Exception):  # a terminal that is gone or knows no such character, a full disk
            print(printable(f"perseus: {text}") + (", simulated GPUs" if self._simulated else ""), flush=True)

    def _of_job(self, iteration: IterationContext, reports: RankReports) -> IterationRecord:
        energies_j = reports.column("energy_j")
        energy_j = float(energies_j.sum())
        has_energy = math.isfinite(energy_j)
        drift = reports.column("drift")
        if iteration.phase not in _UNDER_PLANS:
            self._drift = None
        elif np.isfinite(drift).any():
            self._drift = float(np.nanmax(drift))
        failed = np.flatnonzero(reports.column("failed")).tolist()
        forecast = iteration.forecast
        self._last = IterationRecord(
            simulated=self._simulated,
            iteration=iteration.number,
            ended=round(iteration.ended, 3),
            phase=iteration.phase,
            plan=iteration.plan,
            shape=iteration.shape,
            time_s=_rounded(reports.column("time_s").max()),
            energy_j=_rounded(energy_j) if has_energy else None,
            energy_by_pipeline_j=tuple(map(_rounded, np.bincount(reports.pipeline_of_rank, energies_j)))
            if has_energy
            else None,
            predicted_time_s=forecast and _rounded(forecast.time_s),
            predicted_energy_j=forecast and _rounded(forecast.energy_j),
            default_time_s=forecast and _rounded(forecast.default_time_s),
            default_energy_j=forecast and _rounded(forecast.default_energy_j),
            default_measured=forecast is not None and forecast.default_measured,
            drift=None if self._drift is None else _rounded(self._drift),
            clock_changes=int(reports.column("clock_changes").sum()),
            clock_skips=int(reports.column("clock_skips").sum()),
            failed_ranks=tuple(failed[:MOST_FAILED_RANKS]),
            more_failed_ranks=max(0, len(failed) - MOST_FAILED_RANKS),
            next_phase=iteration.outlook.phase if iteration.outlook else None,
            next_in_s=_seconds(iteration.outlook.in_s) if iteration.outlook else None,
            **self._by_rank.of(reports),
        )
        return self._last

    def _tell_monitor(self, record: IterationRecord, samples: int) -> None:
        if self._monitor is None or not self._communicator.is_connected:  # DeepSpeed's asks for its rank
            return
        prefix = "Perseus/simulated" if self._simulated else "Perseus"
        values = {tag: getattr(record, name) for tag, name in _MONITOR_TAGS.items()}
        events = [(f"{prefix}/{tag}", float(value), samples) for tag, value in values.items() if value is not None]
        try:
            self._monitor.write_events(events)
        except Exception as error:  # files, networks, services: whatever the user has chosen to write to
            self._monitor = None
            logger.warning("perseus: DeepSpeed's monitor failed (%s); Perseus no longer writes to it.", error)

    def _print(self, record: IterationRecord) -> None:
        text = f"step {record.iteration}: {record.phase}, {record.time_s:.3f} s"
        text += "" if record.energy_j is None else f", {record.energy_j:.0f} J"
        if record.predicted_time_s is not None:
            text += f" (plan {record.plan}: {record.predicted_time_s:.3f} s, {record.predicted_energy_j:.0f} J)"
        self.say(text)


def _seconds(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 3)


def _rounded(value: float) -> float:
    """Return a figure without digits that no counter has measured: microseconds and microjoules."""
    return round(float(value), 6)
