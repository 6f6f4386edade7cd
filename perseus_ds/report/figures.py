"""Charts in the format of plotly.js, and their colours.

Matplotlib pictures use the same traces. Colours are CSS variables, which the page's script replaces, because they
differ between light and dark mode. Hues are from Okabe and Ito's palette for colour-blind readers, with a contrast to
the background of at least 3 : 1 for lines and symbols and 4.5 : 1 for text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_iterations import MeanIteration
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.report.facts import MeasuredPoint, Trend
from perseus_ds.report.inputs import RecordedRun
from perseus_ds.units import duration, joules, percent

Figure = dict[str, Any]

# Hexadecimal RGB on light and on dark background.
PALETTE = {
    "ink": ("#1b2430", "#e6eaf0"),
    "soft": ("#5f6b7a", "#a3afbd"),
    "line": ("#d5dae1", "#3a4350"),
    "ground": ("#f6f7f9", "#0f1318"),
    "surface": ("#ffffff", "#181d24"),
    "grid": ("#e6e9ed", "#2b323c"),
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#d55e00", "#f08a3c"),
    "green": ("#00875f", "#2fc59b"),
    "purple": ("#b85c93", "#e39cc3"),
    "amber": ("#a87400", "#e6b93c"),
    "waiting": ("#f1f3f6", "#222933"),
    "hatch": ("#c6ccd5", "#414b59"),
    "fixed": ("#8a94a1", "#6f7b8b"),
    "busy": ("#cfe5f2", "#173f58"),
    "idle": ("#f8dcc4", "#5a3413"),
    "warning": ("#7a3d00", "#ffc78a"),
    "warning-ground": ("#fff1e0", "#3a2610"),
}
# Distinct lines of one chart, in this order.
SERIES = ("blue", "orange", "green", "purple", "amber", "soft", "ink")
# Viridis, for clocks and powers: perceptually uniform, also in grey.
SCALE = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# Dash of lines and symbol of points, with plotly's names.
STYLES = {
    Kind.FORWARD: ("solid", "circle"),
    Kind.BACKWARD: ("dash", "square"),
    Kind.BACKWARD_INPUT: ("longdash", "diamond"),
    Kind.BACKWARD_WEIGHT: ("longdashdot", "x"),
    Kind.RECOMPUTE: ("dashdot", "triangle-down"),
    Kind.FORWARD_BACKWARD: ("10px 2px", "hexagon"),
    Kind.TAIL: ("dot", "triangle-up"),
}
MEASURED_SYMBOLS = ("diamond", "x", "triangle-up", "pentagon", "cross")
QUANTITIES = {"time": "s", "energy": "J", "power": "W"}

_PHASES = {
    "run": ("blue", "circle"),
    "observe": ("orange", "square"),
    "default": ("orange", "diamond"),
    "warm-up": ("orange", "square-open"),
    "profile": ("green", "cross"),
    "optimizing": ("purple", "triangle-up-open"),
}
_OTHER_PHASE = ("soft", "diamond-open")
_DRAWN_EVENTS = ("plan", "proof", "profile", "goal", "drift", "failure")
_ALTERNATIVES = (("green", "dash"), ("amber", "dot"), ("ink", "dashdot"), ("soft", "dot"))
# Stages whose rows differ by less than this are drawn as one curve, as they could not be distinguished.
_SAME = 0.005
_SECOND_ROW = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
_AT_THE_BOTTOM = {"y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
_LEAST_SHOWN = 0.1
_LEAST_PERCENT = 5
_LINE_PX = 15
_MOST_PHASES = 20


def variable(name: str) -> str:
    """Return a colour for pages, which depends on light or dark mode."""
    assert name in PALETTE, name
    return f"var(--{name})"


def css() -> str:
    """Return the CSS variables of all colours, for light and dark mode."""
    lights = "".join(f"--{name}:{of_light};" for name, (of_light, _) in PALETTE.items())
    darks = "".join(f"--{name}:{of_dark};" for name, (_, of_dark) in PALETTE.items())
    return (
        f":root{{color-scheme:light;{lights}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{darks}}}}}\n"
    )


def trace(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    colour: str,
    *,
    dash: str | None = None,
    symbol: str | None = None,
    size: int = 6,
    texts: Sequence[str] = (),
) -> Figure:
    """Return a trace of points as a line with the given dash, as symbols of a size in pixels, or both.

    A text in HTML is shown for each point if there are texts.
    """
    modes = [mode for mode, used in (("lines", dash), ("markers", symbol)) if used]
    found: Figure = {"type": "scatter", "mode": "+".join(modes), "name": name, "x": list(x), "y": list(y)}
    if dash:
        found["line"] = {"color": variable(colour), "dash": dash, "width": 2}
    if symbol:
        edge = {"width": 1, "color": variable("ink")} if not dash and size > 6 else {"width": 0}
        found["marker"] = {"color": variable(colour), "symbol": symbol, "size": size, "line": edge}
    shown = {"text": list(texts), "hovertemplate": "%{text}<extra></extra>"} if texts else {"hoverinfo": "skip"}
    return found | shown


def frontier_traces(
    frontier: Frontier, *, in_use: int | None, in_use_label: str, measured: Sequence[MeasuredPoint]
) -> list[Figure]:
    """Return the lower bound, all plans, the alternatives, and measured points."""
    plans, baseline = frontier.plans, frontier.baseline
    times_s, energies_j = [plan.time_s for plan in plans], [plan.energy_j for plan in plans]
    bounds_j = [plan.lower_bound_j for plan in plans if plan.lower_bound_j is not None]
    found = []
    if len(bounds_j) == len(plans):
        found.append(trace("lower bound of all plans", times_s, bounds_j, "soft", dash="dash"))
    texts = [
        f"<b>plan {number}</b><br>{plan.time_s:.4f} s ({percent(plan.time_s / baseline.time_s - 1, 2)})"
        f"<br>{plan.energy_j:.1f} J ({percent(plan.energy_j / baseline.energy_j - 1, 2)})"
        f"<br>above the bound: {'unknown' if plan.gap is None else f'{plan.gap:.2%}'}"
        f"<br>clock changes: {plan.clock_changes}"
        for number, plan in enumerate(plans)
    ]
    name = f"{len(plans)} plans (predicted)"
    drawn = trace(name, times_s, energies_j, "blue", dash="solid", symbol="circle", texts=texts)
    found.append(drawn | {"meta": "plans"})  # identifies them for the page's script
    found.append(_point("all at the highest clock (predicted)", baseline.time_s, baseline.energy_j, "orange", "square"))
    slowest_s = max(plans[-1].time_s, baseline.time_s)
    for one, (colour, line) in zip(frontier.alternatives, _ALTERNATIVES, strict=False):
        shown = [p for p in one.points if p.time_s <= slowest_s]
        dash, symbol = (None, "x") if len(shown) == 1 else (line, None)
        times_s, energies_j = [p.time_s for p in shown], [p.energy_j for p in shown]
        texts = [f"{one.name}: {p.setting}<br>{p.time_s:.4f} s, {p.energy_j:.1f} J" for p in shown]
        found.append(trace(one.name, times_s, energies_j, colour, dash=dash, symbol=symbol, size=9, texts=texts))
    if in_use is not None:
        found.append(_point(in_use_label, plans[in_use].time_s, plans[in_use].energy_j, "blue", "star"))
    for point, symbol in zip(measured, itertools.cycle(MEASURED_SYMBOLS), strict=False):
        iterations = "1 iteration" if point.iterations == 1 else f"{point.iterations} iterations"
        label = f"measured: {point.label} ({iterations})"
        found.append(_point(label, point.time_s, point.energy_j, "purple", symbol))
    return found


def _point(name: str, time_s: float, energy_j: float, colour: str, symbol: str) -> Figure:
    text = f"{name}<br>{time_s:.4f} s, {energy_j:.1f} J"
    return trace(name, [time_s], [energy_j], colour, symbol=symbol, size=17 if symbol == "star" else 11, texts=[text])


def frontier_figure(frontier: Frontier, traces: Sequence[Figure], shown: int) -> Figure:
    """Draw energy over time of all plans, which can be clicked, and of their bound."""
    plan = frontier.plans[shown]
    ring = {"symbol": "circle-open", "size": 22, "color": variable("ink"), "line": {"width": 2}}
    chosen = {"type": "scatter", "mode": "markers", "name": "plan shown below", "meta": "selected", "x": [plan.time_s],
              "y": [plan.energy_j], "marker": ring, "hoverinfo": "skip"}  # fmt: skip
    layout = _layout("iteration time [s]", "energy per iteration [J]")
    times = ((frontier.t_min_s, "T<sub>min</sub>", "left"), (frontier.t_star_s, "T*", "right"))
    layout["shapes"] = [_line(time_s, "dot") for time_s, _, _ in times]
    layout["annotations"] = [{"x": x, "xanchor": side, "text": name, **_AT_THE_BOTTOM} for x, name, side in times]
    return {"data": [*traces, chosen], "layout": layout}


@dataclass(frozen=True)
class ProfileCurve:
    """Time and energy of one kind of instruction, for a stage or several equal stages."""

    stages: tuple[int, ...]
    kind: Kind
    colour: str
    dash: str
    symbol: str

    @property
    def label(self) -> str:
        """The stages in words, such as ``stages 1-3, 5``."""
        runs: list[list[int]] = []
        for stage in self.stages:
            if runs and runs[-1][-1] == stage - 1:
                runs[-1].append(stage)
            else:
                runs.append([stage])
        parts = [f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
        return ("stage " if len(self.stages) == 1 else "stages ") + ", ".join(parts)

    def values(self, profile: StageProfile, quantity: str) -> npt.NDArray[np.float64]:
        """Return time [s], energy [J] or power [W] at each clock of ``profile.options``."""
        o = profile.options(self.stages[0], self.kind)
        return {"time": o.time_s, "energy": o.energy_j, "power": o.energy_j / o.time_s}[quantity]


def profile_curves(profile: StageProfile) -> list[ProfileCurve]:
    """Return a curve for each kind and group of equal stages. Of many groups, only some are included."""
    groups = stage_groups(profile)
    shown = [groups[round(i)] for i in np.linspace(0, len(groups) - 1, min(len(groups), len(SERIES)))]
    return [
        ProfileCurve(group, kind, colour, *STYLES[kind])
        for group, colour in zip(shown, SERIES, strict=False)
        for stage, kind in profile.keys
        if stage == group[0]
    ]


def stage_groups(profile: StageProfile) -> list[tuple[int, ...]]:
    """Return the stages in groups with equal time and energy at every clock."""
    rows: dict[int, dict[tuple[Kind, int], tuple[float, float]]] = {}
    for m in profile.measurements:  # by stage, kind and clock
        rows.setdefault(m.stage, {})[m.kind, m.clock_mhz] = m.time_s, m.energy_j
    groups: list[list[int]] = []
    for stage, ours in rows.items():
        for group in groups:
            theirs = rows[group[0]]
            if theirs.keys() == ours.keys() and np.allclose([*theirs.values()], [*ours.values()], rtol=_SAME):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return [tuple(group) for group in groups]


def profile_figures(profile: StageProfile) -> dict[str, Figure]:
    """Draw time, energy and power over the clock."""
    figures = {}
    for quantity, unit in QUANTITIES.items():
        layout = _layout("SM clock [MHz]", f"{quantity} [{unit}]") | {"showlegend": False}
        layout["yaxis"]["rangemode"] = "tozero"
        figures[quantity] = {"data": _profile_traces(profile, quantity), "layout": layout}
    return figures


def _profile_traces(profile: StageProfile, quantity: str) -> list[Figure]:
    rows = [row for row in profile.info.rows if row.samples] or profile.measurements
    found = []
    for curve in profile_curves(profile):
        clocks = profile.options(curve.stages[0], curve.kind).clock_mhz.tolist()
        values = {
            clock: float(f"{value:.5g}") for clock, value in zip(clocks, curve.values(profile, quantity), strict=True)
        }
        texts = [
            f"{curve.label} {curve.kind}, {clock} MHz: {value:.4g} {QUANTITIES[quantity]}"
            for clock, value in values.items()
        ]
        # Clocks that were measured on one of the stages and not estimated from neighbouring clocks.
        measured = {row.clock_mhz for row in rows if row.stage in curve.stages and row.kind is curve.kind}
        points = {clock: value for clock, value in values.items() if clock in measured}
        name = f"{curve.label} {curve.kind}"
        found.append(trace(name, clocks, [*values.values()], curve.colour, dash=curve.dash, texts=texts))
        found.append(trace(name, [*points], [*points.values()], curve.colour, symbol=curve.symbol, size=5))
    return found


def history_figure(runs: Sequence[RecordedRun]) -> Figure:
    """Draw energy and time of iterations of all jobs, one job after the other, and what default clocks take.

    Phases differ by colour and symbol. Events are dotted lines. Starts of jobs are solid lines with a name.
    """
    starts = [0, *itertools.accumulate(run.job.history.iterations for run in runs)]
    data = []
    names = dict.fromkeys(phase for run in runs for phase in run.job.history.points)
    for phase in itertools.islice(names, _MOST_PHASES):
        shown = [
            (start + point.place, run.name, point)
            for start, run in zip(starts, runs, strict=False)
            if phase in run.job.history.points
            for point in run.job.history.points[phase].points
        ]
        every = max(run.job.history.points[phase].n for run in runs if phase in run.job.history.points)
        colour, symbol = _PHASES.get(phase, _OTHER_PHASE)
        texts = [
            f"{name}, iteration {point.iteration}, {phase}{'' if point.plan is None else f', plan {point.plan}'}: "
            f"{joules(point.energy_j)}, {duration(point.time_s)}"
            for _, name, point in shown
        ]
        title, xs = phase if every == 1 else f"{phase}, one in {every}", [x for x, _, _ in shown]
        for values, row in (([p.energy_j for *_, p in shown], {}), ([p.time_s for *_, p in shown], _SECOND_ROW)):
            drawn = trace(title, xs, values, colour, symbol=symbol, texts=texts)
            data.append(drawn | {"legendgroup": phase} | row)
    for start, run in zip(starts, runs, strict=False):
        planned = run.job.planned
        if planned.known:
            data += _default_clocks(planned.mean(), [start + 0.5, start + run.job.history.iterations + 0.5])
    layout = _two_rows("iteration", [0.4, starts[-1] + 0.6])
    layout["shapes"], layout["annotations"] = _event_lines(runs, starts)
    return {"data": data, "layout": layout}


def _default_clocks(mean: MeanIteration, range_: list[float]) -> list[Figure]:
    """Draw lines at the energy and time that default clocks take."""
    return [
        trace("default clocks, mean", range_, [value] * 2, "orange", dash="dash") | {"legendgroup": "baseline"} | row
        for value, row in ((mean.default_j, {}), (mean.default_s, _SECOND_ROW))
    ]


def _event_lines(runs: Sequence[RecordedRun], starts: Sequence[int]) -> tuple[list[Figure], list[Figure]]:
    lines: list[Figure] = []
    names: list[Figure] = []
    for start, run in zip(starts, runs, strict=False):
        drawn = sorted({after for after, event in run.job.history.events if event.event in _DRAWN_EVENTS})
        lines += [_line(start + after + 0.5, "dot") for after in drawn]
        if len(runs) > 1:
            lines.append(_line(start + 0.5, "solid"))
            # On three lines in turns, since the names of short runs would overlap.
            line = {"yshift": _LINE_PX * (len(names) % 3)}
            names.append({"x": start + 0.5, "xanchor": "left", "text": run.name, **_AT_THE_BOTTOM, **line})
    return lines, names


def trend_figure(trend: Trend) -> Figure:
    """Draw energy and time under plans relative to default clocks, over the job's life."""
    data = []
    layout = _two_rows(trend.x_title, None, unit="%")
    for name, fractions, axis, row in (
        ("energy", trend.energy, "yaxis", {}),
        ("time", trend.time, "yaxis2", _SECOND_ROW),
    ):
        values = [100 * fraction for fraction in fractions]
        data.append(trace(name, trend.x, values, "blue", dash="solid", symbol="circle", texts=trend.texts) | row)
        layout[axis]["range"] = _range([0.0, *values], _LEAST_PERCENT)
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": 0, "y1": 0,
         "line": {"color": variable("orange"), "dash": "dash", "width": 1.5}}
        for axis in ("y", "y2")
    ]  # fmt: skip
    return {"data": data, "layout": layout | {"showlegend": False}}


