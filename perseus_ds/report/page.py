"""The report of a run, or of checks on a GPU, as one self-contained HTML file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from perseus_ds import units
from perseus_ds.artifacts.evidence import Evidence
from perseus_ds.artifacts.frontier import SLOWDOWNS, Frontier
from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.run_records import FILE_NAME as RECORDS
from perseus_ds.artifacts.timeline import MeasuredIteration
from perseus_ds.errors import ConfigError
from perseus_ds.measures import PowerBySecond
from perseus_ds.report.figures import (
    PALETTE,
    SCALE,
    STYLES,
    Figure,
    css,
    frontier_figure,
    frontier_traces,
    history_figure,
    profile_curves,
    profile_figures,
    trend_figure,
    variable,
)
from perseus_ds.report.jobs import Factors, ReportedJob, main_job, points_of_one_pipeline
from perseus_ds.report.sources import History, Sources, label
from perseus_ds.report.timeline import KINDS, measured_timeline, pipeline_data, timeline_data
from perseus_ds.units import duration, gpu_time, grams, joules, money, number, percent, watt_hours, watts

_FILTERS = ("number", "whole", "percent", "joules", "watt_hours", "grams", "watts", "duration", "gpu_time", "money")


def report_page(found: Sources, jobs: Sequence[ReportedJob], tiles: Sequence[Tile], factors: Factors) -> str:
    """Return the page as HTML."""
    job, in_use = main_job(jobs), found.plan_used or 0
    curves = profile_curves(found.profile) if found.profile else []
    return rendered(
        "report.html",
        _data(found, job, in_use),
        title=f"Perseus report: {found.folder.resolve().name}",
        eyebrow="perseus-ds report",
        heading=found.folder.resolve().name,
        facts=[*_facts(found), *found.energy_notes],
        simulated=found.simulated,
        missing=found.missing,
        found=found,
        iteration_label=label,
        jobs=jobs,
        job=job,
        tiles=tiles,
        factors=factors,
        in_use=in_use,
        others=other_plans(found.frontier, in_use) if found.frontier else [],
        stages=list(dict.fromkeys((curve.label, variable(curve.colour)) for curve in curves)),
        kinds=[(kind, dash) for kind, (dash, _) in STYLES.items() if any(curve.kind is kind for curve in curves)],
        slowdowns=SLOWDOWNS,
        artefacts=_artefacts(found),
    )


def _facts(found: Sources) -> list[str]:
    if found.frontier is None:
        return [found.histories[-1].last_start.gpu or "GPU unknown"] if found.histories else []
    origin = found.frontier.provenance
    sizes = [f"{origin.stages} stages", f"{origin.micro_batches} micro-batches"]
    return [origin.gpu or "GPU unknown", *sizes, origin.schedule.rpartition(":")[2]]


def _data(found: Sources, job: ReportedJob | None, in_use: int) -> dict[str, Any]:
    figures: dict[str, Figure] = {}
    data: dict[str, Any] = {"figures": figures, "kinds": KINDS, "in_use": in_use}
    frontier = found.frontier
    if frontier is not None:
        data["plans"] = [[p.time_s, p.energy_j, p.lower_bound_j, p.clock_changes] for p in frontier.plans]
        data["baseline"] = [frontier.baseline.time_s, frontier.baseline.energy_j]
        name = "plan 0, the fastest" if found.plan_used is None else f"plan {in_use}, in use"
        measured = points_of_one_pipeline(found)
        traces = frontier_traces(frontier, in_use=in_use, in_use_label=name, measured=measured)
        figures["frontier"] = frontier_figure(frontier, traces, in_use)
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
    energy_j = energies_j[-1] if energies_j else None
    gpus_per_rank = found.gpus_per_rank(history)
    energy_j = math.nan if energy_j is None or gpus_per_rank is None else energy_j / gpus_per_rank
    drawn = timeline_data(measured_timeline(iteration, energy_j=energy_j))
    return {"label": label(history, iteration), "plan": iteration.plan, **drawn}


class Tile(NamedTuple):
    """One figure, with a note on its baseline or composition."""

    title: str
    value: str
    note: str


def tiles(found: Sources, job: ReportedJob | None, factors: Factors) -> list[Tile]:
    """Return the main figures on a run's savings."""
    shown = [] if job is None else [*_saved(job, found, factors)]
    if found.frontier is not None:
        shown.append(_plan(found.frontier, found.plan_used, job))
    if job is not None:
        shown += _run(job.history, found, factors)
        shown += _power(job.history)
    return shown


