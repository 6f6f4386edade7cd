"""Finds what a report is made of in a run's output folder, and says what is missing and how to get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import is_there
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.timeline import MeasuredIteration, TimelineFile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.report.history import History, read_history


@dataclass(frozen=True)
class JobSize:
    """How large a job is, as far as its profile says."""

    gpus: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, info: ProfileInfo) -> JobSize:
        """Return what a profile says."""
        ranks, pipelines = info.pipeline_ranks, info.data_parallel or 1
        return cls(
            gpus=None if ranks is None else ranks * pipelines * (info.tensor_parallel or 1),
            samples=(
                None
                if info.micro_batches is None or info.micro_batch_size is None
                else info.micro_batches * info.micro_batch_size * pipelines
            ),
        )


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
    def size(self) -> JobSize:
        """How large the job is, as far as the profile says."""
        return JobSize.of(self.profile.info) if self.profile else JobSize()

    @property
    def pipelines(self) -> int:
        """GPUs per pipeline rank, in all: the energies of a job are so many times those of one pipeline."""
        info = self.profile.info if self.profile else None
        return (info.data_parallel or 1) * (info.tensor_parallel or 1) if info else 1


def label(history: History, iteration: MeasuredIteration) -> str:
    """Return what to call a measured iteration."""
    clocks = "default clocks" if iteration.plan is None else f"plan {iteration.plan}"
    return f"{clocks}, iteration {iteration.iteration} of {history.name}"


def find_sources(
    folder: Path, *, frontier: Path | None = None, profile: Path | None = None, runs: Sequence[Path] = ()
) -> Sources:
    """Collect what a folder and the folders in it hold, or what is named instead.

    A frontier that lies elsewhere is found where the run says it took it from, a profile where the
    frontier says it was computed from.

    Raises:
        PerseusError: What was named is wrong, a file that was found is broken, or there is nothing at all.
    """
    for named in (folder, *runs):
        if not named.is_dir():
            raise ConfigError(f"{named}: no such folder; expected the output_dir of a training run.")
    found = Sources(folder)
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    _read_histories(found, list(runs) or [path for path in folders if (path / "run.jsonl").is_file()])
    _read_frontier(found, frontier or _first(folders, "frontier.json"))
    _read_profile(found, profile or _first(folders, "profile.csv"))
    if not (found.histories or found.frontier or found.profile):
        raise ConfigError(
            f"{folder}: no run.jsonl, profile.csv or frontier.json in it or in a folder of it. Give the output_dir of "
            "a training run, or frontier=… and profile=…."
        )
    return found


def connect(found: Sources, schedule: Schedule | None) -> None:
    """Add the DAG of the schedule, if the frontier and the profile fit it and each other."""
    if found.frontier is None or found.profile is None or schedule is None:
        return
    try:
        check_instructions(found.frontier.instructions, schedule.instructions)
        for plan in (found.frontier.baseline, *found.frontier.plans):
            for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
                for instruction, clock in zip(stream, clocks, strict=True):
                    found.profile.at(instruction.stage, instruction.kind, clock)
        found.dag = Dag.build(schedule)
    except PerseusError as error:
        found.missing.append(f"Timelines of the plans: frontier and profile do not belong together ({error})")


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _read_histories(found: Sources, folders: Sequence[Path]) -> None:
    for folder in folders:
        name = folder.name if folder != found.folder else folder.resolve().name
        found.histories.append(read_history(folder, name))
        found.files.append(folder / "run.jsonl")
    found.histories.sort(key=lambda history: history.started)
    for history in found.histories:
        path = history.folder / "timeline.json"
        if path.is_file():
            found.measured += [(history, iteration) for iteration in TimelineFile.load(path).iterations]
            found.files.append(path)
    for history in (history for history in found.histories if history.left_out):
        found.missing.append(
            f"{history.left_out} iterations of other jobs that ran in {history.folder} before: give each job an "
            "output_dir of its own."
        )
    if not found.histories:
        found.missing.append("The run itself: there is no run.jsonl. Train with a perseus block, or give runs=[…].")
    elif not found.measured:
        found.missing.append("Measured timelines: there is no timeline.json. Train for three iterations or more.")


def _read_frontier(found: Sources, path: Path | None) -> None:
    named = [Path(h.frontier) for h in found.histories if h.frontier and is_there(Path(h.frontier))]
    path = path or (named[-1] if named else None)
    if path is None:
        found.missing.append(
            "The frontier of plans, and what they save: there is no frontier.json. Write one with "
            '"perseus-ds optimize profile=… out=…", or give frontier=….'
        )
        return
    found.frontier = Frontier.load(path)
    found.files.append(path / "frontier.json" if path.is_dir() else path)


def _read_profile(found: Sources, path: Path | None) -> None:
    origin = found.frontier.provenance.profile if found.frontier else None
    if path is None and origin and is_there(Path(origin)):
        path = Path(origin)
    if path is None:
        found.missing.append(
            "The profile, and the timelines that follow from it: there is no profile.csv. Give the one that the "
            "frontier was made from, profile=…."
        )
        return
    found.profile = StageProfile.load(path)
    found.files.append(path / "profile.csv" if path.is_dir() else path)
