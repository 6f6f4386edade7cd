"""Inputs that several commands share: a profile and its schedule, a run's folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.run_arguments import RunArguments
from perseus_ds.errors import ConfigError, PerseusError, ProfileError
from perseus_ds.pipeline.schedule import Schedule, is_of_torch, read_schedule, schedule_class, stages_per_rank
from perseus_ds.report.sources import Sources, connect, find_sources


def schedule_for(
    profile: StageProfile, *, schedule: str | None, stages: int | None, micro_batches: int | None
) -> Schedule:
    """Return the schedule that the arguments name; what they leave out is the profile's.

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
    stages = stages or info.stages or profile.num_stages
    name, found = find_schedule(profile, schedule)
    if is_of_torch(found):
        from perseus_ds.torch_pipelining.order import read_class

        # A rank of these may have any number of stages.
        ranks = info.pipeline_ranks or stages
        return read_class(found, ranks=ranks, stages_per_rank=stages // ranks, micro_batches=micro_batches)
    per_rank = stages_per_rank(found)
    if stages % per_rank:
        raise ConfigError(
            f"stages={stages}: {name} puts {per_rank} stages on every rank. Give a multiple of {per_rank}."
        )
    return read_schedule(found, ranks=stages // per_rank, micro_batches=micro_batches)


def find_schedule(profile: StageProfile, schedule: str | None) -> tuple[str, type]:
    """Return name and class of the schedule that the argument names, else the profile, else 1F1B.

    Raises:
        ConfigError: There is no such schedule.
    """
    name = schedule or profile.info.schedule or "1f1b"
    with _no_warnings():
        return name, schedule_class(name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the profile's path into errors that cannot know it."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


@contextmanager
def _no_warnings() -> Iterator[None]:
    # DeepSpeed warns on import that it finds no accelerator; planning needs none.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


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
        provenance = found.frontier.provenance
        try:
            schedule = schedule_for(
                found.profile,
                schedule=provenance.schedule,
                stages=provenance.stages,
                micro_batches=provenance.micro_batches,
            )
        except PerseusError as error:
            found.missing.append(f"Timelines of the plans: their schedule cannot be read ({error})")
        else:
            connect(found, schedule)
    return found
