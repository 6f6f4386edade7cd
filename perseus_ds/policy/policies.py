"""Chooses the plan of the next iteration, by the user's policy, the frontier and the progress of the run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from perseus_ds.artifacts.frontier import Frontier


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlowdownPolicy(_Policy):
    """At most so much slower than the fastest iteration."""

    name: Literal["slowdown"] = "slowdown"
    max_slowdown: float = Field(0.0, ge=0, allow_inf_nan=False, description="As a fraction of T_min, below 1.")

    @field_validator("max_slowdown")
    @classmethod
    def _is_a_fraction(cls, value: float) -> float:
        if value >= 1:
            meant = value - 1 if 1 < value < 2 else value / 100
            question = f"; was {meant:.4g} meant, {100 * meant:.4g} % slower?" if meant < 1 else ""
            raise ValueError(f"expected a fraction below 1, got {value:g}{question}")
        return value


class DeadlinePolicy(_Policy):
    """Finish by a time, with the least energy that allows it."""

    name: Literal["deadline"]
    finish_by: AwareDatetime = Field(description="When the last step must be done, such as 2026-11-22T08:00:00+00:00.")
    total_steps: int = Field(
        gt=0, le=10**12, description="Steps of the whole training, those before a checkpoint included."
    )


class PowerCapPolicy(_Policy):
    """Keep the average power of the job's GPUs under a budget."""

    name: Literal["power_cap"]
    watts: float = Field(gt=0, le=1e12, allow_inf_nan=False, description="Of all GPUs of the job together [W].")


class EnergyOptimalPolicy(_Policy):
    """The least energy, however long it takes: T*."""

    name: Literal["energy_optimal"]


PolicyConfig = Annotated[
    SlowdownPolicy | DeadlinePolicy | PowerCapPolicy | EnergyOptimalPolicy, Field(discriminator="name")
]


# Times and powers are known this well; of what there is to use up, this much is left.
_MARGIN = 0.005


@dataclass(frozen=True)
class Situation:
    """The progress of the run.

    Attributes:
        step: Steps done, those before a checkpoint included.
        now: The time.
        time_ratio: Measured over predicted iteration time.
        power_ratio: Measured over predicted power.
        stopped_s: Time between iterations [s].
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        running: The plan the policy asked for last; None at the start.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    power_ratio: float = 1.0
    stopped_s: float = 0.0
    gpus_per_rank: int = 1
    running: int | None = None


@dataclass(frozen=True)
class Decision:
    """What to run.

    Attributes:
        plan: Place on the frontier.
        problem: The condition of the policy that cannot be met; empty if it is met.
        failed: Whether nothing could be decided; then the job runs at default clocks.
    """

    plan: int
    problem: str = ""
    failed: bool = False


def decide(policy: PolicyConfig, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that a policy asks for now."""
    if isinstance(policy, SlowdownPolicy):
        return Decision(frontier.plans.index(frontier.within(policy.max_slowdown)))
    if isinstance(policy, EnergyOptimalPolicy):
        return Decision(len(frontier.plans) - 1)
    if isinstance(policy, DeadlinePolicy):
        return _by_deadline(policy, frontier, situation)
    return _under_cap(policy, frontier, situation)


def stretched_plan(frontier: Frontier, plan: int, factor: float) -> int:
    """Return the plan of a pipeline that may take so many times as long as a plan: that of min(T', T*)."""
    deadline_s = frontier.plans[plan].time_s * factor * (1 - _MARGIN)
    return plan if deadline_s <= frontier.plans[plan].time_s else _slowest(frontier, deadline_s)


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
        running = most if situation.running is None else situation.running
        return Decision(_clamp(running, _slowest(frontier, allowed_s * (1 - _MARGIN)), most))
    needed_s = left * (fastest_s * situation.time_ratio + situation.stopped_s)
    if needed_s <= seconds:
        return Decision(0)
    return Decision(
        0,
        f"the deadline {policy.finish_by.isoformat()} cannot be met: {left} steps take {needed_s:.0f} s at the "
        f"fastest, {max(0.0, seconds):.0f} s are left. Running the fastest plan",
    )


def _under_cap(policy: PowerCapPolicy, frontier: Frontier, situation: Situation) -> Decision:
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]
    last = len(powers_w) - 1
    if powers_w[last] <= policy.watts:
        fastest = next(n for n, power_w in enumerate(powers_w) if power_w <= policy.watts)
        safe = next((n for n, power_w in enumerate(powers_w) if power_w <= policy.watts * (1 - _MARGIN)), last)
        return Decision(_clamp(fastest if situation.running is None else situation.running, fastest, safe))
    return Decision(
        last,
        f"a power cap of {policy.watts:.0f} W cannot be kept: the plan that draws least takes {powers_w[-1]:.0f} W. "
        "Running it",
    )


def _clamp(running: int, low: int, high: int) -> int:
    """Return the plan of a range that changes least: small fluctuations do not change plans."""
    return min(max(running, low), high)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
