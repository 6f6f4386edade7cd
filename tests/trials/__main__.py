"""Ends jobs in many scenarios and prints how long their clocks stay locked (``make trials``)."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import job
from stub_nvml.controller import build
from trials.light_job import RANKS
from trials.scenarios import DEEPSPEED, LIGHT
from trials.trial import NotPossibleError, Outcome, Scenario, attempt


@dataclass
class Row:
    """All trials of one scenario."""

    scenario: Scenario
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""

    @property
    def restored_s(self) -> list[float]:
        """Times for which clocks stayed locked, of trials in which the job's own processes restored them [s]."""
        return [outcome.restored_s for outcome in self.outcomes if outcome.restored_s is not None]

    @property
    def later(self) -> int:
        """Number of trials in which the next job or ``perseus-ds reset`` restored them."""
        return sum(outcome.restored_later for outcome in self.outcomes)

    @property
    def left_locked(self) -> int:
        return len(self.outcomes) - len(self.restored_s) - self.later


def run(scenarios: Sequence[tuple[Scenario, int]], folder: Path) -> list[Row]:
    """Try each scenario the given number of times."""
    library = build(folder)
    needs_deepspeed = any(scenario.launcher for scenario, times in scenarios if times)
    extensions = _compiled_extensions(folder) if needs_deepspeed else None
    rows = []
    for number, (scenario, times) in enumerate(scenarios):
        row = Row(scenario)
        rows.append(row)
        try:
            for seed in range(times):
                row.outcomes.append(_attempt(scenario, library, folder / f"{number}-{seed}", seed, extensions))
        except NotPossibleError as error:
            row.problem = str(error)
        print(line_of(row), file=sys.stderr, flush=True)
    return rows


def _attempt(scenario: Scenario, library: Path, folder: Path, seed: int, extensions: Path | None) -> Outcome:
    """Try a scenario. A trial that hangs counts as one with clocks left locked."""
    try:
        return attempt(scenario, library, folder, seed, extensions)
    except TimeoutError as error:
        print(f"{scenario.name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return Outcome(0, None)


def _compiled_extensions(folder: Path) -> Path:
    """Return a folder with the extension that DeepSpeed compiles when a job starts.

    Every trial uses a copy, because a process that is killed while it loads the extension leaves a file ``lock``, and
    all others would wait for its removal.
    """
    extensions = folder / "extensions"
    if Path(job.EXTENSIONS).is_dir():
        shutil.copytree(job.EXTENSIONS, extensions, ignore=shutil.ignore_patterns("lock"))
    assert job.run(folder / "compiling", RANKS, {"TORCH_EXTENSIONS_DIR": str(extensions)}, steps=1).ranks
    extensions.mkdir(exist_ok=True)  # some versions of DeepSpeed compile nothing
    return extensions


def line_of(row: Row) -> str:
    """Return a row of the table."""
    if row.problem:
        return f"| {row.scenario.name} | not tried: {row.problem} | | | | |"
    worst = f"{max(row.restored_s):.2f}" if row.restored_s else ""
    locked = sum(outcome.locked > 0 for outcome in row.outcomes)
    figures = [len(row.outcomes), locked, len(row.restored_s), worst, row.later, row.left_locked]
    return f"| {row.scenario.name} | {' | '.join(map(str, figures))} |"


def table_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    sums = [(rows, "all")]
    sums += [([row for row in rows if row.scenario.ends_agent is ends], name) for ends, name in _KINDS.items()]
    lines = [_HEAD, "|---|---|---|---|---|---|---|", *map(line_of, rows)]
    for chosen, name in sums:
        sum_of_all = Row(Scenario(f"**{name}**", end=lambda trial: 0.0), [o for row in chosen for o in row.outcomes])
        lines.append(line_of(sum_of_all))
    return "\n".join(lines)


_HEAD = (
    "| the job is ended by | trials | of these with locked clocks | restored by its ranks or its agent "
    "| worst, seconds | restored by the next job or `perseus-ds reset` | left locked |"
)
_KINDS = {False: "the agent lives", True: "the agent is killed too"}


def main() -> int:
    """Run the trials. Returns 1 if a clock was left locked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=6, help="trials of each scenario")
    parser.add_argument("--deepspeed-times", type=int, default=3, help="of those with DeepSpeed's engine")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    chosen = parser.parse_args()
    scenarios = [(each, chosen.times) for each in LIGHT] + [(each, chosen.deepspeed_times) for each in DEEPSPEED]
    with tempfile.TemporaryDirectory() as folder:
        rows = run([(each, times) for each, times in scenarios if chosen.only in each.name], Path(folder))
    print(table_of(rows))
    return int(any(row.left_locked for row in rows))


if __name__ == "__main__":
    sys.exit(main())
