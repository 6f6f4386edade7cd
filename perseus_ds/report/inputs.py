"""Reads the inputs of a report from a run's output folder: records of jobs, frontier and profile.

Several jobs may have used a folder. Iterations of different jobs are not comparable, so only the records of its current
job count (``progress/sums.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import check_is_folder, has_file
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile, energy_note
from perseus_ds.artifacts.run_events import Started
from perseus_ds.artifacts.run_records import FILE_NAME, read_records
from perseus_ds.artifacts.timeline import MeasuredIteration, TimelineFile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer import with_alternatives
from perseus_ds.pipeline.dag import Dag
from perseus_ds.progress.sums import Conditions, JobSums, fold


@dataclass(eq=False)
class RecordedRun:
    """A run, with the sums over the records of its job.

    Attributes:
        left_out: Number of iterations of other jobs in the same file.
    """

    folder: Path
    name: str
    job: JobSums
    left_out: int = 0

    @property
    def start(self) -> Started:
        """The last recorded start, or an empty one."""
        return self.job.history.last_start


def read_run(folder: Path, name: str | None = None) -> RecordedRun:
    """Read a job's ``run.jsonl``."""
    jobs = fold(read_records(folder))
    return RecordedRun(folder, name or folder.resolve().name, jobs.current, jobs.left_out)


class Samples(NamedTuple):
    """Samples of iterations.

    Attributes:
        each: Mean number of samples of an iteration.
        energy_j: Energy of a sample [J].
    """

    each: float
    energy_j: float


