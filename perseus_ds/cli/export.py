"""``perseus-ds export``: a frontier's plans for Zeus and lowtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write the plans of a frontier for the server of Zeus's pipeline frequency optimizer."""

    examples = ("perseus-ds export perseus/frontier out=plans",)

    frontier: Path = argument("frontier.json, or the folder it is in", word=True)
    out: Path = argument("folder for freqs_pipeline_00000.py (the fastest plan), freqs_pipeline_00001.py, …")


def run(arguments: Arguments) -> int:
    """Write one file a plan."""
    from perseus_ds.artifacts.frontier import Frontier, export_zeus
    from perseus_ds.cli.output import check_folder

    frontier = Frontier.load(arguments.frontier)
    paths = export_zeus(frontier, check_folder(arguments.out))
    print(f"Written: {len(paths)} plans, {paths[0]} (fastest) to {paths[-1].name} (least energy)")
    return 0
