"""A comparison of runs as a page and as text."""

from __future__ import annotations

from perseus_ds.report.comparison import Comparison, Row
from perseus_ds.report.figures import points_figure
from perseus_ds.report.palette import MEASURED_SYMBOLS, SERIES
from perseus_ds.report.rendering import rendered
from perseus_ds.report.series import Series
from perseus_ds.report.units import duration, joules, percent, watts, whole

_HEADINGS = ("run", "iterations", "time", "", "energy", "", "power", "a sample")


def comparison_page(comparison: Comparison) -> str:
    """Return the page."""
    series = []
    for number, row in enumerate(comparison.rows):
        symbol = "star" if row is comparison.baseline else MEASURED_SYMBOLS[number % len(MEASURED_SYMBOLS)]
        text = f"{row.name}<br>{duration(row.point.time_s)}, {joules(row.point.energy_j)}"
        series.append(
            Series(
                row.name, [row.point.time_s], [row.point.energy_j], SERIES[number % len(SERIES)], symbol=symbol,
                size=16, texts=[text],
            )
        )  # fmt: skip
    return rendered(
        "comparison.html",
        {"figures": {"comparison": points_figure(series)}},
        title="Perseus: runs compared",
        eyebrow="perseus-ds compare",
        heading="Runs compared",
        facts=[f"baseline: {comparison.baseline.name}"],
        simulated=comparison.simulated,
        missing=[],
        comparison=comparison,
    )


def comparison_text(comparison: Comparison) -> str:
    """Return lines of a terminal."""
    table = [_HEADINGS, *(_cells(comparison, row) for row in comparison.rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    lines.append(f"A typical iteration of all GPUs, against {comparison.baseline.name}: {comparison.why}.")
    lines += comparison.notes
    if comparison.simulated:
        lines.append("SIMULATED: " + ", ".join(sorted({row.run for row in comparison.rows if row.simulated})) + ".")
    return "\n".join(lines)


def _cells(comparison: Comparison, row: Row) -> tuple[str, ...]:
    changes = ("baseline", "") if row is comparison.baseline else (
        percent(comparison.time(row)), percent(comparison.energy(row))
    )  # fmt: skip
    return (
        row.name,
        whole(row.point.iterations),
        duration(row.point.time_s),
        changes[0],
        joules(row.point.energy_j),
        changes[1],
        watts(row.power_w),
        joules(row.energy_per_sample_j),
    )
