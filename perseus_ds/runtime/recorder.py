"""What is written of a job: a record of each iteration, to ``run.jsonl``, a monitor and the terminal; and timelines."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.io import open_without_links, write_atomically
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import (
    FILE_NAME,
    MOST_FAILED_RANKS,
    Event,
    IterationRecord,
    LimitsChanged,
    Record,
    RecordFollower,
    Started,
    from_line,
    to_line,
)
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile, Work
from perseus_ds.artifacts.validation import MOST_OPERATIONS
from perseus_ds.clocks.timers import Span
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute, Load, Other
from perseus_ds.policy.decisions import Forecast
from perseus_ds.policy.reports import GpuLimit, RankReports
from perseus_ds.ranks import Communicator
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase
from perseus_ds.runtime.progress import JobFacts, JobLog
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import joules, log_printable, plain, printable

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
# Jobs with at most this number of ranks have all in every record. Larger ones have them less often, for short records.
_RANKS = 64


class Monitor(Protocol):
    """DeepSpeed's monitor, or anything like it."""

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None: ...


class IterationContext(NamedTuple):
    """An iteration as rank 0 knows it before the reports of all ranks are there.

    Attributes:
        number: Training step, 1 first.
        samples: Samples seen by the job so far, the monitor's x-axis.
        phase: As in ``run.jsonl``.
        plan: Its plan; None without one.
        forecast: What the plan promised; None without one.
        order: Number of its order, where orders have plans of their own.
        shape: Number of the shape of its inputs, where shapes have plans of their own.
        ended: When it ended [Unix seconds].
        next_phase: What follows its phase.
    """

    number: int
    samples: int
    phase: str
    plan: int | None = None
    forecast: Forecast | None = None
    order: int | None = None
    shape: int | None = None
    ended: float = 0.0
    next_phase: NextPhase | None = None


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
        """Begin to record in the job's output folder; every rank must do so at the same time."""
        self._last: IterationRecord | None = None
        self._communicator = communicator
        self._directory = directory
        self._simulated = simulated
        self._monitor = monitor if getattr(monitor, "enabled", True) else None
        self._steps_per_print = steps_per_print
        self._log = JobLog(directory.resolve().name)
        self._writer = RecordWriter(directory, self._log) if communicator.is_rank_0 else None
        self._before_start: list[Event] = []
        self._has_started = False
        self._summarised = 0
        self._drift: float | None = None
        # Sum of the ranks' energies since the last record with them, and the number of iterations.
        self._energies_j: npt.NDArray[np.float64] | None = None
        self._iterations = 0
        self._limits: tuple[GpuLimit, ...] = ()
        self._limited: set[int] = set()

    def start(self, event: Started) -> None:
        """Record that the job starts, all its checks being passed, and then what happened meanwhile."""
        self._has_started = True
        self.say(f"{event.mode} mode; {self._command('watch')} shows what this job does")
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
        if self._communicator.is_rank_0:
            self.event(event)
        else:
            self._communicator.send_event(to_line(event).encode())

    def announce(self, event: Event) -> None:
        """Record an event of the job and print it; on rank 0 only."""
        self.event(event)
        self.say(plain(event.in_words()))

    def add(self, iteration: IterationContext, reports: RankReports, limits: tuple[GpuLimit, ...] = ()) -> None:
        """Record an iteration that all ranks have reported, and the GPUs that may do less; on rank 0 only."""
        if self._writer is None:
            return
        self._compare_limits(limits)
        is_printed = bool(self._steps_per_print and iteration.number % self._steps_per_print == 0)
        if self._monitor is not None:
            record = self._of_job(iteration, reports)
            self._writer.write_soon(lambda: record)
            self._tell_monitor(record, iteration.samples)
            if is_printed:
                self._print(record)
        elif is_printed:
            self._writer.write_soon(partial(self._printed, iteration, reports))
        else:
            self._writer.write_soon(partial(self._of_job, iteration, reports))

    def _compare_limits(self, limits: tuple[GpuLimit, ...]) -> None:
        """Record GPUs that may do less than profiled where others do than before; say so of those not named yet."""
        before, self._limits = self._limits, limits
        if limits == before:
            return
        found = tuple((rank, _finite(power_w), _finite(clock_mhz)) for rank, power_w, clock_mhz in limits)
        event = LimitsChanged(limits=found[:MOST_FAILED_RANKS], more=max(0, len(found) - MOST_FAILED_RANKS))
        # Heat comes and goes: each GPU is named once until none is limited any more.
        ranks = {limit.rank for limit in limits}
        is_said = bool(ranks) and ranks <= self._limited
        self._limited = self._limited | ranks if ranks else set()
        (self.event if is_said else self.announce)(event)

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
        for age_s, line in self._communicator.received_events():
            self._writer.write_soon(partial(self._of_other, line, time.time() - age_s))

    def _of_other(self, line: bytes, at: float) -> Record:
        # Clocks of nodes may be minutes apart: rank 0's tells the time of all records.
        return from_line(line).model_copy(update={"time": at, "simulated": self._simulated})

    def close(self) -> None:
        """Print time, energy and saving of the training in one line, record them, and wait until all is written."""
        if self._writer is None:
            return
        self._writer.flush()
        ended = self._log.at_end()
        if ended.iterations > self._summarised:
            self._summarised = ended.iterations
            self.say(ended.in_words())
            self.event(ended)
            if (missing := self.facts().unfinished) is not None:
                self.say(missing)
            self.say(f"{self._command('report')} makes a report of this job")
        self._writer.flush()

    def _command(self, name: str) -> str:
        return f"`perseus-ds {name} {shlex.quote(str(self._directory.resolve()))}`"

    def facts(self) -> JobFacts:
        """Return the facts of the job, over all its starts; on rank 0, from any thread."""
        return self._log.facts(time.time())

    def say(self, text: str) -> None:
        """Print something for the whole job; on rank 0 only."""
        if not self._communicator.is_rank_0:
            return
        with contextlib.suppress(Exception):  # a terminal that is gone or knows no such character, a full disk
            print(printable(f"perseus: {text}") + (", simulated GPUs" if self._simulated else ""), flush=True)

    def _printed(self, iteration: IterationContext, reports: RankReports) -> IterationRecord:
        record = self._of_job(iteration, reports)
        self._print(record)
        return record

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
        forecast, following = iteration.forecast, iteration.next_phase
        self._last = IterationRecord(
            simulated=self._simulated,
            iteration=iteration.number,
            ended=round(iteration.ended, 3),
            phase=iteration.phase,
            plan=iteration.plan,
            order=iteration.order,
            shape=iteration.shape,
            limited=bool(self._limits),
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
            next_phase=following and following.phase,
            next_in_s=None if following is None or following.in_s is None else round(following.in_s, 3),
            **self._by_rank(reports),
        )
        return self._last

    def _by_rank(self, reports: RankReports) -> dict[str, Any]:
        """Return the fields with figures by rank of an iteration's record. Empty if it has none."""
        energies_j = reports.column("energy_j")
        if np.isfinite(energies_j).all():
            self._energies_j = energies_j.copy() if self._energies_j is None else self._energies_j + energies_j
        self._iterations += 1
        if self._iterations % math.ceil(len(energies_j) / _RANKS):
            return {}
        known_j, self._energies_j = self._energies_j, None
        return {
            "energy_by_rank_j": None if known_j is None else tuple(np.round(known_j, 6).tolist()),
            "clocks_asked_mhz": _clocks(reports.column("asked_mhz")),
            "clocks_reached_mhz": _clocks(reports.column("reached_mhz")),
        }

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
        text += "" if record.energy_j is None else f", {joules(record.energy_j)}"
        if record.predicted_time_s is not None:
            text += f" (plan {record.plan}: {record.predicted_time_s:.3f} s, {joules(record.predicted_energy_j)})"
        self.say(plain(text))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(value: float) -> float:
    """Return a figure rounded to the resolution of counters: microseconds and microjoules."""
    return round(float(value), 6)


