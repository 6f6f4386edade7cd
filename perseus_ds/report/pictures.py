"""Pictures of frontiers, timelines, profiles and schedules, in the format of the file's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile, energy_note
from perseus_ds.artifacts.schedule_table import ScheduleTable
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.report.facts import MeasuredPoint
from perseus_ds.report.figures import (
    MEASURED_SYMBOLS,
    PALETTE,
    SCALE,
    SERIES,
    frontier_traces,
    profile_figures,
)
from perseus_ds.report.page import write_output
from perseus_ds.report.timeline import Bar, DrawnTimeline, short_name
from perseus_ds.units import percent

_WIDTH_IN = 9.0
_TALLEST_IN = 14.0
_DPI = 200
# Matplotlib's names of plotly's styles in the palette.
_LINE_STYLES: dict[str, Any] = {"solid": "-", "dash": "--", "longdash": "--", "dashdot": "-.", "longdashdot": "-.",
                                "dot": ":", "10px 2px": (0, (10, 2))}  # fmt: skip
_MARKERS = {"circle": "o", "square": "s", "star": "*", "diamond": "D", "x": "X", "cross": "P", "triangle-up": "^",
            "triangle-down": "v", "pentagon": "p", "hexagon": "h"}  # fmt: skip
_SYMBOLS = ("circle", "square", *MEASURED_SYMBOLS)
_LINES: tuple[Literal["-", "--"], ...] = ("-", "--")
_OPEN: dict[str, Any] = {"linestyle": "none", "markersize": 9, "markerfacecolor": "none"}
_CHARACTER = 0.009
"""Width of a character in a bar, as a fraction of the time axis."""
_LOW, _HIGH = 0.5, 0.82
"""Heights of bars. Forwards are lower, to distinguish them from backwards if there is no room for text."""


def light(name: str) -> str:
    """Return a colour of the palette for pictures, which have a white background."""
    return PALETTE[name][0]


def frontier_picture(
    frontier: Frontier,
    path: Path | str,
    *,
    in_use: FrequencyPlan | None = None,
    measured: Sequence[MeasuredPoint] = (),
) -> None:
    """Draw energy over time of all plans, with the lower bound and points to compare with."""
    figure = Figure(figsize=(_WIDTH_IN, 5.6), layout="constrained")
    axes = figure.add_subplot()
    number, label = None, ""
    if in_use is not None:
        number, change = frontier.plans.index(in_use), in_use.energy_j / frontier.baseline.energy_j - 1
        label = f"plan of a job with these settings: {percent(change)} energy (predicted)"
    _draw_traces(axes, frontier_traces(frontier, in_use=number, in_use_label=label, measured=measured))
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right"}
    for time_s, name in ((frontier.t_min_s, "$T_{min}$"), (frontier.t_star_s, "$T^*$")):
        axes.axvline(time_s, color="0.55", linestyle=":", linewidth=1)
        axes.annotate(name, (time_s, 0.02), xytext=(-4, 0), **place)
    _label_axes(axes, "iteration time [s]", "energy of an iteration [J]")
    axes.margins(x=0.06, y=0.1)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)  # outside the axes, to hide no point
    figure.suptitle(f"Energy against iteration time: {_subject(frontier.provenance)}", fontsize=11)
    _save(figure, path, _DPI)


def _draw_traces(axes: Axes, traces: Sequence[dict[str, Any]]) -> None:
    """Draw traces of the page's charts."""
    for trace in traces:
        line, marker = trace.get("line"), trace.get("marker")
        is_crowded = line is not None and len(trace["x"]) > 80
        axes.plot(
            trace["x"],
            trace["y"],
            color=light((line or marker or {})["color"].removeprefix("var(--").removesuffix(")")),
            linestyle=_LINE_STYLES[line["dash"]] if line else "none",
            marker=_MARKERS[marker["symbol"]] if marker and not is_crowded else None,
            markersize=marker["size"] * (0.5 if line else 0.85) if marker else None,
            markeredgecolor="black",
            markeredgewidth=marker["line"]["width"] if marker else None,
            label=trace["name"],
        )


