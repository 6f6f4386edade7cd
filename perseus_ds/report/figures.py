"""The report's figures, drawn by plotly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.report.history import History
from perseus_ds.report.measured import MeasuredPoint
from perseus_ds.report.savings import Reference

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#5F6B7A"
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", GREY, "#000000")
KIND_DASHES = {
    Kind.FORWARD: "solid",
    Kind.BACKWARD: "dash",
    Kind.RECOMPUTE: "dashdot",
    Kind.TAIL: "dot",
    Kind.BACKWARD_INPUT: "longdash",
    Kind.BACKWARD_WEIGHT: "longdashdot",
}
_PHASES = {
    "run": (BLUE, "circle"),
    "observe": (ORANGE, "square"),
    "warm-up": (ORANGE, "square-open"),
    "profile": (GREEN, "cross"),
    "plan": (PURPLE, "triangle-up-open"),
}
_DRAWN_EVENTS = ("plan", "profile", "policy", "drift", "failure")
_OTHER_PHASE = (GREY, "diamond-open")
_GRID = "#E6E9ED"
_MOST_POINTS, _MOST_EVENTS = 1500, 200


def frontier_figure(
    frontier: Frontier, *, in_use: int, in_use_label: str, measured: Sequence[MeasuredPoint]
) -> go.Figure:
    """Draw energy over time of all plans, the bound, and what to compare them with; plans can be clicked."""
    figure = _figure("iteration time [s]", "energy per iteration [J]")
    plans, baseline = frontier.plans, frontier.baseline
    times, energies = [plan.time_s for plan in plans], [plan.energy_j for plan in plans]
    bounds = [plan.lower_bound_j for plan in plans]
    if None not in bounds:
        figure.add_scatter(
            x=times, y=bounds, mode="lines", name="lower bound: no plan uses less",
            line={"color": GREY, "dash": "dash"}, hovertemplate="bound at %{x:.4f} s: %{y:.1f} J<extra></extra>",
        )  # fmt: skip
    gaps = [f"{plan.gap:.2%}" if plan.gap is not None else "unknown" for plan in plans]
    texts = [
        f"<b>plan {number}</b><br>{plan.time_s:.4f} s ({plan.time_s / baseline.time_s - 1:+.2%})"
        f"<br>{plan.energy_j:.1f} J ({plan.energy_j / baseline.energy_j - 1:+.2%})<br>above the bound: {gap}"
        f"<br>clock changes: {plan.clock_changes}"
        for number, (plan, gap) in enumerate(zip(plans, gaps, strict=True))
    ]
    figure.add_scatter(
        x=times, y=energies, mode="lines+markers", name=f"{len(plans)} plans: click one", meta="plans",
        line={"color": BLUE, "width": 2}, marker={"size": 6}, text=texts, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    default = {"symbol": "square", "color": ORANGE}
    _add_point(figure, (baseline.time_s, baseline.energy_j), "everything at the highest clock", default)
    star = {"symbol": "star", "color": BLUE, "size": 17}
    _add_point(figure, (times[in_use], energies[in_use]), in_use_label, star)
    for point, symbol in zip(measured, itertools.cycle(("diamond", "x", "triangle-up", "pentagon")), strict=False):
        name = f"measured: {point.label}, median of {point.iterations}"
        _add_point(figure, (point.time_s, point.energy_j), name, {"symbol": symbol, "color": PURPLE})
    figure.add_scatter(
        x=[times[in_use]], y=[energies[in_use]], mode="markers", name="plan shown below", meta="selected",
        marker={"symbol": "circle-open", "size": 22, "color": "black", "line": {"width": 2}}, hoverinfo="skip",
    )  # fmt: skip
    _add_times(figure, frontier)
    return figure.update_layout(height=460, hovermode="closest")


def _add_times(figure: go.Figure, frontier: Frontier) -> None:
    for time_s, name in ((frontier.t_min_s, "T<sub>min</sub>"), (frontier.t_star_s, "T*")):
        figure.add_vline(time_s, line={"color": "#9AA3AE", "dash": "dot", "width": 1})
        figure.add_annotation(
            x=time_s, y=0, yref="paper", yanchor="bottom", xanchor="right", text=name, showarrow=False
        )


def history_figure(histories: Sequence[History], reference: Reference | None) -> go.Figure:
    """Draw energy and time of every iteration of all jobs, one job after the other.

    Phases are told by colour and symbol, events by dotted lines, jobs by solid ones with their name.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    iterations = [
        (start + step.number, history.name, step)
        for start, history in zip(_starts(histories), histories, strict=True)
        for step in history.steps
    ]
    for phase in dict.fromkeys(step.record.phase for _, _, step in iterations):
        shown = [(x, name, step) for x, name, step in iterations if step.record.phase == phase]
        every = math.ceil(len(shown) / _MOST_POINTS)
        label, shown = phase if every == 1 else f"{phase}, one in {every}", shown[::every]
        colour, symbol = _PHASES.get(phase, _OTHER_PHASE)
        texts = [
            f"{name}, iteration {step.record.iteration}, {phase}"
            + ("" if step.record.plan is None else f", plan {step.record.plan}")
            for _, name, step in shown
        ]
        for row, unit, values in (
            (1, "J", [step.record.energy_j for _, _, step in shown]),
            (2, "s", [step.record.time_s for _, _, step in shown]),
        ):
            figure.add_scatter(
                x=[x for x, _, _ in shown], y=values, text=texts, mode="markers", name=label, legendgroup=phase,
                showlegend=row == 1, marker={"color": colour, "symbol": symbol, "size": 6}, row=row, col=1,
                hovertemplate=f"%{{text}}: %{{y:.4~g}} {unit}<extra></extra>",
            )  # fmt: skip
    if reference is not None:
        _add_reference(figure, reference, len(iterations))
    _add_events(figure, histories)
    for title, row in (("energy [J]", 1), ("time [s]", 2)):
        figure.update_yaxes(title_text=title, rangemode="tozero", gridcolor=_GRID, zeroline=False, row=row, col=1)
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, range=[0.4, len(iterations) + 0.6])
    figure.update_xaxes(title_text="iteration", row=2, col=1)
    return _styled(figure).update_layout(height=440)


