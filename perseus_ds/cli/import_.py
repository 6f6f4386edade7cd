"""``perseus-ds import``: plans of lowtime or Zeus, evaluated with a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument, blocking_power_argument, schedule_argument


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Read plans of lowtime or Zeus, compute their time and energy from a profile, and write them as a frontier.

    The files of plans are parsed and never executed.
    """

    examples = ("perseus-ds import plans profile=perseus out=perseus/frontier",)

    plans: Path = argument("folder of freqs_pipeline_*.py", word=True)
    profile: Path = argument("profile.csv, or the folder it is in; profile.json is read beside it")
    out: Path = argument("folder for frontier.json and frontier.csv")
    blocking_power_w: float | None = blocking_power_argument()
    schedule: str | None = schedule_argument()


def run(arguments: Arguments) -> int:
    """Write the frontier and print what it saves."""
    from itertools import chain

    from perseus_ds.artifacts.frontier import read_plans
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.cli.inputs import naming, schedule_of_plans
    from perseus_ds.cli.output import check_folder, save_and_summarise
    from perseus_ds.optimizer import frontier_of_imported, with_alternatives
    from perseus_ds.optimizer.problem import problem_for

    profile = StageProfile.load(arguments.profile)
    plans = read_plans(arguments.plans)
    first = next(plans)
    schedule = schedule_of_plans(first[1], profile, arguments.schedule)
    out = check_folder(arguments.out)
    with naming(arguments.profile):
        problem = problem_for(schedule, profile, arguments.blocking_power_w)
        frontier = with_alternatives(frontier_of_imported(chain([first], plans), problem), schedule, profile)
    print(save_and_summarise(frontier, arguments.profile, out))
    return 0
