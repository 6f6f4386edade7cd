"""``perseus-ds compare``: runs side by side, as one HTML file and as text."""

from __future__ import annotations

from pathlib import Path

from perseus_ds.cli.arguments import Arguments, compose, quoted
from perseus_ds.report.comparison import compare
from perseus_ds.report.comparison_page import comparison_page, comparison_text
from perseus_ds.report.rendering import write_output
from perseus_ds.report.sources import find_sources


class CompareArguments(Arguments):
    """Arguments of the command; ``configs/cli/compare.yaml`` explains them."""

    runs: list[Path]
    out: Path
    baseline: str | None


def run(overrides: list[str]) -> int:
    """Write the comparison."""
    folders = [word for word in overrides if "=" not in word]
    words = [word for word in overrides if "=" in word]
    if folders:
        words.insert(0, f"runs=[{','.join(map(quoted, folders))}]")
    arguments = compose("compare", words, CompareArguments)
    comparison = compare([find_sources(folder) for folder in arguments.runs], arguments.baseline)
    out = write_output(comparison_page(comparison), arguments.out, Path(), "comparison.html")
    print(comparison_text(comparison))
    print(f"Written: {out}")
    return 0
