"""``perseus-ds trace``: predicted and measured timelines for Perfetto."""

from __future__ import annotations

import json
import math

from pydantic import Field

from perseus_ds.cli.arguments import compose
from perseus_ds.cli.inputs import RunArguments, sources_for, with_folder
from perseus_ds.errors import ConfigError
from perseus_ds.report.measured_timeline import measured_timeline
from perseus_ds.report.rendering import write_output
from perseus_ds.report.sources import Sources, label
from perseus_ds.report.timeline import Timeline, timeline
from perseus_ds.report.trace import chrome_trace


class TraceArguments(RunArguments):
    """Arguments of the command; ``configs/cli/trace.yaml`` explains them."""

    plan: int | None = Field(ge=0)


def run(overrides: list[str]) -> int:
    """Write the trace."""
    arguments = compose("trace", with_folder(overrides), TraceArguments)
    found = sources_for(arguments)
    timelines = {**_predicted(found, arguments.plan), **_measured(found)}
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
    if found.dag is None or found.profile is None or found.frontier is None:
        return {}
    plans = found.frontier.plans
    number = (found.plan_used or 0) if number is None else number
    if number >= len(plans):
        raise ConfigError(f"plan={number}: the frontier has plans 0 to {len(plans) - 1}.")
    suffix = ", simulated" if found.simulated else ""
    return {
        f"predicted: highest clock{suffix}": timeline(found.dag, found.profile, found.frontier.baseline),
        f"predicted: plan {number}{suffix}": timeline(found.dag, found.profile, plans[number]),
    }


def _measured(found: Sources) -> dict[str, Timeline]:
    suffix = ", simulated" if found.simulated else ""
    return {
        f"measured: {label(history, iteration)}{suffix}": measured_timeline(iteration, energy_j=math.nan)
        for history, iteration in found.measured
    }
