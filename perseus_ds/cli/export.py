"""``perseus-ds export``: a frontier's plans for other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.zeus_plans import export_zeus
from perseus_ds.cli.arguments import Arguments, compose


class ExportArguments(Arguments):
    """Arguments of the command; ``configs/cli/export.yaml`` explains them."""

    frontier: Path
    out: Path
    format: Literal["zeus"]


def run(overrides: list[str]) -> int:
    """Write one file a plan."""
    arguments = compose("export", overrides, ExportArguments)
    paths = export_zeus(Frontier.load(arguments.frontier), arguments.out)
    print(f"Written: {len(paths)} plans, {paths[0]} (fastest) to {paths[-1].name} (most frugal)")
    return 0
