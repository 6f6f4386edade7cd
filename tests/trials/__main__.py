"""Ends jobs in many scenarios and prints how long their clocks stay locked (``make trials``)."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import job
from stub_nvml.controller import build
from trials.light_job import RANKS
from trials.scenarios import DEEPSPEED, LIGHT
from trials.trial import NotPossibleError, Outcome, Scenario, attempt

_HEAD = (
    "| the job is ended by | trials | of these with locked clocks | restored by its ranks or its agent "
    "| worst, seconds | restored by the next job or `perseus-ds reset` | left locked |\n|---|---|---|---|---|---|---|"
)


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


def _attempt(scenario: Scenario, library: Path, folder: Path, seed: int, extensions: Path | None) -> Outcome:
    """Try a scenario. A trial that hangs counts as one with clocks left locked."""
    try:
        return attempt(scenario, library, folder, seed, extensions)
    except TimeoutError as error:
        print(f"{scenario.name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return Outcome(0, None)


def _left_locked(outcomes: list[Outcome]) -> int:
    return sum(each.restored_s is None and not each.restored_later for each in outcomes)


def _line(name: str, outcomes: list[Outcome]) -> str:
    """Return a row of the table."""
    restored_s = [each.restored_s for each in outcomes if each.restored_s is not None]
    locked, later = sum(each.locked > 0 for each in outcomes), sum(each.restored_later for each in outcomes)
    worst = f"{max(restored_s):.2f}" if restored_s else ""
    figures = [len(outcomes), locked, len(restored_s), worst, later, _left_locked(outcomes)]
    return f"| {name} | {' | '.join(map(str, figures))} |"


def main() -> int:
    """Run the trials. Returns 1 if a clock was left locked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=6, help="trials of each scenario")
    parser.add_argument("--deepspeed-times", type=int, default=3, help="of those with DeepSpeed's engine")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parser.parse_args()
    chosen = [each for each in [*LIGHT, *DEEPSPEED] if options.only in each.name]
    print(_HEAD, flush=True)
    sums: dict[str, list[Outcome]] = {"all": [], "the agent lives": [], "the agent is killed too": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build(folder)
        extensions = _compiled_extensions(folder) if any(each.launcher for each in chosen) else None
        for number, scenario in enumerate(chosen):
            times = options.deepspeed_times if scenario.launcher else options.times
            try:
                outcomes = [
                    _attempt(scenario, library, folder / f"{number}-{seed}", seed, extensions) for seed in range(times)
                ]
            except NotPossibleError as error:
                print(f"| {scenario.name} | not tried: {error} | | | | |", flush=True)
                continue
            print(_line(scenario.name, outcomes), flush=True)
            for kind in ("all", "the agent is killed too" if scenario.ends_agent else "the agent lives"):
                sums[kind] += outcomes
    for kind, outcomes in sums.items():
        print(_line(f"**{kind}**", outcomes))
    return int(_left_locked(sums["all"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
