"""The report's main figures: tiles of the page, and lines of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.hour_records import CostsSoFar
from perseus_ds.artifacts.record_base import Event
from perseus_ds.report.jobs import Job
from perseus_ds.report.savings import Factors, Savings
from perseus_ds.report.sources import Sources
from perseus_ds.report.totals import RunTotals
from perseus_ds.report.units import duration, gpu_time, grams, joules, money, number, percent, watt_hours, watts


@dataclass(frozen=True)
class Tile:
    """One figure.

    Attributes:
        title: Names it.
        value: The figure with its unit.
        note: What it is compared with or made of.
    """

    title: str
    value: str
    note: str


def tiles(found: Sources, job: Job | None, factors: Factors) -> list[Tile]:
    """Return the figures that answer what a run saved.

    Args:
        found: What the report is about.
        job: The job they are of; None where nothing was trained.
        factors: What energy stands for.
    """
    shown: list[Tile] = []
    if job is not None and job.savings is not None and job.reference is not None:
        shown += _saved(job.savings, job.reference.origin, found, factors)
    if found.frontier is not None:
        shown.append(_plan(found.frontier, found.plan_used, job.savings if job else None))
    if job is not None:
        shown += by_the_hour([occurrence.event for occurrence in job.history.occurrences])
        shown += _run(job.totals, factors)
    return shown


def by_the_hour(events: Sequence[Event]) -> Iterator[Tile]:
    """Yield what a job that is done cost by the signal of a cheapest policy."""
    costs = [event for event in events if isinstance(event, CostsSoFar)]
    if costs and costs[-1].done and costs[-1].fastest_cost > 0:
        note = f"against the plan of slowdown 0 throughout, by the policy's signal; {costs[-1].iterations} iterations"
        halted = f", training stood still for {duration(costs[-1].halted_s)}" if costs[-1].halted_s else ""
        yield Tile("Cost by the hour", percent(costs[-1].cost / costs[-1].fastest_cost - 1), note + halted)


def as_text(shown: Sequence[Tile], *, simulated: bool) -> str:
    """Return tiles as lines of a terminal."""
    width = max((len(tile.title) for tile in shown), default=0)
    lines = []
    for tile in shown:
        indent = " " * (width + 4)
        note = f"({tile.note})" if tile.note else ""
        lines.append(
            textwrap.fill(
                f"{tile.value}  {note}", 110, initial_indent=f"  {tile.title:{width}}  ", subsequent_indent=indent
            )
        )
    if simulated:
        lines.append("  All of it is SIMULATED: no energy was really used or saved.")
    return "\n".join(lines)


def _saved(savings: Savings, origin: str, found: Sources, factors: Factors) -> Iterator[Tile]:
    planned = savings.planned
    mean_s, mean_j = planned.time_s / planned.iterations, planned.energy_j / planned.iterations
    before_s, before_j = planned.default_s / planned.iterations, planned.default_j / planned.iterations
    yield Tile(
        f"Energy {planned.what}", percent(-planned.saved),
        f"{joules(mean_j)} instead of {joules(before_j)} an iteration at default clocks: {origin}",
    )  # fmt: skip
    yield Tile(
        f"Iteration time {planned.what}", percent(planned.slowdown),
        f"{duration(mean_s)} instead of {duration(before_s)}, mean of {planned.iterations} iterations",
    )  # fmt: skip
    total = savings.everything
    yield Tile(
        "Saved so far", watt_hours(total.saved_j * factors.pue),
        f"{grams(factors.carbon_g(total.saved_j))} CO₂e, {money(factors.price(total.saved_j), factors.currency)}; "
        f"all {total.iterations} iterations, profiling counted, PUE {number(factors.pue, 3)}",
    )  # fmt: skip
    if found.size.gpus is not None:
        gained_s = total.gained_s * found.size.gpus
        yield Tile(
            f"GPU time {'gained' if gained_s >= 0 else 'lost'}", gpu_time(abs(gained_s)),
            f"{percent(-total.gained_s / total.default_s)} time on {found.size.gpus} GPUs, all iterations",
        )  # fmt: skip


def _plan(frontier: Frontier, used: int | None, savings: Savings | None) -> Tile:
    number_ = 0 if used is None else used
    plan, last = frontier.plans[number_], len(frontier.plans) - 1
    own = savings.by_plan.get(number_) if savings is not None and used is not None else None
    parts = []
    if own is None:
        change = plan.energy_j / frontier.baseline.energy_j - 1
        slower = plan.time_s / frontier.baseline.time_s - 1
        parts.append(f"predicted: {percent(change)} energy, {percent(slower)} time against the highest clock")
    elif savings is not None and savings.plans > 1:
        parts.append(
            f"its {own.iterations} iterations alone: {percent(-own.saved)} energy, {percent(own.slowdown)} time"
        )
    if plan.gap is not None:
        parts.append(f"{number(plan.gap * 100, 2)} % above the least energy possible at its speed")
    title = "Fastest plan, none was run" if used is None else "Plan in use"
    return Tile(title, f"{number_} of 0\N{EN DASH}{last}", "; ".join(parts))


def _run(totals: RunTotals, factors: Factors) -> Iterator[Tile]:
    mean_w = totals.energy_j / totals.time_s if totals.time_s and not totals.without_energy else None
    parts = [f"{totals.iterations} iterations in {duration(totals.time_s)}"]
    if totals.gpu_s is not None:
        parts.append(gpu_time(totals.gpu_s))
    if mean_w is not None:
        parts.append(f"{watts(mean_w)} on average")
    if totals.without_energy:
        parts.append(f"not counting {totals.without_energy} iterations whose energy could not be read")
    parts.append(f"{grams(factors.carbon_g(totals.energy_j))} CO₂e")
    parts.append(money(factors.price(totals.energy_j), factors.currency))
    yield Tile("The whole run", watt_hours(totals.energy_j * factors.pue), ", ".join(parts))
    per_sample_j = totals.energy_per_sample_j
    if per_sample_j is not None:
        tokens = factors.tokens_per_sample
        note = f"{totals.size.samples} samples an iteration, GPUs only"
        per_token = f"; {number(per_sample_j / tokens)} J a token of {tokens}" if tokens else ""
        yield Tile("Energy of a sample", joules(per_sample_j), note + per_token)
