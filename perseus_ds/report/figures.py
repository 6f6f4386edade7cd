"""The page's charts as plotly.js reads them: dictionaries with ``data`` and ``layout``.

Colours are CSS variables, which the page's script replaces, as they differ between light and dark.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.measures import Baseline
from perseus_ds.report.jobs import Trend
from perseus_ds.report.series import QUANTITIES, Series, curve_values, profile_curves, variable
from perseus_ds.report.sources import History, Step

Figure = dict[str, Any]

_PHASES = {
    "run": ("blue", "circle"),
    "observe": ("orange", "square"),
    "default": ("orange", "diamond"),
    "warm-up": ("orange", "square-open"),
    "profile": ("green", "cross"),
    "optimizing": ("purple", "triangle-up-open"),
}
_OTHER_PHASE = ("soft", "diamond-open")
_DRAWN_EVENTS = ("plan", "proof", "profile", "policy", "drift", "failure")
_SECOND_ROW = {"xaxis": "x2", "yaxis": "y2"}
_AT_THE_BOTTOM = {"y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
_LEAST_SHOWN = 0.1
_LEAST_PERCENT = 5
_LINE_PX = 15
_MOST_POINTS, _MOST_EVENTS, _MOST_PHASES = 1500, 200, 20


def frontier_figure(frontier: Frontier, series: Sequence[Series], in_use: int) -> Figure:
    """Draw energy over time of all plans, the bound, and what to compare them with; plans can be clicked."""
    data = [_trace(one) for one in series]
    plan = frontier.plans[in_use]
    ring = {"symbol": "circle-open", "size": 22, "color": variable("ink"), "line": {"width": 2}}
    data.append(
        {"type": "scatter", "mode": "markers", "name": "plan shown below", "meta": "selected", "x": [plan.time_s],
         "y": [plan.energy_j], "marker": ring, "hoverinfo": "skip"}
    )  # fmt: skip
    times = ((frontier.t_min_s, "T<sub>min</sub>"), (frontier.t_star_s, "T*"))
    layout = _layout("iteration time [s]", "energy per iteration [J]")
    layout["shapes"] = [_line(time_s, "soft", "dot") for time_s, _ in times]
    layout["annotations"] = [
        {"x": time_s, "xanchor": side, "text": name, **_AT_THE_BOTTOM}
        for (time_s, name), side in zip(times, ("left", "right"), strict=True)
    ]
    return {"data": data, "layout": layout}


def profile_figures(profile: StageProfile) -> dict[str, Figure]:
    """Draw time, energy and power over the clock."""
    figures = {}
    for quantity, unit in QUANTITIES.items():
        layout = _layout("SM clock [MHz]", f"{quantity} [{unit}]") | {"showlegend": False}
        layout["yaxis"]["rangemode"] = "tozero"
        figures[quantity] = {"data": [_trace(one) for one in _profile_series(profile, quantity)], "layout": layout}
    return figures


def _profile_series(profile: StageProfile, quantity: str) -> list[Series]:
    rows = [row for row in profile.info.rows if row.samples] or profile.measurements
    found = []
    for curve in profile_curves(profile):
        stage, kind = curve.stages[0], curve.kind
        clocks = profile.options(stage, kind).clock_mhz.tolist()
        values = [float(f"{value:.5g}") for value in curve_values(profile, stage, kind, quantity)]
        texts = [
            f"{curve.label} {kind}, {clock} MHz: {value:.4g} {QUANTITIES[quantity]}"
            for clock, value in zip(clocks, values, strict=True)
        ]
        # Clocks that were measured on a stage of it, not estimated from their neighbours.
        measured = {row.clock_mhz for row in rows if row.stage in curve.stages and row.kind is kind}
        points = {clock: value for clock, value in zip(clocks, values, strict=True) if clock in measured}
        found.append(Series(curve.label, clocks, values, curve.colour, dash=curve.dash, texts=texts))
        found.append(Series(curve.label, [*points], [*points.values()], curve.colour, symbol=curve.symbol, size=5))
    return found


def history_figure(histories: Sequence[History], baseline: Baseline | None) -> Figure:
    """Draw energy and time of every iteration of all jobs, one job after the other.

    Phases have colours and symbols, events dotted lines, jobs solid ones with their name.
    """
    starts = [0, *itertools.accumulate(len(history.steps) for history in histories)]
    data, count = [], starts[-1]
    phases = Counter(step.phase for history in histories for step in history.steps)
    for phase, of_phase in itertools.islice(phases.items(), _MOST_PHASES):
        every = math.ceil(of_phase / _MOST_POINTS)
        iterations = (
            (start + step.number, history.name, step)
            for start, history in zip(starts, histories, strict=False)
            for step in history.steps
            if step.phase == phase
        )
        data += _phase_traces(phase, every, list(itertools.islice(iterations, 0, None, every)))
    if baseline is not None:
        data += _baseline_traces(baseline, count)
    layout = _two_rows(("energy [J]", "time [s]"), "iteration", [0.4, count + 0.6])
    layout["shapes"], layout["annotations"] = _event_lines(histories, starts)
    return {"data": data, "layout": layout}


def _phase_traces(phase: str, every: int, shown: Sequence[tuple[int, str, Step]]) -> list[Figure]:
    name = phase if every == 1 else f"{phase}, one in {every}"
    colour, symbol = _PHASES.get(phase, _OTHER_PHASE)
    texts = [
        f"{run}, iteration {record.iteration}, {phase}" + ("" if record.plan is None else f", plan {record.plan}")
        for _, run, record in shown
    ]
    common = {
        "type": "scatter", "mode": "markers", "name": name, "legendgroup": phase, "text": texts,
        "x": [x for x, _, _ in shown], "marker": {"color": variable(colour), "symbol": symbol, "size": 6},
    }  # fmt: skip
    energies = {"y": [r.energy_j for _, _, r in shown], "hovertemplate": "%{text}: %{y:.4~g} J<extra></extra>"}
    times = {"y": [r.time_s for _, _, r in shown], "hovertemplate": "%{text}: %{y:.4~g} s<extra></extra>"}
    return [common | energies, common | times | _SECOND_ROW | {"showlegend": False}]


def _baseline_traces(baseline: Baseline, iterations: int) -> list[Figure]:
    name = "default clocks, " + ("measured" if baseline.is_measured else "predicted")
    common = {
        "type": "scatter", "mode": "lines", "name": name, "legendgroup": "baseline", "x": [0.5, iterations + 0.5],
        "line": {"color": variable("orange"), "dash": "dash", "width": 1.5}, "hoverinfo": "skip",
    }  # fmt: skip
    energies, times = {"y": [baseline.typical.energy_j] * 2}, {"y": [baseline.typical.time_s] * 2}
    return [common | energies, common | times | _SECOND_ROW | {"showlegend": False}]


def _event_lines(histories: Sequence[History], starts: Sequence[int]) -> tuple[list[Figure], list[Figure]]:
    lines: list[Figure] = []
    names: list[Figure] = []
    for start, history in zip(starts, histories, strict=False):
        drawn = sorted({found.after for found in history.occurrences if found.event.event in _DRAWN_EVENTS})
        lines += [_line(start + after + 0.5, "soft", "dot") for after in drawn[:_MOST_EVENTS]]
        if len(histories) > 1:
            lines.append(_line(start + 0.5, "soft", "solid"))
            # On three lines in turns: names of short runs would overlap.
            line = {"yshift": _LINE_PX * (len(names) % 3)}
            names.append({"x": start + 0.5, "xanchor": "left", "text": history.name, **_AT_THE_BOTTOM, **line})
    return lines, names


def trend_figure(trend: Trend) -> Figure:
    """Draw how energy and time under plans compare with default clocks, over the job's life."""
    data = []
    layout = _two_rows(("energy [%]", "time [%]"), trend.x_title, None)
    for name, fractions, row in (("energy", trend.energy, ""), ("time", trend.time, "2")):
        values = [100 * fraction for fraction in fractions]
        trace = _trace(Series(name, trend.x, values, "blue", "solid", "circle", texts=trend.texts))
        data.append(trace | {"xaxis": f"x{row}", "yaxis": f"y{row}"})
        layout[f"yaxis{row}"]["range"] = _range([0.0, *values], _LEAST_PERCENT)
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": 0, "y1": 0,
         "line": {"color": variable("orange"), "dash": "dash", "width": 1.5}}
        for axis in ("y", "y2")
    ]  # fmt: skip
    return {"data": data, "layout": layout | {"showlegend": False}}


