"""``perseus-ds import``: plans of lowtime or Zeus, judged by a profile."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.zeus_plans import read_plans
from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.inputs import find_schedule, naming
from perseus_ds.cli.output import save_and_summarise
from perseus_ds.optimizer import problem_for
from perseus_ds.optimizer.imported_plans import judge
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import read_schedule, stages_per_rank


class ImportArguments(Arguments):
    """Arguments of the command; ``configs/cli/import.yaml`` explains them."""

    plans: Path
    profile: Path
    out: Path
    blocking_power_w: float | None = Field(ge=0, allow_inf_nan=False)
    schedule: str | None


def run(overrides: list[str]) -> int:
    """Write the frontier and print what it saves."""
    arguments = compose("import", overrides, ImportArguments)
    profile = StageProfile.load(arguments.profile)
    plans = read_plans(arguments.plans)
    ranks = next(iter(plans.values()))
    _, schedule_class = find_schedule(profile, arguments.schedule)
    forwards = sum(kind == Kind.FORWARD.value for kind, _ in ranks[0])
    schedule = read_schedule(
        schedule_class, ranks=len(ranks), micro_batches=forwards // stages_per_rank(schedule_class)
    )
    with naming(arguments.profile):
        problem = problem_for(schedule, profile, arguments.blocking_power_w)
    print(save_and_summarise(judge(plans, problem), arguments.profile, arguments.out))
    return 0
