"""The facts of a report, computed from its inputs: what the page, the terminal and JSON show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from perseus_ds.artifacts.frontier import SLOWDOWNS, Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_events import of_order
from perseus_ds.artifacts.run_iterations import Sums
from perseus_ds.artifacts.run_savings import SavingSummary
from perseus_ds.progress.facts import facts_of, figures_in_words
from perseus_ds.progress.sums import Conditions, JobSums
from perseus_ds.report.inputs import Inputs, RecordedRun, label
from perseus_ds.units import (
    J_PER_KWH,
    duration,
    gpu_time,
    grams,
    joules,
    money,
    number,
    percent,
    watt_hours,
    watts,
    watts_between,
    whole,
)

_MANY = 100_000
_MOST_PLANS = 5
_MOST_PLANS_DRAWN = 3
_LEAST_PARTS = 4
_LEAST_STEPS = 5
"""Minimum number of iterations per part of a trend. Fewer would show mostly noise."""
_MORE_TIME = 1.01
_NONE = "\N{EN DASH}"
_TIMES = {"days": 86_400.0, "hours": 3_600.0, "minutes": 60.0, "seconds": 1.0}


@dataclass(frozen=True)
class Factors:
    """Factors that convert energy of GPUs to CO2 equivalent and money, as described at ``perseus-ds report``."""

    carbon_g_per_kwh: float
    price_per_kwh: float
    currency: str
    pue: float = 1.0
    tokens_per_sample: int | None = None

    def with_pue(self, energy_j: float) -> str:
        """Return the energy of the data centre for an energy of GPUs, in words."""
        return watt_hours(energy_j * self.pue)

    def carbon_g(self, energy_j: float) -> float:
        """Return the CO2 equivalent of GPU energy [g]."""
        return energy_j * self.pue / J_PER_KWH * self.carbon_g_per_kwh

    def carbon(self, energy_j: float) -> str:
        """Return the CO2 equivalent of GPU energy, in words."""
        return grams(self.carbon_g(energy_j))

    def cost(self, energy_j: float) -> float:
        """Return the price of GPU energy in the currency."""
        return energy_j * self.pue / J_PER_KWH * self.price_per_kwh

    def price(self, energy_j: float) -> str:
        """Return the price of GPU energy, in words."""
        return money(self.cost(energy_j), self.currency)


class MeasuredPoint(NamedTuple):
    """The mean iteration under a plan, or at default clocks if the plan is None."""

    label: str
    plan: int | None
    time_s: float
    energy_j: float
    iterations: int


def measured_points(run: RecordedRun) -> list[MeasuredPoint]:
    """Return a point at default clocks and one for each plan, if they were measured, with energies of all GPUs."""
    points = []
    default = run.job.at_default_clocks
    # A run that only profiles has no iterations at default clocks except its warm-up.
    if run.start.mode != "profile":
        points += _point("default clocks", None, default)
    order = run.job.history.order
    planned = [(each.plan or 0, sums) for each, sums in run.job.of_last_frontier() if each.order == order]
    longest = sorted(planned, key=lambda pair: -pair[1].iterations)[:_MOST_PLANS_DRAWN]
    for plan, sums in sorted(longest, key=lambda pair: pair[0]):
        points += _point(f"plan {plan}", plan, sums)
    return points


def _point(name: str, plan: int | None, sums: Sums) -> list[MeasuredPoint]:
    if not sums.known:
        return []
    mean = sums.mean()
    return [MeasuredPoint(name, plan, mean.time_s, mean.energy_j, sums.compared)]


def points_of_one_pipeline(found: Inputs) -> list[MeasuredPoint]:
    """Return the points of all runs with the energies of one pipeline with one GPU per rank, as plans have.

    Runs with an unknown number of GPUs have no points.
    """
    points = []
    for run in found.runs:
        gpus_per_rank = found.gpus_per_rank(run)
        if gpus_per_rank is not None:
            name = f", run '{run.name}'" if len(found.runs) > 1 else ""
            points += [
                point._replace(label=point.label + name, energy_j=point.energy_j / gpus_per_rank)
                for point in measured_points(run)
            ]
    return points


@dataclass(frozen=True)
class Trend:
    """Iterations under plans in successive parts of a job.

    Energy and time are relative differences from default clocks, so that -0.1 is 10 % less. ``x`` is the end of each
    part: the time since the job started, in the unit that ``x_title`` names, or iterations if no times are recorded.
    """

    x: tuple[float, ...]
    x_title: str
    energy: tuple[float, ...]
    time: tuple[float, ...]
    texts: tuple[str, ...]

    @property
    def in_words(self) -> str:
        first, last = (f"{percent(self.energy[at])} energy, {percent(self.time[at])} time" for at in (0, -1))
        return f"Means of {len(self.x)} parts of the iterations under plans. First part: {first}; last part: {last}."


def trend_of(job: JobSums) -> Trend | None:
    """Return energy and time relative to default clocks over time, or None if the run is too short."""
    parts = [part for part in job.history.planned.of_at_least(_LEAST_STEPS) if part.sums.default_j]
    if len(parts) < _LEAST_PARTS:
        return None
    began = job.history.first_start.time
    is_timed = began > 0 and all(part.ended is not None for part in parts)

    x: list[float] = [part.last for part in parts]
    title = "iteration"
    if is_timed:
        times_s = [(part.ended or began) - began for part in parts]
        unit = next((name for name, size_s in _TIMES.items() if times_s[-1] >= 2 * size_s), "seconds")
        x = [time_s / _TIMES[unit] for time_s in times_s]
        title = f"{unit} since the start"
    return Trend(
        x=tuple(x),
        x_title=title,
        energy=tuple(-(part.sums.saved or 0.0) for part in parts),
        time=tuple(part.sums.slowdown or 0.0 for part in parts),
        texts=tuple(
            f"iterations {part.first} to {part.last}, plans {', '.join(map(str, sorted(part.plans)))}" for part in parts
        ),
    )


@dataclass(frozen=True)
class SavingRow:
    """A row of the table of savings, in words."""

    iterations: str
    what: str
    time_each: str
    energy_each: str
    time: str
    energy: str
    saved: str
    with_pue: str
    carbon: str
    price: str
    gpu_time: str


@dataclass(frozen=True)
class RankRow:
    """A row of the table of ranks, in words."""

    energy: str
    power: str


@dataclass(frozen=True)
class ReportedRun:
    """A run of the report.

    Attributes:
        under_plans: Which iterations ran under plans, in words.
        saving: The saving of all iterations under plans. None if there are none that can be compared.
        rows: The table of savings.
        events: The first events, each with the number of iterations before it, and the number of all.
    """

    run: RecordedRun
    saving: SavingSummary | None
    rows: tuple[SavingRow, ...]
    by_rank: tuple[RankRow, ...]
    events: tuple[tuple[int, str], ...]
    event_count: int
    trend: Trend | None

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def simulated(self) -> bool:
        return self.run.job.present.is_simulated

    @property
    def iterations(self) -> int:
        return self.run.job.history.iterations

    @property
    def has_unknown_saving(self) -> bool:
        """True if plans ran, but default clocks are not known."""
        return self.saving is None and self.run.job.planned.iterations > 0


class Tile(NamedTuple):
    """One figure, with a note on its baseline or composition."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class OtherPlan:
    """A row of the table of other plans, in words."""

    number: int
    name: str
    is_in_use: bool
    time: str
    energy: str
    saved: str
    power: str
    change: str
    carbon: str
    price: str