def _add_events(figure: go.Figure, histories: Sequence[History]) -> None:
    lines = []
    for start, history in zip(_starts(histories), histories, strict=True):
        drawn = sorted({o.after for o in history.occurrences if o.event.event in _DRAWN_EVENTS})
        dotted = {"color": "#9AA3AE", "width": 1, "dash": "dot"}
        lines += [(start + after + 0.5, dotted) for after in drawn[:_MOST_EVENTS]]
        if len(histories) > 1:
            lines.append((start + 0.5, {"color": GREY, "width": 1}))
            figure.add_annotation(
                x=start + 0.5, xanchor="left", y=0, yref="paper", yanchor="bottom", text=history.name, showarrow=False
            )
    # All at once: one by one, plotly takes a second for every ten.
    figure.update_layout(
        shapes=[
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line} for x, line in lines
        ]
    )


def _starts(histories: Sequence[History]) -> list[int]:
    """Return how many iterations come before each job's first."""
    return [0, *itertools.accumulate(len(history.steps) for history in histories)][: len(histories)]


def _add_reference(figure: go.Figure, reference: Reference, iterations: int) -> None:
    name = "default clocks, " + ("measured" if reference.measured else "predicted")
    for row, value in ((1, reference.energy_j), (2, reference.time_s)):
        figure.add_scatter(
            x=[0.5, iterations + 0.5], y=[value, value], mode="lines", name=name, legendgroup="reference",
            showlegend=row == 1, line={"color": ORANGE, "dash": "dash", "width": 1.5}, hoverinfo="skip", row=row, col=1,
        )  # fmt: skip


def profile_figures(profile: StageProfile) -> dict[str, go.Figure]:
    """Draw time, energy and power over clock, one curve for each stage and kind; of many stages a few."""
    figures = {}
    for what, unit in (("time", "s"), ("energy", "J"), ("power", "W")):
        figure = _figure("SM clock [MHz]", f"{what} [{unit}]")
        for stage, colour in zip(shown_stages(profile), STAGE_COLOURS, strict=False):
            for kind in [kind for s, kind in profile.keys if s == stage]:
                options = profile.options(stage, kind)
                values = {
                    "time": options.time_s,
                    "energy": options.energy_j,
                    "power": options.energy_j / options.time_s,
                }[what]
                measured = _measured(profile, stage, kind)
                figure.add_scatter(
                    x=options.clock_mhz.tolist(), y=[float(f"{v:.5g}") for v in values], mode="lines+markers",
                    line={"color": colour, "dash": KIND_DASHES[kind], "width": 1.5},
                    marker={"size": [5 if clock in measured else 0 for clock in options.clock_mhz.tolist()]},
                    hovertemplate=f"stage {stage} {kind}, %{{x}} MHz: %{{y:.4~g}} {unit}<extra></extra>",
                )  # fmt: skip
        figures[what] = figure.update_layout(height=320, showlegend=False).update_yaxes(rangemode="tozero")
    return figures


def shown_stages(profile: StageProfile) -> list[int]:
    """Return the stages that have a colour: all, or evenly spread ones."""
    stages = sorted({stage for stage, _ in profile.keys})
    return [stages[round(i)] for i in np.linspace(0, len(stages) - 1, min(len(stages), len(STAGE_COLOURS)))]


def _measured(profile: StageProfile, stage: int, kind: Kind) -> set[int]:
    """Return the clocks that were measured, not estimated from their neighbours."""
    quality = [row for row in profile.info.rows if (row.stage, row.kind) == (stage, kind)]
    clocks = profile.options(stage, kind).clock_mhz.tolist()
    return {row.clock_mhz for row in quality if row.samples > 0} if quality else set(clocks)


def _add_point(figure: go.Figure, at: tuple[float, float], name: str, marker: dict[str, Any]) -> None:
    figure.add_scatter(
        x=[at[0]], y=[at[1]], mode="markers", name=name,
        marker={"size": 11, "line": {"width": 1, "color": "black"}, **marker},
        hovertemplate=f"{name}<br>%{{x:.4f}} s, %{{y:.1f}} J<extra></extra>",
    )  # fmt: skip


def _figure(x_title: str, y_title: str) -> go.Figure:
    figure = go.Figure()
    figure.update_xaxes(title_text=x_title, gridcolor=_GRID, zeroline=False)
    figure.update_yaxes(title_text=y_title, gridcolor=_GRID, zeroline=False)
    return _styled(figure)


def _styled(figure: go.Figure) -> go.Figure:
    legend: dict[str, Any] = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left"}
    figure.update_yaxes(automargin=True, title_standoff=8)
    return figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#1B2430"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 64, "r": 16, "t": 24, "b": 48},
        legend=legend,
        dragmode=False,
    )
