"""Compares runs, such as default clocks with plans, or plans with power caps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle

from perseus_ds.artifacts.profile import energy_note
from perseus_ds.artifacts.run_savings import SavingSummary, with_error
from perseus_ds.errors import ConfigError
from perseus_ds.progress.sums import AT_DEFAULT_CLOCKS, Conditions
from perseus_ds.report.facts import MeasuredPoint
from perseus_ds.report.figures import MEASURED_SYMBOLS, SERIES, points_figure, trace
from perseus_ds.report.inputs import Inputs, RecordedRun
from perseus_ds.report.page import rendered
from perseus_ds.units import columns, duration, joules, percent, watts, whole


@dataclass(frozen=True)
class ComparedRow:
    """The mean iteration of one run, of the whole job, at default clocks or under plans.

    Attributes:
        samples: Mean number of samples per iteration; None if it is unknown.
        saving: The saving of a run under plans; None at default clocks.
    """

    run: RecordedRun
    point: MeasuredPoint
    samples: float | None
    saving: SavingSummary | None

    @property
    def name(self) -> str:
        """The run, and its clocks or plan."""
        return f"{self.run.name}: {self.point.label}"

    @property
    def power(self) -> str:
        """Mean power of all GPUs, in words."""
        return watts(self.point.energy_j / self.point.time_s)

    @property
    def energy_per_sample(self) -> str:
        """Energy of one sample, in words."""
        return joules(self.point.energy_j / self.samples if self.samples else None)


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs with a baseline, which is one of the rows, and the reason why it was chosen."""

    rows: tuple[ComparedRow, ...]
    baseline: ComparedRow
    why: str
    notes: tuple[str, ...]

    def time(self, row: ComparedRow) -> str:
        """Return the change of the iteration time relative to the baseline, in words."""
        return self._change(row, row.point.time_s / self.baseline.point.time_s - 1, "slowdown_error", "time")

    def energy(self, row: ComparedRow) -> str:
        """Return the change of energy relative to the baseline, in words."""
        return self._change(row, row.point.energy_j / self.baseline.point.energy_j - 1, "saved_error", "energy")

    def _change(self, row: ComparedRow, change: float, error: str, figure: str) -> str:
        """Return a change with its error, or the number of pairs if the plans of a run are undecided."""
        if row.saving is None:
            return percent(change)
        if row.saving.saved is None:
            return str(getattr(row.saving, figure))
        return with_error(change, getattr(row.saving, error))


def compare(runs: Sequence[Inputs], baseline: str | None = None) -> Comparison:
    """Compare runs.

    The baseline is a run or a row with the given name. By default, it consists of iterations at default clocks:
    preferably what default clocks take for the iterations under plans, otherwise the longest series.
    """
    inputs = [each for each in runs for _ in each.runs]
    found = _named([run for each in runs for run in each.runs])
    rows, notes = [], []
    for each, run in zip(inputs, found, strict=True):
        of_run = _rows(each, run)
        rows += of_run
        if not of_run and run.start.mode != "profile":
            notes.append(f"{run.name}: no iterations of known energy at default clocks or under a plan.")
    if not rows:
        raise ConfigError(f"Nothing to compare. {' '.join(notes)} Train for more steps.")
    chosen, why = _baseline(rows, baseline)
    if others := sorted({row.run.name for row in rows if row.run.start.job != chosen.run.start.job}):
        notes.append(
            f"{', '.join(others)}: not the same job as {chosen.run.name}: model, schedule, parallelism, GPU or "
            "versions differ, which may explain differences."
        )
    notes += [f"{row.run.name}: the saving is {row.saving.certainty}." for row in rows if row.saving is not None]
    notes += [f"{run.name}: {text}." for run in found if (text := energy_note(run.start.settings))]
    settings = {run.name: str(run.start.settings) for run in found if run.start.settings is not None}
    if len(set(settings.values())) > 1:
        notes += [f"{name}: GPUs with {what}." for name, what in settings.items()]
    capped = sorted(run.name for run in found if _is_capped(run))
    if 0 < len(capped) < len(found):
        notes.append(
            f"{', '.join(capped)}: at default clocks, a power limit of the GPUs or another one kept clocks low."
        )
    return Comparison(tuple(rows), chosen, why, tuple(notes))


