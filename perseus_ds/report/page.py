"""The report of a run: one HTML file that needs nothing else, neither a server nor a network."""

from __future__ import annotations

import importlib.metadata
import json
import math
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from perseus_ds.artifacts.timeline import MeasuredIteration
from perseus_ds.report.figures import (
    KIND_DASHES,
    STAGE_COLOURS,
    frontier_figure,
    history_figure,
    profile_figures,
    shown_stages,
)
from perseus_ds.report.history import History
from perseus_ds.report.measured_timeline import measured_timeline
from perseus_ds.report.pipeline_data import KINDS, pipeline_data, timeline_data
from perseus_ds.report.savings import Factors, Reference, Saving, reference_for, savings
from perseus_ds.report.sources import Sources, label
from perseus_ds.report.words import event_in_words


@dataclass(frozen=True)
class Job:
    """A job of the report.

    Attributes:
        history: What it did.
        reference: The same at default clocks; None where nothing says what that is.
        savings: What it saved; empty if it ran under no plan.
    """

    history: History
    reference: Reference | None
    savings: list[Saving]


def report_page(found: Sources, factors: Factors) -> str:
    """Return the page.

    Args:
        found: What it is about.
        factors: What a kilowatt-hour stands for.
    """
    jobs = [_job(history, found) for history in found.histories]
    best = next((job for job in reversed(jobs) if job.savings and job.reference and job.reference.measured), None)
    best = best or next((job for job in reversed(jobs) if job.savings), None)
    in_use = found.plan_used or 0
    in_use_label = "plan 0, the fastest" if found.plan_used is None else f"plan {in_use}, in use"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perseus_ds.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "in_words": event_in_words}
    return environment.get_template("page.html").render(
        found=found,
        jobs=jobs,
        best=best,
        factors=factors,
        in_use=in_use,
        in_use_label=in_use_label,
        stages=list(zip(shown_stages(found.profile), STAGE_COLOURS, strict=False)) if found.profile else [],
        kinds=[(kind, dash) for kind, dash in KIND_DASHES.items() if found.profile and _has(found, kind)],
        data=_as_json(_data(found, best, in_use, in_use_label)),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        version=importlib.metadata.version("perseus-ds"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _job(history: History, found: Sources) -> Job:
    reference = reference_for(history, found.histories, found.frontier)
    return Job(history, reference, savings(history, reference) if reference else [])


def _has(found: Sources, kind: object) -> bool:
    return found.profile is not None and any(k is kind for _, k in found.profile.keys)


def _data(found: Sources, best: Job | None, in_use: int, in_use_label: str) -> dict[str, Any]:
    """Return what the page's script works on."""
    data: dict[str, Any] = {"figures": {}, "kinds": KINDS, "measured": [], "in_use": in_use}
    figures: dict[str, Figure] = data["figures"]
    if found.frontier is not None:
        frontier = found.frontier
        data["plans"] = [
            [plan.time_s, plan.energy_j, plan.lower_bound_j, plan.clock_changes] for plan in frontier.plans
        ]
        data["baseline"] = [frontier.baseline.time_s, frontier.baseline.energy_j]
        figures["frontier"] = frontier_figure(
            frontier, in_use=in_use, in_use_label=in_use_label, measured=found.measured_points
        )
    if found.dag is not None and found.profile is not None and found.frontier is not None:
        data["pipeline"] = pipeline_data(found.dag, found.profile, found.frontier)
    if any(history.steps for history in found.histories):
        figures["history"] = history_figure(found.histories, best.reference if best else None)
    if found.profile is not None:
        figures |= {f"profile-{what}": figure for what, figure in profile_figures(found.profile).items()}
    data["measured"] = [_measured_data(history, iteration, found) for history, iteration in found.measured]
    return data


def _measured_data(history: History, iteration: MeasuredIteration, found: Sources) -> dict[str, Any]:
    energies_j = [s.record.energy_j for s in history.steps if s.record.iteration == iteration.iteration]
    energy_j = energies_j[-1] / found.pipelines if energies_j and energies_j[-1] is not None else math.nan
    drawn = timeline_data(measured_timeline(iteration, energy_j=energy_j))
    return {"label": label(history, iteration), "plan": iteration.plan, **drawn}


def _as_json(data: dict[str, Any]) -> str:
    """Return JSON that may stand in a script element."""

    def plain(value: Any) -> Any:
        return json.loads(value.to_json()) if isinstance(value, Figure) else str(value)

    text = json.dumps(data, default=plain, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def number(value: float | None, digits: int = 4) -> str:
    """Return a figure for people: some digits, thousands apart, no exponent."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "\N{MINUS SIGN}")


def percent(value: float | None) -> str:
    """Return a signed percentage."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    text = f"{value:+.1%}".replace("-", "\N{MINUS SIGN}")
    return "±0.0%" if text[1:] == "0.0%" else text


def write_page(found: Sources, factors: Factors, path: Path) -> None:
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_page(found, factors), encoding="utf-8")
