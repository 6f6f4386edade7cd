"""``perseus-ds plot``: pictures of a frontier and of the pipeline's timeline."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.inputs import naming, schedule_for
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.report.history import read_history
from perseus_ds.report.measured import measured_points
from perseus_ds.report.pictures import frontier_picture, timeline_picture
from perseus_ds.report.timeline import timeline


class PlotArguments(Arguments):
    """Arguments of the command; ``configs/cli/plot.yaml`` explains them."""

    frontier: Path
    profile: Path
    out: Path
    max_slowdown: float = Field(ge=0, allow_inf_nan=False)
    runs: list[Path]


def run(overrides: list[str]) -> int:
    """Write ``frontier.png`` and ``timeline.png``."""
    arguments = compose("plot", overrides, PlotArguments)
    frontier, profile = Frontier.load(arguments.frontier), StageProfile.load(arguments.profile)
    provenance = frontier.provenance
    schedule = schedule_for(
        profile, schedule=provenance.schedule, stages=provenance.stages, micro_batches=provenance.micro_batches
    )
    try:
        check_instructions(frontier.instructions, schedule.instructions)
    except PlanError as error:
        raise PlanError(f"{arguments.frontier}: {error}") from None
    plan = frontier.within(arguments.max_slowdown)
    pipelines = (profile.info.data_parallel or 1) * (profile.info.tensor_parallel or 1)
    measured = measured_points([read_history(path) for path in arguments.runs], pipelines=pipelines)
    dag = Dag.build(schedule)
    with naming(arguments.profile):
        before, after = timeline(dag, profile, frontier.baseline), timeline(dag, profile, plan)
    arguments.out.mkdir(parents=True, exist_ok=True)
    frontier_picture(frontier, arguments.out / "frontier.png", in_use=plan, measured=measured)
    timeline_picture(before, after, provenance, arguments.out / "timeline.png")
    print(f"Written: {arguments.out / 'frontier.png'} and timeline.png")
    return 0