def _clocks(clocks_mhz: npt.NDArray[np.float64]) -> tuple[int | None, ...] | None:
    """Return clocks by rank, None for unknown ones. None if all are unknown."""
    if np.isnan(clocks_mhz).all():
        return None
    return tuple(None if math.isnan(clock) else int(clock) for clock in clocks_mhz.tolist())


# Records of iterations are made and written together: one by one they would take time from training in each.
_TOGETHER_S = 0.5
# During hours with a full disk, only the last records are kept (some megabytes).
_MOST_UNWRITTEN = 10_000

_Waiting: TypeAlias = tuple[Callable[[], Record], float] | threading.Event
"""What makes a record, and how long it may wait [s]; or what is set once all before it is written."""


class RecordWriter:
    """One thread appends records to the file in order.

    Args:
        directory: The job's output folder.
        log: Gets all records, those of earlier starts first.
    """

    def __init__(self, directory: Path, log: JobLog) -> None:
        self._path = directory / FILE_NAME
        self._log = log
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._unwritten: deque[bytes] = deque(maxlen=_MOST_UNWRITTEN)
        self._works = True
        self._thread = threading.Thread(target=self._write_all, name="perseus-records", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Have a record written; returns at once, from any thread."""
        self._waiting.put((lambda: record, 0.0))

    def write_soon(self, make: Callable[[], Record]) -> None:
        """Have a record made and written within half a second; returns at once, from any thread."""
        self._waiting.put((make, _TOGETHER_S))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until all enqueued records are written, or until the timeout [s]."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(timeout_s)

    def _write_all(self) -> None:
        try:
            for _, records in RecordFollower(self._path.parent).read():
                self._log.add(records)
        except FileNotFoundError:
            pass  # there is no earlier start
        except Exception as error:  # those of this start are of use all the same
            logger.warning("perseus: the records of earlier starts cannot be read (%r).", error)
        while True:
            lines, written = self._made(self._next_together())
            if lines:
                self._append(lines)
            for event in written:
                event.set()

    def _next_together(self) -> list[_Waiting]:
        """Wait for the next record, and for others that arrive while it may be delayed."""
        found: list[_Waiting] = []
        end_s = math.inf
        with contextlib.suppress(queue.Empty):
            while True:
                rest_s = None if math.isinf(end_s) else max(0.0, end_s - time.monotonic())
                found.append(waiting := self._waiting.get(timeout=rest_s))
                may_wait_s = 0.0 if isinstance(waiting, threading.Event) else waiting[1]
                end_s = min(end_s, time.monotonic() + may_wait_s)
        return found

    def _made(self, together: list[_Waiting]) -> tuple[list[bytes], list[threading.Event]]:
        """Make records; return their lines, and what is to be set once they are written."""
        lines, written = [], []
        for waiting in together:
            if isinstance(waiting, threading.Event):
                written.append(waiting)
                continue
            try:
                record = waiting[0]()
                lines.append(to_line(record).encode())
                self._log.add([record])
            except Exception as error:  # the records after it are of use all the same
                logger.warning("perseus: a record of this job cannot be made (%r); it is left out.", error)
        return lines, written

    def _append(self, lines: list[bytes]) -> None:
        """Write lines, after those that could not be written because the disk was full."""
        self._unwritten.extend(lines)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_without_links(self._path, append=True) as file:
                while self._unwritten:
                    _append_whole(file.fileno(), self._unwritten[0])
                    self._unwritten.popleft()
        except OSError as error:
            if self._works:
                logger.warning("perseus: %s cannot be written (%s); training continues without it.", self._path, error)
            self._works = False
            return
        if not self._works:
            logger.warning("perseus: %s can be written again.", self._path)
        self._works = True


def _append_whole(handle: int, line: bytes) -> None:
    """Append a line to a file. A partially written line is removed.

    Raises:
        OSError: It cannot be written.
    """
    size = os.fstat(handle).st_size
    try:
        while line:
            line = line[os.write(handle, line) :]
    except OSError:
        os.ftruncate(handle, size)
        raise


_SHOWN_PHASES = ("warm-up", "observe", "run")
# The first iteration with a plan begins at the previous clocks.
_SETTLED = 2
_MOST_SHOWN = 6


class TimelineLog:
    """Writes ``timeline.json`` on rank 0: a few iterations of its pipeline, one for each plan."""

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        *,
        gpu: str,
        job: ProfileInfo,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self._communicator = communicator
        self._time = timebase
        self._path = directory / "timeline.json"
        self._file = TimelineFile(simulated=bool(job.simulated), gpu=gpu, job=job)
        self._seen: dict[tuple[str, int | None], int] = {}
        self._kept = 0
        self._works = True

    def wants(self, phase: str, plan: int | None) -> bool:
        """Count an iteration; return whether it is to be kept, which all ranks of the first pipeline have to help with.

        They count alike; ranks of other pipelines keep nothing.
        """
        if phase not in _SHOWN_PHASES or not self._communicator.topology.is_shown:
            return False
        key = phase, plan
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] != _SETTLED or self._kept == _MOST_SHOWN:
            return False
        self._kept += 1
        return True

    def keep(self, ran: NextIteration, seen: IterationMeasurement, memory_bytes: int | None) -> None:
        """Gather what all ranks of the first pipeline did, and the memory that each has needed so far.

        All of them must do so at the same time.
        """
        begun_s = seen.start_s - self._communicator.ahead_s(self._time)
        by_rank = self._communicator.pipeline_gather((begun_s, seen.spans(), dict(seen.clock_mhz), memory_bytes))
        if not self._communicator.is_rank_0 or not self._works:
            return
        first_s = by_rank[0][0]
        operations = [
            [entry for span in spans for entry in _entries(span, begun_s - first_s, clock_mhz)]
            for begun_s, spans, clock_mhz, _ in by_rank
        ]
        iteration = MeasuredIteration(iteration=seen.number, phase=ran.phase, plan=ran.plan, ranks=operations)
        if self._file.job is not None:
            needed_bytes = known_of_all([needed for *_, needed in by_rank])
            self._file.job = self._file.job.model_copy(update={"memory_bytes": needed_bytes})
        # What could not be read again is not written: iterations of large jobs are fewer.
        if self._file.operations + iteration.operations <= MOST_OPERATIONS:
            self._file.iterations.append(iteration)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, self._file.model_dump_json(exclude_none=True) + "\n")
            except OSError as error:
                self._works = False
                logger.warning("perseus: %s cannot be written (%s); training continues without it.", self._path, error)


def known_of_all(values: Sequence[int | None]) -> list[int]:
    """Return the values of all ranks. Empty if one is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _entries(span: Span, late_s: float, clock_mhz: Mapping[Instruction, int]) -> list[MeasuredOperation]:
    match span.operation:
        case Compute(instruction=instruction):
            parts: Sequence[Work] = (instruction,)
        case Load() | Other() as operation:
            parts = (operation,)
        case operation:
            parts = operation.transfers
    start_s, end_s = round(span.start_s + late_s, 6), round(span.end_s + late_s, 6)
    return [
        MeasuredOperation.of(part, start_s, end_s, clock_mhz.get(part) if isinstance(part, Instruction) else None)
        for part in parts
    ]