@dataclass(frozen=True)
class WaitTable:
    """The waits of the ranks in a measured iteration, in words: rank, waits, without waiting, against the mean."""

    title: str
    is_open: bool
    rows: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True)
class ReportFacts:
    """Everything that a report shows.

    Attributes:
        main: The main run: the last one with a saving, or otherwise with iterations.
        in_use: The plan in use, or the fastest one.
        last_plan: The most frugal plan. 0 without a frontier.
        others: Other plans. Empty without a frontier.
        slower: What a little more time would save, in words.
    """

    inputs: Inputs
    factors: Factors
    runs: tuple[ReportedRun, ...]
    main: ReportedRun | None
    tiles: tuple[Tile, ...]
    in_use: int
    last_plan: int
    others: tuple[OtherPlan, ...]
    others_of: str
    slower: str
    waits: tuple[WaitTable, ...]
    alternatives: tuple[tuple[str, tuple[str, ...]], ...]


def facts(found: Inputs, factors: Factors) -> ReportFacts:
    """Return the facts of a report."""
    runs = tuple(_reported(found, run, factors) for run in found.runs)
    candidates = [run for run in runs if run.saving is not None] or [run for run in runs if run.iterations]
    main = candidates[-1] if candidates else None
    in_use = found.plan_used or 0
    frontier = found.frontier
    planned = main.run.job.planned if main is not None and main.saving is not None else None
    return ReportFacts(
        inputs=found,
        factors=factors,
        runs=runs,
        main=main,
        tiles=tuple(_tiles(found, main, factors)),
        in_use=in_use,
        last_plan=0 if frontier is None else len(frontier.plans) - 1,
        others=() if frontier is None else tuple(_other_plans(frontier, found.plan_used, planned, factors)),
        others_of="" if planned is None else f"energy of {number(planned.iterations, 1)} iterations",
        slower="" if frontier is None else _slower(frontier, in_use),
        waits=tuple(_waits(found)),
        alternatives=() if frontier is None else tuple(_alternatives(frontier)),
    )


