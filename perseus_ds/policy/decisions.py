"""Chooses the plan of the next iteration, by the user's policy, the frontier and the progress of the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, NamedTuple

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.policy.policies import (
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PolicyConfig,
    ReducePolicy,
    SlowdownPolicy,
)
from perseus_ds.policy.signals import Signal

# Times and powers are known this well; of what there is to use up, this much is left.
MARGIN = 0.005
# Of a plan that draws exactly the cap: an energy counter is refreshed every 0.1 s or so, and the largest of several
# averages of ten iterations may still be this much below the real one.
_READING = 0.002
_REMEMBERED = 10
_LEAST_POWERS = 4
_LARGEST = 10**18
_Positive = Annotated[float, Field(gt=0, le=_LARGEST)]


@dataclass(frozen=True)
class PowerCap:
    """A power cap in force, and how near to it a faster plan may come.

    Attributes:
        watts: Of all GPUs of the job.
        headroom: A faster plan is taken only if it would draw less than the cap by this fraction of it.
        raised: Whether a faster plan was taken after a slower one.
        signal: The file that asks for it; empty where an order or the policy does.
    """

    watts: float
    headroom: float = 0.02
    raised: bool = False
    signal: str = ""


@dataclass(frozen=True)
class Decision:
    """What to run.

    Attributes:
        plan: Place on the frontier.
        problem: The condition of the policy that cannot be met; empty if it is met.
        failed: Whether nothing could be decided; then the job runs at default clocks.
        cap: The power cap in force; None for none, or where it cannot be read.
    """

    plan: int
    problem: str = ""
    failed: bool = False
    cap: PowerCap | None = None


@dataclass(frozen=True)
class Situation:
    """The progress of the run.

    Attributes:
        step: Steps done, those before a checkpoint included.
        time_ratio: Measured over predicted iteration time.
        power_ratio: Measured over predicted power.
        stopped_s: Time between iterations [s].
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        default_power_w: What they draw at default clocks: as measured in the job, or by the profile [W].
        signals: Last good values of the signals, by file.
        before: What was decided last; None at the start.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    power_ratio: float = 1.0
    stopped_s: float = 0.0
    gpus_per_rank: int = 1
    default_power_w: float = 0.0
    signals: Mapping[str, Signal] = field(default_factory=dict)
    before: Decision | None = None


class RunStatistics(FileModel):
    """Measured over predicted values of the last iterations; a checkpoint keeps it.

    Attributes:
        stopped_s: What an iteration's end and the next one's beginning have between them, such as evaluations and
            checkpoints, on the average of all iterations so far [s].
        stops: Of how many iterations.
        times: Iteration times over those of the plans that the policy asked for.
        powers: Power as measured and by these plans [W].
    """

    stopped_s: float = Field(0.0, ge=0, le=_LARGEST)
    stops: int = Field(0, ge=0, le=_LARGEST)
    times: tuple[_Positive, ...] = ()
    powers: tuple[tuple[Annotated[float, Field(ge=0, le=_LARGEST)], _Positive], ...] = ()

    def add_stop(self, time_s: float) -> None:
        """Take in the time between two iterations [s]."""
        self.stops += 1
        self.stopped_s += (max(0.0, time_s) - self.stopped_s) / self.stops

    def add_iteration(
        self, *, time_s: float, energy_j: float, promised_time_s: float, promised_energy_j: float
    ) -> None:
        """Take in an iteration: of the job, and of the plan that the policy asked for [s, J]."""
        self.times = (*self.times[1 - _REMEMBERED :], time_s / promised_time_s)
        if math.isfinite(energy_j):  # NaN: a GPU's counter cannot be read
            power_w = energy_j / time_s, promised_energy_j / promised_time_s
            self.powers = (*self.powers[1 - _REMEMBERED :], power_w)

    @property
    def time_ratio(self) -> float:
        """Iteration time, 1 where it is not known; a median, since single iterations may be held up."""
        return statistics.median(self.times or [1.0])

    @property
    def power_ratio(self) -> float:
        """Power, 1 where few are known; of sums, since counters are refreshed more rarely than iterations end."""
        powers = self.powers
        if len(powers) < _LEAST_POWERS:
            return 1.0
        return sum(measured_w for measured_w, _ in powers) / sum(promised_w for _, promised_w in powers)


