"""``perseus-ds trace``: predicted and measured timelines for Perfetto."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_ds.cli.arguments import RunArguments, argument
from perseus_ds.errors import ConfigError

if TYPE_CHECKING:
    from perseus_ds.report.sources import Sources
    from perseus_ds.report.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """Write predicted and measured timelines for Perfetto (trace.json; open it at ui.perfetto.dev)."""

    examples = ("perseus-ds trace perseus",)

    plan: int | None = argument(
        "which plan of the frontier, 0 is the fastest; by default the one in use", None, at_least=0
    )


def run(arguments: Arguments) -> int:
    """Write the trace."""
    from perseus_ds.cli.inputs import sources_for
    from perseus_ds.report.page import write_output
    from perseus_ds.report.sources import label
    from perseus_ds.report.timeline import chrome_trace, measured_timeline

    found = sources_for(arguments)
    suffix = ", simulated" if found.simulated else ""
    timelines = {f"predicted: {name}{suffix}": each for name, each in _predicted(found, arguments.plan).items()}
    for history, iteration in found.measured:
        name = f"measured: {label(history, iteration)}{suffix}"
        timelines[name] = measured_timeline(iteration, energy_j=math.nan)
    if not timelines:
        raise ConfigError(f"{arguments.run}: there is no timeline to write. {' '.join(found.missing)}")
    about = {"simulated": found.simulated, "written_by": "perseus-ds"}
    text = json.dumps(chrome_trace(timelines, about, found.profile)) + "\n"
    out = write_output(text, arguments.out, arguments.run, "trace.json")
    for missing in found.missing:
        print(f"Not in the trace: {missing}")
    print(f"Written: {out}, with {len(timelines)} timelines; open it at https://ui.perfetto.dev")
    return 0


def _predicted(found: Sources, number: int | None) -> dict[str, Timeline]:
    from perseus_ds.report.timeline import timeline

    if found.dag is None or found.profile is None or found.frontier is None:
        return {}
    plans = found.frontier.plans
    number = (found.plan_used or 0) if number is None else number
    if number >= len(plans):
        raise ConfigError(f"plan={number}: the frontier has plans 0 to {len(plans) - 1}.")
    return {
        "highest clock": timeline(found.dag, found.profile, found.frontier.baseline),
        f"plan {number}": timeline(found.dag, found.profile, plans[number]),
    }
