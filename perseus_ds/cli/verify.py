"""``perseus-ds verify``: whether a frontier's plans and lower bounds are what it states."""

from __future__ import annotations

import re
from pathlib import Path

from perseus_ds.artifacts.certificates import FILE_NAME, Certificates
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.arguments import Arguments, compose, quoted
from perseus_ds.cli.inputs import naming, schedule_for
from perseus_ds.errors import FrontierError
from perseus_ds.optimizer.verification import verify


class VerifyArguments(Arguments):
    """Arguments of the command; ``configs/cli/verify.yaml`` explains them."""

    frontier: Path
    profile: Path
    certificates: Path | None
    schedule: str | None


def run(overrides: list[str]) -> int:
    """Print that every claim holds; the first one that does not is an error."""
    arguments = compose("verify", _with_frontier(overrides), VerifyArguments)
    folder = arguments.frontier if arguments.frontier.is_dir() else arguments.frontier.parent
    path = arguments.certificates or folder / FILE_NAME
    frontier, certificates = Frontier.load(arguments.frontier), Certificates.load(path)
    profile = StageProfile.load(arguments.profile)
    if arguments.schedule is not None:
        expected = schedule_for(
            profile,
            schedule=arguments.schedule,
            stages=frontier.provenance.stages,
            micro_batches=frontier.provenance.micro_batches,
        )
        if expected.ranks != certificates.schedule.ranks:
            raise FrontierError(f"{path}: its schedule is not that of schedule={arguments.schedule}.")
    with naming(arguments.profile):
        try:
            verified = verify(frontier, certificates, profile)
        except FrontierError as error:
            raise FrontierError(f"{arguments.frontier}: {error}") from None
    print(
        f"{verified.plans} plans verified: time and energy of each follow from the profile's rows, and each lower "
        f"bound is proven by its certificate; the worst plan is {verified.worst_gap:.3%} above its bound."
    )
    if arguments.schedule is None:
        print(f"The schedule is the one in {path.name} ({certificates.schedule.name}); give schedule=… to compare it.")
    return 0


def _with_frontier(overrides: list[str]) -> list[str]:
    """Take a first word that is no ``key=value`` for the frontier."""
    if not overrides or re.match(r"[a-z_]+=", overrides[0]):
        return overrides
    return [f"frontier={quoted(overrides[0])}", *overrides[1:]]