def points_figure(series: Sequence[Series]) -> Figure:
    """Draw energy over iteration time of some points, on axes that show at least 10 %, so that 1 % looks small."""
    layout = _layout("iteration time [s]", "energy per iteration [J]")
    for axis in ("x", "y"):
        values = [value for one in series for value in getattr(one, axis)]
        layout[f"{axis}axis"]["range"] = _range(values, _LEAST_SHOWN * max(values))
    return {"data": [_trace(one) for one in series], "layout": layout}


def _range(values: Sequence[float], least: float) -> list[float]:
    """Return the range of an axis: the values with a margin, and at least so much from end to end."""
    low, high = min(values), max(values)
    margin = max(0.1 * (high - low), (least - (high - low)) / 2)
    return [low - margin, high + margin]


def _trace(series: Series) -> Figure:
    colour = variable(series.colour)
    modes = [name for name, used in (("lines", series.dash), ("markers", series.symbol)) if used]
    trace: Figure = {
        "type": "scatter", "mode": "+".join(modes), "name": series.name, "x": list(series.x), "y": list(series.y)
    }  # fmt: skip
    if series.dash:
        trace["line"] = {"color": colour, "dash": series.dash, "width": 2}
    if series.symbol:
        edge = {"width": 1, "color": variable("ink")} if not series.dash and series.size > 6 else {"width": 0}
        trace["marker"] = {"color": colour, "symbol": series.symbol, "size": series.size, "line": edge}
    if series.texts:
        trace |= {"text": list(series.texts), "hovertemplate": "%{text}<extra></extra>"}
    else:
        trace["hoverinfo"] = "skip"
    return trace if series.role is None else trace | {"meta": series.role}


