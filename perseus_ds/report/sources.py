"""What a report is made of, found in a run's output folder: histories of jobs, frontier, profile; and what is missing.

A job's history is that from its first iteration to its last, over all its starts, from ``run.jsonl``. A folder may have
served several jobs. Iterations of different jobs are not comparable, so a history is that of the job that trained last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_records import FILE_NAME, Event, IterationRecord, Record, Started, iterate_records, trains
from perseus_ds.artifacts.timeline import MeasuredIteration, TimelineFile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.measures import sums_by_part
from perseus_ds.optimizer import with_alternatives
from perseus_ds.pipeline.dag import Dag
from perseus_ds.runtime.progress import JobProgress


@dataclass(frozen=True, slots=True)
class Step:
    """What a report needs of an iteration's record, which takes ten times the memory.

    Attributes:
        plan: Its place on the job's frontier; None for plans of frontiers of shapes of inputs or of limits, too.
        counts: See :mod:`perseus_ds.measures`.
    """

    iteration: int
    ended: float | None
    phase: str
    plan: int | None
    counts: bool
    time_s: float
    energy_j: float | None


@dataclass(frozen=True)
class Occurrence:
    """An event and its place in the job's history.

    Attributes:
        after: Number of steps before it.
    """

    after: int
    event: Event


class History(JobProgress):
    """All that a job did.

    Attributes:
        folder: Where its ``run.jsonl`` lies.
        starts: Its starts, the first one first.
        steps: All iterations but those that calibrate a simulated GPU.
        left_out: Number of iterations of other jobs in the same file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.folder = folder
        self.name = name
        self.starts: list[Started] = []
        self.steps: list[Step] = []
        self.occurrences: list[Occurrence] = []
        self.left_out = 0
        # The first step under the frontier last in use, for which alone numbers of plans are valid.
        self._first_planned = 0
        self._frontier: tuple[str | None, int] | None = None
        # Energy by rank [J] and the time that it took, then the time since a record had it.
        self._by_rank_j: list[float] = []
        self._by_rank_s = self._since_s = 0.0
        self._sizes: set[int] = set()

    def add(self, record: Record) -> bool:
        counts = super().add(record)
        if isinstance(record, Event):
            (record.model_extra or {}).clear()  # keys of later versions, of any size
            self.occurrences.append(Occurrence(len(self.steps), record))
            if isinstance(record, Started):
                self.starts.append(record)
        elif trains(record):
            self._add_step(record, counts=counts)
        return counts

    def _add_step(self, record: IterationRecord, *, counts: bool) -> None:
        plan = None if record.has_own_plans else record.plan
        if plan is not None and record.phase == "run" and self._frontier != self.measures.frontier:
            self._first_planned, self._frontier = len(self.steps), self.measures.frontier
        self.steps.append(
            Step(record.iteration, record.ended, record.phase, plan, counts, record.time_s, record.energy_j)
        )
        if record.energy_j is not None:
            self._since_s += record.time_s
        if record.energy_by_rank_j is not None:
            self._by_rank_s, self._since_s = self._by_rank_s + self._since_s, 0.0
            self._sizes.add(len(record.energy_by_rank_j))
            self._by_rank_j = sums_by_part(self._by_rank_j, record.energy_by_rank_j)

    @property
    def by_rank(self) -> list[tuple[float, float]]:
        """Energy [J] and mean power [W] by rank; none where not known, or the job was resumed at another size."""
        if len(self._sizes) > 1 or not self._by_rank_s:
            return []
        return [(energy_j, energy_j / self._by_rank_s) for energy_j in self._by_rank_j]

    @property
    def last_start(self) -> Started:
        """Its last start, of which nothing is known where none is recorded."""
        return self.starts[-1] if self.starts else Started()

    @property
    def started(self) -> float:
        """When it first started [Unix seconds]; 0 where it is not recorded."""
        return self.starts[0].time if self.starts else 0.0

    @property
    def frontier(self) -> str | None:
        """Where the last start under plans had its frontier from, if it was named."""
        return next((start.frontier for start in reversed(self.starts) if start.mode in ("auto", "run")), None)

    @property
    def under_plans(self) -> list[Step]:
        """Iterations under a plan of the frontier last in use."""
        return [step for step in self.steps[self._first_planned :] if step.phase == "run" and step.plan is not None]


