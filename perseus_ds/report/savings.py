"""What a run saved: energy against the same iterations at default clocks, and what that is in CO2 and money."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.report.history import History, Step
from perseus_ds.report.measured import at_default_clocks, measured_point

J_PER_KWH = 3.6e6
_MANY = 100_000


@dataclass(frozen=True)
class Factors:
    """What a kilowatt-hour stands for.

    Attributes:
        carbon_g_per_kwh: CO2 equivalent emitted for it [g].
        price_per_kwh: What it costs.
        currency: In which currency.
    """

    carbon_g_per_kwh: float
    price_per_kwh: float
    currency: str


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
        default_j: As many at default clocks [J].
        default_s: As many at default clocks [s].
    """

    what: str
    iterations: int
    time_s: float
    energy_j: float
    default_j: float
    default_s: float

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
    def saved_kwh(self) -> float:
        return self.saved_j / J_PER_KWH

    def times(self, what: str, iterations: int) -> Saving:
        """Return as many iterations of the same kind."""
        scale = iterations / self.iterations
        return Saving(
            what,
            iterations,
            self.time_s * scale,
            self.energy_j * scale,
            self.default_j * scale,
            self.default_s * scale,
        )


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
        origin = f"median of {len(steps)} {steps[0].record.phase} iterations of {where}, measured"
        return Reference(point.time_s, point.energy_j, origin, True)
    energies_j = [s.record.default_energy_j for s in history.under_plans if s.record.default_energy_j is not None]
    if frontier is None or not energies_j:
        return None
    energy_j = statistics.median(energies_j)
    return Reference(frontier.baseline.time_s, energy_j, "predicted by the profile, not measured", False)


def savings(history: History, reference: Reference) -> list[Saving]:
    """Return what the iterations under plans saved, and what all did, with the cost of finding the plans counted."""
    planned = _total("iterations under plans", history.under_plans, reference)
    if planned is None:
        return []
    rows = [planned]
    others = len(history.steps) - planned.iterations
    everything = _total("iterations in all, profiling counted", history.steps, reference)
    if others and everything is not None:
        rows.append(everything)
    return [*rows, planned.times("iterations under plans, at that rate", _MANY)]


def _total(what: str, steps: Sequence[Step], reference: Reference) -> Saving | None:
    usable = [(step.record.time_s, step.record.energy_j) for step in steps if step.record.energy_j is not None]
    if not usable:
        return None
    return Saving(
        what,
        len(usable),
        sum(time_s for time_s, _ in usable),
        sum(energy_j for _, energy_j in usable),
        len(usable) * reference.energy_j,
        len(usable) * reference.time_s,
    )
