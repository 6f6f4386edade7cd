"""Inputs that several commands share: a profile and its schedule, a run's folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.limits import MOST_INSTRUCTIONS, MOST_STAGES
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.zeus_plans import Pairs
from perseus_ds.cli.arguments import RunArguments
from perseus_ds.errors import ConfigError, PerseusError, ProfileError
from perseus_ds.pipeline.commands import KNOWN, OF_TORCH, is_of_torch, read_schedule, schedule_class, stages_per_rank
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.report.sources import Sources, connect, find_sources


def schedule_for(
    profile: StageProfile,
    *,
    schedule: str | None,
    stages: int | None,
    micro_batches: int | None,
) -> Schedule:
    """Return the schedule that the arguments name; what they leave out is the profile's.

    Args:
        profile: Its ``profile.json`` may hold the schedule's streams. A class that it names is not imported.
        schedule: As the user gave it; a class of that name is imported.
        stages: As the user gave it.
        micro_batches: As the user gave it.

    Raises:
        ConfigError: Neither says how many micro-batches there are, or the stages do not fit the schedule.
        ScheduleError: The schedule cannot be read.
    """
    info = profile.info
    micro_batches = info.micro_batches if micro_batches is None else micro_batches
    if micro_batches is None:
        raise ConfigError(
            "micro_batches is missing: the profile has no profile.json that holds it. Write micro_batches=…."
        )
    written = None if schedule or info.streams is None else info.streams.to_schedule()
    if written and written.micro_batches == micro_batches and stages in (None, written.num_stages):
        return written
    stages = stages or info.stages or profile.num_stages
    check_size(stages, micro_batches)
    name, found = find_schedule(info.schedule, schedule)
    if is_of_torch(found):
        from perseus_ds.engines.torch_pipelining.order import read_class

        # A rank of these may have any number of stages.
        ranks = info.pipeline_ranks or stages
        return read_class(found, ranks=ranks, stages_per_rank=stages // ranks, micro_batches=micro_batches)
    per_rank = stages_per_rank(found)
    if stages % per_rank:
        raise ConfigError(
            f"stages={stages}: {name} puts {per_rank} stages on every rank. Give a multiple of {per_rank}."
        )
    return read_schedule(found, ranks=stages // per_rank, micro_batches=micro_batches)


def schedule_of(frontier: Frontier) -> Schedule:
    """Return the schedule of a frontier's plans.

    Raises:
        ConfigError: Its file does not hold it.
    """
    if frontier.schedule is None:
        raise ConfigError('frontier.json holds no schedule ("streams"). Run "perseus-ds optimize" again.')
    return frontier.schedule


def schedule_of_plans(pairs: Pairs, profile: StageProfile, schedule: str | None) -> Schedule:
    """Return the schedule of plans made elsewhere, by how many ranks and forwards they have.

    Raises:
        ConfigError: There is no such schedule, or its class is named by a file only.
        ScheduleError: It cannot be read.
    """
    info = profile.info
    written = None if schedule or info.streams is None else info.streams.to_schedule()
    forwards = [sum(kind == Kind.FORWARD for kind, _ in entries) for entries in pairs]
    if written and forwards == [sum(i.kind is Kind.FORWARD for i in stream) for stream in written.instructions]:
        return written
    _, found = find_schedule(info.schedule, schedule)
    per_rank = stages_per_rank(found)
    micro_batches = forwards[0] // per_rank
    check_size(len(pairs) * per_rank, micro_batches)
    return read_schedule(found, ranks=len(pairs), micro_batches=micro_batches)


def find_schedule(label: str | None, schedule: str | None) -> tuple[str, type]:
    """Return name and class of a schedule.

    Args:
        label: Its name in a file; only known names are taken.
        schedule: Its name as the user gave it, which comes first.

    Raises:
        ConfigError: There is no such schedule, or its class is named by a file only.
    """
    name = schedule or label or "1f1b"
    if schedule is None and name not in KNOWN and not name.startswith(OF_TORCH):
        raise ConfigError(
            f"The file names the schedule {name!r}, and holds no instructions of it for these stages and "
            f"micro-batches. Classes that files name are not imported; if you trust it, write schedule={name} with "
            '"perseus-ds optimize".'
        )
    # DeepSpeed warns on import that it finds no accelerator; planning needs none.
    logging.disable(logging.WARNING)
    try:
        return name, schedule_class(name)
    finally:
        logging.disable(logging.NOTSET)


def check_size(stages: int, micro_batches: int) -> None:
    """Check that an iteration is small enough to be planned.

    Raises:
        ConfigError: It is not.
    """
    if stages * micro_batches > MOST_INSTRUCTIONS or stages > MOST_STAGES:
        raise ConfigError(
            f"stages={stages} and micro_batches={micro_batches}: at most {MOST_STAGES} stages, and {MOST_INSTRUCTIONS} "
            "stages times micro-batches."
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the profile's path into errors that cannot know it."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def frontier_and_profile(frontier: Path, profile: Path | None) -> tuple[Frontier, StageProfile]:
    """Return a frontier and the profile it was computed from.

    Args:
        frontier: frontier.json or its folder, or the output folder of a training run, which says where it lies.
        profile: The profile's path, if it was given.

    Raises:
        PerseusError: One of them is not found, or broken.
    """
    folder = frontier if frontier.is_dir() else frontier.parent
    holds_it = frontier != folder or (folder / "frontier.json").is_file()
    if holds_it and profile is not None:
        return Frontier.load(frontier), StageProfile.load(profile)
    found = find_sources(folder, frontier=frontier if holds_it else None, profile=profile)
    if found.frontier is None or found.profile is None:
        raise ConfigError(f"{folder}: {' '.join(found.missing)}")
    return found.frontier, found.profile


def sources_for(arguments: RunArguments) -> Sources:
    """Read what the arguments name.

    Raises:
        PerseusError: What was named is wrong, a file that was found is broken, or there is nothing at all.
    """
    found = find_sources(arguments.run, frontier=arguments.frontier, profile=arguments.profile, runs=arguments.runs)
    if found.frontier is not None and found.profile is not None:
        try:
            schedule = schedule_of(found.frontier)
        except PerseusError as error:
            found.missing.append(f"Timelines of the plans: their schedule cannot be read ({error})")
        else:
            connect(found, schedule)
    return found
