"""Writes records of iterations and events to ``run.jsonl``, and timelines."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.io import open_without_links, write_atomically
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_events import Event, Failed, LimitsChanged, Started
from perseus_ds.artifacts.run_iterations import MOST_FAILED_RANKS, IterationRecord, OfRanks, Sums
from perseus_ds.artifacts.run_records import FILE_NAME, Record, RecordFollower, to_line
from perseus_ds.artifacts.run_savings import NO_ORDER, TrialState
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile, Work
from perseus_ds.artifacts.validation import MOST_OPERATIONS
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Other, Span, Transfer, Wait
from perseus_ds.policy.plans import Forecast
from perseus_ds.policy.reports import GpuLimit, RankReports
from perseus_ds.progress.facts import JobFacts, end_of, facts_of
from perseus_ds.progress.sums import JobsOfFile
from perseus_ds.progress.thinning import KEPT, MORE, ThinningStopped, thin
from perseus_ds.protocol.job_messages import Observed, Say, ToRank
from perseus_ds.savings import Default, sums_of
from perseus_ds.server.iterations import Run, Seen
from perseus_ds.server.job import Job
from perseus_ds.units import joules, plain

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
# Jobs with at most this number of ranks (pipelines) list all of them with every iteration. Larger ones list them less
# often, so that an iteration has this number of listed ranks on average.
_ALL_LISTED, _LISTED_ON_AVERAGE = 64, 16
# Heat that comes and goes more often than this is one limit [s].
_LASTS_S = 30.0
# Maximum time to wait for the disk before and after the summary. Agents replace a server that is silent for 5 s.
_AT_END_S = 2.0


class Recorder:
    """Records iterations and events, and prints messages to the log of rank 0."""

    def __init__(
        self,
        directory: Path,
        *,
        simulated: bool,
        energy_note: str = "",
        send: Callable[[ToRank], None],
        steps_per_print: int | None = None,
        has_monitor: bool = False,
        is_quiet: bool = False,
    ) -> None:
        """Begin to record in the job's output folder.

        ``energy_note`` is shown with energies. ``send`` sends a message to rank 0, from any thread. Rank 0 receives the
        figures of every iteration if it has a monitor. If ``is_quiet``, only warnings are printed.
        """
        self._directory = directory
        self._simulated = simulated
        # Energies of modules say so wherever they are printed; that GPUs are simulated is in the first and last line.
        self._note = f", {energy_note}" if energy_note else ""
        self._simulated_note = ", simulated GPUs" if simulated else ""
        self._send = send
        self._steps_per_print = steps_per_print
        self._has_monitor = has_monitor
        self._is_quiet = is_quiet
        self._jobs = JobsOfFile()
        self._job: str | None = None
        self._writer = RecordWriter(directory, self._jobs, self.warn)
        self.last: IterationRecord | None = None
        self._summarised = 0
        self._drift: float | None = None
        self._by_rank_j = _Listed()
        # By phase and whether a plan ran, because energies of pipelines at default clocks and under plans are compared.
        self._by_pipeline_j: defaultdict[tuple[str, bool], _Listed] = defaultdict(_Listed)
        self._limits: tuple[GpuLimit, ...] = ()
        self._limited: set[int] = set()
        self._printed_next = _Steps()
        self._time_s = 0.0
        # By rank, the recorded clock limit [MHz], and when it last applied, as a sum of iteration times [s].
        self._hot: dict[int, tuple[float, float]] = {}

    def start(self, event: Started) -> None:
        """Record the start of the job, after all checks."""
        self._job = event.job
        self.say(f"{event.mode} mode; {self._command('watch')} shows what this job does{self._simulated_note}")
        self.event(event)

    def event(self, event: Event) -> None:
        """Record an event of the job. Thread-safe."""
        self._writer.write(event.model_copy(update={"time": event.time or time.time(), "simulated": self._simulated}))

    def announce(self, event: Event) -> None:
        """Record an event of the job and print it."""
        self.event(event)
        self.say(plain(event.in_words()))

    def add(self, seen: Seen, run: Run, default: Default | None = None, trial: TrialState | None = None) -> None:
        """Record an iteration.

        Args:
            seen: The iteration.
            run: What it ran; if ranks ran differently, what rank 0 ran.
            default: What default clocks take for its order, if this is known.
            trial: What the trial of its plans knows, if it ran under plans.
        """
        self._time_s += seen.time_s
        self._compare_limits(self._lasting(seen.ranks.limits))
        record = self.last = self._of_job(seen, run, default, trial)
        self._writer.write(record, may_wait=True)
        if self._has_monitor:
            prefix = "Perseus/simulated" if self._simulated else "Perseus"
            values = ((tag, getattr(record, name)) for tag, name in _MONITOR_TAGS.items())
            figures = tuple((f"{prefix}/{tag}", float(value)) for tag, value in values if value is not None)
            self._send(Observed(figures, seen.messages[0].report.samples))
        if self._steps_per_print:
            self._print_in_time(record, self._steps_per_print)

    def _print_in_time(self, record: IterationRecord, steps_per_print: int) -> None:
        """Add a step to the next line about steps, and print the line if it is due."""
        self._printed_next.add(record)
        if record.iteration % steps_per_print == 0:
            self.say(self._printed_next.in_words())
            self._printed_next = _Steps()

    def _lasting(self, limits: tuple[GpuLimit, ...]) -> tuple[GpuLimit, ...]:
        """Return the limits, but clock limits that heat has raised or ended only after some time."""
        of_rank = {limit.rank: limit for limit in limits}
        for rank in of_rank.keys() | self._hot.keys():
            limit = of_rank.get(rank, GpuLimit(rank, math.inf, math.inf))
            clock_mhz, at_s = self._hot.get(rank, (math.inf, 0.0))
            if limit.clock_mhz <= clock_mhz or self._time_s - at_s > _LASTS_S:
                clock_mhz, at_s = limit.clock_mhz, self._time_s
            if math.isfinite(clock_mhz):
                self._hot[rank] = clock_mhz, at_s
                of_rank[rank] = limit._replace(clock_mhz=clock_mhz)
            else:
                self._hot.pop(rank, None)
        return tuple(limit for _, limit in sorted(of_rank.items()))

    def _compare_limits(self, limits: tuple[GpuLimit, ...]) -> None:
        """Record a change of limited GPUs, and print it unless all of them were already printed."""
        before, self._limits = self._limits, limits
        if limits == before:
            return
        found = tuple((rank, _finite(power_w), _finite(clock_mhz)) for rank, power_w, clock_mhz in limits)
        event = LimitsChanged(limits=found[:MOST_FAILED_RANKS], more=max(0, len(found) - MOST_FAILED_RANKS))
        # Thermal limits come and go. Each GPU is printed once until no GPU is limited.
        ranks = {limit.rank for limit in limits}
        is_said = bool(ranks) and ranks <= self._limited
        self._limited = self._limited | ranks if ranks else set()
        (self.event if is_said else self.announce)(event)

    def flush(self) -> None:
        """Wait until all records are written, or until a timeout."""
        self._writer.flush()

    def close(self, *, killed: bool = False) -> None:
        """Print and record a summary of the training, and wait a short time until all records are written.

        There is no summary if the records of earlier starts are still being read.

        Args:
            killed: Whether a rank ended without closing Perseus.
        """
        self._writer.may_thin = False
        self._writer.flush(_AT_END_S)
        ended = self._jobs.read(end_of, self._job).model_copy(update={"killed": killed})
        if self._writer.has_read and ended.iterations > self._summarised:
            self._summarised = ended.iterations
            self.say(f"{ended.in_words()}{self._simulated_note}")
            self.event(ended)
            if (missing := self.facts().unfinished) is not None:
                self.say(missing)
            self.say(f"{self._command('report')} makes a report of this job")
        self._writer.end(_AT_END_S)

    def _command(self, name: str) -> str:
        return f"`perseus-ds {name} {shlex.quote(str(self._directory.resolve()))}`"

    def facts(self) -> JobFacts:
        """Return the facts of the job over all its starts. Thread-safe."""
        name, now = self._directory.resolve().name, time.time()
        facts: JobFacts = self._jobs.read(lambda job: facts_of(job, name, now))
        return facts

    def say(self, text: str) -> None:
        """Print a line for the whole job."""
        if not self._is_quiet:
            self._send(Say(f"perseus: {text}{self._note}"))

    def warn(self, text: str) -> None:
        """Log a warning for the whole job."""
        self._send(Say(f"perseus: {text}", warns=True))

    def fail(self, failed: Failed, warning: str) -> None:
        """Record that a part of Perseus does not work, and log a warning. Thread-safe."""
        self.warn(warning)
        self.event(failed)

    def _of_job(self, seen: Seen, run: Run, default: Default | None, trial: TrialState | None) -> IterationRecord:
        reports = seen.ranks
        energies_j = reports.energy_j
        energy_j = float(energies_j.sum())
        has_energy = math.isfinite(energy_j)
        if run.phase not in _UNDER_PLANS:
            self._drift = None
        elif seen.drift is not None:
            self._drift = seen.drift.most
        failed = np.flatnonzero(reports.has_failed).tolist()
        order = NO_ORDER if seen.order is None else seen.order.number
        plans, following = run.plans.get(order), run.next_phase
        by_pipeline_j = self._by_pipeline_j[run.phase_of(order), plans is not None]
        forecast = None if plans is None else plans.forecast
        if forecast is not None and forecast.is_refuted:
            forecast = default = None
        return IterationRecord(
            simulated=self._simulated,
            iteration=seen.number,
            ended=round(seen.ended, 3),
            phase=run.phase_of(order),
            plan=None if plans is None else plans.shown_plan,
            order=order or None,
            limited=bool(seen.ranks.limits),
            time_s=_rounded(reports.time_s.max()),
            energy_j=_rounded(energy_j) if has_energy else None,
            energy_by_pipeline_j=by_pipeline_j.add(_sums_by(reports.pipeline, energies_j)).energies_j,
            **_promise(forecast, default),
            default_time_s=default and _rounded(default.time_s),
            default_energy_j=default and _rounded(default.energy_j),
            default_measured=default is not None and default.is_measured,
            tokens=_tokens(reports),
            trial=None if plans is None else trial,
            drift=None if self._drift is None else _rounded(self._drift),
            failed_ranks=tuple(failed[:MOST_FAILED_RANKS]),
            more_failed_ranks=max(0, len(failed) - MOST_FAILED_RANKS),
            next_phase=following and following.phase,
            next_in_s=None if following is None or following.in_s is None else round(following.in_s, 3),
            **_combined(reports),
            **self._by_rank(reports),
        )

    def _by_rank(self, reports: RankReports) -> dict[str, Any]:
        """Return the fields with figures by rank of an iteration's record. Empty if it has none."""
        found = self._by_rank_j.add(reports.energy_j)
        if not found.is_due:
            return {}
        return {
            "energy_by_rank_j": found.energies_j,
            "clocks_asked_mhz": _clocks(reports.asked_mhz),
            "clocks_reached_mhz": _clocks(reports.reached_mhz),
        }


