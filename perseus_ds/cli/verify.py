"""``perseus-ds verify``: whether a frontier's plans and lower bounds are what it states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument
from perseus_ds.errors import ConfigError, FrontierError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Recompute time, energy and lower bound of every plan of a frontier, without the solver.

    It needs the certificates that "perseus-ds optimize" writes with certificates=true.
    """

    examples = ("perseus-ds verify perseus/frontier",)

    frontier: Path = argument("frontier.json, or the folder it is in", word=True)
    profile: Path | None = argument(
        "profile.csv or its folder; by default beside the frontier, or where the frontier says it came from", None
    )
    certificates: Path | None = argument("certificates.npz; by default the one beside frontier.json", None)
    schedule: str | None = argument(
        "1f1b, dualpipev or package.module:Class, to compare with the schedule in the certificates", None
    )


def run(arguments: Arguments) -> int:
    """Print that every claim holds, or the first one that does not; returns 1 then."""
    from perseus_ds.artifacts.certificates import FILE_NAME, Certificates
    from perseus_ds.cli.inputs import folder_of, naming, schedule_for
    from perseus_ds.cli.output import answer_no
    from perseus_ds.optimizer.bounds import verify
    from perseus_ds.report.sources import find_sources

    folder = folder_of(arguments.frontier)
    path = arguments.certificates or folder / FILE_NAME
    certificates = Certificates.load(path)
    found = find_sources(folder, frontier=arguments.frontier, profile=arguments.profile)
    frontier, profile = found.frontier, found.profile
    if frontier is None or profile is None:
        raise ConfigError(f"{folder}: {' '.join(found.missing)}")
    if arguments.schedule is not None:
        made = frontier.provenance
        expected = schedule_for(
            profile, schedule=arguments.schedule, stages=made.stages, micro_batches=made.micro_batches
        )
        if expected.ranks != certificates.schedule.ranks:
            return answer_no("verify", f"{path}: its schedule is not that of schedule={arguments.schedule}.")
    with naming(arguments.profile or folder):
        try:
            worst_gap = verify(frontier, certificates, profile)
        except FrontierError as error:
            return answer_no("verify", f"{arguments.frontier}: {error}")
    print(
        f"{len(frontier.plans)} plans verified: time and energy of each follow from the profile's rows, and each lower "
        f"bound is proven by its certificate; the worst plan is {worst_gap:.3%} above its bound."
    )
    if arguments.schedule is None:
        print(f"The schedule is the one in {path.name} ({certificates.schedule.name}); give schedule=… to compare it.")
    return 0
