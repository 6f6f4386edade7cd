"""Chooses the plan of the next iteration by the policy, the frontier and the progress of the job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.measures import STALL
from perseus_ds.policy.policies import (
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PolicyConfig,
    ReducePolicy,
    SlowdownPolicy,
)

# Relative uncertainty of times and powers. This share of a limit is kept in reserve.
MARGIN = 0.005
# An energy counter is refreshed about every 0.1 s. If a plan draws exactly the cap, the largest of several averages of
# ten iterations may be this much below the real power.
_READING_ERROR = 0.002
_KEPT_ITERATIONS = 10
_LAST_KINDS = 100
_LEAST_POWERS = 4
_LARGEST = 10**18
_Positive = Annotated[float, Field(gt=0, le=_LARGEST)]


@dataclass(frozen=True)
class PowerCap:
    """A power cap in force, for all GPUs of the job.

    Attributes:
        headroom: A faster plan is chosen only if its power is below the cap by this fraction.
        raised: Whether a faster plan was chosen after a slower one.
    """

    watts: float
    headroom: float = 0.02
    raised: bool = False


@dataclass(frozen=True)
class Decision:
    """A decision of a policy.

    Attributes:
        plan: Index of the plan on the frontier.
        problem: Condition of the policy that cannot be met. Empty if it is met.
        failed: Whether the decision failed, so that the job runs at default clocks.
        cap: None if there is none.
    """

    plan: int
    problem: str = ""
    failed: bool = False
    cap: PowerCap | None = None


@dataclass(frozen=True)
class Situation:
    """Progress of the job.

    Attributes:
        step: Number of finished steps, including those before a checkpoint.
        iterations_per_step: Number of iterations of a step.
        time_ratio: Measured divided by predicted iteration time.
        power_ratio: Measured divided by predicted power.
        stopped_s: Time between iterations [s].
        relative_time: Time of the iterations that are planned, relative to the mean of all iterations of the job.
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        default_power_w: Power of all GPUs at default clocks [W].
        before: Previous decision. None at the start.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    power_ratio: float = 1.0
    stopped_s: float = 0.0
    relative_time: float = 1.0
    gpus_per_rank: float = 1
    default_power_w: float = 0.0
    before: Decision | None = None
    iterations_per_step: float = 1.0


class RunStatistics(FileModel):
    """Measured relative to predicted values of the last iterations, kept for later starts of the job.

    Attributes:
        stopped_s: Average time between iterations, including evaluations and checkpoints [s].
        stops: Number of iterations in this average.
        times: Iteration times divided by those of the policy's plans.
        powers: Measured power and power of these plans [W].
    """

    stopped_s: float = Field(0.0, ge=0, le=_LARGEST)
    stops: int = Field(0, ge=0, le=_LARGEST)
    times: tuple[_Positive, ...] = ()
    powers: tuple[tuple[Annotated[float, Field(ge=0, le=_LARGEST)], _Positive], ...] = ()

    def add_stop(self, time_s: float) -> None:
        """Add the time between two iterations [s]."""
        self.stops += 1
        self.stopped_s += (max(0.0, time_s) - self.stopped_s) / self.stops

    def add_iteration(
        self, *, time_s: float, energy_j: float, promised_time_s: float, promised_energy_j: float
    ) -> None:
        """Add the measured time [s] and energy [J] of an iteration, and those of the policy's plan."""
        self.times = (*self.times[1 - _KEPT_ITERATIONS :], time_s / promised_time_s)
        if math.isfinite(energy_j):  # NaN: a GPU's counter cannot be read
            power_w = energy_j / time_s, promised_energy_j / promised_time_s
            self.powers = (*self.powers[1 - _KEPT_ITERATIONS :], power_w)

    @property
    def time_ratio(self) -> float:
        """Iteration time ratio, 1 if unknown. It is a median, because single iterations may be delayed."""
        return statistics.median(self.times or [1.0])

    @property
    def power_ratio(self) -> float:
        """Power ratio, 1 if few powers are known.

        It is a ratio of sums, because counters may be refreshed less often than iterations end.
        """
        if len(self.powers) < _LEAST_POWERS:
            return 1.0
        measured_w, promised_w = map(sum, zip(*self.powers, strict=True))
        return float(measured_w / promised_w)


