"""Inputs and outputs of several commands: a profile with its schedule, the folder of a run, folders to write to."""

from __future__ import annotations

import logging
import os
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perseus_ds.artifacts.frontier import Pairs
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_records import FILE_NAME
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.artifacts.validation import MOST_INSTRUCTIONS, MOST_STAGES
from perseus_ds.cli.values import RunArguments, flag_of
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.pipeline.commands import KNOWN, OF_TORCH, is_of_torch, read_schedule, schedule_class, stages_per_rank
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.progress.sums import AT_DEFAULT_CLOCKS
from perseus_ds.report.inputs import Inputs, add_dag_and_alternatives, read, read_run
from perseus_ds.units import printable

if TYPE_CHECKING:
    from perseus_ds.layouts.balance import MeasuredJob


_SHOWN_AFTER_S, _REFRESHED_EVERY_S = 1.0, 0.5
"""Time until a progress bar is shown, and between refreshes of its time [s]."""


def schedule_for(
    profile: StageProfile,
    *,
    schedule: str | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
) -> Schedule:
    """Return the schedule selected by the arguments, with the profile's values as defaults.

    A class named by the user is imported, but a class named in the profile is not.
    """
    info = profile.info
    micro_batches = micro_batches or micro_batches_of(profile)
    written = _written_schedule(profile, schedule)
    if written and written.micro_batches == micro_batches and stages in (None, written.num_stages):
        return written
    stages = stages or info.stages or profile.num_stages
    check_size(stages, micro_batches)
    name, found = find_schedule(info.schedule, schedule)
    if is_of_torch(found):
        from perseus_ds.engines.torch_pipelining.order import read_class

        # A rank may have any number of stages in these schedules.
        ranks = info.pipeline_ranks or stages
        return read_class(found, ranks=ranks, stages_per_rank=stages // ranks, micro_batches=micro_batches)
    per_rank = stages_per_rank(found)
    if stages % per_rank:
        raise ConfigError(
            f"--stages {stages}: {name} puts {per_rank} stages on every rank. Give a multiple of {per_rank}."
        )
    return read_schedule(found, ranks=stages // per_rank, micro_batches=micro_batches)


def micro_batches_of(profile: StageProfile) -> int:
    """Return the number of micro-batches per iteration of the job that measured a profile."""
    if profile.info.micro_batches is None:
        raise ConfigError("--micro-batches is missing: the profile has no profile.json that contains their number.")
    return profile.info.micro_batches


def _written_schedule(profile: StageProfile, named: str | None) -> Schedule | None:
    """Return the schedule stored in the profile's files, unless the user names one."""
    return None if named or profile.info.streams is None else profile.info.streams.to_schedule()


def _forwards(kinds: Iterable[str]) -> int:
    return sum(kind == Kind.FORWARD for kind in kinds)


def schedule_of_plans(pairs: Pairs, profile: StageProfile, schedule: str | None) -> Schedule:
    """Return the schedule of imported plans, given their numbers of ranks and forwards."""
    written = _written_schedule(profile, schedule)
    forwards = [_forwards(kind for kind, _ in entries) for entries in pairs]
    if written and forwards == [_forwards(each.kind for each in stream) for stream in written.instructions]:
        return written
    _, found = find_schedule(profile.info.schedule, schedule)
    per_rank = stages_per_rank(found)
    micro_batches = forwards[0] // per_rank
    check_size(len(pairs) * per_rank, micro_batches)
    return read_schedule(found, ranks=len(pairs), micro_batches=micro_batches)


def find_schedule(label: str | None, schedule: str | None) -> tuple[str, type]:
    """Return name and class of the schedule that the user names, or of a known one in a file."""
    name = schedule or label or "1f1b"
    if schedule is None and name not in KNOWN and not name.startswith(OF_TORCH):
        raise ConfigError(
            f"The file names the schedule {name!r}, and has no instructions of it for these stages and micro-batches. "
            f"Classes named in files are not imported; if you trust this one, use --schedule {name} with "
            '"perseus-ds optimize".'
        )
    # DeepSpeed warns on import that it finds no accelerator, which planning does not need.
    logging.disable(logging.WARNING)
    try:
        return name, schedule_class(name)
    finally:
        logging.disable(logging.NOTSET)


def check_size(stages: int, micro_batches: int) -> None:
    """Check that an iteration is small enough to compute plans for it."""
    if stages * micro_batches > MOST_INSTRUCTIONS or stages > MOST_STAGES:
        raise ConfigError(
            f"{stages} stages and {micro_batches} micro-batches: at most {MOST_STAGES} stages, and {MOST_INSTRUCTIONS} "
            "stages times micro-batches."
        )


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path of the profile to errors, and show settings as flags."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"^([a-z_]+)=", lambda key: f"{flag_of(key[1])} ", str(error))) from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def folder_of(path: Path) -> Path:
    """Return a path that is a folder, or the folder of a file."""
    return path if path.is_dir() else path.parent


def sources_for(arguments: RunArguments) -> Inputs:
    """Read the inputs selected by the arguments."""
    found = read(arguments.run, frontier=arguments.frontier, profile=arguments.profile, runs=arguments.runs)
    folders = [run.folder for run in found.runs]
    jobs = {run.start.job for run in found.runs} - {None}
    if len(jobs) > 1 and not arguments.runs and arguments.run not in folders:
        raise ConfigError(
            f"{arguments.run}: its runs are of {len(jobs)} different jobs. Give the folder of one: "
            f"{', '.join(map(str, folders))}; or those that belong together, --runs RUN RUN."
        )
    add_dag_and_alternatives(found)
    return found


def is_measured_job(path: Path) -> bool:
    """Return whether a path is a job's output or a profile, and not a Hugging Face model."""
    if path.suffix == ".csv":
        return True
    if not path.is_dir():
        return False
    if (path / "config.json").is_file():
        return False
    if any((path / name).is_file() for name in ("profile.csv", "timeline.json", FILE_NAME)):
        return True
    raise ConfigError(
        f"{path}: no profile.csv, timeline.json or config.json in this folder. Give the output_dir of a job that has "
        "trained under Perseus, or a folder of a Hugging Face model."
    )


def measured_job(
    path: Path, *, schedule: str | None, micro_batches: int | None, blocking_power_w: float | None
) -> MeasuredJob:
    """Read a job that has trained, from its profile or otherwise from observations."""
    from perseus_ds.layouts.balance import MeasuredJob
    from perseus_ds.profiler.observed import observed_profile

    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder. Give the output_dir of a job, or its profile.csv.")
    folder = folder_of(path)
    timeline = TimelineFile.load(folder / "timeline.json") if (folder / "timeline.json").is_file() else None
    history = read_run(folder).job.history if (folder / FILE_NAME).is_file() else None
    if path.is_file() or (folder / "profile.csv").is_file():
        profile = StageProfile.load(path)
        if blocking_power_w is not None:
            info = profile.info.model_copy(update={"blocking_power_w": blocking_power_w})
            profile = StageProfile(profile.measurements, info)
    elif timeline is not None:
        ranks = max((len(iteration.ranks) for iteration in timeline.iterations), default=1)
        powers_w = np.array([power_w for _, power_w in history.by_rank]) if history else np.array([])
        # Ranks that share a stage have consecutive numbers.
        by_stage_w = powers_w.reshape(ranks, -1).mean(axis=1) if len(powers_w) and len(powers_w) % ranks == 0 else []
        with path_in_errors(path):
            profile = observed_profile(timeline, list(by_stage_w), blocking_power_w=blocking_power_w)
    else:
        raise ConfigError(f"{path}: no profile.csv and no timeline.json. Train for three iterations or more.")
    recorded = timeline.job if timeline and timeline.job else ProfileInfo()
    layout = profile.info.layout or recorded.layout
    if layout is None:
        raise ConfigError(
            f"{path}: the layers on its stages were not recorded: it was written by an earlier version of perseus-ds, "
            "or its engine does not know the layers of this model. Train a few iterations with this version."
        )
    if len(layout.stages) != profile.num_stages:
        raise ConfigError(
            f"{path}: the layout has {len(layout.stages)} stages, the profile {profile.num_stages}. They belong to "
            "different jobs: measure the profile again."
        )
    # From the phase in which iterations are least disturbed. The first one of a job is slow.
    points = history.points if history else {}
    by_phase = (points[phase].points for phase in AT_DEFAULT_CLOCKS if phase in points)
    times_s = next(([point.time_s for point in found] for found in by_phase if len(found) > 1), [])
    return MeasuredJob(
        layout=layout,
        profile=profile,
        schedule=schedule_for(profile, schedule=schedule, micro_batches=micro_batches),
        time_s=statistics.median(times_s) if times_s else None,
        memory_bytes=profile.info.memory_bytes or recorded.memory_bytes,
    )


def answer_no(command: str, reason: object) -> int:
    """Print the reason why the answer of a command is no, and return its exit code."""
    print(printable(f"perseus-ds {command}: {reason}"), file=sys.stderr)
    return 1


def check_folder(out: Path) -> Path:
    """Check that an output folder can be created and written, and return it."""
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{out}: cannot be a folder ({existing} is a file). Give another path, --out PATH.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: cannot write to {existing}. Give another folder, --out PATH.")
    return out


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on stderr for work that takes more than a second.

    The time that has passed is also shown while no step reports its progress, such as during imports.

    Yields a function that takes the name of the current step and the completed fraction, 0 to 1. ``what`` is the name
    of the first step.
    """
    from tqdm import tqdm

    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, desc=what, bar_format=layout, delay=_SHOWN_AFTER_S, leave=False, disable=None) as bar:

        def progress(step: str, done: float) -> None:
            bar.set_description_str(step, refresh=False)
            bar.update(done - bar.n)

        if bar.disable:
            yield progress
            return
        has_ended = threading.Event()

        def refresh() -> None:
            has_ended.wait(_SHOWN_AFTER_S)
            while not has_ended.wait(_REFRESHED_EVERY_S):
                bar.refresh()

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            has_ended.set()
            thread.join()
