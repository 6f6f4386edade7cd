"""``perseus-ds plot``: pictures of a frontier and of the pipeline's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from perseus_ds.cli.arguments import argument
from perseus_ds.errors import ConfigError, PlanError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw the frontier, and the pipeline's timeline at the highest clock and under a plan."""

    examples: ClassVar[tuple[str, ...]] = (
        "perseus-ds plot perseus",
        "perseus-ds plot perseus/frontier profile=perseus out=pictures max_slowdown=0.05",
    )

    frontier: Path = argument("frontier.json or its folder, or the output_dir of a training run", word=True)
    profile: Path | None = argument(
        "profile.csv or its folder; by default beside the frontier, or where the frontier says it came from", None
    )
    out: Path | None = argument("folder for frontier.png and timeline.png; by default that of the frontier", None)
    max_slowdown: float = argument(
        "draw the plan that a job with this setting runs, or the fastest if none is that fast", 0.0, at_least=0
    )
    runs: list[Path] = argument("output folders of training runs, to draw what was measured", [])


def run(arguments: Arguments) -> int:
    """Write ``frontier.png`` and ``timeline.png``."""
    from perseus_ds.artifacts.plan import check_instructions
    from perseus_ds.cli.inputs import frontier_and_profile, naming, schedule_of
    from perseus_ds.cli.output import check_folder
    from perseus_ds.pipeline.dag import Dag
    from perseus_ds.report.history import read_history
    from perseus_ds.report.jobs import measured_points
    from perseus_ds.report.pictures import frontier_picture, timeline_picture
    from perseus_ds.report.timeline import timeline

    folder = arguments.frontier if arguments.frontier.is_dir() else arguments.frontier.parent
    frontier, profile = frontier_and_profile(arguments.frontier, arguments.profile)
    provenance = frontier.provenance
    schedule = schedule_of(frontier)
    try:
        check_instructions(frontier.instructions, schedule.instructions)
    except PlanError as error:
        raise PlanError(f"{arguments.frontier}: {error}") from None
    plan = frontier.within(arguments.max_slowdown)
    pipelines = (profile.info.data_parallel or 1) * (profile.info.tensor_parallel or 1)
    measured = measured_points([read_history(path) for path in arguments.runs], pipelines=pipelines)
    if arguments.runs and not measured:
        raise ConfigError("runs: no iterations at default clocks or under a plan in any. Train for some steps more.")
    dag = Dag.build(schedule)
    with naming(arguments.profile or folder):
        before, after = timeline(dag, profile, frontier.baseline), timeline(dag, profile, plan)
    out = check_folder(arguments.out or folder)
    out.mkdir(parents=True, exist_ok=True)
    frontier_picture(frontier, out / "frontier.png", in_use=plan, measured=measured)
    timeline_picture(before, after, provenance, out / "timeline.png")
    print(f"Written: {out / 'frontier.png'} and timeline.png")
    return 0