def as_text(shown: Sequence[Tile], *, simulated: bool, energy_notes: Sequence[str] = ()) -> str:
    """Return tiles as lines for a terminal."""
    width = max((len(title) for title, _, _ in shown), default=0)
    wrapper = textwrap.TextWrapper(110, subsequent_indent=" " * (width + 4))
    lines = []
    for title, value, note in shown:
        wrapper.initial_indent = f"  {title:{width}}  "
        lines.append(wrapper.fill(f"{value}  ({note})"))
    lines += [f"  Energies: {note}." for note in energy_notes]
    if simulated:
        lines.append("  All figures are SIMULATED: no energy was really used or saved.")
    return "\n".join(lines)


def _saved(job: ReportedJob, found: Sources, factors: Factors) -> Iterator[Tile]:
    planned, total = job.saving, job.everything
    if planned is None:
        return
    each = planned.times(1)
    counted = sum(one.typical.iterations for one in job.plans)
    yield Tile(
        f"Energy {job.under_plans}", percent(-planned.saved),
        f"{joules(each.energy_j)} instead of {joules(each.default_j)} an iteration; "
        f"compared with {job.baseline}{job.doubt}",
    )  # fmt: skip
    yield Tile(
        f"Iteration time {job.under_plans}", percent(planned.slowdown),
        f"{duration(each.time_s)} instead of {duration(each.default_s)}, typical of {counted} iterations{job.doubt}",
    )  # fmt: skip
    if total is None:
        return
    yield Tile(
        "Saved so far", watt_hours(total.saved_j * factors.pue),
        f"{grams(factors.carbon_g(total.saved_j))} CO₂e, {money(factors.price(total.saved_j), factors.currency)}; "
        f"all {total.iterations} iterations, profiling counted, PUE {number(factors.pue, 3)}{job.doubt}",
    )  # fmt: skip
    gpus = found.gpus(job.history)
    if gpus is not None:
        gained_s = total.gained_s * gpus
        yield Tile(
            f"GPU time {'gained' if gained_s >= 0 else 'lost'}", gpu_time(abs(gained_s)),
            f"{percent(total.slowdown)} time on {gpus} GPUs, all iterations{job.doubt}",
        )  # fmt: skip


def _plan(frontier: Frontier, used: int | None, job: ReportedJob | None) -> Tile:
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
        parts.append(f"{number(plan.gap * 100, 2)} % above the lower bound at its speed")
    title = "Fastest plan, none was run" if used is None else "Plan in use"
    return Tile(title, f"{number_} of 0\N{EN DASH}{last}", "; ".join(parts))


def _power(history: History) -> Iterator[Tile]:
    steps, seconds = history.under_plans or history.steps, PowerBySecond()
    for step in steps:
        seconds.add(step.time_s, step.energy_j, step.ended)
    if (power := seconds.figures) is not None:
        which = "under plans" if history.under_plans else "of the run"
        yield Tile(
            "Power over a second", f"{watts(power.lowest_w)} to {watts(power.highest_w)}",
            f"{watts(power.mean_w)} on average, {watts(power.change_w)} at most from one to the next; all GPUs, "
            f"iterations {which}, grouped to at least a second: {duration(power.window_s)}",
        )  # fmt: skip


def _run(history: History, found: Sources, factors: Factors) -> Iterator[Tile]:
    total, gpus, samples = history.total, found.gpus(history), found.samples(history)
    parts = [f"{total.iterations} iterations in {duration(total.time_s)}"]
    if gpus is not None:
        parts.append(gpu_time(total.time_s * gpus))
    if total.time_s and not total.without_energy:
        parts.append(f"{watts(total.energy_j / total.time_s)} on average")
    if total.without_energy:
        parts.append(f"not counting {total.without_energy} iterations with unknown energy")
    parts.append(f"{grams(factors.carbon_g(total.energy_j))} CO₂e")
    parts.append(money(factors.price(total.energy_j), factors.currency))
    yield Tile("The whole run", watt_hours(total.energy_j * factors.pue), ", ".join(parts))
    known = total.iterations - total.without_energy
    if samples is not None and known:
        per_sample_j, tokens = total.energy_j / (known * samples), factors.tokens_per_sample
        note = f"{samples} samples an iteration, GPUs only"
        per_token = f"; {number(per_sample_j / tokens)} J a token of {tokens}" if tokens else ""
        yield Tile("Energy of a sample", joules(per_sample_j), note + per_token)


