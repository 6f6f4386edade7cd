"""The frontiers of several schedules side by side, as text and as a picture."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perseus_ds.artifacts.schedule_table import ComparedSchedule, ScheduleTable
from perseus_ds.report.palette import MEASURED_SYMBOLS, SERIES, light
from perseus_ds.report.pictures import MARKERS
from perseus_ds.units import number, percent

_DPI = 200
_SYMBOLS = ("circle", "square", *MEASURED_SYMBOLS)
_LINES: tuple[Literal["-", "--"], ...] = ("-", "--")
_OPEN: dict[str, Any] = {"linestyle": "none", "markersize": 9, "markerfacecolor": "none"}


def schedules_text(table: ScheduleTable) -> str:
    """Return the table to print, what its columns mean, and what it takes for granted."""
    first = table.schedules[0]
    width = max(len("schedule"), *(len(one.name) for one in table.schedules))
    lines = [
        f"Predicted from {table.profile}{_subject(table)}; one pipeline, one GPU for each rank.",
        "",
        f"{'':{width}}   micro-   held by   fastest plan, at T_min        plan of least energy, at T*   "
        "each micro-batch",
        f"{'schedule':{width}}  batches    a rank   time [s]  energy [J]  saved   time [s]  energy [J]  saved      "
        "time    energy",
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

    def plan(time_s: float, energy_j: float) -> str:
        return f"{number(time_s):>11}{number(energy_j, 5):>12}{1 - energy_j / one.baseline_energy_j:7.1%}"

    return (
        f"{one.name:{width}} {one.micro_batches:8d}{max(one.held_by_rank):10.1f}{plan(fastest_s, fastest_j)}"
        f"{plan(frugal_s, frugal_j)}{percent(time):>10}{percent(energy):>10}"
    )


def schedules_picture(table: ScheduleTable, path: Path) -> None:
    """Draw energy over time of every schedule's plans, both for each micro-batch, so that all can be compared."""
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    axes = figure.add_subplot()
    names = [*dict.fromkeys(one.name for one in table.schedules)]
    counts = [*dict.fromkeys(one.micro_batches for one in table.schedules)]
    # A colour that is used again comes with another line.
    lines = dict(zip(names, cycle(product(_LINES, map(light, SERIES))), strict=False))
    markers = dict(zip(counts, cycle(MARKERS[symbol] for symbol in _SYMBOLS), strict=False))
    for one in table.schedules:
        (dash, colour), marker, share = lines[one.name], markers[one.micro_batches], 1 / one.micro_batches
        times_s, energies_j = ([value * share for value in values] for values in zip(*one.plans, strict=True))
        axes.plot(times_s, energies_j, color=colour, linestyle=dash, linewidth=1.2, marker=marker, markersize=3.5)
        baseline = one.baseline_time_s * share, one.baseline_energy_j * share
        axes.plot(*baseline, marker=marker, markeredgecolor=colour, **_OPEN)
    handles = [Line2D([], [], color=colour, linestyle=dash, label=name) for name, (dash, colour) in lines.items()]
    handles += [
        Line2D([], [], color="black", linestyle="none", marker=marker, markersize=5, label=f"{count} micro-batches")
        for count, marker in markers.items()
    ]
    handles.append(Line2D([], [], marker="o", markeredgecolor="black", label="open: all at the highest clock", **_OPEN))
    axes.set_xlabel("iteration time for each micro-batch [s]")
    axes.set_ylabel("energy for each micro-batch [J]")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.05, y=0.08)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"Predicted frontiers of several schedules{_subject(table)}", fontsize=11)
    figure.savefig(path, dpi=_DPI)


def _subject(table: ScheduleTable) -> str:
    gpu = f": {table.gpu}" if table.gpu else ""
    hidden = table.simulated and "simulated" not in gpu.lower()
    return gpu + (" (SIMULATED)" if hidden else "")
