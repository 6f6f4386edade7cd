"""What charts show and in which colours, lines and symbols; matplotlib and plotly only draw it.

Hues are Okabe and Ito's, which colour-blind people can tell apart, darkened or lightened until they stand out from the
background: at least 3 : 1 for lines and symbols, 4.5 : 1 for text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.report.jobs import MeasuredPoint
from perseus_ds.units import percent


@dataclass(frozen=True)
class Colour:
    """One colour, as hexadecimal RGB, on light and on dark background."""

    light: str
    dark: str


PALETTE = {
    "ink": Colour("#1b2430", "#e6eaf0"),
    "soft": Colour("#5f6b7a", "#a3afbd"),
    "line": Colour("#d5dae1", "#3a4350"),
    "ground": Colour("#f6f7f9", "#0f1318"),
    "surface": Colour("#ffffff", "#181d24"),
    "grid": Colour("#e6e9ed", "#2b323c"),
    "blue": Colour("#0072b2", "#56b4e9"),
    "orange": Colour("#d55e00", "#f08a3c"),
    "green": Colour("#00875f", "#2fc59b"),
    "purple": Colour("#b85c93", "#e39cc3"),
    "amber": Colour("#a87400", "#e6b93c"),
    "waiting": Colour("#f1f3f6", "#222933"),
    "hatch": Colour("#c6ccd5", "#414b59"),
    "fixed": Colour("#8a94a1", "#6f7b8b"),
    "busy": Colour("#cfe5f2", "#173f58"),
    "idle": Colour("#f8dcc4", "#5a3413"),
    "warning": Colour("#7a3d00", "#ffc78a"),
    "warning-ground": Colour("#fff1e0", "#3a2610"),
}
# Distinct lines of one chart, in this order.
SERIES = ("blue", "orange", "green", "purple", "amber", "soft", "ink")
# Viridis, for clocks and powers: equal steps look equal, and still do in grey.
SCALE = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# The dash of lines and the symbol of points, by plotly's names.
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


def light(name: str) -> str:
    """Return a colour for pictures, which are on white."""
    return PALETTE[name].light


def variable(name: str) -> str:
    """Return a colour for pages, which follows light and dark."""
    assert name in PALETTE, name
    return f"var(--{name})"


def css() -> str:
    """Return the CSS variables of all colours: light, and dark where the reader prefers that and does not print."""
    lights = "".join(f"--{name}:{colour.light};" for name, colour in PALETTE.items())
    darks = "".join(f"--{name}:{colour.dark};" for name, colour in PALETTE.items())
    return (
        f":root{{color-scheme:light;{lights}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{darks}}}}}\n"
    )


QUANTITIES = {"time": "s", "energy": "J", "power": "W"}
# Two stages whose rows differ by less are drawn as one curve: they could not be told apart.
_SAME = 0.005
_ALTERNATIVES = (("green", "dash"), ("amber", "dot"), ("ink", "dashdot"), ("soft", "dot"))


@dataclass(frozen=True)
class Series:
    """Points of one kind, as a line, as symbols or both.

    Attributes:
        colour: Its name in the palette.
        dash: Of the line; None for symbols only.
        symbol: None for a line only.
        size: Of the symbol [px].
        texts: What to say of each point, in HTML; empty for nothing.
        role: What the page's script knows it by.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dash: str | None = None
    symbol: str | None = None
    size: int = 6
    texts: Sequence[str] = ()
    role: str | None = None


