"""A profile as a picture: time, energy and power over clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.denoise import estimate_all

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676", "#000000")
_STYLES = {
    Kind.FORWARD: ("-", "o"),
    Kind.BACKWARD: ("--", "s"),
    Kind.TAIL: (":", "^"),
    Kind.RECOMPUTE: ("-.", "v"),
    Kind.BACKWARD_INPUT: ("--", "<"),
    Kind.BACKWARD_WEIGHT: ("--", ">"),
}
_MOST_STAGES = len(_COLOURS)


def profile_picture(profile: StageProfile, path: Path, *, blocking_power_w: float) -> None:
    """Draw the rows, the fitted curves with two standard deviations, and the options worth choosing from.

    Args:
        profile: What to draw; of more than eight stages, eight evenly spread ones.
        path: Where to write the picture; its suffix says the format.
        blocking_power_w: What a waiting GPU draws [W].
    """
    clocks = sorted({m.clock_mhz for m in profile.measurements})
    fitted = estimate_all(profile, range(clocks[0], clocks[-1] + 1, max(1, (clocks[-1] - clocks[0]) // 120)))
    stages = sorted({stage for stage, _ in profile.keys})
    shown = [stages[round(i)] for i in np.linspace(0, len(stages) - 1, min(len(stages), _MOST_STAGES))]
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, what in zip(panels, ("time", "energy", "power"), strict=True):
        for colour, stage in zip(_COLOURS, shown, strict=False):
            for kind in [kind for s, kind in profile.keys if s == stage]:
                _draw(axes, what, (profile, fitted), (stage, kind), (colour, blocking_power_w))
        axes.set_xlabel("SM clock [MHz]")
        axes.set_ylabel({"time": "time [s]", "energy": "energy [J]", "power": "power [W]"}[what])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize="small")
    title = f"{profile.info.gpu or 'profile'}: rows (filled: Pareto-optimal), fitted curves ± 2 standard deviations"
    figure.suptitle(title + (" — SIMULATED" if profile.info.simulated else ""), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw(
    axes: Axes,
    what: str,
    profiles: tuple[StageProfile, StageProfile],
    key: tuple[int, Kind],
    drawn: tuple[str, float],
) -> None:
    (profile, fitted), (colour, blocking_power_w) = profiles, drawn
    line, marker = _STYLES[key[1]]
    curve, options = fitted.options(*key), profile.options(*key)
    values = {"time": curve.time_s, "energy": curve.energy_j, "power": curve.energy_j / curve.time_s}[what]
    errors = {r.clock_mhz: r for r in fitted.info.rows if (r.stage, r.kind) == key}
    found = [errors.get(int(clock)) for clock in curve.clock_mhz]
    column = "time_relative_error" if what == "time" else "energy_relative_error"
    band = np.array([(getattr(row, column) or 0.0) if row else 0.0 for row in found])
    axes.plot(curve.clock_mhz, values, color=colour, linestyle=line, linewidth=1, label=f"stage {key[0]} {key[1]}")
    axes.fill_between(
        curve.clock_mhz, values * (1 - 2 * band), values * (1 + 2 * band), color=colour, alpha=0.15, linewidth=0
    )
    points = {"time": options.time_s, "energy": options.energy_j, "power": options.energy_j / options.time_s}[what]
    worth = np.isin(options.clock_mhz, options.pareto(blocking_power_w).clock_mhz)
    for chosen, filling in ((worth, colour), (~worth, "white")):
        axes.scatter(
            options.clock_mhz[chosen], points[chosen], s=12, marker=marker, linewidths=0.7, edgecolors=colour, c=filling
        )