def figures(report: ReportFacts, now: float) -> dict[str, Any]:
    """Return the figures of a report as plain values, at a time [Unix seconds].

    Each run has those of ``watch --json``, and what follows from the inputs and factors of the report.
    """
    found, factors = report.inputs, report.factors
    runs = []
    for run in found.runs:
        of_job = facts_of(run.job, run.name, now).model_dump(mode="json")
        samples, energy_j = found.samples(run), run.job.total().energy_j
        saved_j = None if run.job.whole is None else run.job.whole.saved_j
        of_report = {
            "folder": str(run.folder),
            "gpus": found.gpus(run),
            "samples": None if samples is None else samples._asdict(),
            "carbon_g": factors.carbon_g(energy_j),
            "saved_carbon_g": None if saved_j is None else factors.carbon_g(saved_j),
            "cost": factors.cost(energy_j),
            "saved_cost": None if saved_j is None else factors.cost(saved_j),
        }
        runs.append(of_job | of_report)
    return {
        "simulated": found.simulated,
        "energy_notes": found.energy_notes,
        "factors": asdict(factors),
        "plan_in_use": found.plan_used,
        "plans": [] if found.frontier is None else [_plan_figures(plan) for plan in found.frontier.plans],
        "runs": runs,
        "files": [str(path) for path in found.files],
        "missing": found.missing,
    }


def _plan_figures(plan: FrequencyPlan) -> dict[str, float | None]:
    return {"time_s": plan.time_s, "energy_j": plan.energy_j, "lower_bound_j": plan.lower_bound_j}


def _under_plans(plans: Sequence[Conditions]) -> str:
    """Describe the iterations under plans."""
    if len(plans) == 1:
        return f"under plan {plans[0].plan}{of_order(plans[0].order)}"
    return "under both plans" if len(plans) == 2 else f"under all {len(plans)} plans"


def _plans_of(job: JobSums) -> list[Conditions]:
    return [conditions for conditions in job.by_conditions() if conditions.is_planned]


def _reported(found: Inputs, run: RecordedRun, factors: Factors) -> ReportedRun:
    job = run.job
    saving = job.under_plans if job.planned.compared else None
    return ReportedRun(
        run=run,
        saving=saving,
        rows=tuple(_rows(job, factors, found.gpus(run))) if saving is not None else (),
        by_rank=tuple(RankRow(joules(energy_j), watts(power_w)) for energy_j, power_w in job.history.by_rank),
        events=tuple((after, event.in_words()) for after, event in job.history.events),
        event_count=job.history.event_count,
        trend=trend_of(job),
    )


def _rows(job: JobSums, factors: Factors, gpus: int | None) -> Iterator[SavingRow]:
    """Yield the rows of the table of savings."""
    plans, saving, all_steps = _plans_of(job), job.under_plans, job.whole
    by_conditions = job.by_conditions()
    assert saving is not None, "iterations under plans were compared"
    if len(plans) > 1:
        longest = sorted(plans, key=lambda each: -by_conditions[each].iterations)[:_MOST_PLANS]
        for each in sorted(longest, key=lambda each: (each.frontier, each.order, each.plan or 0)):
            sums = by_conditions[each]
            if sums.compared:
                yield _row(f"under plan {each.plan}{of_order(each.order)}", sums, None, factors, gpus)
    planned = job.planned
    yield _row(_under_plans(plans), planned, saving, factors, gpus)
    if all_steps is not None and all_steps.iterations > planned.iterations:
        yield _row("in all, profiling counted", _with_saving(job.total(), all_steps), all_steps, factors, gpus)
    scale = _MANY / planned.compared
    many = Sums(
        iterations=_MANY,
        compared=_MANY,
        compared_s=scale * planned.compared_s,
        known=_MANY if planned.known else 0,
        compared_j=scale * planned.compared_j,
        default_s=scale * planned.default_s,
        default_j=scale * planned.default_j,
    )
    yield _row(f"{_under_plans(plans)}, at that rate", many, saving, factors, gpus)


