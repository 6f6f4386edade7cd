"""A profile as a picture: time, energy and power over clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.profiler.denoise import estimate_all
from perseus_ds.report.palette import light
from perseus_ds.report.pictures import LINE_STYLES, MARKERS, save_picture
from perseus_ds.report.series import QUANTITIES, Curve, curve_values, profile_curves


def profile_picture(profile: StageProfile, path: Path, *, blocking_power_w: float) -> None:
    """Draw the rows, the fitted curves with two standard deviations, and the options worth choosing from.

    Args:
        profile: What to draw; stages that take the same are one curve, and of many curves a few are shown.
        path: Where to write the picture; its suffix says the format.
        blocking_power_w: What a waiting GPU draws [W].
    """
    clocks = sorted({m.clock_mhz for m in profile.measurements})
    fitted = estimate_all(profile, range(clocks[0], clocks[-1] + 1, max(1, (clocks[-1] - clocks[0]) // 120)))
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (quantity, unit) in zip(panels, QUANTITIES.items(), strict=True):
        for curve in profile_curves(profile):
            _draw(axes, quantity, (profile, fitted), curve, blocking_power_w)
        axes.set_xlabel("SM clock [MHz]")
        axes.set_ylabel(f"{quantity} [{unit}]")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize="small")
    title = f"{profile.info.gpu or 'profile'}: rows (filled: Pareto-optimal), fitted curves ± 2 standard deviations"
    figure.suptitle(title + (" — SIMULATED" if profile.info.simulated else ""), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path, 160)


def _draw(
    axes: Axes, quantity: str, profiles: tuple[StageProfile, StageProfile], curve: Curve, blocking_power_w: float
) -> None:
    profile, fitted = profiles
    stage, kind, colour = curve.stages[0], curve.kind, light(curve.colour)
    clocks, values = fitted.options(stage, kind).clock_mhz, curve_values(fitted, stage, kind, quantity)
    errors = {r.clock_mhz: r for r in fitted.info.rows if (r.stage, r.kind) == (stage, kind)}
    found = [errors.get(int(clock)) for clock in clocks]
    column = "time_relative_error" if quantity == "time" else "energy_relative_error"
    band = np.array([(getattr(row, column) or 0.0) if row else 0.0 for row in found])
    line = LINE_STYLES[curve.dash]
    axes.plot(clocks, values, color=colour, linestyle=line, linewidth=1, label=f"{curve.label} {kind}")
    axes.fill_between(clocks, values * (1 - 2 * band), values * (1 + 2 * band), color=colour, alpha=0.15, linewidth=0)
    options, points = profile.options(stage, kind), curve_values(profile, stage, kind, quantity)
    worth = np.isin(options.clock_mhz, options.pareto(blocking_power_w).clock_mhz)
    marker = MARKERS[curve.symbol]
    for chosen, filling in ((worth, colour), (~worth, "white")):
        axes.scatter(
            options.clock_mhz[chosen], points[chosen], s=12, marker=marker, linewidths=0.7, edgecolors=colour, c=filling
        )
