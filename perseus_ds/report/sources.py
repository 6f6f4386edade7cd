"""Finds the inputs of a report in a run's output folder: histories of jobs, frontier and profile.

A job's history extends from its first to its last iteration over all its starts, as recorded in ``run.jsonl``. Several
jobs may have used a folder. Iterations of different jobs are not comparable, so the history is that of the job that
trained last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile, energy_note
from perseus_ds.artifacts.run_records import (
    FILE_NAME,
    Event,
    IterationRecord,
    Record,
    Started,
    is_training_iteration,
    read_records,
)
from perseus_ds.artifacts.timeline import MeasuredIteration, TimelineFile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.measures import sums_by_part
from perseus_ds.optimizer import with_alternatives
from perseus_ds.pipeline.dag import Dag
from perseus_ds.server.progress import JobProgress


class Step(NamedTuple):
    """The part of an iteration's record that a report needs, in a tenth of its memory.

    Attributes:
        plan: Index of the plan on the job's frontier; None also for the separate plans of an order.
        counts: Whether the iteration counts, as defined in :mod:`perseus_ds.measures`.
    """

    iteration: int
    ended: float | None
    phase: str
    plan: int | None
    counts: bool
    time_s: float
    energy_j: float | None


class History(JobProgress):
    """The history of a job.

    Attributes:
        steps: All iterations except those that calibrate a simulated GPU.
        events: Events, each with the number of steps before it.
        left_out: Number of iterations of other jobs in the same file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.folder = folder
        self.name = name
        self.starts: list[Started] = []
        self.steps: list[Step] = []
        self.events: list[tuple[int, Event]] = []
        self.left_out = 0
        # The first step under the most recent frontier, since plan numbers are valid for one frontier only.
        self._first_planned = 0
        self._frontier: tuple[str | None, int] | None = None
        # Energy by rank [J], its period [s], and the time since the last record with energies by rank [s].
        self._by_rank_j: list[float] = []
        self._by_rank_s = self._since_s = 0.0
        self._sizes: set[int] = set()
        self._pipeline_counts: set[int] = set()

    def add(self, record: Record) -> bool:
        counts = super().add(record)
        if isinstance(record, Event):
            (record.model_extra or {}).clear()  # keys of later versions, which may be large
            self.events.append((len(self.steps), record))
            if isinstance(record, Started):
                self.starts.append(record)
        elif is_training_iteration(record):
            self._add_step(record, counts=counts)
        return counts

    def _add_step(self, record: IterationRecord, *, counts: bool) -> None:
        plan = None if record.order else record.plan
        if plan is not None and record.phase == "run" and self._frontier != self.measures.frontier:
            self._first_planned, self._frontier = len(self.steps), self.measures.frontier
        self.steps.append(
            Step(record.iteration, record.ended, record.phase, plan, counts, record.time_s, record.energy_j)
        )
        if record.energy_j is not None:
            self._since_s += record.time_s
        if record.energy_by_pipeline_j is not None:
            self._pipeline_counts.add(len(record.energy_by_pipeline_j))
        if record.energy_by_rank_j is not None:
            self._by_rank_s, self._since_s = self._by_rank_s + self._since_s, 0.0
            self._sizes.add(len(record.energy_by_rank_j))
            self._by_rank_j = sums_by_part(self._by_rank_j, record.energy_by_rank_j)

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of the job, or None if its records do not contain it."""
        return next(iter(self._sizes)) if len(self._sizes) == 1 else None

    @property
    def pipelines(self) -> int | None:
        """Number of data-parallel pipelines, or None if the records do not contain it."""
        return next(iter(self._pipeline_counts)) if len(self._pipeline_counts) == 1 else None

    @property
    def by_rank(self) -> list[tuple[float, float]]:
        """Energy [J] and mean power [W] by rank, empty if unknown or if the number of ranks changed."""
        if len(self._sizes) > 1 or not self._by_rank_s:
            return []
        return [(energy_j, energy_j / self._by_rank_s) for energy_j in self._by_rank_j]

    @property
    def last_start(self) -> Started:
        """The last recorded start, or an empty one."""
        return self.starts[-1] if self.starts else Started()

    @property
    def started(self) -> float:
        """Time of the first start [Unix seconds], or 0 if it is not recorded."""
        return self.starts[0].time if self.starts else 0.0

    @property
    def frontier(self) -> str | None:
        """The frontier named at the last start under plans, if any."""
        return next((start.frontier for start in reversed(self.starts) if start.mode in ("auto", "run")), None)

    @property
    def under_plans(self) -> list[Step]:
        """Iterations under plans of the most recent frontier."""
        return [step for step in self.steps[self._first_planned :] if step.phase == "run" and step.plan is not None]


def read_history(folder: Path, name: str | None = None) -> History:
    """Read a job's ``run.jsonl``."""
    name = name or folder.resolve().name
    jobs: dict[str | None, History] = {}
    job = last = jobs[None] = History(folder, name)
    for record in read_records(folder):
        if isinstance(record, Started):
            job = jobs.setdefault(record.job, History(folder, name))
        job.add(record)
        # The job that trained last or, if none did, that started last.
        if is_training_iteration(record) or not last.steps:
            last = job
    last.left_out = sum(len(other.steps) for other in jobs.values() if other is not last)
    return last