def _with_saving(total: Sums, saving: SavingSummary) -> Sums:
    """Return the sums over all iterations, as if all of them were compared."""
    return Sums(
        iterations=total.iterations,
        compared=total.iterations,
        compared_s=total.time_s,
        known=total.iterations - total.without_energy,
        compared_j=total.energy_j,
        default_s=total.time_s + saving.gained_s,
        default_j=total.energy_j + saving.saved_j,
    )


def _row(what: str, sums: Sums, saving: SavingSummary | None, factors: Factors, gpus: int | None) -> SavingRow:
    mean = sums.mean()
    return SavingRow(
        iterations=whole(sums.iterations),
        what=what,
        time_each=duration(mean.time_s),
        energy_each=joules(mean.energy_j),
        time="" if saving is None else _time(saving),
        energy="" if saving is None else _energy(saving),
        saved=joules(sums.saved_j),
        with_pue=factors.with_pue(sums.saved_j),
        carbon=factors.carbon(sums.saved_j),
        price=factors.price(sums.saved_j),
        gpu_time="" if gpus is None else gpu_time(sums.gained_s * gpus),
    )


def _tiles(found: Inputs, main: ReportedRun | None, factors: Factors) -> Iterator[Tile]:
    if main is not None and main.saving is not None:
        yield from _saved(main.run.job, main.saving, found.gpus(main.run), factors)
    if found.frontier is not None:
        yield _plan(found.frontier, found.plan_used, None if main is None else main.run.job)
    if main is not None:
        yield from _total(main.run, found, factors)
        yield from _power(main.run.job)
        for figure in figures_in_words(facts_of(main.run.job, main.name, now=0.0)):
            yield Tile(figure.title, figure.value, figure.note)


def _energy(saving: SavingSummary) -> str:
    return "undecided" if saving.saved is None else saving.energy


def _time(saving: SavingSummary) -> str:
    return "undecided" if saving.slowdown is None else saving.time


def _saved(job: JobSums, saving: SavingSummary, gpus: int | None, factors: Factors) -> Iterator[Tile]:
    planned, under = job.planned, _under_plans(_plans_of(job))
    mean = planned.mean()
    energy = f"{joules(mean.energy_j, like=mean.default_j)} instead of {joules(mean.default_j)}"
    time = f"{duration(mean.time_s, like=mean.default_s)} instead of {duration(mean.default_s)}"
    yield Tile(f"Energy {under}", _energy(saving), f"{energy} an iteration at {saving.baseline}; {saving.certainty}")
    yield Tile(
        f"Iteration time {under}", _time(saving), f"{time}, mean of {planned.compared} iterations; {saving.certainty}"
    )
    all_steps = job.whole
    if all_steps is None:
        return
    change = "" if all_steps.saved is None else f"{all_steps.energy} energy, "
    yield Tile(
        "Saved so far", factors.with_pue(all_steps.saved_j),
        f"{change}{factors.carbon(all_steps.saved_j)} CO₂e, {factors.price(all_steps.saved_j)}; all "
        f"{all_steps.iterations} iterations, profiling counted, PUE {number(factors.pue, 3)}; {all_steps.certainty}",
    )  # fmt: skip
    if gpus is not None:
        gained_s = all_steps.gained_s * gpus
        change = "" if all_steps.slowdown is None else f"{all_steps.time} time, "
        yield Tile(
            f"GPU time {'gained' if gained_s >= 0 else 'lost'}", gpu_time(abs(gained_s)),
            f"{change}{gpus} GPUs, all iterations; {all_steps.certainty}",
        )  # fmt: skip


def _plan(frontier: Frontier, used: int | None, job: JobSums | None) -> Tile:
    number_ = 0 if used is None else used
    plan, last = frontier.plans[number_], len(frontier.plans) - 1
    plans = [] if job is None or used is None else job.plans()
    order = 0 if job is None else job.history.order
    own = next((one for one in plans if (one.plan, one.order) == (number_, order)), None)
    parts = []
    if own is None:
        change = plan.energy_j / frontier.baseline.energy_j - 1
        slower = plan.time_s / frontier.baseline.time_s - 1
        parts.append(f"predicted: {percent(change)} energy, {percent(slower)} time against the highest clock")
    elif len(plans) > 1:
        parts.append(f"its {own.iterations} iterations alone: {joules(own.saved_j)} saved")
    if plan.gap is not None:
        parts.append(f"{number(plan.gap * 100, 2)} % above the lower bound at its speed")
    title = "Fastest plan, none was run" if used is None else "Plan in use"
    return Tile(title, f"{number_} of 0\N{EN DASH}{last}", "; ".join(parts))


