"""The jobs of a report, with their times, energies and savings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.run_records import UNDECIDED, of_order
from perseus_ds.measures import Baseline, Measured, Saving, Typical
from perseus_ds.report.sources import History, Sources, Step
from perseus_ds.units import J_PER_KWH

_MANY = 100_000
_MOST_PLANS = 5
_MOST_PLANS_DRAWN = 3
_LEAST_PARTS, _MOST_PARTS = 4, 40
_LEAST_STEPS = 5
"""Minimum number of iterations per part. Fewer would show mostly noise."""


@dataclass(frozen=True)
class Factors:
    """Factors that convert energy of GPUs to CO2 equivalent and money, as described at ``perseus-ds report``."""

    carbon_g_per_kwh: float
    price_per_kwh: float
    currency: str
    pue: float = 1.0
    tokens_per_sample: int | None = None

    def carbon_g(self, energy_j: float) -> float:
        """Return the CO2 equivalent of GPU energy [g]."""
        return energy_j * self.pue / J_PER_KWH * self.carbon_g_per_kwh

    def price(self, energy_j: float) -> float:
        """Return the price of GPU energy."""
        return energy_j * self.pue / J_PER_KWH * self.price_per_kwh


class MeasuredPoint(NamedTuple):
    """The typical iteration under a plan, or at default clocks if the plan is None."""

    label: str
    plan: int | None
    time_s: float
    energy_j: float
    iterations: int


def points_of_one_pipeline(found: Sources) -> list[MeasuredPoint]:
    """Return the points of all runs with the energies of one pipeline with one GPU per rank, as plans have.

    Runs with an unknown number of GPUs have no points.
    """
    points = []
    for history in found.histories:
        gpus_per_rank = found.gpus_per_rank(history)
        if gpus_per_rank is not None:
            run = f", run '{history.name}'" if len(found.histories) > 1 else ""
            points += [
                point._replace(label=point.label + run, energy_j=point.energy_j / gpus_per_rank)
                for point in measured_points(history)
            ]
    return points


def measured_points(history: History) -> list[MeasuredPoint]:
    """Return a point at default clocks and one for each plan, if they were measured, with energies of all GPUs."""
    series: list[tuple[int | None, Typical]] = []
    default = history.measures.baseline()
    # A run that only profiles has no iterations at default clocks except its warm-up.
    if default is not None and default.is_measured and history.last_start.mode != "profile":
        series.append((None, default.typical))
    plans = sorted(history.measures.typical_of_plans().items(), key=lambda item: -item[1].iterations)
    points = []
    for plan, typical in [*series, *sorted(plans[:_MOST_PLANS_DRAWN])]:
        if typical.energy_j is not None:
            label = "default clocks" if plan is None else f"plan {plan}"
            points.append(MeasuredPoint(label, plan, typical.time_s, typical.energy_j, typical.iterations))
    return points


@dataclass(frozen=True)
class Trend:
    """Typical iterations under plans in successive parts of a job.

    Energy and time are relative differences from default clocks, so that -0.1 is 10 % less. ``x`` is the middle of each
    part: hours since the job started, or iterations if no times are recorded.
    """

    x: tuple[float, ...]
    x_title: str
    energy: tuple[float, ...]
    time: tuple[float, ...]
    texts: tuple[str, ...]


def trend_of(history: History, baseline: Baseline) -> Trend | None:
    """Return energy and time relative to default clocks over time, or None if the run is too short."""
    steps = [step for step in history.under_plans if step.counts and step.energy_j is not None]
    count = min(_MOST_PARTS, len(steps) // _LEAST_STEPS)
    default_s, default_j = baseline.typical.time_s, baseline.typical.energy_j
    if count < _LEAST_PARTS or not default_j:
        return None
    parts = [[steps[place] for place in part] for part in np.array_split(np.arange(len(steps)), count)]
    timed = all(step.ended is not None for step in steps) and history.started > 0
    typical = [Typical.of([one.time_s for one in part], [one.energy_j for one in part]) for part in parts]
    known = [(one.time_s, one.energy_j) for one in typical if one is not None and one.energy_j is not None]

    def place(step: Step) -> float:
        return (step.ended - history.started) / 3600 if timed and step.ended is not None else step.iteration

    return Trend(
        x=tuple(statistics.median(map(place, part)) for part in parts),
        x_title="hours since the start" if timed else "iteration",
        energy=tuple(energy_j / default_j - 1 for _, energy_j in known),
        time=tuple(time_s / default_s - 1 for time_s, _ in known),
        texts=tuple(
            f"iterations {part[0].iteration} to {part[-1].iteration}, plans "
            + ", ".join(map(str, sorted({step.plan for step in part if step.plan is not None})))
            for part in parts
        ),
    )


@dataclass(frozen=True)
class ReportedJob:
    """A job of the report.

    Attributes:
        baseline: None if time and energy at default clocks are unknown.
        saving: The saving of all iterations under plans, if there are any and a baseline.
    """

    history: History
    baseline: Baseline | None
    plans: list[Measured]
    saving: Saving | None
    trend: Trend | None

    @property
    def under_plans(self) -> str:
        """The iterations under plans in words."""
        if len(self.plans) == 1:
            return "under plans" if self.plans[0].plan is None else f"under plan {self.plans[0].plan}"
        return "under both plans" if len(self.plans) == 2 else f"under all {len(self.plans)} plans"

    @property
    def doubt(self) -> str:
        """A remark on the savings if no comparison of a plan with default clocks is complete, otherwise empty."""
        is_undecided = self.baseline is not None and self.history.measures.is_undecided(self.baseline)
        return f"; {UNDECIDED}" if self.saving is not None and is_undecided else ""

    @property
    def everything(self) -> Saving | None:
        """The saving of the whole job, as in its last line. None if no iteration could be compared."""
        whole, total = self.history.whole, self.history.total
        if whole is None:
            return None
        default_s, default_j = total.time_s + whole.gained_s, total.energy_j + whole.saved_j
        return Saving(whole.steps, total.time_s, total.energy_j, default_s, default_j)

    @property
    def rows(self) -> list[tuple[str, Saving]]:
        """The rows of the table of savings: which iterations, and their saving."""
        if self.saving is None:
            return []
        everything = self.everything
        rows: list[tuple[str, Saving]] = []
        if len(self.plans) > 1:
            longest = sorted(self.plans, key=lambda one: -one.ran)[:_MOST_PLANS]
            for one in sorted(longest, key=lambda one: (*one.kind, one.plan or 0)):
                which = "plans" if one.plan is None else f"plan {one.plan}"
                rows += [(f"under {which}{of_order(one.kind.order)}", one.saving)] if one.saving else []
        rows.append((self.under_plans, self.saving))
        if everything is not None and everything.iterations > self.saving.iterations:
            rows.append(("in all, profiling counted", everything))
        return [*rows, (f"{self.under_plans}, at that rate", self.saving.times(_MANY))]


def jobs_of(found: Sources) -> list[ReportedJob]:
    """Return the jobs in the order of their starts."""
    jobs = []
    for history in found.histories:
        others = {
            other.name: other.measures  # the other runs of the same job
            for other in found.histories
            if other.folder != history.folder and other.last_start.job == history.last_start.job
        }
        plans = history.measures.plans(others)
        baseline = plans[-1].baseline if plans else history.measures.baseline(others=others)
        trend = trend_of(history, baseline) if baseline is not None and plans else None
        jobs.append(ReportedJob(history, baseline, plans, history.measures.saving(others), trend))
    return jobs


def main_job(jobs: Sequence[ReportedJob]) -> ReportedJob | None:
    """Return the main job: the last one with a saving, preferably compared with a measured baseline."""
    saved = [job for job in jobs if job.saving is not None]
    measured = [job for job in saved if job.baseline is not None and job.baseline.is_measured]
    candidates = measured or saved or [job for job in jobs if job.history.steps]
    return candidates[-1] if candidates else None
