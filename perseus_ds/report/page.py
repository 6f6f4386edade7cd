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
from typing import Any

import jinja2

from perseus_ds import units
from perseus_ds.artifacts.evidence import Evidence
from perseus_ds.artifacts.frontier import SLOWDOWNS
from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.run_records import FILE_NAME as RECORDS
from perseus_ds.artifacts.timeline import MeasuredIteration
from perseus_ds.errors import ConfigError
from perseus_ds.report.facts import ReportFacts, Tile, points_of_one_pipeline
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
from perseus_ds.report.inputs import Inputs, RecordedRun, label
from perseus_ds.report.timeline import KINDS, measured_timeline, pipeline_data, timeline_data
from perseus_ds.units import percent

_FILTERS = ("number", "whole", "percent", "joules", "watt_hours", "grams", "watts", "duration", "gpu_time", "money")


def html(report: ReportFacts) -> str:
    """Return the report as an HTML page."""
    found = report.inputs
    curves = profile_curves(found.profile) if found.profile else []
    kinds = {curve.kind for curve in curves}
    return rendered(
        "report.html",
        _data(report),
        title=f"Perseus report: {found.folder.resolve().name}",
        eyebrow="perseus-ds report",
        heading=found.folder.resolve().name,
        facts=[*_about(found), *found.energy_notes],
        simulated=found.simulated,
        missing=found.missing,
        found=found,
        report=report,
        stages=list(dict.fromkeys((curve.label, variable(curve.colour)) for curve in curves)),
        kinds=[(kind, dash) for kind, (dash, _) in STYLES.items() if kind in kinds],
        slowdowns=[percent(slowdown, 0) for slowdown in SLOWDOWNS],
        artefacts=list(_artefacts(found)),
    )


def _about(found: Inputs) -> list[str]:
    if found.frontier is None:
        return [found.runs[-1].start.gpu or "GPU unknown"] if found.runs else []
    origin = found.frontier.provenance
    sizes = [f"{origin.stages} stages", f"{origin.micro_batches} micro-batches"]
    return [origin.gpu or "GPU unknown", *sizes, origin.schedule.rpartition(":")[2]]


def _data(report: ReportFacts) -> dict[str, Any]:
    """Return the data of the page's script."""
    figures: dict[str, Figure] = {}
    data: dict[str, Any] = {"figures": figures, "kinds": KINDS, "in_use": report.in_use}
    found, in_use = report.inputs, report.in_use
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
    if any(run.iterations for run in report.runs):
        figures["history"] = history_figure(found.runs)
    if report.main is not None and report.main.trend is not None:
        figures["trend"] = trend_figure(report.main.trend)
    if found.profile is not None:
        figures |= {f"profile-{quantity}": figure for quantity, figure in profile_figures(found.profile).items()}
    data["measured"] = [_measured_data(run, iteration, found) for run, iteration in found.measured]
    return data


def _measured_data(run: RecordedRun, iteration: MeasuredIteration, found: Inputs) -> dict[str, Any]:
    gpus_per_rank = found.gpus_per_rank(run)
    energy_j = math.nan
    if iteration.energy_j is not None and gpus_per_rank is not None:
        energy_j = iteration.energy_j / gpus_per_rank
    drawn = timeline_data(measured_timeline(iteration, energy_j=energy_j))
    return {"label": label(run, iteration), "plan": iteration.plan, **drawn}


def text(report: ReportFacts) -> str:
    """Return the main figures as lines for a terminal."""
    found = report.inputs
    return as_text(report.tiles, simulated=found.simulated, energy_notes=found.energy_notes)


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


def _artefacts(found: Inputs) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the files of a report, each with time (UTC), hash and description."""
    says: dict[Path, list[str | None]] = {}
    for run in found.runs:
        start, starts = run.start, run.job.history.starts
        mode, several = start.mode and f"{start.mode} mode", f"{starts} starts" if starts > 1 else None
        schema = f"schema {start.schema_version}" if starts else None
        says[run.folder / RECORDS] = [start.job and f"job {start.job[:12]}", mode, several, schema, start.gpu]
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