def frontier_series(
    frontier: Frontier, *, in_use: int | None, in_use_label: str, measured: Sequence[MeasuredPoint]
) -> list[Series]:
    """Return the lower bound, all plans, and what to compare them with."""
    plans, baseline = frontier.plans, frontier.baseline
    times_s, energies_j = [plan.time_s for plan in plans], [plan.energy_j for plan in plans]
    bounds_j = [plan.lower_bound_j for plan in plans if plan.lower_bound_j is not None]
    found = []
    if len(bounds_j) == len(plans):
        found.append(Series("lower bound: no plan uses less", times_s, bounds_j, "soft", dash="dash"))
    texts = [
        f"<b>plan {number}</b><br>{plan.time_s:.4f} s ({percent(plan.time_s / baseline.time_s - 1, 2)})"
        f"<br>{plan.energy_j:.1f} J ({percent(plan.energy_j / baseline.energy_j - 1, 2)})"
        f"<br>above the bound: {'unknown' if plan.gap is None else f'{plan.gap:.2%}'}"
        f"<br>clock changes: {plan.clock_changes}"
        for number, plan in enumerate(plans)
    ]
    name = f"{len(plans)} plans (predicted)"
    found.append(Series(name, times_s, energies_j, "blue", dash="solid", symbol="circle", texts=texts, role="plans"))
    found.append(_point("all at the highest clock (predicted)", baseline.time_s, baseline.energy_j, "orange", "square"))
    slowest_s = max(plans[-1].time_s, baseline.time_s)
    for one, (colour, line) in zip(frontier.alternatives, _ALTERNATIVES, strict=False):
        shown = [p for p in one.points if p.time_s <= slowest_s]
        dash, symbol = (None, "x") if len(shown) == 1 else (line, None)
        times_s, energies_j = [p.time_s for p in shown], [p.energy_j for p in shown]
        texts = [f"{one.name}: {p.setting}<br>{p.time_s:.4f} s, {p.energy_j:.1f} J" for p in shown]
        found.append(Series(one.name, times_s, energies_j, colour, dash=dash, symbol=symbol, size=9, texts=texts))
    if in_use is not None:
        plan = plans[in_use]
        found.append(_point(in_use_label, plan.time_s, plan.energy_j, "blue", "star"))
    for point, symbol in zip(measured, itertools.cycle(MEASURED_SYMBOLS), strict=False):
        iterations = "1 iteration" if point.iterations == 1 else f"{point.iterations} iterations"
        label = f"measured: {point.label} ({iterations})"
        found.append(_point(label, point.time_s, point.energy_j, "purple", symbol))
    return found


def _point(name: str, time_s: float, energy_j: float, colour: str, symbol: str) -> Series:
    size = 17 if symbol == "star" else 11
    text = f"{name}<br>{time_s:.4f} s, {energy_j:.1f} J"
    return Series(name, [time_s], [energy_j], colour, symbol=symbol, size=size, texts=[text])


@dataclass(frozen=True)
class Curve:
    """One kind of instruction of one stage, or of several that take the same."""

    stages: tuple[int, ...]
    kind: Kind
    colour: str
    dash: str
    symbol: str

    @property
    def label(self) -> str:
        """The stages in words."""
        return stages_in_words(self.stages)


def profile_curves(profile: StageProfile) -> list[Curve]:
    """Return the curves worth drawing: one for each group of equal stages and each kind; of many groups, a few."""
    groups = stage_groups(profile)
    shown = [groups[round(i)] for i in np.linspace(0, len(groups) - 1, min(len(groups), len(SERIES)))]
    return [
        Curve(group, kind, colour, *STYLES[kind])
        for group, colour in zip(shown, SERIES, strict=False)
        for stage, kind in profile.keys
        if stage == group[0]
    ]


def stage_groups(profile: StageProfile) -> list[tuple[int, ...]]:
    """Return the stages, those that take the same time and energy at every clock together."""
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


def stages_in_words(stages: Sequence[int]) -> str:
    """Return such as ``stages 1-3, 5``."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    parts = [f"{run[0]}\N{EN DASH}{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(parts)


def curve_values(profile: StageProfile, stage: int, kind: Kind, quantity: str) -> npt.NDArray[np.float64]:
    """Return time [s], energy [J] or power [W] at each clock of ``profile.options``, in its order."""
    o = profile.options(stage, kind)
    return {"time": o.time_s, "energy": o.energy_j, "power": o.energy_j / o.time_s}[quantity]