@dataclass(frozen=True)
class Forecast:
    """Time and energy of one iteration of the whole job.

    Attributes:
        time_s: Iteration time that the plans promise [s].
        energy_j: Energy of all GPUs that they promise [J].
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
class Assignment:
    """What the pipelines run, as rank 0 has decided.

    Attributes:
        plan: What the policy asks for, as a place on the frontier.
        paused: Whether to run at default clocks.
        capped: Whether default clocks would draw more than the power cap in force: then all iterations run under plans.
        stretch_factors: Of each pipeline: how many times as long as the policy's plan its plan may take.
        plans: Of each pipeline.
        promised_slowdown: Of the whole job against default clocks, by the profile.
        promised_power: Relative to default clocks, with which plans keep both of their promises.
        number: Another one whenever anything else is another.
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
        """Give every pipeline its plan: as slow as it may be without making the others wait.

        Args:
            frontier: The plans.
            plan: The policy's.
            stretch_factors: Of every pipeline.
            lateness: How much longer than promised plans take in this job, as a fraction: plans are faster by that, to
                keep what the policy's plan promises.
            decided: Whether it is ``paused`` and ``capped``.
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
        """Return time and energy of the job's iteration, under these plans and at default clocks.

        A pipeline that takes ``s`` times as long is charged ``s`` times its plan's energy, and the
        others wait for the slowest at blocking power: the accounting of the paper's emulation. ``gpus_per_stage`` GPUs
        of one pipeline share a stage.
        """
        time_s, energy_j = self._of_job([frontier.plans[number] for number in self.plans], frontier)
        default_time_s, default_energy_j = self._of_job([frontier.baseline] * len(self.plans), frontier)
        return Forecast(time_s, gpus_per_stage * energy_j, default_time_s, gpus_per_stage * default_energy_j)

    def _of_job(self, plans: Sequence[FrequencyPlan], frontier: Frontier) -> tuple[float, float]:
        """Return time [s] and energy [J], one GPU a stage, of pipelines as slow as they are under these plans."""
        slowness = [max(self.stretch_factors) / factor for factor in self.stretch_factors]
        times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
        energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
        waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
        return max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s


def decide(policy: PolicyConfig, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that a policy asks for now."""
    if isinstance(policy, SlowdownPolicy):
        return Decision(frontier.plans.index(frontier.within(policy.max_slowdown)))
    if isinstance(policy, EnergyOptimalPolicy):
        return Decision(len(frontier.plans) - 1)
    if isinstance(policy, DeadlinePolicy):
        return _by_deadline(policy, frontier, situation)
    if isinstance(policy, ReducePolicy):
        return _reduced(policy, frontier, situation)
    signal = situation.signals.get(policy.signal or "")
    watts = policy.watts if signal is None else signal.held_at(situation.now.timestamp())
    if watts is not None:
        return _under_cap(watts, policy.signal or "", frontier, situation)
    problem = f"the power cap cannot be read from {policy.signal}. Running the plan that draws least"
    return Decision(len(frontier.plans) - 1, problem)


class Reduction(NamedTuple):
    """Less power, as it is asked for now.

    Attributes:
        power_fraction: Of the power at default clocks.
        until_s: When it ends or changes [Unix seconds]; infinity where that is not known.
        signal: The file that asks for it; empty where an order or the policy does.
    """

    power_fraction: float
    until_s: float
    signal: str = ""


def reduction_of(policy: ReducePolicy, now: datetime, signals: Mapping[str, Signal]) -> Reduction | None:
    """Return what a policy asks for now, by itself or by its file; None for no reduction."""
    now_s = now.timestamp()
    until_s = math.inf if policy.until is None else policy.until.timestamp()
    asked = [Reduction(policy.fraction_until(now), until_s)]
    if policy.signal is not None and (signal := signals.get(policy.signal)) is not None:
        asked.append(Reduction(signal.fraction_at(now_s), signal.next_change_s(now_s), policy.signal))
    least = min(asked, key=lambda one: one.power_fraction)
    return least if least.power_fraction < 1 else None


