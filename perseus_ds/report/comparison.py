"""Runs side by side: default clocks against plans, plans against power caps, yesterday against today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perseus_ds.artifacts.run_records import ClockRefused
from perseus_ds.errors import ConfigError
from perseus_ds.report.figures import points_figure
from perseus_ds.report.history import History
from perseus_ds.report.jobs import MeasuredPoint, measured_points
from perseus_ds.report.palette import MEASURED_SYMBOLS, SERIES
from perseus_ds.report.rendering import rendered
from perseus_ds.report.series import Series
from perseus_ds.report.sources import JobSize, Sources
from perseus_ds.units import duration, joules, percent, watts, whole


@dataclass(frozen=True)
class Row:
    """Iterations of one run, all at default clocks or all under one plan.

    Attributes:
        point: A typical one of them, of the whole job.
        job: The job's fingerprint; None where it is not recorded.
        is_of_verdict: Whether these are the iterations at default clocks that a plan was compared with in its job.
    """

    run: str
    clocks: str
    point: MeasuredPoint
    size: JobSize
    job: str | None
    simulated: bool
    is_of_verdict: bool = False

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.run}: {self.clocks}"

    @property
    def power_w(self) -> float:
        """Average power of all GPUs [W]."""
        return self.point.energy_j / self.point.time_s

    @property
    def energy_per_sample_j(self) -> float | None:
        """Energy of one sample [J]; None where the job's size is not known."""
        return self.point.energy_j / self.size.samples if self.size.samples else None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        notes: What to keep in mind, and what could not be compared.
    """

    rows: tuple[Row, ...]
    baseline: Row
    why: str
    notes: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        """Whether any of it is simulated."""
        return any(row.simulated for row in self.rows)

    def time(self, row: Row) -> float:
        """Return how much longer than in the baseline an iteration takes, as a fraction."""
        return row.point.time_s / self.baseline.point.time_s - 1

    def energy(self, row: Row) -> float:
        """Return how much more energy than in the baseline an iteration takes, as a fraction."""
        return row.point.energy_j / self.baseline.point.energy_j - 1


def compare(runs: Sequence[Sources], baseline: str | None = None) -> Comparison:
    """Compare runs.

    Args:
        runs: What was found of each.
        baseline: Name of the run, or of the row, to compare with; by default iterations at default clocks, best those
            of a plan's verdict, of several the most.

    Raises:
        ConfigError: Nothing was measured, or there is no such baseline.
    """
    names = _names(runs)
    histories = [replace(history, name=names[history.folder]) for found in runs for history in found.histories]
    sizes = [found.size for found in runs for _ in found.histories]
    rows, notes = [], []
    for history, size in zip(histories, sizes, strict=True):
        name = history.name
        points = measured_points([history], others=histories)
        rows += [_row(name, point, history, size) for point in points]
        if not points and history.mode != "profile":
            notes.append(f"{name}: no iterations at default clocks or under a plan whose energy is known.")
    if all(row.point.plan is not None for row in rows):
        rows += [row for history, size in zip(histories, sizes, strict=True) if (row := _predicted(history, size))][:1]
    if not rows:
        raise ConfigError(f"Nothing to compare. {' '.join(notes)} Train for some steps more.")
    chosen, why = _baseline(rows, baseline)
    jobs = {row.run for row in rows if row.job != chosen.job}
    if jobs:
        notes.append(
            f"{', '.join(sorted(jobs))}: another job than {chosen.run} by model, schedule, parallelism, GPU or "
            "versions. What differs may come from that."
        )
    settings = {history.name: history.settings for history in histories if history.settings is not None}
    if len(set(settings.values())) > 1:
        notes += [f"{name}: GPUs with {found}." for name, found in settings.items()]
    limited = sorted(history.name for history in histories if is_capped(history))
    if 0 < len(limited) < len(histories):
        notes.append(
            f"{', '.join(limited)}: at default clocks a power limit, the GPUs' own or another, kept clocks down."
        )
    return Comparison(tuple(rows), chosen, why, tuple(notes))


def _row(run: str, point: MeasuredPoint, history: History, size: JobSize) -> Row:
    is_of_verdict = point.plan is None and history.measures.verdict is not None
    labelled = replace(point, label=f"{run}: {point.label}")
    return Row(run, point.label, labelled, size, history.job, history.simulated, is_of_verdict)


def _predicted(history: History, size: JobSize) -> Row | None:
    """Return what the profile predicts for default clocks, where a run measured too few iterations there."""
    baseline = history.measures.baseline()
    if baseline is None or baseline.is_measured or baseline.typical.energy_j is None:
        return None
    point = MeasuredPoint(str(baseline), None, baseline.typical.time_s, baseline.typical.energy_j, 0)
    return _row(history.name, point, history, size)


def is_capped(history: History) -> bool:
    """Return whether a power limit kept GPUs below their highest clock while the job ran at default clocks."""
    refusals = [found.event for found in history.occurrences if isinstance(found.event, ClockRefused)]
    return any(event.clock_mhz is None and any("power" in reason for reason in event.reasons) for event in refusals)


def _names(runs: Sequence[Sources]) -> dict[Path, str]:
    """Return a name for each run's folder: its own, with as many of those above it as tell it from the others."""
    folders = [history.folder for found in runs for history in found.histories]
    parts = {folder: folder.resolve().parts for folder in folders}
    for depth in range(1, max(map(len, parts.values()), default=1) + 1):
        names = {folder: "/".join(found[-depth:]) for folder, found in parts.items()}
        if len(set(names.values())) == len(set(parts.values())):
            break
    return names if folders else {}


def _baseline(rows: Sequence[Row], wanted: str | None) -> tuple[Row, str]:
    default = [row for row in rows if row.point.plan is None]
    if wanted is not None:
        of_run = [row for row in rows if wanted in (row.run, row.name)]
        if not of_run:
            raise ConfigError(f"baseline={wanted}: expected one of {', '.join(row.name for row in rows)}.")
        return next((row for row in of_run if row in default), of_run[0]), "as asked for"
    if default:
        best = max(default, key=lambda row: (row.is_of_verdict, row.point.iterations))
        why = "the most iterations at default clocks" if best.point.iterations else "none were measured"
        why = "with which its job compared its plans" if best.is_of_verdict else why
        return best, why
    return rows[0], "the first; none is at default clocks"


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
