"""Ends jobs in all kinds of ways, many times, and prints how long their clocks stayed locked: ``make trials``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stub_nvml.controller import build
from trials import extension
from trials.light_job import RANKS
from trials.trial import NotPossibleError, Outcome, Way, attempt
from trials.ways import DEEPSPEED, LIGHT


@dataclass
class Row:
    """All trials of one way.

    Attributes:
        way: The way.
        outcomes: Of the trials.
        problem: Why there are no more.
    """

    way: Way
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""

    @property
    def restored_s(self) -> list[float]:
        """How long the clocks stayed locked, where the job's own processes restored them [s]."""
        return [outcome.restored_s for outcome in self.outcomes if outcome.restored_s is not None]

    @property
    def later(self) -> int:
        """In how many trials the next job or ``perseus-ds reset`` restored them."""
        return sum(outcome.restored_later for outcome in self.outcomes)

    @property
    def left_locked(self) -> int:
        return len(self.outcomes) - len(self.restored_s) - self.later


def run(ways: Sequence[tuple[Way, int]], folder: Path) -> list[Row]:
    """Try each way so many times."""
    library = build(folder)
    extensions = extension.compiled(folder, RANKS) if any(way.launcher for way, times in ways if times) else None
    rows = []
    for number, (way, times) in enumerate(ways):
        row = Row(way)
        rows.append(row)
        try:
            for seed in range(times):
                row.outcomes.append(_attempt(way, library, folder / f"{number}-{seed}", seed, extensions))
        except NotPossibleError as error:
            row.problem = str(error)
        print(line_of(row), file=sys.stderr, flush=True)
    return rows


def _attempt(way: Way, library: Path, folder: Path, seed: int, extensions: Path | None) -> Outcome:
    """Try a way; a trial that hangs counts as one whose clocks stay locked."""
    try:
        return attempt(way, library, folder, seed, extensions)
    except TimeoutError as error:
        print(f"{way.name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return Outcome(0, None)


def line_of(row: Row) -> str:
    """Return a row of the table."""
    if row.problem:
        return f"| {row.way.name} | not tried: {row.problem} | | | | |"
    worst = f"{max(row.restored_s):.2f}" if row.restored_s else ""
    locked = sum(outcome.locked > 0 for outcome in row.outcomes)
    figures = [len(row.outcomes), locked, len(row.restored_s), worst, row.later, row.left_locked]
    return f"| {row.way.name} | {' | '.join(map(str, figures))} |"


def table_of(rows: Sequence[Row]) -> str:
    """Return the table, in Markdown."""
    sums = [(rows, "all")]
    sums += [([row for row in rows if row.way.ends_guardians is ends], name) for ends, name in _KINDS.items()]
    lines = [_HEAD, "|---|---|---|---|---|---|---|", *map(line_of, rows)]
    for chosen, name in sums:
        together = Row(Way(f"**{name}**", end=lambda trial: 0.0), [o for row in chosen for o in row.outcomes])
        lines.append(line_of(together))
    return "\n".join(lines)


_HEAD = (
    "| the job is ended by | trials | of these with locked clocks | restored by its ranks or guardians "
    "| worst, seconds | restored by the next job or `perseus-ds reset` | left locked |"
)
_KINDS = {False: "a guardian lives", True: "both guardians are killed too"}


def main() -> int:
    """Run the trials; returns 1 if a clock was left locked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=6, help="trials of each way")
    parser.add_argument("--deepspeed-times", type=int, default=3, help="of those with DeepSpeed's engine")
    parser.add_argument("--only", default="", help="ways whose name contains this")
    chosen = parser.parse_args()
    ways = [(way, chosen.times) for way in LIGHT] + [(way, chosen.deepspeed_times) for way in DEEPSPEED]
    with tempfile.TemporaryDirectory() as folder:
        rows = run([(way, times) for way, times in ways if chosen.only in way.name], Path(folder))
    print(table_of(rows))
    return int(any(row.left_locked for row in rows))


if __name__ == "__main__":
    sys.exit(main())
