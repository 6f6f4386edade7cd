"""Adds up iterations, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from perseus_ds.artifacts.run_records import IterationRecord, PlanTotals


@dataclass
class Tally:
    """Iterations, all of them together; the names are those of the record of a job's end.

    Attributes:
        iterations: How many.
        time_s: Their time [s].
        energy_j: Their energy, of all GPUs [J].
        without_energy: How many have an energy that could not be read.
        clock_changes: Clock changes of all GPUs.
        clock_skips: Clock changes left out.
        planned: How many ran under plans, and are known at default clocks.
        planned_s: Time of those [s].
        planned_j: Energy of those [J].
        default_s: Time of those at default clocks [s].
        default_j: Energy of those at default clocks [J].
        default_measured: Whether the job has measured what the last of those takes at default clocks.
    """

    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = 0
    clock_changes: int = 0
    clock_skips: int = 0
    planned: int = 0
    planned_s: float = 0.0
    planned_j: float = 0.0
    default_s: float = 0.0
    default_j: float = 0.0
    default_measured: bool = False

    def add(self, record: IterationRecord) -> None:
        """Add an iteration."""
        self.iterations += 1
        self.time_s += record.time_s
        self.clock_changes += record.clock_changes
        self.clock_skips += record.clock_skips
        if record.energy_j is None:
            self.without_energy += 1
            return
        self.energy_j += record.energy_j
        if record.default_energy_j is not None:
            self.planned += 1
            self.planned_s += record.time_s
            self.planned_j += record.energy_j
            # Version 1 of the records has no time at default clocks.
            self.default_s += record.time_s if record.default_time_s is None else record.default_time_s
            self.default_j += record.default_energy_j
            self.default_measured = record.default_measured

    def of_plan(self, plan: int) -> PlanTotals:
        """Return the planned iterations, which all ran under one plan."""
        return PlanTotals(
            plan=plan,
            iterations=self.planned,
            time_s=self.planned_s,
            energy_j=self.planned_j,
            default_s=self.default_s,
            default_j=self.default_j,
        )
