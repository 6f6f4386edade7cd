"""The frontiers of several schedules side by side, as text and as a picture."""

from __future__ import annotations

import itertools
from pathlib import Path

from matplotlib.figure import Figure

from perseus_ds.artifacts.schedule_table import ComparedSchedule, ScheduleTable
from perseus_ds.report.palette import MEASURED_SYMBOLS, SERIES, light
from perseus_ds.report.pictures import MARKERS
from perseus_ds.report.units import percent

_DPI = 200
_SYMBOLS = ("circle", "square", *MEASURED_SYMBOLS)


def schedules_text(table: ScheduleTable) -> str:
    """Return the table to print, what its columns mean, and what it takes for granted."""
    first = table.schedules[0]
    width = max(len("schedule"), *(len(one.name) for one in table.schedules))
    lines = [
        f"Predicted from {table.profile}{_subject(table)}; one pipeline, one GPU for each rank.",
        "",
        f"{'':{width}} {'micro-':>7} {'held by':>8}   {'highest clock':>19}   {'fastest plan (T_min)':>21}   "
        f"{'least energy (T*)':>21}   {'each micro-batch':>17}",
        f"{'schedule':{width}} {'batches':>7} {'a rank':>8}   {'time [s]':>9}{'energy [J]':>10}   {'time [s]':>10}"
        f"{'saved':>11}   {'time [s]':>10}{'saved':>11}   {'time':>8}{'energy':>9}",
        *(_line(one, first, width) for one in table.schedules),
        "",
        "held by a rank: micro-batches whose activations the fullest rank holds, one of its n stages counting as 1/n.",
        "saved: energy, against the same schedule at the highest clock.",
        f"each micro-batch: the fastest plan against {first.label}, at the highest clock.",
        f"No plan can use more than {max(one.worst_gap for one in table.schedules):.2%} less energy in its time.",
    ]
    assumed = {one.name: one.assumptions for one in table.schedules if one.assumptions}
    if assumed:
        lines += ["", "Assumed, not measured:"]
        lines += [f"  {name}: {'; '.join(sentences)}." for name, sentences in assumed.items()]
    if table.simulated:
        lines.append("The profile is SIMULATED: no GPU was measured.")
    return "\n".join(lines)


def _line(one: ComparedSchedule, first: ComparedSchedule, width: int) -> str:
    (fastest_s, fastest_j), (frugal_s, frugal_j) = one.plans[0], one.plans[-1]
    share = first.micro_batches / one.micro_batches
    time, energy = share * fastest_s / first.baseline_time_s - 1, share * fastest_j / first.baseline_energy_j - 1
    return (
        f"{one.name:{width}} {one.micro_batches:7d} {max(one.held_by_rank):8.1f}   "
        f"{one.baseline_time_s:9.4g} {one.baseline_energy_j:9.5g}   "
        f"{fastest_s:10.4g}{1 - fastest_j / one.baseline_energy_j:11.1%}   "
        f"{frugal_s:10.4g}{1 - frugal_j / one.baseline_energy_j:11.1%}   {percent(time):>8} {percent(energy):>8}"
    )


def schedules_picture(table: ScheduleTable, path: Path) -> None:
    """Draw energy over time of every schedule's plans, both for each micro-batch, so that all can be compared.

    Args:
        table: The schedules.
        path: Where to write the picture; its suffix says the format.
    """
    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    axes = figure.add_subplot()
    styles = [style for number in range(len(_SYMBOLS)) for style in _styles(number)]
    for one, (symbol, colour) in zip(table.schedules, itertools.cycle(styles), strict=False):
        share = 1 / one.micro_batches
        times_s, energies_j = ([value * share for value in values] for values in zip(*one.plans, strict=True))
        hue, marker = light(colour), MARKERS[symbol]
        axes.plot(times_s, energies_j, color=hue, linewidth=1.2, marker=marker, markersize=3.5, label=one.label)
        axes.plot(
            one.baseline_time_s * share, one.baseline_energy_j * share, marker=marker, markersize=9,
            markerfacecolor="none", markeredgecolor=hue, linestyle="none",
        )  # fmt: skip
    axes.plot([], [], marker="o", markersize=9, markerfacecolor="none", markeredgecolor="black", linestyle="none",
              label="large, open: all at the highest clock")  # fmt: skip
    axes.set_xlabel("iteration time for each micro-batch [s]")
    axes.set_ylabel("energy for each micro-batch [J]")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.05, y=0.08)
    axes.legend(loc="best", frameon=True, framealpha=1, edgecolor="0.8", fontsize=9)
    figure.suptitle(f"Predicted frontiers of several schedules{_subject(table)}", fontsize=11)
    figure.savefig(path, dpi=_DPI)


def _styles(number: int) -> list[tuple[str, str]]:
    """Return a symbol for each colour; for another number, each colour has another symbol."""
    return [(_SYMBOLS[(number + index) % len(_SYMBOLS)], colour) for index, colour in enumerate(SERIES)]


def _subject(table: ScheduleTable) -> str:
    gpu = f": {table.gpu}" if table.gpu else ""
    hidden = table.simulated and "simulated" not in gpu.lower()
    return gpu + (" (SIMULATED)" if hidden else "")
