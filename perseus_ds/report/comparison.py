"""Compares runs, such as default clocks with plans, or plans with power caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from perseus_ds.artifacts.profile import energy_note
from perseus_ds.artifacts.run_records import ClockRefused
from perseus_ds.errors import ConfigError
from perseus_ds.report.figures import MEASURED_SYMBOLS, SERIES, points_figure, trace
from perseus_ds.report.jobs import MeasuredPoint, measured_points
from perseus_ds.report.page import rendered
from perseus_ds.report.sources import History, Sources
from perseus_ds.units import columns, duration, joules, percent, watts, whole


@dataclass(frozen=True)
class Row:
    """The typical iteration of one run, of the whole job, either at default clocks or under one plan.

    The number of samples per iteration is None if it is unknown.
    """

    history: History
    point: MeasuredPoint
    samples: int | None

    @property
    def name(self) -> str:
        """The run, and its clocks or plan."""
        return f"{self.history.name}: {self.point.label}"

    @property
    def is_of_verdict(self) -> bool:
        """True if the job's verdict compared these iterations at default clocks with a plan."""
        return self.point.plan is None and self.history.measures.verdict is not None

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs [W]."""
        return self.point.energy_j / self.point.time_s

    @property
    def energy_per_sample_j(self) -> float | None:
        """Energy of one sample [J], or None if the job's size is unknown."""
        return self.point.energy_j / self.samples if self.samples else None


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs with a baseline, which is one of the rows, and the reason why it was chosen."""

    rows: tuple[Row, ...]
    baseline: Row
    why: str
    notes: tuple[str, ...]

    def time(self, row: Row) -> float:
        """Return the iteration time relative to the baseline: 0.1 is 10 % more."""
        return row.point.time_s / self.baseline.point.time_s - 1

    def energy(self, row: Row) -> float:
        """Return the energy relative to the baseline: 0.1 is 10 % more."""
        return row.point.energy_j / self.baseline.point.energy_j - 1


def compare(runs: Sequence[Sources], baseline: str | None = None) -> Comparison:
    """Compare runs.

    The baseline is a run or a row with the given name. By default, it consists of iterations at default clocks:
    preferably those of a plan's verdict, otherwise the longest series.
    """
    found = [(history, each.samples(history)) for each in runs for history in each.histories]
    histories = [history for history, _ in found]
    _name_runs(histories)
    rows, notes = [], []
    for history, samples in found:
        points = measured_points(history)
        rows += [Row(history, point, samples) for point in points]
        if not points and history.last_start.mode != "profile":
            notes.append(f"{history.name}: no iterations of known energy at default clocks or under a plan.")
    if all(row.point.plan is not None for row in rows):
        predicted = ((history, _predicted(history), samples) for history, samples in found)
        rows += [Row(history, point, samples) for history, point, samples in predicted if point is not None][:1]
    if not rows:
        raise ConfigError(f"Nothing to compare. {' '.join(notes)} Train for more steps.")
    chosen, why = _baseline(rows, baseline)
    job = chosen.history.last_start.job
    if others := sorted({row.history.name for row in rows if row.history.last_start.job != job}):
        notes.append(
            f"{', '.join(others)}: not the same job as {chosen.history.name}: model, schedule, parallelism, GPU or "
            "versions differ, which may explain differences."
        )
    notes += [f"{h.name}: {text}." for h in histories if (text := energy_note(h.last_start.settings))]
    settings = {h.name: str(h.last_start.settings) for h in histories if h.last_start.settings is not None}
    if len(set(settings.values())) > 1:
        notes += [f"{name}: GPUs with {what}." for name, what in settings.items()]
    capped = sorted(history.name for history in histories if _is_capped(history))
    if 0 < len(capped) < len(histories):
        notes.append(
            f"{', '.join(capped)}: at default clocks, a power limit of the GPUs or another one kept clocks low."
        )
    return Comparison(tuple(rows), chosen, why, tuple(notes))


def _predicted(history: History) -> MeasuredPoint | None:
    """Return the profile's prediction for default clocks if too few iterations were measured there."""
    baseline = history.measures.baseline()
    if baseline is None or baseline.is_measured or baseline.typical.energy_j is None:
        return None
    return MeasuredPoint(str(baseline), None, baseline.typical.time_s, baseline.typical.energy_j, 0)


def _is_capped(history: History) -> bool:
    """Return whether a power limit kept clocks low while the job ran at default clocks."""
    refusals = [event for _, event in history.events if isinstance(event, ClockRefused)]
    return any(event.clock_mhz is None and any("power" in reason for reason in event.reasons) for event in refusals)


def _name_runs(histories: Sequence[History]) -> None:
    """Name each run by its folder, with as many parents as necessary to distinguish it."""
    parts = [history.folder.resolve().parts for history in histories]
    depth = 1
    while len({found[-depth:] for found in parts}) < len(set(parts)):
        depth += 1
    for history, found in zip(histories, parts, strict=True):
        history.name = "/".join(found[-depth:])


def _baseline(rows: Sequence[Row], wanted: str | None) -> tuple[Row, str]:
    if wanted is not None:
        of_run = [row for row in rows if wanted in (row.history.name, row.name)]
        if not of_run:
            raise ConfigError(f"--baseline {wanted}: expected one of {', '.join(row.name for row in rows)}.")
        return next((row for row in of_run if row.point.plan is None), of_run[0]), "as requested"
    default = [row for row in rows if row.point.plan is None]
    if not default:
        return rows[0], "the first one; none is at default clocks"
    best = max(default, key=lambda row: (row.is_of_verdict, row.point.iterations))
    if best.is_of_verdict:
        return best, "with which its job compared its plans"
    return best, "the longest series at default clocks" if best.point.iterations else "none were measured"


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    traces = []
    for row, colour, symbol in zip(comparison.rows, cycle(SERIES), cycle(MEASURED_SYMBOLS), strict=False):
        point, symbol_ = row.point, "star" if row is comparison.baseline else symbol
        texts = [f"{row.name}<br>{duration(point.time_s)}, {joules(point.energy_j)}"]
        traces.append(trace(row.name, [point.time_s], [point.energy_j], colour, symbol=symbol_, size=16, texts=texts))
    return rendered(
        "comparison.html",
        {"figures": {"comparison": points_figure(traces)}},
        title="Perseus: runs compared",
        eyebrow="perseus-ds compare",
        heading="Runs compared",
        facts=[f"baseline: {comparison.baseline.name}"],
        simulated=any(row.history.simulated for row in comparison.rows),
        missing=[],
        comparison=comparison,
    )


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines for a terminal."""
    table = [("run", "iterations", "time", "", "energy", "", "power", "a sample")]
    for row in comparison.rows:
        point, is_baseline = row.point, row is comparison.baseline
        time = "baseline" if is_baseline else percent(comparison.time(row))
        energy = "" if is_baseline else percent(comparison.energy(row))
        table.append(
            (row.name, whole(point.iterations), duration(point.time_s), time, joules(point.energy_j), energy,
             watts(row.power_w), joules(row.energy_per_sample_j))
        )  # fmt: skip
    lines = columns(table)
    lines.append(f"A typical iteration of all GPUs, against {comparison.baseline.name}: {comparison.why}.")
    lines += comparison.notes
    if runs := sorted({row.history.name for row in comparison.rows if row.history.simulated}):
        lines.append(f"SIMULATED: {', '.join(runs)}.")
    return "\n".join(lines)
