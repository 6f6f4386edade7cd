"""Arguments that the commands about a training run share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Which run, and which files belong to it."""

    run: Path = argument(
        "output_dir of a training run, or a folder of several with their profile and frontier", word=True
    )
    out: Path | None = argument(
        "file to write, or an existing folder for it; by default in the folder of the run", None
    )
    frontier: Path | None = argument(
        "frontier.json or its folder; by default in the folder of the run, or where the run says it took it from", None
    )
    profile: Path | None = argument(
        "profile.csv or its folder; by default in the folder of the run, or where the frontier says it came from", None
    )
    runs: list[Path] = argument("output folders of training runs, instead of those in the folder of the run", [])