def _label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def timeline_picture(before: DrawnTimeline, after: DrawnTimeline, provenance: Provenance, path: Path | str) -> None:
    """Draw two timelines of one pipeline one above the other, on the same axes."""
    figure = Figure(figsize=(_WIDTH_IN, min(2.2 + 0.75 * before.ranks, _TALLEST_IN)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    clocks = [bar.clock_mhz for part in (before, after) for bar in part.bars if bar.clock_mhz is not None]
    norm, colours = Normalize(min(clocks), max(clocks)), LinearSegmentedColormap.from_list("clock", SCALE)
    longest_s = max(before.time_s, after.time_s)
    for axes, part in ((upper, before), (lower, after)):
        _draw_timeline(axes, part, norm, colours, longest_s)
    upper.set_title(f"Everything at the highest clock: {before.time_s:.3f} s, {before.energy_j:.0f} J", loc="left")
    lower.set_title(
        f"Under the plan: {after.time_s:.3f} s ({percent(after.time_s / before.time_s - 1)}), "
        f"{after.energy_j:.0f} J ({percent(after.energy_j / before.energy_j - 1)})",
        loc="left",
    )
    lower.set_xlabel("time [s]")
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(norm, colours), ax=[upper, lower], pad=0.01, aspect=30)
    bar.set_label("SM clock [MHz]")
    middle = colours(0.5)
    handles: list[Patch | Line2D] = [
        Line2D([], [], color=middle, linewidth=4, solid_capstyle="butt", label="forward (low bar)"),
        Line2D([], [], color=middle, linewidth=9, solid_capstyle="butt", label="backward (high bar)"),
        Patch(facecolor=light("waiting"), label="waiting"),
        Patch(facecolor="white", edgecolor="black", label="critical path"),
    ]
    if any(_kind(bar) in (None, Kind.TAIL) for part in (before, after) for bar in part.bars):
        handles.append(Patch(facecolor=light("fixed"), label="load, transfer, tail"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(f"One iteration, predicted: {_subject(provenance)}", fontsize=11)
    _save(figure, path, _DPI)


def _draw_timeline(axes: Axes, part: DrawnTimeline, norm: Normalize, colours: Colormap, longest_s: float) -> None:
    axes.barh(range(part.ranks), part.time_s, height=_HIGH, color=light("waiting"))
    instructions = [bar for bar in part.bars if isinstance(bar.work, Instruction)]
    for bars, edge, width in (
        ([b for b in part.bars if not isinstance(b.work, Instruction)], "none", 0.0),
        ([b for b in instructions if not b.critical], "white", 0.4),
        ([b for b in instructions if b.critical], "black", 1.1),
    ):
        axes.barh(
            [b.rank for b in bars],
            [b.end_s - b.start_s for b in bars],
            left=[b.start_s for b in bars],
            height=[_height(b) for b in bars],
            color=[light("fixed") if b.clock_mhz is None else colours(norm(b.clock_mhz)) for b in bars],
            edgecolor=edge,
            linewidth=width,
        )
    path = sorted((b for b in instructions if b.critical), key=lambda b: b.start_s)
    for first, second in pairwise(path):
        if first.rank != second.rank:  # a line where the critical path continues on another rank
            down = 0.5 if second.rank > first.rank else -0.5
            y = [first.rank + down * _height(first), second.rank - down * _height(second)]
            axes.plot([first.end_s, second.start_s], y, color="black", linewidth=1.1)
    digits = len(str(max((b.work.micro_batch for b in part.bars if isinstance(b.work, Instruction)), default=0)))
    for bar in instructions:
        if (bar.end_s - bar.start_s) / longest_s >= _CHARACTER * (1 + digits) and _kind(bar) is not Kind.TAIL:
            dark = bar.clock_mhz is None or norm(bar.clock_mhz) < 0.6
            style: dict[str, Any] = {"color": "white" if dark else "black", "ha": "center", "va": "center"}
            axes.text((bar.start_s + bar.end_s) / 2, bar.rank, short_name(bar.work), fontsize=7, **style)
    axes.axvline(part.time_s, color="black", linewidth=0.8)
    axes.set_xlim(0, longest_s * 1.005)
    axes.set_ylim(part.ranks - 0.5, -0.5)
    axes.set_yticks(range(part.ranks), [f"rank {rank}" for rank in range(part.ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _kind(bar: Bar) -> Kind | None:
    return bar.work.kind if isinstance(bar.work, Instruction) else None


def _height(bar: Bar) -> float:
    return _LOW if _kind(bar) in (Kind.FORWARD, Kind.RECOMPUTE) else _HIGH


def _subject(provenance: Provenance) -> str:
    parts = [f"{provenance.stages} stages", f"{provenance.micro_batches} micro-batches", provenance.gpu or ""]
    if provenance.simulated and "simulated" not in parts[-1].lower():
        parts.append("SIMULATED")
    parts.append(energy_note(provenance.settings))
    return ", ".join(part for part in parts if part)


def _save(figure: Figure, path: Path | str, dpi: int) -> None:
    """Write a picture completely or not at all, in the format of its suffix, by default PNG."""
    path, data = Path(path), BytesIO()
    try:
        figure.savefig(data, format=path.suffix[1:] or "png", dpi=dpi)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Give another suffix, such as .png.") from None
    write_output(data.getvalue(), None, path.parent, path.name)


def profile_picture(profile: StageProfile, path: Path) -> None:
    """Draw time, energy and power over the clock."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    for axes, chart in zip(figure.subplots(1, 3), profile_figures(profile).values(), strict=True):
        _draw_traces(axes, chart["data"])
        _label_axes(axes, *(chart["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")))
        axes.set_ylim(bottom=0)
    lines: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        lines.setdefault(label, handle)  # a curve's line precedes its points
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=min(6, len(lines)), fontsize="small")
    title = f"{profile.info.gpu or 'profile'}: measured points, fitted lines"
    if note := energy_note(profile.info.settings):
        title += f", {note}"
    figure.suptitle(title + (" — SIMULATED" if profile.info.simulated else ""), fontsize="medium")
    _save(figure, path, 160)


def schedules_picture(table: ScheduleTable, path: Path) -> None:
    """Draw energy over time of every schedule's plans, both per micro-batch."""
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    axes = figure.add_subplot()
    names = [*dict.fromkeys(one.name for one in table.schedules)]
    counts = [*dict.fromkeys(one.micro_batches for one in table.schedules)]
    # A colour that is used again has another line style.
    lines = dict(zip(names, cycle(product(_LINES, map(light, SERIES))), strict=False))
    markers = dict(zip(counts, cycle(_MARKERS[symbol] for symbol in _SYMBOLS), strict=False))
    for one in table.schedules:
        (dash, colour), marker, share = lines[one.name], markers[one.micro_batches], 1 / one.micro_batches
        times_s = [time_s * share for time_s, _ in one.plans]
        energies_j = [energy_j * share for _, energy_j in one.plans]
        axes.plot(times_s, energies_j, color=colour, linestyle=dash, linewidth=1.2, marker=marker, markersize=3.5)
        baseline = one.baseline_time_s * share, one.baseline_energy_j * share
        axes.plot(*baseline, marker=marker, markeredgecolor=colour, **_OPEN)
    handles = [Line2D([], [], color=colour, linestyle=dash, label=name) for name, (dash, colour) in lines.items()]
    handles += [
        Line2D([], [], color="black", linestyle="none", marker=marker, markersize=5, label=f"{count} micro-batches")
        for count, marker in markers.items()
    ]
    handles.append(Line2D([], [], marker="o", markeredgecolor="black", label="open: all at the highest clock", **_OPEN))
    _label_axes(axes, "iteration time for each micro-batch [s]", "energy for each micro-batch [J]")
    axes.margins(x=0.05, y=0.08)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"Predicted frontiers of several schedules{table.subject}", fontsize=11)
    _save(figure, path, _DPI)
