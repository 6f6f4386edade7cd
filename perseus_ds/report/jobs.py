"""The jobs of a report: what their iterations take and save, in all and over time, also in CO2 and money."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from perseus_ds.artifacts.run_records import ProfileWritten
from perseus_ds.measures import Baseline, JobMeasures, Measured, Saving, Typical
from perseus_ds.report.history import History, Share, Step
from perseus_ds.report.sources import JobSize, Sources
from perseus_ds.units import J_PER_KWH

_MANY = 100_000
_MOST_PLANS = 5
_MOST_PLANS_DRAWN = 3
_LEAST_PARTS, _MOST_PARTS = 4, 40
_LEAST_STEPS = 5
"""Per part: fewer iterations would mostly show their noise."""


@dataclass(frozen=True)
class Factors:
    """What energy of GPUs stands for.

    Attributes:
        carbon_g_per_kwh: CO2 equivalent emitted for a kilowatt-hour [g].
        pue: Energy that the whole data centre draws for each joule of a GPU.
        tokens_per_sample: Sequence length; None where there are no tokens.
    """

    carbon_g_per_kwh: float
    price_per_kwh: float
    currency: str
    pue: float = 1.0
    tokens_per_sample: int | None = None

    def carbon_g(self, energy_j: float) -> float:
        """Return the CO2 equivalent of energy of GPUs [g]."""
        return energy_j * self.pue / J_PER_KWH * self.carbon_g_per_kwh

    def price(self, energy_j: float) -> float:
        """Return what energy of GPUs costs."""
        return energy_j * self.pue / J_PER_KWH * self.price_per_kwh


@dataclass(frozen=True)
class MeasuredPoint:
    """A typical one of several iterations of the same kind.

    Attributes:
        plan: The plan's place on the frontier; None at default clocks.
        energy_j: Energy of one pipeline, one GPU per rank [J].
    """

    label: str
    plan: int | None
    time_s: float
    energy_j: float
    iterations: int


def measured_points(
    histories: Sequence[History], *, pipelines: int = 1, others: Sequence[History] = ()
) -> list[MeasuredPoint]:
    """Return for each run a point at default clocks and one for each plan, as far as there are such iterations.

    Args:
        histories: The runs; where there are several, labels say which one a point is from.
        pipelines: GPUs per pipeline rank: the energies of the job are so many times those of one pipeline.
        others: Other runs, whose iterations at default clocks may be more.
    """
    points = []
    for history in histories:
        run = f", run '{history.name}'" if len(histories) > 1 else ""
        found: list[tuple[str, int | None, Typical]] = []
        default = default_clocks_of(history, [*histories, *others])
        if default is not None:
            found.append(("default clocks", None, default.typical))
        plans = sorted(history.measures.typical_of_plans().items(), key=lambda item: -item[1].iterations)
        found += [(f"plan {plan}", plan, typical) for plan, typical in sorted(plans[:_MOST_PLANS_DRAWN])]
        points += [
            MeasuredPoint(f"{label}{run}", plan, typical.time_s, typical.energy_j / pipelines, typical.iterations)
            for label, plan, typical in found
            if typical.energy_j is not None
        ]
    return points


def default_clocks_of(history: History, histories: Sequence[History]) -> Baseline | None:
    """Return the iterations of a run at default clocks that are worth showing beside those of other runs.

    Those of a run that only profiles are its warm-up; a few are none where another run of the job has more.
    """
    found = history.measures.verdict or history.measures.longest_at_default_clocks()
    if found is None or history.mode == "profile":
        return None
    best = history.measures.baseline(others=runs_of_the_same_job(history, histories))
    is_best = best is None or (best.run is None and best.is_measured)
    return found if found.is_enough or is_best else None


def runs_of_the_same_job(history: History, histories: Sequence[History]) -> dict[str, JobMeasures]:
    """Return what the iterations of the other runs of a job take, by the names of the runs."""
    return {one.name: one.measures for one in histories if one.folder != history.folder and one.job == history.job}


@dataclass(frozen=True)
class RunTotals:
    """All iterations of a job.

    Attributes:
        time_s: All of them together [s].
        energy_j: All of them together, of all GPUs [J].
        without_energy: Iterations whose energy could not be read, and is not in ``energy_j``.
    """

    iterations: int
    time_s: float
    energy_j: float
    without_energy: int
    size: JobSize

    @property
    def gpu_s(self) -> float | None:
        """GPU-seconds."""
        return None if self.size.gpus is None else self.time_s * self.size.gpus

    @property
    def energy_per_sample_j(self) -> float | None:
        """Over the iterations whose energy is known [J]."""
        known = self.iterations - self.without_energy
        return None if self.size.samples is None or not known else self.energy_j / (known * self.size.samples)


def totals_of(history: History, size: JobSize) -> RunTotals:
    """Return what a job took."""
    steps = history.steps
    known = [step.energy_j for step in steps if step.energy_j is not None]
    return RunTotals(
        iterations=len(steps),
        time_s=sum(step.time_s for step in steps),
        energy_j=sum(known),
        without_energy=len(steps) - len(known),
        size=size,
    )


@dataclass(frozen=True)
class Trend:
    """Typical iterations of equal parts of those under plans.

    Attributes:
        x: Middle of each part: hours since the job started, or iterations where no times are recorded.
        energy: Against default clocks, as a fraction: -0.1 is 10 % less.
    """

    x: tuple[float, ...]
    x_title: str
    energy: tuple[float, ...]
    time: tuple[float, ...]
    texts: tuple[str, ...]


def trend_of(history: History, baseline: Baseline) -> Trend | None:
    """Return how energy and time compare with default clocks over time; None for a run too short to tell."""
    steps = [step for step in history.under_plans if not step.disturbed and step.energy_j is not None]
    count = min(_MOST_PARTS, len(steps) // _LEAST_STEPS)
    default_s, default_j = baseline.typical.time_s, baseline.typical.energy_j
    if count < _LEAST_PARTS or not default_j:
        return None
    edges = [round(part * len(steps) / count) for part in range(count + 1)]
    parts = [steps[first:last] for first, last in pairwise(edges)]
    timed = all(step.ended is not None for step in steps) and history.started > 0
    typical = [Typical.of([one.time_s for one in part], [one.energy_j for one in part]) for part in parts]
    known = [(one.time_s, one.energy_j) for one in typical if one is not None and one.energy_j is not None]
    return Trend(
        x=tuple(statistics.median(_hours(step, history) if timed else step.number for step in part) for part in parts),
        x_title="hours since the start" if timed else "iteration",
        energy=tuple(energy_j / default_j - 1 for _, energy_j in known),
        time=tuple(time_s / default_s - 1 for time_s, _ in known),
        texts=tuple(
            f"iterations {part[0].iteration} to {part[-1].iteration}, plans "
            + ", ".join(map(str, sorted({step.plan for step in part if step.plan is not None})))
            for part in parts
        ),
    )


def _hours(step: Step, history: History) -> float:
    assert step.ended is not None
    return (step.ended - history.started) / 3600


@dataclass(frozen=True)
class Job:
    """A job of the report.

    Attributes:
        shares: Its energy by rank; empty where that is not known.
        baseline: What its plans are compared with; None where nothing says what default clocks take.
        plans: What its iterations under each plan take.
        saving: What all of them saved; None if it ran under no plan, or nothing says what default clocks take.
        trend: How that developed; None where it is too short to tell.
    """

    history: History
    totals: RunTotals
    shares: list[Share]
    baseline: Baseline | None
    plans: list[Measured]
    saving: Saving | None
    trend: Trend | None

    @property
    def under_plans(self) -> str:
        """The iterations under plans in words."""
        return f"under plan {self.plans[0].plan}" if len(self.plans) == 1 else f"under all {len(self.plans)} plans"

    @property
    def everything(self) -> Saving | None:
        """All iterations, so that the cost of finding the plans counts."""
        if self.saving is None or self.baseline is None or self.baseline.typical.energy_j is None:
            return None
        profiles = [found.event for found in self.history.occurrences if isinstance(found.event, ProfileWritten)]
        count = self.totals.iterations
        default_s, default_j = count * self.baseline.typical.time_s, count * self.baseline.typical.energy_j
        lost_s, lost_j = (sum(getattr(event, name) or 0.0 for event in profiles) for name in ("lost_s", "lost_j"))
        time_s, energy_j = default_s - self.saving.gained_s + lost_s, default_j - self.saving.saved_j + lost_j
        return Saving(count, time_s, energy_j, default_s, default_j)

    @property
    def rows(self) -> list[tuple[str, Saving]]:
        """What a table shows of its savings: which iterations, and what they saved."""
        everything = self.everything
        if self.saving is None or everything is None:
            return []
        rows: list[tuple[str, Saving]] = []
        if len(self.plans) > 1:
            longest = sorted(self.plans, key=lambda one: -one.ran)[:_MOST_PLANS]
            for one in sorted(longest, key=lambda one: one.plan or 0):
                saving = Saving.of([one])
                rows += [(f"under plan {one.plan}", saving)] if saving else []
        rows.append((self.under_plans, self.saving))
        if everything.iterations > self.saving.iterations:
            rows.append(("in all, profiling counted", everything))
        return [*rows, (f"{self.under_plans}, at that rate", self.saving.times(_MANY))]


def jobs_of(found: Sources) -> list[Job]:
    """Return the jobs in the order they were started."""
    return [_job(history, found) for history in found.histories]


def main_job(jobs: Sequence[Job]) -> Job | None:
    """Return the job whose figures stand first: the last one that saved something, best against what was measured."""
    saved = [job for job in jobs if job.saving is not None]
    measured = [job for job in saved if job.baseline is not None and job.baseline.is_measured]
    candidates = measured or saved or [job for job in jobs if job.history.steps]
    return candidates[-1] if candidates else None


def _job(history: History, found: Sources) -> Job:
    others = runs_of_the_same_job(history, found.histories)
    plans = history.measures.plans(others)
    baseline = plans[-1].baseline if plans else history.measures.baseline(others=others)
    return Job(
        history=history,
        totals=totals_of(history, found.size),
        shares=history.by_rank.shares(),
        baseline=baseline,
        plans=plans,
        saving=history.measures.saving(others),
        trend=trend_of(history, baseline) if baseline is not None and plans else None,
    )
