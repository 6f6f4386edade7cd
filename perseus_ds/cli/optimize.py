"""``perseus-ds optimize``: from a profile to the frontier of frequency plans."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.inputs import naming, schedule_for
from perseus_ds.cli.output import progress_bar, save_and_summarise
from perseus_ds.errors import ConfigError
from perseus_ds.optimizer import Solver, optimize


class OptimizeArguments(Arguments):
    """Arguments of the command; ``configs/cli/optimize.yaml`` explains them."""

    profile: Path
    out: Path
    micro_batches: int | None = Field(ge=1)
    stages: int | None = Field(ge=1)
    blocking_power_w: float | None = Field(ge=0, allow_inf_nan=False)
    schedule: str | None
    solver: Solver | None
    plans: int = Field(ge=2)
    switch_cost_j: float = Field(ge=0, allow_inf_nan=False)
    certificates: bool


def run(overrides: list[str]) -> int:
    """Write the frontier and print what it saves."""
    arguments = compose("optimize", overrides, OptimizeArguments)
    profile = StageProfile.load(arguments.profile)
    schedule = schedule_for(
        profile, schedule=arguments.schedule, stages=arguments.stages, micro_batches=arguments.micro_batches
    )
    with naming(arguments.profile), progress_bar() as progress:
        frontier = optimize(
            schedule,
            profile,
            blocking_power_w=arguments.blocking_power_w,
            plans=arguments.plans,
            switch_cost_j=arguments.switch_cost_j,
            progress=progress,
            **({} if arguments.solver is None else {"solver": arguments.solver}),
        )
    print(save_and_summarise(frontier, arguments.profile, arguments.out))
    if arguments.certificates:
        print(f"Written: {_save_certificates(frontier, arguments.out)}")
    return 0


def _save_certificates(frontier: Frontier, out: Path) -> Path:
    if frontier.certificates is None:
        raise ConfigError("certificates=true: only solver=exact proves bounds. Leave solver out, or certificates=true.")
    return frontier.certificates.save(out)