def other_plans(frontier: Frontier, in_use: int) -> list[int]:
    """Return plans at several slowdowns, including the plan in use, the fastest first."""
    plans = frontier.plans
    chosen = {plans.index(frontier.within(slowdown)) for slowdown in (*SLOWDOWNS, 0.10)}
    return sorted(chosen | {0, in_use, len(plans) - 1})


def _artefacts(found: Sources) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the files of a report, each with time (UTC), hash and description."""
    says: dict[Path, list[str | None]] = {}
    for history in found.histories:
        start, starts = history.last_start, len(history.starts)
        mode, several = start.mode and f"{start.mode} mode", f"{starts} starts" if starts > 1 else None
        schema = f"schema {start.schema_version}" if starts else None
        says[history.folder / RECORDS] = [start.job and f"job {start.job[:12]}", mode, several, schema, start.gpu]
    for path in found.files:
        if path.name == "frontier.json" and found.frontier is not None:
            origin = found.frontier.provenance
            waiting = f"{origin.blocking_power_w:g} W while waiting"
            schedule = origin.schedule.rpartition(":")[2]
            says[path] = [f"solver {origin.solver}", schedule, waiting, origin.profile and f"profile {origin.profile}"]
        elif path.name == "profile.csv" and found.profile is not None:
            info = found.profile.info
            versions = (f"{name} {version}" for name, version in info.versions.items())
            driver = info.driver and f"driver {info.driver}"
            says[path] = [info.gpu, str(info.settings or ""), driver, info.model, *versions]
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
        written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d %H:%M")
        yield path, written, digest.hexdigest()[:12], ", ".join(filter(None, says.get(path, [])))


def evidence_page(evidence: Evidence) -> str:
    """Return the page as HTML."""
    machine = evidence.machine
    versions = [f"{name} {version}" for name, version in machine.versions.items()]
    return rendered(
        "evidence.html",
        {"figures": {}},
        title=f"Perseus: evidence from {machine.gpu}",
        eyebrow="perseus-ds report",
        heading=f"Checks on {machine.gpu}",
        facts=[*([f"driver {machine.driver}"] if machine.driver else []), *versions, f"measured {evidence.made}"],
        simulated=machine.simulated,
        missing=[f"not made: {title}" for title in evidence.not_made],
        evidence=evidence,
    )


def evidence_text(evidence: Evidence) -> str:
    """Return the number of passed checks and the reasons of failures as lines for a terminal."""
    lines = [f"{evidence.passed} of {len(evidence.checks)} checks passed on {evidence.machine.gpu}."]
    lines += [f"FAILED: {check.title}: {check.reason}" for check in evidence.checks if check.outcome == "failed"]
    lines += [f"Not made: {title}" for title in evidence.not_made]
    if evidence.machine.simulated:
        lines.append("SIMULATED: a stand-in replaced the GPU, so no figure applies to a real GPU.")
    return "\n".join(lines)


def rendered(template: str, data: Mapping[str, Any], **variables: Any) -> str:
    """Return a page from a template."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perseus_ds.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(units, name) for name in _FILTERS}
    plotly = importlib.resources.files("perseus_ds.report").joinpath("page/plotly-basic.min.js")
    return environment.get_template(template).render(
        data=_as_json({**data, "palette": PALETTE, "scale": SCALE}),
        plotly=plotly.read_text(encoding="utf-8").replace("</script", "<\\/script"),
        palette_css=css(),
        scale=SCALE,
        version=importlib.metadata.version("perseus-ds"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **variables,
    )


def _as_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe within a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_output(content: str | bytes, out: Path | None, folder: Path, name: str) -> Path:
    """Write a file to ``out``, or to ``name`` in ``out`` if that is a folder, or in the other folder by default."""
    path = out or folder / name
    try:
        if out is not None and out.is_dir():
            path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}). Give another path, --out PATH.") from None
    return path