@dataclass
class Inputs:
    """The inputs of a report.

    Attributes:
        runs: Runs in the order of their starts.
        dag: The DAG of the plans' schedule, or None if it is unknown or does not fit the profile.
        missing: Sentences that describe missing inputs and how to provide them.
    """

    folder: Path
    runs: list[RecordedRun] = field(default_factory=list)
    frontier: Frontier | None = None
    profile: StageProfile | None = None
    dag: Dag | None = None
    measured: list[tuple[RecordedRun, MeasuredIteration]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """True if any input is simulated."""
        return bool(
            any(run.job.present.is_simulated for run in self.runs)
            or (self.frontier and self.frontier.provenance.simulated)
            or (self.profile and self.profile.info.simulated)
        )

    @property
    def energy_notes(self) -> list[str]:
        """Texts to be shown with energies that may not be only those of GPUs."""
        settings = [run.start.settings for run in self.runs]
        settings += [self.frontier.provenance.settings] if self.frontier else []
        settings += [self.profile.info.settings] if self.profile else []
        return sorted({energy_note(each) for each in settings} - {""})

    @property
    def plan_used(self) -> int | None:
        """The plan of the last iteration under a plan of the frontier, or None if there was none."""
        used = [run.job.history.plan for run in self.runs if run.job.history.plan is not None]
        last = used[-1] if used else None
        return last if last is not None and self.frontier and last < len(self.frontier.plans) else None

    @property
    def _info(self) -> ProfileInfo:
        return self.profile.info if self.profile else ProfileInfo()

    # A job under plans may have more pipelines than the job whose profile they are based on.

    def gpus_per_rank(self, run: RecordedRun) -> float | None:
        """Return the number of GPUs per pipeline rank, by which a job's energies exceed those of one pipeline.

        None if neither the job's records nor the profile contain it.
        """
        history = run.job.history
        if history.gpus is not None and self.frontier is not None:
            # A rank without energy shares the counter of another one.
            counted = sum(energy_j > 0 for energy_j, _ in history.by_rank) or history.gpus
            return counted / len(self.frontier.instructions)
        info = self._info
        pipelines = history.pipelines or info.data_parallel
        return None if pipelines is None else pipelines * (info.tensor_parallel or 1)

    def gpus(self, run: RecordedRun) -> int | None:
        """Return the number of GPUs of a job, or None if neither its records nor the profile contain it."""
        if run.job.history.gpus is not None:
            return run.job.history.gpus
        ranks, per_rank = self._info.pipeline_ranks, self.gpus_per_rank(run)
        return None if ranks is None or per_rank is None else round(ranks * per_rank)

    def samples(
        self, run: RecordedRun, wanted: Callable[[Conditions], bool] = lambda conditions: True
    ) -> Samples | None:
        """Return the samples of a job's iterations under some conditions, or None if their number is unknown."""
        info = self._info
        found = run.job.micro_batches(wanted, of_first=info.micro_batches)
        if info.micro_batch_size is None or not found.micro_batches:
            return None
        pipelines = run.job.history.pipelines or info.data_parallel or 1
        count = found.micro_batches * info.micro_batch_size * pipelines
        return Samples(count / found.iterations, found.energy_j / count)


def label(run: RecordedRun, iteration: MeasuredIteration) -> str:
    """Return the name of a measured iteration."""
    clocks = "default clocks" if iteration.plan is None else f"plan {iteration.plan}"
    return f"{clocks}, iteration {iteration.iteration} of {run.name}"


def read(
    folder: Path, *, frontier: Path | None = None, profile: Path | None = None, runs: Sequence[Path] = ()
) -> Inputs:
    """Read the inputs of a report in a folder and its subfolders, except those that are named.

    The frontier is taken from the folder or, if it has none, from the last run under plans: from the path that the run
    names or from the run's own folder. The profile is taken from the folder, from the frontier's folder, or from the
    path that the frontier names. Inputs that are still missing are searched for in all subfolders, in the order of
    their names.
    """
    for named in (folder, *runs):
        check_is_folder(named)
    found = Inputs(folder)
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    _read_runs(found, list(runs) or [path for path in folders if has_file(path, FILE_NAME)])
    frontier = frontier or _find_frontier(folders, found.runs)
    found.frontier = _loaded(found, Frontier.load, frontier, "frontier.json", _NO_FRONTIER)
    profile = profile or _find_profile(folders, frontier, found.frontier)
    found.profile = _loaded(found, StageProfile.load, profile, "profile.csv", _NO_PROFILE)
    if not found.files:
        raise ConfigError(
            f"{folder}: no run.jsonl, profile.csv or frontier.json in this folder or its subfolders. Give the "
            "output_dir of a training run, or --frontier PATH and --profile PATH."
        )
    return found


_Loaded = TypeVar("_Loaded")
_NO_FRONTIER = (
    "The frontier of plans, and their savings: there is no frontier.json. Write one with "
    '"perseus-ds optimize PROFILE --out DIR", or give --frontier PATH.'
)
_NO_PROFILE = (
    "The profile, and the timelines computed from it: there is no profile.csv. Give the profile from which the "
    "frontier was computed, --profile PATH."
)


def _loaded(
    found: Inputs, load: Callable[[Path], _Loaded], path: Path | None, name: str, missing: str
) -> _Loaded | None:
    """Return the contents of a file, given its path or its folder, and note its path. None if it is missing."""
    if path is None:
        found.missing.append(missing)
        return None
    found.files.append(path / name if path.is_dir() else path)
    return load(path)


def add_dag_and_alternatives(found: Inputs) -> None:
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
    return next((folder for folder in folders if has_file(folder, name)), None)


def _find_frontier(folders: Sequence[Path], runs: Sequence[RecordedRun]) -> Path | None:
    if (folder := _first(folders[:1], "frontier.json")) is not None:
        return folder
    for run in reversed(runs):
        history = run.job.history
        if history.frontier and os.path.exists(history.frontier):  # Path.exists raises an error for long names
            return Path(history.frontier)
        if history.plan is not None and (folder := _first([run.folder], "frontier.json")) is not None:
            return folder
    return _first(folders, "frontier.json")


def _find_profile(folders: Sequence[Path], path: Path | None, frontier: Frontier | None) -> Path | None:
    beside = [] if path is None else [path if path.is_dir() else path.parent]
    if (folder := _first([*folders[:1], *beside], "profile.csv")) is not None:
        return folder
    origin = frontier.provenance.profile if frontier else None
    return Path(origin) if origin and os.path.exists(origin) else _first(folders, "profile.csv")


def _read_runs(found: Inputs, folders: Sequence[Path]) -> None:
    """Read the records and measured timelines of runs."""
    for folder in folders:
        name = folder.name if folder != found.folder else folder.resolve().name
        path = folder / "timeline.json"
        measured = TimelineFile.load(path).iterations if path.is_file() else []
        run = read_run(folder, name)
        found.runs.append(run)
        found.measured += [(run, iteration) for iteration in measured]
        found.files += [folder / FILE_NAME, *([path] if path.is_file() else [])]
        if run.left_out:
            found.missing.append(
                f"{run.left_out} iterations of other jobs that ran in {folder} before: give each job its own "
                "output_dir."
            )
    found.runs.sort(key=lambda run: run.job.history.first_start.time)
    found.measured.sort(key=lambda pair: found.runs.index(pair[0]))
    if not found.runs:
        found.missing.append("The run itself: there is no run.jsonl. Train with a perseus block, or give --runs PATH.")
    elif not found.measured:
        found.missing.append("Measured timelines: there is no timeline.json. Train for three iterations or more.")
