"""``perseus-ds compare``: runs side by side, as one HTML file and as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show runs side by side: default clocks, power limits, plans; also as one HTML file (comparison.html)."""

    examples = (
        "perseus-ds compare runs/default runs/plan",
        "perseus-ds compare a b baseline=b out=ab.html",
    )

    runs: list[Path] = argument("output folders of training runs", word=True)
    baseline: str | None = argument(
        "name of the run to compare with; by default the one with the most iterations at default clocks", None
    )
    out: Path | None = argument("file to write, or an existing folder for it; by default in this folder", None)


def run(arguments: Arguments) -> int:
    """Write the comparison."""
    from perseus_ds.report.comparison import compare, comparison_page, comparison_text
    from perseus_ds.report.page import write_output
    from perseus_ds.report.sources import find_sources

    comparison = compare([find_sources(folder) for folder in arguments.runs], arguments.baseline)
    out = write_output(comparison_page(comparison), arguments.out, Path(), "comparison.html")
    print(comparison_text(comparison))
    print(f"Written: {out}")
    return 0
