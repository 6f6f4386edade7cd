"""Draws the realised share of each scenario of ``fleet.py``, in two versions of perseus-ds. GPUs are SIMULATED.

    cd benchmarks/results
    python ../fleet_picture.py fleet-before.json fleet-today.json ../../docs/images/fleet.png

Scenarios with nothing to save have no share. A scenario that was not run in the earlier version has one mark.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def shares(path: Path) -> dict[str, float]:
    """Return the mean realised share of each scenario of a file, in its order."""
    scenarios = json.loads(path.read_text())["scenarios"]
    return {each["name"]: each["realised_mean"] for each in scenarios if each["realised_mean"] is not None}


def draw(before: dict[str, float], today: dict[str, float], path: Path) -> None:
    """Draw a row for each scenario, the first one at the top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.21 * len(today) + 1.1), layout="constrained")
    axes = figure.add_subplot()
    rows = {name: len(today) - number for number, name in enumerate(today)}
    for name, row in rows.items():
        if name in before:
            axes.plot([100 * before[name], 100 * today[name]], [row, row], color="0.75", zorder=1)
    known = [name for name in rows if name in before]
    axes.plot([100 * before[name] for name in known], [rows[name] for name in known], "x", color="C1", label="before")
    axes.plot([100 * today[name] for name in rows], list(rows.values()), "o", color="C0", label="today")
    axes.set_yticks(list(rows.values()), list(rows), fontsize=7)
    axes.set_xlim(min(0.0, 100 * min(today.values())), max(105.0, 100 * max(today.values()) + 5))
    axes.set_ylim(0, len(today) + 1)
    axes.set_xlabel("energy saved, of what the best plans would have saved [%], SIMULATED")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("today", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(shares(arguments.before), shares(arguments.today), arguments.picture)


if __name__ == "__main__":
    main()
