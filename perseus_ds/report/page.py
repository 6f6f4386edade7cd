"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perseus_ds.artifacts.timeline import MeasuredIteration
from perseus_ds.report.alternatives import alternatives, one_percent_slower
from perseus_ds.report.figures import Figure, frontier_figure, history_figure, profile_figures, trend_figure
from perseus_ds.report.history import History
from perseus_ds.report.jobs import Job, main_job
from perseus_ds.report.measured_timeline import measured_timeline
from perseus_ds.report.palette import DASHES, variable
from perseus_ds.report.pipeline_data import KINDS, pipeline_data, timeline_data
from perseus_ds.report.provenance import artefacts
from perseus_ds.report.rendering import rendered
from perseus_ds.report.savings import Factors
from perseus_ds.report.series import frontier_series, profile_curves
from perseus_ds.report.sources import Sources, label
from perseus_ds.report.tiles import Tile


def report_page(found: Sources, jobs: Sequence[Job], tiles: Sequence[Tile], factors: Factors) -> str:
    """Return the page.

    Args:
        found: What it is about.
        jobs: The jobs in it.
        tiles: Its main figures.
        factors: What energy stands for.
    """
    job, in_use = main_job(jobs), found.plan_used or 0
    curves = profile_curves(found.profile) if found.profile else []
    return rendered(
        "report.html",
        _data(found, job, in_use),
        title=f"Perseus report: {found.folder.resolve().name}",
        eyebrow="perseus-ds report",
        heading=found.folder.resolve().name,
        facts=_facts(found),
        simulated=found.simulated,
        missing=found.missing,
        found=found,
        jobs=jobs,
        job=job,
        tiles=tiles,
        factors=factors,
        in_use=in_use,
        others=alternatives(found.frontier, in_use) if found.frontier else [],
        one_percent=one_percent_slower(found.frontier, in_use) if found.frontier else None,
        stages=list(dict.fromkeys((curve.label, variable(curve.colour)) for curve in curves)),
        kinds=[(kind, dash) for kind, dash in DASHES.items() if any(curve.kind is kind for curve in curves)],
        artefacts=artefacts(found),
    )


def _facts(found: Sources) -> list[str]:
    if found.frontier is not None:
        origin = found.frontier.provenance
        schedule = origin.schedule.rpartition(":")[2]
        return [
            origin.gpu or "GPU unknown",
            f"{origin.stages} stages",
            f"{origin.micro_batches} micro-batches",
            schedule,
        ]
    return [found.histories[-1].gpu or "GPU unknown"] if found.histories else []


def _data(found: Sources, job: Job | None, in_use: int) -> dict[str, Any]:
    """Return what the page's script works on."""
    figures: dict[str, Figure] = {}
    data: dict[str, Any] = {"figures": figures, "kinds": KINDS, "in_use": in_use}
    frontier = found.frontier
    if frontier is not None:
        data["plans"] = [[p.time_s, p.energy_j, p.lower_bound_j, p.clock_changes] for p in frontier.plans]
        data["baseline"] = [frontier.baseline.time_s, frontier.baseline.energy_j]
        name = "plan 0, the fastest" if found.plan_used is None else f"plan {in_use}, in use"
        series = frontier_series(frontier, in_use=in_use, in_use_label=name, measured=found.measured_points)
        figures["frontier"] = frontier_figure(frontier, series, in_use)
        if found.dag is not None and found.profile is not None:
            data["pipeline"] = pipeline_data(found.dag, found.profile, frontier)
    if any(history.steps for history in found.histories):
        figures["history"] = history_figure(found.histories, job.reference if job else None)
    if job is not None and job.trend is not None:
        figures["trend"] = trend_figure(job.trend)
    if found.profile is not None:
        figures |= {f"profile-{quantity}": figure for quantity, figure in profile_figures(found.profile).items()}
    data["measured"] = [_measured_data(history, iteration, found) for history, iteration in found.measured]
    return data


def _measured_data(history: History, iteration: MeasuredIteration, found: Sources) -> dict[str, Any]:
    energies_j = [s.record.energy_j for s in history.steps if s.record.iteration == iteration.iteration]
    energy_j = energies_j[-1] / found.pipelines if energies_j and energies_j[-1] is not None else math.nan
    drawn = timeline_data(measured_timeline(iteration, energy_j=energy_j))
    return {"label": label(history, iteration), "plan": iteration.plan, **drawn}
