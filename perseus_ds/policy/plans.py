"""The plans of all pipelines of a job in iterations of one order, and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.policy.decisions import MARGIN
from perseus_ds.savings import Default


@dataclass(frozen=True)
class Forecast:
    """Time and energy of all GPUs in a mean iteration, as promised by plans and at default clocks.

    Those at default clocks were either measured in this job or come from the profile.

    Attributes:
        is_refuted: Whether they come from a profile from which passes deviate by more than ``max_drift``.
    """

    time_s: float
    energy_j: float
    default_time_s: float
    default_energy_j: float
    default_measured: bool = False
    is_refuted: bool = False

    @property
    def slowdown(self) -> float:
        """Slowdown relative to default clocks, as a fraction."""
        return self.time_s / self.default_time_s - 1

    @property
    def saved(self) -> float:
        """Saving of energy relative to default clocks, as a fraction."""
        return 1 - self.energy_j / self.default_energy_j


class _Cost(NamedTuple):
    """Time [s] and energy [J] of an iteration of the job, with one GPU per stage."""

    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Plans:
    """Frequency plans of an order for all pipelines.

    Attributes:
        dag: DAG of its schedule.
        plan: Index of the goal's plan on the frontier.
        stretch_factors: For each pipeline, the time that its plan may take relative to that of the goal's plan.
        plans: Index of each pipeline's plan.
        promised_slowdown: Slowdown of the whole job relative to default clocks, from the profile.
        promised_power: Power relative to default clocks at which plans keep their promises of time and energy.
        forecast: Prediction for an iteration of the whole job. None if default clocks are not known.
    """

    frontier: Frontier
    dag: Dag
    plan: int
    stretch_factors: tuple[float, ...]
    plans: tuple[int, ...]
    promised_slowdown: float = 0.0
    promised_power: float = 1.0
    forecast: Forecast | None = None

    @classmethod
    def of(
        cls, frontier: Frontier, dag: Dag, plan: int, stretch_factors: Sequence[float], lateness: float = 0.0
    ) -> Plans:
        """Give each pipeline the slowest plan that does not delay the others.

        ``lateness`` is the fraction by which plans take longer than promised in this job. Plans that are faster by this
        fraction are chosen, so that the job keeps the promise of the goal's plan.
        """

        def cost_of(plans: Sequence[int]) -> _Cost:
            return _cost([frontier.plans[number] for number in plans], stretch_factors, frontier)

        promised = [stretched_plan(frontier, plan, factor) for factor in stretch_factors]
        plans = [stretched_plan(frontier, plan, factor / (1 + lateness)) for factor in stretch_factors]
        default = _cost([frontier.baseline] * len(plans), stretch_factors, frontier)
        time_ratio = cost_of(promised).time_s / default.time_s
        return cls(
            frontier=frontier,
            dag=dag,
            plan=plan,
            stretch_factors=tuple(stretch_factors),
            plans=tuple(plans),
            promised_slowdown=time_ratio - 1,
            promised_power=cost_of(plans).energy_j / default.energy_j / time_ratio,
        )

    def forecast_from(self, default: Default, *, is_refuted: bool = False) -> Forecast:
        """Return what is promised, given what default clocks take."""
        time_s = default.time_s * (1 + self.promised_slowdown)
        return Forecast(
            time_s=time_s,
            energy_j=time_s * self.promised_power * default.power_w,
            default_time_s=default.time_s,
            default_energy_j=default.energy_j,
            default_measured=default.is_measured,
            is_refuted=is_refuted and not default.is_measured,
        )

    def of_pipeline(self, pipeline: int) -> FrequencyPlan:
        return self.frontier.plans[self.plans[pipeline]]

    @property
    def shown_plan(self) -> int:
        """Index on the frontier of the plan of the first pipeline, that of rank 0."""
        return self.plans[0]

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the clocks."""
        return id(self.frontier), self.plans


def stretched_plan(frontier: Frontier, plan: int, factor: float) -> int:
    """Return the plan of a pipeline that may take ``factor`` times as long as ``plan``: that of min(T', T*).

    With a factor below 1 it is a faster plan.
    """
    deadline_s = frontier.plans[plan].time_s * factor * (1 - MARGIN)
    if factor >= 1 and deadline_s <= frontier.plans[plan].time_s:
        return plan
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))


def _cost(plans: Sequence[FrequencyPlan], stretch_factors: Sequence[float], frontier: Frontier) -> _Cost:
    """Return the cost of an iteration, given the plan of each pipeline.

    As in the emulation of the paper, a pipeline that takes ``s`` times as long uses ``s`` times its plan's energy, and
    the others wait for the slowest at blocking power.
    """
    slowness = [max(stretch_factors) / factor for factor in stretch_factors]
    times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
    energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
    waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
    return _Cost(max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s)
