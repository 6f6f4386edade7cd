"""Energy and time of a run against the same iterations at default clocks, and what that is in CO2 and money."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.report.history import History, Step
from perseus_ds.report.measured import at_default_clocks, by_plan, measured_point
from perseus_ds.report.units import J_PER_KWH

_MANY = 100_000
_MOST_PLANS = 5
_WHEN = {
    "observe": "in observe mode",
    "default": "to compare plans with",
    "plan": "while it planned",
    "warm-up": "as it warmed up",
}


@dataclass(frozen=True)
class Factors:
    """What energy of GPUs stands for.

    Attributes:
        carbon_g_per_kwh: CO2 equivalent emitted for a kilowatt-hour [g].
        price_per_kwh: What a kilowatt-hour costs.
        currency: In which currency.
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
class Reference:
    """An iteration of the whole job at default clocks.

    Attributes:
        time_s: Iteration time [s].
        energy_j: Of the whole job [J].
        origin: Where the figures come from.
        measured: Whether they were measured, not predicted.
    """

    time_s: float
    energy_j: float
    origin: str
    measured: bool


@dataclass(frozen=True)
class Saving:
    """Iterations, and what they took and saved.

    Attributes:
        what: Which iterations.
        iterations: How many.
        time_s: All of them together [s].
        energy_j: All of them together, of the whole job [J].
        default_s: As many at default clocks [s].
        default_j: As many at default clocks [J].
    """

    what: str
    iterations: int
    time_s: float
    energy_j: float
    default_s: float
    default_j: float

    @property
    def saved_j(self) -> float:
        return self.default_j - self.energy_j

    @property
    def saved(self) -> float:
        """As a fraction of the energy at default clocks."""
        return self.saved_j / self.default_j

    @property
    def slowdown(self) -> float:
        """By how much longer they took, as a fraction of the time at default clocks."""
        return self.time_s / self.default_s - 1

    @property
    def gained_s(self) -> float:
        """How much less time they took than at default clocks [s]; negative for more."""
        return self.default_s - self.time_s

    def times(self, what: str, iterations: int) -> Saving:
        """Return as many iterations of the same kind."""
        scale = iterations / self.iterations
        sums = (value * scale for value in (self.time_s, self.energy_j, self.default_s, self.default_j))
        return Saving(what, iterations, *sums)


@dataclass(frozen=True)
class Savings:
    """What a job saved.

    Attributes:
        by_plan: By plan, of those that ran for longest, the fastest first.
        plans: How many plans were run in all.
        planned: All iterations under plans.
        everything: All iterations, so that the cost of finding the plans counts.
    """

    by_plan: dict[int, Saving]
    plans: int
    planned: Saving
    everything: Saving

    @property
    def rows(self) -> list[Saving]:
        """What a table shows of it."""
        rows = list(self.by_plan.values()) if self.plans > 1 else []
        rows.append(self.planned)
        if self.everything.iterations > self.planned.iterations:
            rows.append(self.everything)
        return [*rows, self.planned.times(f"{self.planned.what}, at that rate", _MANY)]


def reference_for(history: History, histories: Sequence[History], frontier: Frontier | None) -> Reference | None:
    """Return what an iteration takes at default clocks: measured in the same job, in another run of it, or predicted.

    Args:
        history: The job that ran under plans.
        histories: All runs of the report.
        frontier: Its plans.
    """
    observed = [h for h in histories if h is not history and h.mode == "observe" and h.job == history.job]
    found = at_default_clocks([history, *observed])
    if found is not None:
        source, steps = found
        point = measured_point("default clocks", None, steps)
        assert point is not None  # at_default_clocks returns steps with an energy
        where = "this job" if source is history else f"the run “{source.name}”"
        origin = f"measured, {len(steps)} iterations of {where} {_WHEN[steps[0].record.phase]}"
        return Reference(point.time_s, point.energy_j, origin, True)
    energies_j = [s.record.default_energy_j for s in history.under_plans if s.record.default_energy_j is not None]
    if frontier is None or not energies_j:
        return None
    energy_j = statistics.median(energies_j)
    return Reference(frontier.baseline.time_s, energy_j, "predicted by the profile, not measured", False)


def savings_of(history: History, reference: Reference) -> Savings | None:
    """Return what a job saved; None if it ran under no plan, or its energy could not be read."""
    plans = by_plan(history)
    name = f"under plan {next(iter(plans))}" if len(plans) == 1 else f"under all {len(plans)} plans"
    planned = _total(name, history.under_plans, reference)
    everything = _total("in all, profiling counted", history.steps, reference)
    if planned is None or everything is None:
        return None
    longest = sorted(list(plans)[:_MOST_PLANS])
    rows = {plan: _total(f"under plan {plan}", plans[plan], reference) for plan in longest}
    return Savings({plan: row for plan, row in rows.items() if row is not None}, len(plans), planned, everything)


def _total(what: str, steps: Sequence[Step], reference: Reference) -> Saving | None:
    usable = [(step.record.time_s, step.record.energy_j) for step in steps if step.record.energy_j is not None]
    if not usable:
        return None
    time_s, energy_j = sum(time_s for time_s, _ in usable), sum(energy_j for _, energy_j in usable)
    return Saving(what, len(usable), time_s, energy_j, len(usable) * reference.time_s, len(usable) * reference.energy_j)