@dataclass
class Sources:
    """The inputs of a report.

    Attributes:
        histories: Jobs in the order of their starts.
        dag: The DAG of the plans' schedule, or None if it is unknown or does not fit the profile.
        missing: Sentences that describe missing inputs and how to provide them.
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
        """True if any input is simulated."""
        return bool(
            any(history.simulated for history in self.histories)
            or (self.frontier and self.frontier.provenance.simulated)
            or (self.profile and self.profile.info.simulated)
        )

    @property
    def energy_notes(self) -> list[str]:
        """Texts to be shown with energies that may not be only those of GPUs."""
        settings = [history.last_start.settings for history in self.histories]
        settings += [self.frontier.provenance.settings] if self.frontier else []
        settings += [self.profile.info.settings] if self.profile else []
        return sorted({energy_note(each) for each in settings} - {""})

    @property
    def plan_used(self) -> int | None:
        """The plan of the last iteration under a plan of the frontier, or None if there was none."""
        used = [step.plan for history in self.histories for step in history.under_plans]
        last = used[-1] if used else None
        return last if last is not None and self.frontier and last < len(self.frontier.plans) else None

    @property
    def _info(self) -> ProfileInfo:
        return self.profile.info if self.profile else ProfileInfo()

    # A job under plans may have more pipelines than the job whose profile they are based on.

    def gpus_per_rank(self, history: History) -> float | None:
        """Return the number of GPUs per pipeline rank, by which a job's energies exceed those of one pipeline.

        None if neither the job's records nor the profile contain it.
        """
        if history.gpus is not None and self.frontier is not None:
            # A rank without energy shares the counter of another one.
            counted = sum(energy_j > 0 for energy_j, _ in history.by_rank) or history.gpus
            return counted / len(self.frontier.instructions)
        info = self._info
        pipelines = history.pipelines or info.data_parallel
        return None if pipelines is None else pipelines * (info.tensor_parallel or 1)

    def gpus(self, history: History) -> int | None:
        """Return the number of GPUs of a job, or None if neither its records nor the profile contain it."""
        if history.gpus is not None:
            return history.gpus
        ranks, per_rank = self._info.pipeline_ranks, self.gpus_per_rank(history)
        return None if ranks is None or per_rank is None else round(ranks * per_rank)

    def samples(self, history: History) -> int | None:
        """Return the number of samples per iteration of a job, or None if it is unknown."""
        info = self._info
        if info.micro_batches is None or info.micro_batch_size is None:
            return None
        return info.micro_batches * info.micro_batch_size * (history.pipelines or info.data_parallel or 1)


def label(history: History, iteration: MeasuredIteration) -> str:
    """Return the name of a measured iteration."""
    clocks = "default clocks" if iteration.plan is None else f"plan {iteration.plan}"
    return f"{clocks}, iteration {iteration.iteration} of {history.name}"


def find_sources(
    folder: Path, *, frontier: Path | None = None, profile: Path | None = None, runs: Sequence[Path] = ()
) -> Sources:
    """Find the inputs of a report in a folder and its subfolders, except those that are named.

    The frontier is taken from the folder or, if it has none, from the last run under plans: from the path that the run
    names or from the run's own folder. The profile is taken from the folder, from the frontier's folder, or from the
    path that the frontier names. Inputs that are still missing are searched for in all subfolders, in the order of
    their names.
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
            "The frontier of plans, and their savings: there is no frontier.json. Write one with "
            '"perseus-ds optimize PROFILE --out DIR", or give --frontier PATH.'
        )
    profile = profile or _find_profile(folders, frontier, found.frontier)
    if profile is not None:
        found.profile = StageProfile.load(profile)
        found.files.append(profile / "profile.csv" if profile.is_dir() else profile)
    else:
        found.missing.append(
            "The profile, and the timelines computed from it: there is no profile.csv. Give the profile from which the "
            "frontier was computed, --profile PATH."
        )
    if not found.files:
        raise ConfigError(
            f"{folder}: no run.jsonl, profile.csv or frontier.json in this folder or its subfolders. Give the "
            "output_dir of a training run, or --frontier PATH and --profile PATH."
        )
    return found


def connect(found: Sources) -> None:
    """Add the DAG of the frontier's schedule and the alternatives, if they fit the profile."""
    if found.frontier is None or found.profile is None:
        return
    schedule = found.frontier.schedule
    if schedule is None:
        found.missing.append(
            'Timelines of the plans: frontier.json has no schedule ("streams"). Run "perseus-ds optimize" again.'
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
        if history.frontier and os.path.exists(history.frontier):  # Path.exists raises an error for long names
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
        f"{history.left_out} iterations of other jobs that ran in {history.folder} before: give each job its own "
        "output_dir."
        for history in found.histories
        if history.left_out
    ]
    if not found.histories:
        found.missing.append("The run itself: there is no run.jsonl. Train with a perseus block, or give --runs PATH.")
    elif not found.measured:
        found.missing.append("Measured timelines: there is no timeline.json. Train for three iterations or more.")
