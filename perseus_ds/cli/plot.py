"""``perseus-ds plot``: pictures of a frontier and of the pipeline's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import RunArguments, argument
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """Draw the frontier, and the pipeline's timeline at the highest clock and under a plan."""

    examples = (
        "perseus-ds plot perseus",
        "perseus-ds plot perseus/frontier profile=perseus out=pictures max_slowdown=0.05",
    )

    out: Path | None = argument("folder for frontier.png and timeline.png; by default that of the run", None)
    max_slowdown: float = argument(
        "draw the plan that a job with this setting runs, or the fastest if none is that fast", 0.0, at_least=0
    )


def run(arguments: Arguments) -> int:
    """Write ``frontier.png`` and ``timeline.png``."""
    from perseus_ds.cli.inputs import sources_for
    from perseus_ds.cli.output import check_folder
    from perseus_ds.report.jobs import measured_points
    from perseus_ds.report.pictures import frontier_picture, timeline_picture
    from perseus_ds.report.timeline import timeline

    found = sources_for(arguments)
    if found.frontier is None or found.profile is None or found.dag is None:
        raise ConfigError(f"{arguments.run}: there is not all that is to be drawn. {' '.join(found.missing)}")
    measured = measured_points(found.histories, pipelines=found.pipelines)
    if arguments.runs and not measured:
        raise ConfigError("runs: no iterations at default clocks or under a plan in any. Train for some steps more.")
    plan = found.frontier.within(arguments.max_slowdown)
    before, after = (timeline(found.dag, found.profile, each) for each in (found.frontier.baseline, plan))
    out = check_folder(arguments.out or arguments.run)
    out.mkdir(parents=True, exist_ok=True)
    frontier_picture(found.frontier, out / "frontier.png", in_use=plan, measured=measured)
    timeline_picture(before, after, found.frontier.provenance, out / "timeline.png")
    print(f"Written: {out / 'frontier.png'} and timeline.png")
    return 0
