"""Draws the realised share of each scenario of ``fleet.py``, in two versions of perseus-ds. GPUs are SIMULATED.

    cd benchmarks/results
    python ../fleet_picture.py fleet-before.json fleet-today.json ../../docs/images/fleet.png

Beside the name of a scenario is what its best plans save. A scenario with nothing to save has no share. One that was
not run in the earlier version has one mark.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def scenarios(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of each scenario of a file, in its order."""
    return {each["name"]: each for each in json.loads(path.read_text())["scenarios"]}


def draw(before: dict[str, dict[str, Any]], today: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw a row for each scenario, the first one at the top: realised shares, and how late the job was."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.21 * len(today) + 1.1), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    rows = {name: len(today) - number for number, name in enumerate(today)}
    shares = {name: 100 * one["realised_mean"] for name, one in today.items() if one["realised_mean"] is not None}
    earlier = {name: 100 * before[name]["realised_mean"] for name in shares if name in before}
    for name, share in earlier.items():
        left.plot([share, shares[name]], [rows[name]] * 2, color="0.75", zorder=1)
    left.plot([*earlier.values()], [rows[name] for name in earlier], "x", color="C1", label="before")
    left.plot([*shares.values()], [rows[name] for name in shares], "o", color="C0", label="today")
    late = [100 * one["late_worst"] for one in today.values()]
    right.plot(late, [*rows.values()], "o", color="C0")
    right.axvline(0, color="0.5", linewidth=1)
    labels = [f"{name} ({100 * one['possible']:.1f} %)" for name, one in today.items()]
    left.set_yticks([*rows.values()], labels, fontsize=7)
    right.tick_params(axis="y", length=0)
    left.set_xlim(min(0.0, *shares.values()) - 3, max(105.0, 5 + max(shares.values())))
    right.margins(x=0.12)
    left.set_ylim(0, len(today) + 1)
    left.set_xlabel("energy saved, of what the best plans would have saved [%]")
    right.set_xlabel("late [%]")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    left.legend(loc="lower left")
    figure.suptitle("SIMULATED jobs; in brackets: what the best plans save", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("today", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(scenarios(arguments.before), scenarios(arguments.today), arguments.picture)


if __name__ == "__main__":
    main()