def lists_every(count: int) -> int:
    """Return the number of iterations from one list of ranks or pipelines to the next, given the length of a list."""
    return 1 if count <= _ALL_LISTED else math.ceil(count / _LISTED_ON_AVERAGE)


def _sums_by(pipeline: npt.NDArray[np.int64], energies_j: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the energy of each pipeline [J]."""
    return np.bincount(pipeline, energies_j).astype(np.float64)


class _Steps:
    """The steps since the last line in the log about steps."""

    def __init__(self) -> None:
        self._sums = Sums()
        self._first = self._last = 0
        # How many steps ran under plans, at default clocks, and for the profile; and the different plans.
        self._ran: Counter[str] = Counter()
        self._plans: set[int] = set()

    def add(self, record: IterationRecord) -> None:
        """Add a step."""
        self._first = self._first or record.iteration
        self._last = record.iteration
        self._sums.add(sums_of(record))
        if record.plan is not None:
            self._plans.add(record.plan)
            self._ran["plans"] += 1
        else:
            self._ran["profiling" if record.phase == "profile" else "default clocks"] += 1

    def in_words(self) -> str:
        """Return a description in one line, with the mean time and energy of a step."""
        sums = self._sums
        text = f"steps {self._first}-{self._last}" if self._first < self._last else f"step {self._last}"
        text += f": {self._clocks}"
        if self._plans and sums.known and sums.compared + sums.stalls == sums.iterations:
            mean = sums.mean()
            text += f", {sums.stalls} with stalls not counted" if sums.stalls else ""
            text += f", {mean.time_s:.3f} s, {joules(mean.energy_j)} each"
            return plain(f"{text} (default clocks: {mean.default_s:.3f} s, {joules(mean.default_j)})")
        text += f", {sums.time_s / sums.iterations:.3f} s"
        if known := sums.iterations - sums.without_energy:
            text += f", {joules(sums.energy_j / known)} each"
        return plain(text)

    @property
    def _clocks(self) -> str:
        plans = f"plan {min(self._plans)}" if len(self._plans) == 1 else "plans"
        if len(self._ran) == 1:
            return plans if self._plans else next(iter(self._ran))
        words = {"plans": f"under {plans}", "default clocks": "at default clocks"}
        return ", ".join(f"{count} {words.get(what, what)}" for what, count in self._ran.items())


class _List(NamedTuple):
    """Whether a record lists ranks or pipelines, and their energies [J]; None if they are not known."""

    is_due: bool
    energies_j: tuple[float, ...] | None


class _Listed:
    """Energies by rank or pipeline, which are listed in some records."""

    def __init__(self) -> None:
        self._sums_j: npt.NDArray[np.float64] | None = None
        self._iterations = 0

    def add(self, energies_j: npt.NDArray[np.float64]) -> _List:
        """Add an iteration, and return the sums since the last list, if another one is due."""
        if np.isfinite(energies_j).all():
            self._sums_j = energies_j.copy() if self._sums_j is None else self._sums_j + energies_j
        self._iterations += 1
        every = lists_every(len(energies_j))
        if self._iterations % every:
            return _List(False, None)
        known_j, self._sums_j = self._sums_j, None
        digits = 6 if every == 1 else 3
        return _List(True, None if known_j is None else tuple(np.round(known_j, digits).tolist()))


def _tokens(reports: RankReports) -> int | None:
    """Return the number of tokens in the inputs of all pipelines. None if a pipeline does not know them."""
    by_pipeline = reports.by_pipeline(reports.tokens)
    return int(by_pipeline.sum()) if by_pipeline.min() > 0 else None


def _combined_figures() -> Iterator[tuple[str, OfRanks]]:
    """Yield the fields of records that are made from a figure of all ranks."""
    for name, field in IterationRecord.model_fields.items():
        for how in field.metadata:
            if isinstance(how, OfRanks):
                assert how.figure in RankReports.FIGURES, f"{name}: no report of a rank has {how.figure}"
                yield name, how


_COMBINED = tuple(_combined_figures())


def _combined(reports: RankReports) -> dict[str, float]:
    """Return the fields that are made from a figure of all ranks. Those that no rank knows are left out."""
    found = {}
    for name, (figure, how) in _COMBINED:
        of_ranks = getattr(reports, figure)
        known = of_ranks[~np.isnan(of_ranks)]
        if len(known):
            found[name] = _rounded(known.sum() if how == "sum" else known.max())
    return found


def _promise(forecast: Forecast | None, default: Default | None) -> dict[str, float]:
    """Return the time and energy that plans promise, relative to what default clocks take for this iteration."""
    if forecast is None or default is None:
        return {}
    return {
        "predicted_time_s": _rounded(default.time_s * forecast.time_s / forecast.default_time_s),
        "predicted_energy_j": _rounded(default.energy_j * forecast.energy_j / forecast.default_energy_j),
    }


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


# Records of iterations within this time [s] are written together, which is faster than one by one.
_TOGETHER_S = 0.5
# During hours with a full disk, only the last records are kept (some megabytes).
_MOST_UNWRITTEN = 10_000


class RecordWriter:
    """Appends records to the file in order, on a separate thread. All methods are thread-safe.

    Attributes:
        has_read: Whether the sums contain all records of earlier starts.
        may_thin: Whether a long file is thinned, for which records wait. Thinning stops soon after it becomes False.
    """

    def __init__(self, directory: Path, jobs: JobsOfFile, warn: Callable[[str], None]) -> None:
        """Begin to read the records of earlier starts in a job's output folder, and add all records to their sums."""
        self._path = directory / FILE_NAME
        self._warn = warn
        self._jobs = jobs
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._enqueued = self._written = 0  # numbers of records
        self._is_due = self._is_over = False
        self._unwritten: deque[bytes] = deque(maxlen=_MOST_UNWRITTEN)
        self._works = True
        self._iterations = 0  # number of those in the file
        self._thin_at = KEPT + MORE
        self._may_be_cut_off = True  # the last line of an earlier start, if its node has crashed
        self.has_read = False
        self.may_thin = True
        self._thread = threading.Thread(target=self._write_all, name="perseus-records", daemon=True)
        self._thread.start()

    def write(self, record: Record, *, may_wait: bool = False) -> None:
        """Enqueue a record. One that may wait is written together with others that arrive soon."""
        with self._changed:
            if self._is_over:
                return  # the thread has ended
            self._waiting.append(record)
            self._enqueued += 1
            self._is_due |= not may_wait
            self._changed.notify_all()

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until all enqueued records are written, or until the timeout [s]."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()
            enqueued = self._enqueued
            self._changed.wait_for(lambda: self._written >= enqueued, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Wait until all enqueued records are written and the thread has ended, or until the timeout [s]."""
        with self._changed:
            self._is_due = self._is_over = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        earlier = self._of_earlier_starts()
        is_over, written = False, 0
        while not is_over:
            self.has_read = self.has_read or not self._add_earlier(earlier)
            with self._changed:
                self._changed.wait_for(lambda: self._is_due, _TOGETHER_S if self.has_read else 0.0)
                records, self._waiting = self._waiting, []
                is_over, self._is_due = self._is_over, False
            if lines := [line for record in records if (line := self._line(record))]:
                self._append(lines)
            if self.has_read and self.may_thin and self._iterations >= self._thin_at and not self._unwritten:
                self._thin()
            written += len(records)
            if self.has_read or is_over:
                with self._changed:
                    self._written = written
                    self._changed.notify_all()

    def _of_earlier_starts(self) -> Iterator[list[Record]]:
        for _, records in RecordFollower(self._path.parent).read():
            yield records

    def _add_earlier(self, earlier: Iterator[list[Record]]) -> bool:
        """Add the next records of earlier starts to the sums. Return False if there are no more."""
        try:
            records = next(earlier, None)
            self._jobs.add(records or ())
            self._count(records or ())
        except FileNotFoundError:
            return False  # there is no earlier start
        except Exception as error:  # records of this start are still useful
            self._warn(f"the records of earlier starts cannot be read ({error!r})")
            return False
        return records is not None

    def _line(self, record: Record) -> bytes:
        """Add a record to the sums, and return its line. Empty if there is an error."""
        try:
            line = to_line(record).encode()
            if self.has_read:  # otherwise it is read at the end of the file
                self._jobs.add([record])
                self._count([record])
        except Exception as error:  # the following records are still useful
            self._warn(f"a record of this job cannot be made ({error!r}); it is left out")
            return b""
        return line

    def _count(self, records: Iterable[Record]) -> None:
        self._iterations += sum(isinstance(record, IterationRecord) for record in records)

    def _thin(self) -> None:
        """Replace the first iterations of a long file by their sums. It is tried again later if there is an error."""
        try:
            thin(self._path, self._iterations - KEPT, lambda: self.may_thin)
        except ThinningStopped:
            return
        except Exception as error:  # the file stays as it is
            self._thin_at = self._iterations + MORE
            self._warn(f"the first records of {self._path} cannot be summed up ({error!r}); it becomes longer")
            return
        self._iterations, self._thin_at = KEPT, KEPT + MORE

    def _append(self, lines: list[bytes]) -> None:
        """Write lines, after those that could not be written because the disk was full."""
        self._unwritten.extend(lines)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_without_links(self._path, append=True) as file:
                if self._may_be_cut_off and _is_cut_off(self._path):
                    _append_whole(file.fileno(), b"\n")
                self._may_be_cut_off = False
                while self._unwritten:
                    _append_whole(file.fileno(), self._unwritten[0])
                    self._unwritten.popleft()
        except Exception as error:  # the thread must survive it
            if self._works:
                self._warn(f"{self._path} cannot be written ({error}); training continues without it")
            self._works = False
            return
        if not self._works:
            self._warn(f"{self._path} can be written again")
        self._works = True


def _is_cut_off(path: Path) -> bool:
    """Return whether the last line of a file does not end with a newline."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read() != b"\n"


def _append_whole(handle: int, line: bytes) -> None:
    """Append a line to a file. A partially written line is removed."""
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
    """Writes ``timeline.json``: a few iterations of rank 0's pipeline, one for each plan."""

    def __init__(self, directory: Path, *, gpu: str, job: ProfileInfo, warn: Callable[[str], None]) -> None:
        self._path = directory / "timeline.json"
        self._file = TimelineFile(simulated=bool(job.simulated), gpu=gpu, job=job)
        self._warn = warn
        self._seen: Counter[tuple[str, int | None]] = Counter()
        self._works = True

    def wants(self, run: Run) -> bool:
        """Return whether an iteration with this run is still to be kept."""
        is_full = len(self._file.iterations) == _MOST_SHOWN
        return run.phase in _SHOWN_PHASES and self._seen[run.phase, _plan_of(run)] < _SETTLED and not is_full

    def add(self, seen: Seen, run: Run, job: Job) -> None:
        """Keep an iteration if it is wanted."""
        if not self.wants(run):
            return
        spans = [seen.spans(rank) for rank in job.shown]
        if not all(spans):
            return
        number = _plan_of(run)
        self._seen[run.phase, number] += 1
        if self._seen[run.phase, number] < _SETTLED:
            return
        begins_s = common_begins_s(job, seen)
        operations = []
        for place, (own, begin_s) in enumerate(zip(spans, begins_s, strict=True)):
            late_s, clocks_mhz = begin_s - min(begins_s), _planned_clocks_mhz(job, run, place)
            operations.append([entry for span in own for entry in _entries(span, late_s, clocks_mhz)])
        energy_j = seen.job_report.energy_j
        iteration = MeasuredIteration(
            iteration=seen.number,
            phase=run.phase,
            plan=number,
            ranks=operations,
            energy_j=_rounded(energy_j) if energy_j > 0 else None,
        )
        if self._file.job is not None:
            needed_bytes = known_of_all([job.states[rank].memory_bytes or None for rank in job.shown])
            self._file.job = self._file.job.model_copy(update={"memory_bytes": needed_bytes})
        # Readers accept a limited number of operations, so files of large jobs have fewer iterations.
        if self._works and self._file.operations + iteration.operations <= MOST_OPERATIONS:
            self._file.iterations.append(iteration)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, self._file.model_dump_json(exclude_none=True) + "\n")
            except OSError as error:
                self._works = False
                self._warn(f"{self._path} cannot be written ({error}); training continues without it")


def _plan_of(run: Run) -> int | None:
    """Return the plan of rank 0's pipeline in the first order. None at other clocks."""
    plans = run.plans.get(0)
    return None if plans is None else plans.shown_plan


def _planned_clocks_mhz(job: Job, run: Run, place: int) -> dict[Instruction, int]:
    """Return the planned clocks of a rank of the shown pipeline in the first order [MHz]. Empty at other clocks."""
    plans = run.plans.get(0)
    plan = None if plans is None else plans.of_pipeline(job.places[job.shown[place]].pipeline)
    return {} if plan is None else dict(zip(plan.instructions[place], plan.clocks_mhz[place], strict=True))


def common_begins_s(job: Job, seen: Seen) -> list[float]:
    """Return when the ranks of the shown pipeline began an iteration, in a common time [s].

    Clocks of different nodes are never compared. Ranks of another node are aligned by transfers for which both sides
    wait, which end at the same time, or by transfers in both directions, which are assumed to take equally long.
    """
    spans = [seen.spans(rank) for rank in job.shown]
    begins_s = [seen.messages[rank].begun_s for rank in job.shown]
    begins_s = [begin_s if math.isfinite(begin_s) else 0.0 for begin_s in begins_s]
    for place in range(1, len(begins_s)):
        before, rank = job.facts[job.shown[place - 1]], job.facts[job.shown[place]]
        if before.node != rank.node or not math.isfinite(seen.messages[job.shown[place]].begun_s):
            begins_s[place] = begins_s[place - 1] + begin_after_s(spans[place - 1], spans[place])
    return begins_s


def begin_after_s(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return how much later ``second`` began than ``first``, estimated from their transfers [s]."""
    sent, received, both = [], [], []
    of_first = {end.transfer: end for end in _ends_of_transfers(first)}
    for end in _ends_of_transfers(second):
        other = of_first.get(end.transfer)
        if other is None:
            continue
        later_s = other.end_s - end.end_s
        if end.is_exchange and not other.is_launch:
            both.append(later_s)
        elif end.transfer.source < end.transfer.target:
            sent.append(later_s)
        else:
            received.append(later_s)
    if both:
        return statistics.median(both)
    if sent and received:
        return (max(sent) + min(received)) / 2
    return 0.0


class _TransferEnd(NamedTuple):
    """When a transfer ended or, if it is a launch, was launched on one rank [s]."""

    transfer: Transfer
    end_s: float
    is_launch: bool
    is_exchange: bool


def _ends_of_transfers(spans: Sequence[Span]) -> Iterator[_TransferEnd]:
    for span in spans:
        if isinstance(operation := span.operation, Exchange | Launch | Wait):
            is_launch, is_exchange = isinstance(operation, Launch), isinstance(operation, Exchange)
            end_s = span.start_s if is_launch else span.end_s
            for transfer in operation.transfers:
                yield _TransferEnd(transfer, end_s, is_launch, is_exchange)


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