def _line(x: float, colour: str, dash: str) -> Figure:
    line = {"color": variable(colour), "dash": dash, "width": 1}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _layout(x_title: str, y_title: str) -> Figure:
    return {**_common(), "showlegend": True, "xaxis": _axis(x_title), "yaxis": _axis(y_title)}


def _two_rows(y_titles: tuple[str, str], x_title: str, x_range: list[float] | None) -> Figure:
    both = {"range": x_range} if x_range else {}
    return {
        **_common(),
        "xaxis": _axis("") | both | {"anchor": "y", "showticklabels": False},
        "xaxis2": _axis(x_title) | both | {"anchor": "y2", "matches": "x"},
        "yaxis": _axis(y_titles[0]) | {"domain": [0.54, 1], "rangemode": "tozero", "anchor": "x"},
        "yaxis2": _axis(y_titles[1]) | {"domain": [0, 0.46], "rangemode": "tozero", "anchor": "x2"},
    }


def _axis(title: str) -> Figure:
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": variable("grid"),
        "zeroline": False,
        "automargin": True,
    }


def _common() -> Figure:
    surface, ink = variable("surface"), variable("ink")
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left"}
    return {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
        "paper_bgcolor": surface,
        "plot_bgcolor": surface,
        "margin": {"l": 64, "r": 16, "t": 24, "b": 48},
        "legend": legend,
        "hoverlabel": {"bgcolor": surface, "bordercolor": variable("line"), "font": {"color": ink}},
        "hovermode": "closest",
        "dragmode": False,
        "autosize": True,
    }
