"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.frontier import SLOWDOWNS, Frontier
from perseus_ds.artifacts.plan import PowerSwing
from perseus_ds.artifacts.run_records import CostsSoFar, Event
from perseus_ds.artifacts.timeline import MeasuredIteration
from perseus_ds.report.figures import Figure, frontier_figure, history_figure, profile_figures, trend_figure
from perseus_ds.report.history import History
from perseus_ds.report.jobs import Factors, Job, RunTotals, main_job, measured_points
from perseus_ds.report.palette import DASHES, variable
from perseus_ds.report.rendering import rendered
from perseus_ds.report.series import frontier_series, profile_curves
from perseus_ds.report.sources import Sources, label
from perseus_ds.report.timeline import KINDS, measured_timeline, pipeline_data, timeline_data
from perseus_ds.units import duration, gpu_time, grams, joules, money, number, percent, watt_hours, watts


def report_page(found: Sources, jobs: Sequence[Job], tiles: Sequence[Tile], factors: Factors) -> str:
    """Return the page."""
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
        others=other_plans(found.frontier, in_use) if found.frontier else [],
        one_percent=one_percent_slower(found.frontier, in_use) if found.frontier else None,
        stages=list(dict.fromkeys((curve.label, variable(curve.colour)) for curve in curves)),
        kinds=[(kind, dash) for kind, dash in DASHES.items() if any(curve.kind is kind for curve in curves)],
        slowdowns=SLOWDOWNS,
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
        measured = measured_points(found.histories, pipelines=found.pipelines)
        series = frontier_series(frontier, in_use=in_use, in_use_label=name, measured=measured)
        figures["frontier"] = frontier_figure(frontier, series, in_use)
        if found.dag is not None and found.profile is not None:
            data["pipeline"] = pipeline_data(found.dag, found.profile, frontier)
    if any(history.steps for history in found.histories):
        figures["history"] = history_figure(found.histories, job.baseline if job else None)
    if job is not None and job.trend is not None:
        figures["trend"] = trend_figure(job.trend)
    if found.profile is not None:
        figures |= {f"profile-{quantity}": figure for quantity, figure in profile_figures(found.profile).items()}
    data["measured"] = [_measured_data(history, iteration, found) for history, iteration in found.measured]
    return data


