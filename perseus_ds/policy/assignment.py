"""The plan of every pipeline of a job: the policy's, or a slower one where another pipeline takes longer anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.rank_report import JobReport
from perseus_ds.policy.decisions import stretched_plan
from perseus_ds.policy.stragglers import Straggler, straggler_of, with_reported


@dataclass(frozen=True)
class Forecast:
    """Time and energy of one iteration of the whole job, by the profile.

    Attributes:
        time_s: Iteration time [s].
        energy_j: Energy of all GPUs [J].
        default_time_s: Iteration time at default clocks [s].
        default_energy_j: Energy of all GPUs at default clocks [J].
        default_measured: Whether time and energy at default clocks were measured in this job.
    """

    time_s: float
    energy_j: float
    default_time_s: float
    default_energy_j: float
    default_measured: bool = False


@dataclass(frozen=True)
class PlanChoice:
    """The decision of rank 0.

    Attributes:
        plan: The plan that the policy asks for, as a place on the frontier.
        paused: Whether to run at default clocks.
        reported: A straggler that a user has reported.
        halts: Whether training stands still before the iteration.
    """

    plan: int
    paused: bool = False
    reported: Straggler | None = None
    halts: bool = False


@dataclass(frozen=True)
class Assignment:
    """The plans of all pipelines in an iteration, as rank 0 has decided.

    Attributes:
        choice: The decision of rank 0.
        stretch_factors: How many times as long as the policy's plan each pipeline may take.
        plans: Each pipeline's plan, as a place on the frontier.
    """

    choice: PlanChoice
    stretch_factors: tuple[float, ...]
    plans: tuple[int, ...]

    @classmethod
    def of(cls, frontier: Frontier, choice: PlanChoice, measured_factors: Sequence[float]) -> Assignment:
        """Give every pipeline its plan."""
        factors = with_reported(measured_factors, choice.reported)
        return cls(choice, factors, tuple(stretched_plan(frontier, choice.plan, factor) for factor in factors))

    @property
    def straggler(self) -> Straggler | None:
        """The pipeline all others wait for, if they do."""
        return straggler_of(self.stretch_factors)

    def status(self) -> dict[str, Any]:
        """Return the assignment as plain values, for people and records."""
        straggler = self.straggler
        return {
            "plan": self.choice.plan,
            "plans": list(self.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": self.choice.paused,
            "halts": self.choice.halts,
        }

    def forecast(self, frontier: Frontier, gpus_per_stage: int) -> Forecast:
        """Return time and energy of the job's iteration, under these plans and at default clocks.

        A pipeline that takes ``s`` times as long is charged ``s`` times its plan's energy, and the
        others wait for the slowest at blocking power: the accounting of the paper's emulation.

        Args:
            frontier: The plans.
            gpus_per_stage: GPUs of one pipeline that share a stage.
        """
        time_s, energy_j = self._job([frontier.plans[number] for number in self.plans], frontier)
        default_time_s, default_energy_j = self._job([frontier.baseline] * len(self.plans), frontier)
        return Forecast(time_s, gpus_per_stage * energy_j, default_time_s, gpus_per_stage * default_energy_j)

    def _job(self, plans: Sequence[FrequencyPlan], frontier: Frontier) -> tuple[float, float]:
        """Return time [s] and energy [J], one GPU a stage, of pipelines as slow as they are under these plans."""
        slowness = [max(self.stretch_factors) / factor for factor in self.stretch_factors]
        times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
        energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
        waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
        return max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s


@dataclass(frozen=True)
class PipelineOrder:
    """What a rank is told of rank 0's decision.

    Attributes:
        number: Of the decision, another one whenever the plan of any pipeline is another.
        plan: The plan that the policy asks for, as a place on the frontier.
        paused: Whether to run at default clocks.
        halts: Whether training stands still before the iteration.
        stretch_factor: How many times as long as the policy's plan the plan of this rank's pipeline may take.
        promised_slowdown: Of the whole job against default clocks, by the profile.
    """

    number: int
    plan: int
    paused: bool
    halts: bool
    stretch_factor: float
    promised_slowdown: float

    @classmethod
    def of_report(cls, report: JobReport) -> PipelineOrder:
        """Return what rank 0 has sent with its report."""
        return cls(
            number=report.assignment,
            plan=report.plan,
            paused=report.paused,
            halts=report.halts,
            stretch_factor=report.stretch_factor,
            promised_slowdown=report.promised_slowdown,
        )

    def as_reported(self) -> dict[str, Any]:
        """Return the fields of rank 0's report that carry it, but for the stretch factors of the pipelines."""
        return {
            "assignment": self.number,
            "plan": self.plan,
            "paused": self.paused,
            "halts": self.halts,
            "promised_slowdown": self.promised_slowdown,
        }