@dataclass(frozen=True)
class Forecast:
    """Time and energy of all GPUs in a mean iteration, as promised by plans and at default clocks.

    Those at default clocks were either measured in this job or come from the profile.

    Attributes:
        stall_s: Time above which an iteration under these plans contains a stall [s].
        is_refuted: Whether they come from a profile from which passes deviate by more than ``max_drift``.
    """

    time_s: float
    energy_j: float
    default_time_s: float
    default_energy_j: float
    stall_s: float
    default_measured: bool = False
    is_refuted: bool = False


@dataclass(frozen=True)
class Assignment:
    """Assignment of plans to pipelines.

    Attributes:
        plan: Index of the policy's plan on the frontier.
        paused: Whether to run at default clocks.
        capped: Whether default clocks would exceed the power cap in force. Then all iterations run under plans.
        stretch_factors: For each pipeline, the time that its plan may take relative to that of the policy's plan.
        plans: Index of each pipeline's plan.
        promised_slowdown: Slowdown of the whole job relative to default clocks, from the profile.
        promised_power: Power relative to default clocks at which plans keep their promises of time and energy.
        number: Number that differs whenever another field differs.
    """

    plan: int = 0
    paused: bool = False
    capped: bool = False
    stretch_factors: tuple[float, ...] = ()
    plans: tuple[int, ...] = ()
    promised_slowdown: float = 0.0
    promised_power: float = 1.0
    number: int = field(default=0, compare=False)

    @classmethod
    def of(
        cls,
        frontier: Frontier,
        plan: int,
        stretch_factors: Sequence[float],
        *,
        lateness: float = 0.0,
        **decided: bool,
    ) -> Assignment:
        """Assign each pipeline the slowest plan that does not delay the others.

        ``lateness`` is the fraction by which plans take longer than promised in this job. Plans that are faster by this
        fraction are chosen, so that the job keeps the promise of the policy's plan.
        """

        def with_factors(factors: tuple[float, ...]) -> Assignment:
            plans = tuple(stretched_plan(frontier, plan, factor) for factor in factors)
            return cls(plan=plan, stretch_factors=factors, plans=plans, **decided)

        assignment = with_factors(tuple(stretch_factors))
        promised = forecast = assignment.forecast(frontier, 1)
        if lateness > 0:
            assignment = with_factors(tuple(factor / (1 + lateness) for factor in stretch_factors))
            forecast = assignment.forecast(frontier, 1)
        time_ratio = promised.time_s / promised.default_time_s
        power = forecast.energy_j / forecast.default_energy_j / time_ratio
        return replace(assignment, promised_slowdown=time_ratio - 1, promised_power=power)

    def forecast(self, frontier: Frontier, gpus_per_stage: int) -> Forecast:
        """Return time and energy of an iteration of the job, under these plans and at default clocks.

        As in the emulation of the paper, a pipeline that takes ``s`` times as long uses ``s`` times its plan's energy,
        and the others wait for the slowest at blocking power. In each pipeline, ``gpus_per_stage`` GPUs share a stage.
        """
        time_s, energy_j = self._of_job([frontier.plans[number] for number in self.plans], frontier)
        default_time_s, default_energy_j = self._of_job([frontier.baseline] * len(self.plans), frontier)
        return Forecast(
            time_s, gpus_per_stage * energy_j, default_time_s, gpus_per_stage * default_energy_j, STALL * time_s
        )

    def _of_job(self, plans: Sequence[FrequencyPlan], frontier: Frontier) -> tuple[float, float]:
        """Return time [s] and energy [J] with one GPU per stage, given the slowness of each pipeline."""
        slowness = [max(self.stretch_factors) / factor for factor in self.stretch_factors]
        times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
        energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
        waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
        return max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s