def read_history(folder: Path, name: str | None = None) -> History:
    """Read a job's ``run.jsonl``.

    Raises:
        ConfigError: The file is missing, or a line of it is no record.
    """
    name = name or folder.resolve().name
    jobs: dict[str | None, History] = {}
    job = last = jobs[None] = History(folder, name)
    for record in iterate_records(folder):
        if isinstance(record, Started):
            job = jobs.setdefault(record.job, History(folder, name))
        job.add(record)
        # The job that trained last; where none did, the one that started last.
        if trains(record) or not last.steps:
            last = job
    last.left_out = sum(len(other.steps) for other in jobs.values() if other is not last)
    return last


@dataclass
class Sources:
    """What was found.

    Attributes:
        histories: Jobs in the order they were started.
        frontier: The plans.
        profile: What the plans were made from.
        dag: The iteration the plans are for; None where it does not fit the profile or nothing says what it is.
        measured: Iterations as they ran, by the name of the job.
        missing: What could not be had, and what to do about it, in sentences.
    """

    folder: Path
    histories: list[History] = field(default_factory=list)
    frontier: Frontier | None = None
    profile: StageProfile | None = None
    dag: Dag | None = None
    measured: list[tuple[History, MeasuredIteration]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """Whether anything in it is simulated."""
        return bool(
            any(history.simulated for history in self.histories)
            or (self.frontier and self.frontier.provenance.simulated)
            or (self.profile and self.profile.info.simulated)
        )

    @property
    def plan_used(self) -> int | None:
        """The plan of the last iteration that ran under one of the frontier's, None if there was none."""
        used = [step.plan for history in self.histories for step in history.under_plans]
        last = used[-1] if used else None
        return last if last is not None and self.frontier and last < len(self.frontier.plans) else None

    @property
    def _info(self) -> ProfileInfo:
        return self.profile.info if self.profile else ProfileInfo()

    @property
    def pipelines(self) -> int:
        """GPUs per pipeline rank, in all: the energies of a job are so many times those of one pipeline."""
        return (self._info.data_parallel or 1) * (self._info.tensor_parallel or 1)

    @property
    def gpus(self) -> int | None:
        """GPUs of the job; None where the profile does not say how many."""
        ranks = self._info.pipeline_ranks
        return None if ranks is None else ranks * self.pipelines

    @property
    def samples(self) -> int | None:
        """Samples of an iteration; None where the profile does not say how many."""
        info = self._info
        if info.micro_batches is None or info.micro_batch_size is None:
            return None
        return info.micro_batches * info.micro_batch_size * (info.data_parallel or 1)


def label(history: History, iteration: MeasuredIteration) -> str:
    """Return what to call a measured iteration."""
    clocks = "default clocks" if iteration.plan is None else f"plan {iteration.plan}"
    return f"{clocks}, iteration {iteration.iteration} of {history.name}"


def find_sources(
    folder: Path, *, frontier: Path | None = None, profile: Path | None = None, runs: Sequence[Path] = ()
) -> Sources:
    """Collect what a folder and the folders in it hold, or what is named instead.

    The frontier is that of the folder itself, or else that of the last run under plans, where the run says it took it
    from or in the run's own folder; the profile that of the folder, or else that beside the frontier, or where the
    frontier says it was computed from. Whatever is still missing is looked for in all folders, by name.

    Raises:
        PerseusError: What was named is wrong, a file that was found is broken, or there is nothing at all.
    """
    for named in (folder, *runs):
        if not named.is_dir():
            raise ConfigError(f"{named}: no such folder; expected the output_dir of a training run.")
    found = Sources(folder)
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    _read_histories(found, list(runs) or [path for path in folders if (path / FILE_NAME).is_file()])
    frontier = frontier or _find_frontier(folders, found.histories)
    if frontier is not None:
        found.frontier = Frontier.load(frontier)
        found.files.append(frontier / "frontier.json" if frontier.is_dir() else frontier)
    else:
        found.missing.append(
            "The frontier of plans, and what they save: there is no frontier.json. Write one with "
            '"perseus-ds optimize PROFILE --out DIR", or give --frontier PATH.'
        )
    profile = profile or _find_profile(folders, frontier, found.frontier)
    if profile is not None:
        found.profile = StageProfile.load(profile)
        found.files.append(profile / "profile.csv" if profile.is_dir() else profile)
    else:
        found.missing.append(
            "The profile, and the timelines that follow from it: there is no profile.csv. Give the one that the "
            "frontier was made from, --profile PATH."
        )
    if not found.files:
        raise ConfigError(
            f"{folder}: no run.jsonl, profile.csv or frontier.json in it or in a folder of it. Give the output_dir of "
            "a training run, or --frontier PATH and --profile PATH."
        )
    return found


def connect(found: Sources) -> None:
    """Add the DAG of the frontier's schedule and its alternatives, if the frontier and the profile fit each other."""
    if found.frontier is None or found.profile is None:
        return
    schedule = found.frontier.schedule
    if schedule is None:
        found.missing.append(
            'Timelines of the plans: frontier.json holds no schedule ("streams"). Run "perseus-ds optimize" again.'
        )
        return
    try:
        check_instructions(found.frontier.instructions, schedule.instructions)
        for plan in (found.frontier.baseline, *found.frontier.plans):
            for instruction, clock in plan.clock_of_mhz.items():
                found.profile.at(instruction.stage, instruction.kind, clock)
        found.frontier = with_alternatives(found.frontier, schedule, found.profile)
        found.dag = Dag.build(schedule)
    except PerseusError as error:
        found.missing.append(f"Timelines of the plans: frontier and profile do not belong together ({error})")


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _find_frontier(folders: Sequence[Path], histories: Sequence[History]) -> Path | None:
    if (folder := _first(folders[:1], "frontier.json")) is not None:
        return folder
    for history in reversed(histories):
        if history.frontier and os.path.exists(history.frontier):  # Path.exists takes no long names
            return Path(history.frontier)
        if history.under_plans and (folder := _first([history.folder], "frontier.json")) is not None:
            return folder
    return _first(folders, "frontier.json")


def _find_profile(folders: Sequence[Path], path: Path | None, frontier: Frontier | None) -> Path | None:
    beside = [] if path is None else [path if path.is_dir() else path.parent]
    if (folder := _first([*folders[:1], *beside], "profile.csv")) is not None:
        return folder
    origin = frontier.provenance.profile if frontier else None
    return Path(origin) if origin and os.path.exists(origin) else _first(folders, "profile.csv")


def _read_histories(found: Sources, folders: Sequence[Path]) -> None:
    for folder in folders:
        name = folder.name if folder != found.folder else folder.resolve().name
        found.histories.append(read_history(folder, name))
        found.files.append(folder / FILE_NAME)
    found.histories.sort(key=lambda history: history.started)
    for history in found.histories:
        path = history.folder / "timeline.json"
        if path.is_file():
            found.measured += [(history, iteration) for iteration in TimelineFile.load(path).iterations]
            found.files.append(path)
    found.missing += [
        f"{history.left_out} iterations of other jobs that ran in {history.folder} before: give each job an output_dir "
        "of its own."
        for history in found.histories
        if history.left_out
    ]
    if not found.histories:
        found.missing.append("The run itself: there is no run.jsonl. Train with a perseus block, or give --runs PATH.")
    elif not found.measured:
        found.missing.append("Measured timelines: there is no timeline.json. Train for three iterations or more.")
