"""What several commands read: a profile, and the schedule it is for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.schedule import Schedule, read_schedule, schedule_class, stages_per_rank
from perseus_ds.stage_profile import StageProfile


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
        raise ConfigError("micro_batches is missing: no profile.json says it. Write micro_batches=….")
    stages = stages or info.stages or profile.num_stages
    name, found = find_schedule(profile, schedule)
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
    # DeepSpeed warns on import that it sees no accelerator, of which planning has no need.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