def _rows(inputs: Inputs, run: RecordedRun) -> list[ComparedRow]:
    """Return a row at default clocks, and one under plans if there are iterations under plans."""
    job, rows = run.job, []
    planned, default = job.planned, job.at_default_clocks
    saving = job.under_plans
    if planned.known and saving is not None:
        mean = planned.mean()
        plans = {conditions.plan for conditions in job.by_conditions() if conditions.is_planned}
        name = f"plan {plans.pop()}" if len(plans) == 1 else "plans"
        default_point = MeasuredPoint("default clocks", None, mean.default_s, mean.default_j, default.compared)
        point = MeasuredPoint(name, 0, mean.time_s, mean.energy_j, planned.compared)
        samples = _samples(inputs, run, lambda conditions: conditions.is_planned)
        rows += [ComparedRow(run, default_point, samples, None), ComparedRow(run, point, samples, saving)]
    elif default.known and run.start.mode != "profile":
        mean = default.mean()
        point = MeasuredPoint("default clocks", None, mean.time_s, mean.energy_j, default.compared)
        samples = _samples(inputs, run, lambda conditions: conditions.phase in AT_DEFAULT_CLOCKS)
        rows.append(ComparedRow(run, point, samples, None))
    return rows


def _samples(inputs: Inputs, run: RecordedRun, wanted: Callable[[Conditions], bool]) -> float | None:
    """Return the mean number of samples of a job's iterations under some conditions. None if it is unknown."""
    found = inputs.samples(run, wanted)
    return None if found is None else found.each


def _is_capped(run: RecordedRun) -> bool:
    """Return whether a power limit kept clocks low while the job ran at default clocks."""
    at_default_clocks = [event for event in run.job.history.refused.values() if event.clock_mhz is None]
    reasons = chain.from_iterable(event.reasons for event in at_default_clocks)
    return any("power" in reason for reason in reasons)


def _named(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs, each named by its folder, with as many parents as necessary to distinguish it."""
    parts = [run.folder.resolve().parts for run in runs]
    depth = 1
    while len({found[-depth:] for found in parts}) < len(set(parts)):
        depth += 1
    return [replace(run, name="/".join(found[-depth:])) for run, found in zip(runs, parts, strict=True)]


def _baseline(rows: Sequence[ComparedRow], wanted: str | None) -> tuple[ComparedRow, str]:
    if wanted is not None:
        of_run = [row for row in rows if wanted in (row.run.name, row.name)]
        if not of_run:
            raise ConfigError(f"--baseline {wanted}: expected one of {', '.join(row.name for row in rows)}.")
        return next((row for row in of_run if row.point.plan is None), of_run[0]), "as requested"
    planned = {row.run.name for row in rows if row.saving is not None}
    default = [row for row in rows if row.point.plan is None]
    best = max(default, key=lambda row: (row.run.name in planned, row.point.iterations))
    if best.run.name in planned:
        return best, "what default clocks take for the iterations under its plans"
    return best, "the longest series at default clocks"


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
        simulated=any(row.run.job.present.is_simulated for row in comparison.rows),
        missing=[],
        comparison=comparison,
    )


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines for a terminal."""
    table = [("run", "iterations", "time", "", "energy", "", "power", "a sample")]
    for row in comparison.rows:
        point, is_baseline = row.point, row is comparison.baseline
        time = "baseline" if is_baseline else comparison.time(row)
        energy = "" if is_baseline else comparison.energy(row)
        table.append(
            (row.name, whole(point.iterations), duration(point.time_s), time, joules(point.energy_j), energy, row.power,
             row.energy_per_sample)
        )  # fmt: skip
    lines = columns(table)
    lines.append(f"A mean iteration of all GPUs, against {comparison.baseline.name}: {comparison.why}.")
    lines += comparison.notes
    if runs := sorted({row.run.name for row in comparison.rows if row.run.job.present.is_simulated}):
        lines.append(f"SIMULATED: {', '.join(runs)}.")
    return "\n".join(lines)