def points_figure(traces: Sequence[Figure]) -> Figure:
    """Draw energy over iteration time of points, on axes that span at least 10 %.

    So a difference of 1 % looks small.
    """
    layout = _layout("iteration time [s]", "energy per iteration [J]")
    for axis in ("x", "y"):
        values = [value for one in traces for value in one[axis]]
        layout[f"{axis}axis"]["range"] = _range(values, _LEAST_SHOWN * max(values))
    return {"data": list(traces), "layout": layout}


def _range(values: Sequence[float], least: float) -> list[float]:
    """Return the range of an axis: the values with a margin, at least ``least`` wide."""
    low, high = min(values), max(values)
    margin = max(0.1 * (high - low), (least - (high - low)) / 2)
    return [low - margin, high + margin]


def _line(x: float, dash: str) -> Figure:
    line = {"color": variable("soft"), "dash": dash, "width": 1}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _layout(x_title: str, y_title: str) -> Figure:
    return {"showlegend": True, "xaxis": _axis(x_title), "yaxis": _axis(y_title)}


def _two_rows(x_title: str, x_range: list[float] | None, *, unit: str | None = None) -> Figure:
    both = {"range": x_range} if x_range else {}
    return {
        "xaxis": _axis("") | both | {"anchor": "y", "showticklabels": False},
        "xaxis2": _axis(x_title) | both | {"anchor": "y2", "matches": "x"},
        "yaxis": _axis(f"energy [{unit or 'J'}]") | {"domain": [0.54, 1], "rangemode": "tozero", "anchor": "x"},
        "yaxis2": _axis(f"time [{unit or 's'}]") | {"domain": [0, 0.46], "rangemode": "tozero", "anchor": "x2"},
    }


def _axis(title: str) -> Figure:
    return {"title": {"text": title}}