def _reduced(policy: ReducePolicy, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that the policy asks for, or a slower one that draws no more than the reduction allows."""
    asked = decide(policy.policy, frontier, situation)
    reduction = reduction_of(policy, situation.now, situation.signals)
    if reduction is None:
        return asked
    watts = reduction.power_fraction * situation.default_power_w
    capped = _under_cap(watts, reduction.signal, frontier, situation)
    cap = asked.cap if asked.cap is not None and asked.cap.watts < watts else capped.cap
    return replace(asked, plan=max(asked.plan, capped.plan), problem=capped.problem or asked.problem, cap=cap)


def stretched_plan(frontier: Frontier, plan: int, factor: float) -> int:
    """Return the plan of a pipeline that may take so many times as long as a plan: that of min(T', T*).

    Args:
        frontier: The plans.
        plan: The policy's.
        factor: Below 1, the plan is a faster one, or the fastest.
    """
    deadline_s = frontier.plans[plan].time_s * factor * (1 - MARGIN)
    if factor >= 1 and deadline_s <= frontier.plans[plan].time_s:
        return plan
    return _slowest(frontier, deadline_s)


def _by_deadline(policy: DeadlinePolicy, frontier: Frontier, situation: Situation) -> Decision:
    left = policy.total_steps - situation.step
    if left <= 0:
        return Decision(len(frontier.plans) - 1)
    seconds = (policy.finish_by - situation.now).total_seconds()
    # One step in reserve: what an iteration takes more than the one before is only known afterwards.
    allowed_s = (seconds / (left + 1) - situation.stopped_s) / situation.time_ratio
    fastest_s = frontier.plans[0].time_s
    if allowed_s >= fastest_s:
        most = _slowest(frontier, allowed_s)
        running = most if situation.before is None else situation.before.plan
        # Within this range, the plan that changes least: small fluctuations do not change plans.
        return Decision(min(max(running, _slowest(frontier, allowed_s * (1 - MARGIN))), most))
    needed_s = left * (fastest_s * situation.time_ratio + situation.stopped_s)
    return Decision(0, "" if needed_s <= seconds else _too_late(policy, situation, needed_s))


def _too_late(policy: DeadlinePolicy, situation: Situation, needed_s: float) -> str:
    left_s = max(0.0, (policy.finish_by - situation.now).total_seconds())
    return (
        f"the deadline {policy.finish_by.isoformat()} cannot be met: {policy.total_steps - situation.step} steps take "
        f"{needed_s:.0f} s at the fastest, {left_s:.0f} s are left. Running the fastest plan"
    )


def _under_cap(watts: float, signal: str, frontier: Frontier, situation: Situation) -> Decision:
    """Return the fastest plan under the cap.

    Measured power is noisy, so a slower plan is taken once the power may exceed the cap, and a faster one only where it
    would stay below it by the headroom, which doubles each time that this was wrong.
    """
    last = len(frontier.plans) - 1
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]

    def fastest_below(cap_w: float) -> int:
        return next((n for n, power_w in enumerate(powers_w) if power_w <= cap_w), last)

    cap, plan, before = PowerCap(watts, signal=signal), fastest_below(watts * (1 - MARGIN)), situation.before
    if before is not None and before.cap is not None and before.cap.watts == watts:
        cap, running = replace(before.cap, signal=signal), before.plan
        if powers_w[running] > watts * (1 - _READING):
            headroom = 2 * cap.headroom if cap.raised else cap.headroom
            cap, plan = replace(cap, headroom=headroom, raised=False), max(running, plan)
        elif (faster := fastest_below(watts * (1 - cap.headroom))) < running:
            cap, plan = replace(cap, raised=True), faster
        else:
            plan = running
    problem = (
        f"a power cap of {watts:.0f} W cannot be kept: the plan that draws least takes {powers_w[last]:.0f} W. "
        "Running it"
        if powers_w[last] > watts
        else ""
    )
    return Decision(plan, problem, cap=cap)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