def _measured_data(history: History, iteration: MeasuredIteration, found: Sources) -> dict[str, Any]:
    energies_j = [s.energy_j for s in history.steps if s.iteration == iteration.iteration]
    energy_j = energies_j[-1] / found.pipelines if energies_j and energies_j[-1] is not None else math.nan
    drawn = timeline_data(measured_timeline(iteration, energy_j=energy_j))
    return {"label": label(history, iteration), "plan": iteration.plan, **drawn}


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        note: What it is compared with or made of.
    """

    title: str
    value: str
    note: str


def tiles(found: Sources, job: Job | None, factors: Factors) -> list[Tile]:
    """Return the figures that answer what a run saved."""
    shown: list[Tile] = []
    if job is not None:
        shown += _saved(job, found, factors)
    if found.frontier is not None:
        shown.append(_plan(found.frontier, found.plan_used, job))
    if job is not None:
        shown += by_the_hour([occurrence.event for occurrence in job.history.occurrences])
        shown += _run(job.totals, factors)
    return shown


def by_the_hour(events: Sequence[Event]) -> Iterator[Tile]:
    """Yield what a job that is done cost by the signal of a cheapest policy."""
    costs = [event for event in events if isinstance(event, CostsSoFar)]
    if costs and costs[-1].done and costs[-1].fastest_cost > 0:
        note = f"against the plan of slowdown 0 throughout, by the policy's signal; {costs[-1].iterations} iterations"
        halted = f", training stood still for {duration(costs[-1].halted_s)}" if costs[-1].halted_s else ""
        yield Tile("Cost by the hour", percent(costs[-1].cost / costs[-1].fastest_cost - 1), note + halted)


def as_text(shown: Sequence[Tile], *, simulated: bool) -> str:
    """Return tiles as lines of a terminal."""
    width = max((len(tile.title) for tile in shown), default=0)
    lines = []
    for tile in shown:
        indent = " " * (width + 4)
        note = f"({tile.note})" if tile.note else ""
        lines.append(
            textwrap.fill(
                f"{tile.value}  {note}", 110, initial_indent=f"  {tile.title:{width}}  ", subsequent_indent=indent
            )
        )
    if simulated:
        lines.append("  All of it is SIMULATED: no energy was really used or saved.")
    return "\n".join(lines)


def _saved(job: Job, found: Sources, factors: Factors) -> Iterator[Tile]:
    planned, total = job.saving, job.everything
    if planned is None or total is None:
        return
    each = planned.times(1)
    counted = sum(one.typical.iterations for one in job.plans)
    yield Tile(
        f"Energy {job.under_plans}", percent(-planned.saved),
        f"{joules(each.energy_j)} instead of {joules(each.default_j)} an iteration; compared with {job.baseline}",
    )  # fmt: skip
    yield Tile(
        f"Iteration time {job.under_plans}", percent(planned.slowdown),
        f"{duration(each.time_s)} instead of {duration(each.default_s)}, typical of {counted} iterations",
    )  # fmt: skip
    yield Tile(
        "Saved so far", watt_hours(total.saved_j * factors.pue),
        f"{grams(factors.carbon_g(total.saved_j))} CO₂e, {money(factors.price(total.saved_j), factors.currency)}; "
        f"all {total.iterations} iterations, profiling counted, PUE {number(factors.pue, 3)}",
    )  # fmt: skip
    if found.size.gpus is not None:
        gained_s = total.gained_s * found.size.gpus
        yield Tile(
            f"GPU time {'gained' if gained_s >= 0 else 'lost'}", gpu_time(abs(gained_s)),
            f"{percent(total.slowdown)} time on {found.size.gpus} GPUs, all iterations",
        )  # fmt: skip


def _plan(frontier: Frontier, used: int | None, job: Job | None) -> Tile:
    number_ = 0 if used is None else used
    plan, last = frontier.plans[number_], len(frontier.plans) - 1
    plans = job.plans if job is not None and used is not None else []
    own = next((one for one in plans if one.plan == number_), None)
    parts = []
    if own is None or own.saved is None:
        change = plan.energy_j / frontier.baseline.energy_j - 1
        slower = plan.time_s / frontier.baseline.time_s - 1
        parts.append(f"predicted: {percent(change)} energy, {percent(slower)} time against the highest clock")
    elif len(plans) > 1:
        parts.append(f"its {own.ran} iterations alone: {percent(-own.saved)} energy, {percent(own.slowdown)} time")
    if plan.gap is not None:
        parts.append(f"{number(plan.gap * 100, 2)} % above the least energy possible at its speed")
    title = "Fastest plan, none was run" if used is None else "Plan in use"
    return Tile(title, f"{number_} of 0\N{EN DASH}{last}", "; ".join(parts))


def _run(totals: RunTotals, factors: Factors) -> Iterator[Tile]:
    mean_w = totals.energy_j / totals.time_s if totals.time_s and not totals.without_energy else None
    parts = [f"{totals.iterations} iterations in {duration(totals.time_s)}"]
    if totals.gpu_s is not None:
        parts.append(gpu_time(totals.gpu_s))
    if mean_w is not None:
        parts.append(f"{watts(mean_w)} on average")
    if totals.without_energy:
        parts.append(f"not counting {totals.without_energy} iterations whose energy could not be read")
    parts.append(f"{grams(factors.carbon_g(totals.energy_j))} CO₂e")
    parts.append(money(factors.price(totals.energy_j), factors.currency))
    yield Tile("The whole run", watt_hours(totals.energy_j * factors.pue), ", ".join(parts))
    per_sample_j = totals.energy_per_sample_j
    if per_sample_j is not None:
        tokens = factors.tokens_per_sample
        note = f"{totals.size.samples} samples an iteration, GPUs only"
        per_token = f"; {number(per_sample_j / tokens)} J a token of {tokens}" if tokens else ""
        yield Tile("Energy of a sample", joules(per_sample_j), note + per_token)


_SLOWDOWNS = (0.0, 0.01, 0.02, 0.05, 0.10)


@dataclass(frozen=True)
class OtherPlan:
    """A plan, compared with the one in use; by the profile.

    Attributes:
        plan: Its place on the frontier.
        time: Iteration time against the plan in use, as a fraction: 0.01 is 1 % longer.
        energy: Energy against the plan in use, likewise.
        saved: Energy saved against everything at the highest clock, as a fraction.
        power: Of one pipeline over a second; None where it is not known.
    """

    plan: int
    time: float
    energy: float
    saved: float
    power: PowerSwing | None


def other_plans(frontier: Frontier, in_use: int) -> list[OtherPlan]:
    """Return the plan in use among those of some slowdowns, the fastest first, up to the most frugal one."""
    plans = frontier.plans
    chosen = {plans.index(frontier.within(slowdown)) for slowdown in _SLOWDOWNS} | {0, in_use, len(plans) - 1}
    return [_compared(frontier, plan, in_use) for plan in sorted(chosen)]


def one_percent_slower(frontier: Frontier, in_use: int) -> OtherPlan | None:
    """Return what 1 % more time than the plan in use takes would buy; None where the frontier ends before."""
    plan = frontier.plans.index(frontier.lookup(frontier.plans[in_use].time_s * 1.01))
    return _compared(frontier, plan, in_use) if plan > in_use else None


def _compared(frontier: Frontier, plan: int, in_use: int) -> OtherPlan:
    ours, theirs = frontier.plans[plan], frontier.plans[in_use]
    return OtherPlan(
        plan=plan,
        time=ours.time_s / theirs.time_s - 1,
        energy=ours.energy_j / theirs.energy_j - 1,
        saved=1 - ours.energy_j / frontier.baseline.energy_j,
        power=ours.power,
    )


@dataclass(frozen=True)
class Artefact:
    """A file.

    Attributes:
        written: When it was last written, UTC.
        sha256: The first digits of its hash.
        facts: What it says of its origin.
    """

    path: Path
    written: str
    sha256: str
    facts: str


def artefacts(found: Sources) -> list[Artefact]:
    """Return the files of a report in the order they were read."""
    return [_artefact(path, _says(path, found)) for path in found.files]


def _artefact(path: Path, facts: list[str | None]) -> Artefact:
    written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return Artefact(
        path=path,
        written=written.strftime("%Y-%m-%d %H:%M"),
        sha256=_sha256(path)[:12],
        facts=", ".join(fact for fact in facts if fact),
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _says(path: Path, found: Sources) -> list[str | None]:
    if path.name == "run.jsonl":
        history = next(h for h in found.histories if h.folder == path.parent)
        schema = history.starts[-1].schema_version if history.starts else None
        return [
            f"job {history.job[:12]}" if history.job else None,
            f"{history.mode} mode" if history.mode else None,
            f"{len(history.starts)} starts" if len(history.starts) > 1 else None,
            f"schema {schema}" if schema else None,
            history.gpu,
        ]
    if path.name == "frontier.json" and found.frontier is not None:
        origin = found.frontier.provenance
        return [
            f"solver {origin.solver}",
            origin.schedule.rpartition(":")[2],
            f"{origin.blocking_power_w:g} W while waiting",
            f"profile {origin.profile}" if origin.profile else None,
        ]
    if path.name == "profile.csv" and found.profile is not None:
        info = found.profile.info
        versions = [f"{name} {version}" for name, version in info.versions.items()]
        return [
            info.gpu,
            str(info.settings) if info.settings else None,
            f"driver {info.driver}" if info.driver else None,
            info.model,
            *versions,
        ]
    return []
