"""``perseus-ds optimize``: from a profile to the frontier of frequency plans."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, cast

from perseus_ds.cli.arguments import argument, blocking_power_argument, schedule_argument
from perseus_ds.errors import ConfigError

if TYPE_CHECKING:
    from perseus_ds.optimizer import Solver


class SolverChoice(Enum):
    """Which solver computes the plans."""

    exact = "with a lower bound for each plan (default)"
    lowtime = "the published one"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute the frontier of frequency plans from a profile."""

    examples = ("perseus-ds optimize perseus out=perseus/frontier",)

    profile: Path = argument("profile.csv, or the folder it is in; profile.json is read beside it", word=True)
    out: Path = argument("folder for frontier.json and frontier.csv")
    micro_batches: int | None = argument(
        "micro-batches per iteration; by default what profile.json says", None, at_least=1
    )
    stages: int | None = argument("stages of the model; by default as many as the profile has", None, at_least=1)
    blocking_power_w: float | None = blocking_power_argument()
    schedule: str | None = schedule_argument()
    solver: SolverChoice = argument("which solver computes the plans", SolverChoice.exact)
    plans: int = argument("number of deadlines, from T_min to T*, for which exact computes a plan", 120, at_least=2)
    switch_cost_j: float = argument(
        "energy that exact assumes for a change of clock when it chooses clocks [J]", 0.0, at_least=0
    )
    switch_cost_s: float = argument("delay that exact assumes for what follows a change of clock [s]", 0.0, at_least=0)
    least_dwell_s: float = argument("shortest time at one clock in plans of exact [s]", 0.0, at_least=0)
    least_swing: bool = argument(
        "true: plans may use 0.1 % more energy to change their power less from one second to the next", False
    )
    certificates: bool = argument(
        "true: write certificates.npz too, the proofs of the lower bounds, for perseus-ds verify", False
    )


def run(arguments: Arguments) -> int:
    """Write the frontier and print what it saves."""
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.cli.inputs import naming, schedule_for
    from perseus_ds.cli.output import check_folder, progress_bar, save_and_summarise
    from perseus_ds.optimizer import optimize, with_alternatives

    if arguments.certificates and arguments.solver is not SolverChoice.exact:
        raise ConfigError("certificates=true: only solver=exact proves bounds. Leave solver out, or certificates=true.")
    profile = StageProfile.load(arguments.profile)
    schedule = schedule_for(
        profile, schedule=arguments.schedule, stages=arguments.stages, micro_batches=arguments.micro_batches
    )
    out = check_folder(arguments.out)
    with naming(arguments.profile), progress_bar() as progress:
        frontier = optimize(
            schedule,
            profile,
            blocking_power_w=arguments.blocking_power_w,
            plans=arguments.plans,
            switch_cost_j=arguments.switch_cost_j,
            switch_cost_s=arguments.switch_cost_s,
            least_dwell_s=arguments.least_dwell_s,
            least_swing=arguments.least_swing,
            progress=progress,
            solver=cast("Solver", arguments.solver.name),
        )
        frontier = with_alternatives(frontier, schedule, profile)
    print(save_and_summarise(frontier, arguments.profile, out, certificates=arguments.certificates))
    return 0
