"""What the commands about a finished run have in common: which folder, and what is found there."""

from __future__ import annotations

import re
from pathlib import Path

from perseus_ds.cli.arguments import Arguments, quoted
from perseus_ds.cli.inputs import schedule_for
from perseus_ds.errors import PerseusError
from perseus_ds.report.sources import Sources, connect, find_sources


class RunArguments(Arguments):
    """Arguments that say what a command is about."""

    run: Path
    out: Path | None
    frontier: Path | None
    profile: Path | None
    runs: list[Path]


def with_folder(overrides: list[str]) -> list[str]:
    """Take a first word that is no ``key=value`` for the run's folder."""
    if not overrides or re.match(r"[a-z_]+=", overrides[0]):
        return overrides
    return [f"run={quoted(overrides[0])}", *overrides[1:]]


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
