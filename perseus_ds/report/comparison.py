"""Runs side by side: default clocks against plans, plans against power caps, yesterday against today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perseus_ds.artifacts.run_records import ClockRefused
from perseus_ds.errors import ConfigError
from perseus_ds.report.history import History
from perseus_ds.report.measured import MeasuredPoint, measured_points
from perseus_ds.report.sources import Sources
from perseus_ds.report.totals import JobSize

AT_POWER_LIMIT = "default clocks, at a power limit"


@dataclass(frozen=True)
class Row:
    """Iterations of one run, all at default clocks or all under one plan.

    Attributes:
        run: The run's name.
        clocks: Default clocks, the same at a power limit, or the plan.
        point: A typical one of them, of the whole job.
        size: How large the job is, as far as its profile says.
        job: The job's fingerprint; None where it is not recorded.
        simulated: Whether the run is simulated.
    """

    run: str
    clocks: str
    point: MeasuredPoint
    size: JobSize
    job: str | None
    simulated: bool

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
        rows: In the order in which they were given.
        baseline: What the others are compared with.
        why: Why that is the baseline.
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
        baseline: Name of the run, or of the row, to compare with; by default the first at default clocks, best
            without a power limit.

    Raises:
        ConfigError: Nothing was measured, or there is no such baseline.
    """
    names = _names(runs)
    rows, notes = [], []
    for found in runs:
        for history in found.histories:
            name = names[history.folder]
            points = measured_points([history])
            rows += [_row(name, point, history, found.size) for point in points]
            if not points and history.mode != "profile":
                notes.append(f"{name}: no iterations at default clocks or under a plan whose energy is known.")
    if not rows:
        raise ConfigError(f"Nothing to compare. {' '.join(notes)} Train for some steps more.")
    chosen, why = _baseline(rows, baseline)
    jobs = {row.run for row in rows if row.job != chosen.job}
    if jobs:
        notes.append(
            f"{', '.join(sorted(jobs))}: another job than {chosen.run} by model, schedule, parallelism, GPU or "
            "versions. What differs may come from that."
        )
    if any(row.clocks == AT_POWER_LIMIT for row in rows):
        notes.append(
            f"{AT_POWER_LIMIT}: the driver said that a power limit, its own or one that was set, kept clocks down."
        )
    return Comparison(tuple(rows), chosen, why, tuple(notes))


def _row(run: str, point: MeasuredPoint, history: History, size: JobSize) -> Row:
    capped = point.plan is None and is_capped(history)
    label = AT_POWER_LIMIT if capped else point.label
    return Row(run, label, replace(point, label=f"{run}: {label}"), size, history.job, history.simulated)


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
    default.sort(key=lambda row: row.clocks == AT_POWER_LIMIT)
    if wanted is not None:
        of_run = [row for row in rows if wanted in (row.run, row.name)]
        if not of_run:
            raise ConfigError(f"baseline={wanted}: expected one of {', '.join(row.name for row in rows)}.")
        return next((row for row in of_run if row in default), of_run[0]), "as asked for"
    if default:
        limited = " without a power limit" if default[-1].clocks == AT_POWER_LIMIT != default[0].clocks else ""
        return default[0], f"the first at default clocks{limited}"
    return rows[0], "the first; none is at default clocks"