def decide(policy: PolicyConfig, frontier: Frontier, situation: Situation) -> Decision:
    """Return the decision of a policy."""
    if isinstance(policy, SlowdownPolicy):
        return Decision(frontier.plans.index(frontier.within(policy.max_slowdown)))
    if isinstance(policy, EnergyOptimalPolicy):
        return Decision(len(frontier.plans) - 1)
    if isinstance(policy, DeadlinePolicy):
        return _by_deadline(policy, frontier, situation)
    if isinstance(policy, ReducePolicy):
        return _reduced(policy, frontier, situation)
    return _under_cap(policy.watts, frontier, situation)


def _reduced(policy: ReducePolicy, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan of the base policy, or a slower one that meets the reduction."""
    chosen = decide(policy.policy, frontier, situation)
    if policy.power_fraction == 1 or policy.is_over(situation.now):
        return chosen
    watts = policy.power_fraction * situation.default_power_w
    capped = _under_cap(watts, frontier, situation)
    cap = chosen.cap if chosen.cap is not None and chosen.cap.watts < watts else capped.cap
    return replace(chosen, plan=max(chosen.plan, capped.plan), problem=capped.problem or chosen.problem, cap=cap)


def stretched_plan(frontier: Frontier, plan: int, factor: float) -> int:
    """Return the plan of a pipeline that may take ``factor`` times as long as ``plan``: that of min(T', T*).

    With a factor below 1 it is a faster plan.
    """
    deadline_s = frontier.plans[plan].time_s * factor * (1 - MARGIN)
    if factor >= 1 and deadline_s <= frontier.plans[plan].time_s:
        return plan
    return _slowest(frontier, deadline_s)


def _by_deadline(policy: DeadlinePolicy, frontier: Frontier, situation: Situation) -> Decision:
    left = (policy.total_steps - situation.step) * situation.iterations_per_step
    if left <= 0:
        return Decision(len(frontier.plans) - 1)
    seconds = (policy.finish_by - situation.now).total_seconds()
    # One step is kept in reserve, because the duration of a longer iteration is known only afterwards.
    ratio = situation.time_ratio / situation.relative_time
    allowed_s = (seconds / (left + 1) - situation.stopped_s) / ratio
    fastest_s = frontier.plans[0].time_s
    if allowed_s >= fastest_s:
        most = _slowest(frontier, allowed_s)
        running = most if situation.before is None else situation.before.plan
        # Within this range, choose the plan that is nearest to the current one, so that small fluctuations have no
        # effect.
        return Decision(min(max(running, _slowest(frontier, allowed_s * (1 - MARGIN))), most))
    needed_s = left * (fastest_s * ratio + situation.stopped_s)
    if needed_s <= seconds:
        return Decision(0)
    return Decision(
        0,
        f"the deadline {policy.finish_by.isoformat()} cannot be met: {left:.0f} iterations take at least "
        f"{needed_s:.0f} s, {max(0.0, seconds):.0f} s remain. Running the fastest plan",
    )


def _under_cap(watts: float, frontier: Frontier, situation: Situation) -> Decision:
    """Return the fastest plan under the cap.

    Measured power is noisy. A slower plan is chosen when the power may exceed the cap. A faster one is chosen only if
    it stays below the cap by the headroom, which doubles each time that this was wrong.
    """
    last = len(frontier.plans) - 1
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]

    def fastest_below(cap_w: float) -> int:
        return next((n for n, power_w in enumerate(powers_w) if power_w <= cap_w), last)

    cap, plan, before = PowerCap(watts), fastest_below(watts * (1 - MARGIN)), situation.before
    if before is not None and before.cap is not None and before.cap.watts == watts:
        cap, running = before.cap, before.plan
        if powers_w[running] > watts * (1 - _READING_ERROR):
            headroom = 2 * cap.headroom if cap.raised else cap.headroom
            cap, plan = replace(cap, headroom=headroom, raised=False), max(running, plan)
        elif (faster := fastest_below(watts * (1 - cap.headroom))) < running:
            cap, plan = replace(cap, raised=True), faster
        else:
            plan = running
    problem = (
        f"a power cap of {watts:.0f} W cannot be kept: the plan with the lowest power draws {powers_w[last]:.0f} W. "
        "Running it"
        if powers_w[last] > watts
        else ""
    )
    return Decision(plan, problem, cap=cap)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