def _power(job: JobSums) -> Iterator[Tile]:
    power = job.history.power
    if power is not None:
        which = "of the run" if job.history.plan is None else "under plans"
        mean, change = watts(power.mean_w, like=power.highest_w), watts(power.change_w, like=power.highest_w)
        yield Tile(
            "Power over a second", watts_between(power.lowest_w, power.highest_w),
            f"{mean} on average, {change} at most from one to the next; all GPUs, "
            f"iterations {which}, grouped to at least a second: {duration(power.window_s)}",
        )  # fmt: skip


def _total(run: RecordedRun, found: Inputs, factors: Factors) -> Iterator[Tile]:
    total, gpus, samples = run.job.total(), found.gpus(run), found.samples(run)
    parts = [f"{total.iterations} iterations in {duration(total.time_s)}"]
    if gpus is not None:
        parts.append(gpu_time(total.time_s * gpus))
    if total.time_s and not total.without_energy:
        parts.append(f"{watts(total.energy_j / total.time_s)} on average")
    if total.without_energy:
        parts.append(f"not counting {total.without_energy} iterations with unknown energy")
    parts.append(f"{factors.carbon(total.energy_j)} CO₂e")
    parts.append(factors.price(total.energy_j))
    yield Tile("The whole run", factors.with_pue(total.energy_j), ", ".join(parts))
    if samples is not None:
        length = factors.tokens_per_sample
        each = whole(samples.each) if samples.each.is_integer() else f"on average {number(samples.each)}"
        note = f"{each} samples an iteration, GPUs only"
        per_token = f"; {number(samples.energy_j / length)} J a token of {length}" if length else ""
        yield Tile("Energy of a sample", joules(samples.energy_j), note + per_token)


def _slower(frontier: Frontier, in_use: int) -> str:
    """Describe what the plan that takes a little longer would save."""
    used = frontier.plans[in_use]
    slower = frontier.lookup(used.time_s * _MORE_TIME)
    if slower == used:
        return f"No plan that takes up to 1 % longer than plan {in_use} uses less energy."
    energy, time = percent(slower.energy_j / used.energy_j - 1, 2), percent(slower.time_s / used.time_s - 1, 2)
    number_ = frontier.plans.index(slower)
    return f"1 % more time than plan {in_use} allows plan {number_}: {energy} energy at {time} time."


def _other_plans(frontier: Frontier, used: int | None, planned: Sums | None, factors: Factors) -> Iterator[OtherPlan]:
    """Yield plans at several slowdowns, including the plan in use, the fastest first."""
    plans, in_use = frontier.plans, used or 0
    chosen = {plans.index(frontier.within(slowdown)) for slowdown in (*SLOWDOWNS, 0.10)}
    for each in sorted(chosen | {0, in_use, len(plans) - 1}):
        plan, now = plans[each], plans[in_use]
        energy = plan.energy_j / now.energy_j - 1
        change_j = energy * (planned.energy_j if planned is not None else 0.0)
        sign = "+" if change_j > 0 else ""
        power = plan.power
        span = _NONE if power is None else watts_between(power.lowest_w, power.highest_w)
        mark = "" if each != in_use else " (in use)" if used is not None else " (the fastest)"
        yield OtherPlan(
            number=each,
            name=f"plan {each}{mark}",
            is_in_use=each == in_use,
            time=percent(plan.time_s / now.time_s - 1, 2),
            energy=percent(energy, 2),
            saved=percent(1 - plan.energy_j / frontier.baseline.energy_j),
            power=span,
            change=sign + joules(change_j),
            carbon=sign + factors.carbon(change_j),
            price=sign + factors.price(change_j),
        )


def _waits(found: Inputs) -> Iterator[WaitTable]:
    for place, (run, iteration) in enumerate(found.measured):
        busy_s = iteration.busy_s
        mean_s, most_s = sum(busy_s) / len(busy_s), max(busy_s)
        rows = tuple(
            (
                f"rank {rank}{', the slowest' if own_s == most_s else ''}",
                f"{100 * waits:.1f} %",
                duration(own_s),
                percent(own_s / mean_s - 1) if mean_s else "",
            )
            for rank, (waits, own_s) in enumerate(zip(iteration.waits, busy_s, strict=True))
        )
        is_last = place == len(found.measured) - 1
        yield WaitTable(label(run, iteration), is_last and len(busy_s) <= 16, rows)


def _alternatives(frontier: Frontier) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, saved in frontier.savings().items():
        yield name, tuple(_NONE if value is None else f"{100 * value:.1f} %" for value in saved)
