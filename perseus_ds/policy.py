"""Which plan the next iteration runs: what a user wants, decided from the frontier and how the run goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from perseus_ds.errors import DeadlineError
from perseus_ds.frontier import Frontier


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlowdownPolicy(_Policy):
    """At most so much slower than the fastest iteration."""

    name: Literal["slowdown"] = "slowdown"
    max_slowdown: float = Field(0.0, ge=0, allow_inf_nan=False, description="As a fraction of T_min.")


class DeadlinePolicy(_Policy):
    """Finish by a time, on as little energy as that allows."""

    name: Literal["deadline"]
    finish_by: AwareDatetime = Field(description="When the last step must be done, such as 2026-11-22T08:00:00+00:00.")
    total_steps: int = Field(gt=0, description="Steps of the whole training, those before a checkpoint included.")


class PowerCapPolicy(_Policy):
    """Keep the average power of the job's GPUs under a budget."""

    name: Literal["power_cap"]
    watts: float = Field(gt=0, allow_inf_nan=False, description="Of all GPUs of the job together [W].")


class EnergyOptimalPolicy(_Policy):
    """The least energy, however long it takes: T*."""

    name: Literal["energy_optimal"]


PolicyConfig = Annotated[
    SlowdownPolicy | DeadlinePolicy | PowerCapPolicy | EnergyOptimalPolicy, Field(discriminator="name")
]


@dataclass(frozen=True)
class Situation:
    """How the run goes.

    Attributes:
        step: Steps done, those before a checkpoint included.
        now: The time.
        time_ratio: Measured over predicted iteration time.
        energy_ratio: Measured over predicted energy of an iteration.
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    energy_ratio: float = 1.0
    gpus_per_rank: int = 1


@dataclass(frozen=True)
class Decision:
    """What to run.

    Attributes:
        plan: Place on the frontier.
        problem: What the policy asks for that cannot be had; empty if it can.
    """

    plan: int
    problem: str = ""


def decide(policy: PolicyConfig, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that a policy asks for now."""
    if isinstance(policy, SlowdownPolicy):
        return Decision(frontier.plans.index(frontier.within(policy.max_slowdown)))
    if isinstance(policy, EnergyOptimalPolicy):
        return Decision(len(frontier.plans) - 1)
    if isinstance(policy, DeadlinePolicy):
        return _by_deadline(policy, frontier, situation)
    return _under_cap(policy, frontier, situation)


def no_slower_than(frontier: Frontier, plan: int, straggler_s: float | None) -> int:
    """Return the plan to run when another pipeline takes longer anyway: that of min(T', T*)."""
    if straggler_s is None or straggler_s <= frontier.plans[plan].time_s:
        return plan
    return frontier.plans.index(frontier.lookup(straggler_s))


def _by_deadline(policy: DeadlinePolicy, frontier: Frontier, situation: Situation) -> Decision:
    left = policy.total_steps - situation.step
    if left <= 0:
        return Decision(len(frontier.plans) - 1)
    seconds = (policy.finish_by - situation.now).total_seconds()
    # One step in reserve: what an iteration takes more than the one before is only known afterwards.
    allowed_s = seconds / (left + 1) / situation.time_ratio
    try:
        return Decision(frontier.plans.index(frontier.lookup(max(allowed_s, 1e-9))))
    except DeadlineError:
        needed_s = left * frontier.plans[0].time_s * situation.time_ratio
        if needed_s <= seconds:
            return Decision(0)
        return Decision(
            0,
            f"the deadline {policy.finish_by.isoformat()} cannot be met: {left} steps take {needed_s:.0f} s at the "
            f"fastest, {max(0.0, seconds):.0f} s are left. Running the fastest plan",
        )


def _under_cap(policy: PowerCapPolicy, frontier: Frontier, situation: Situation) -> Decision:
    scale = situation.gpus_per_rank * situation.energy_ratio / situation.time_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]
    first = _first(powers_w, lambda power_w: power_w <= policy.watts)
    if first is not None:
        return Decision(first)
    return Decision(
        len(powers_w) - 1,
        f"a power cap of {policy.watts:.0f} W cannot be kept: the plan that draws least takes {powers_w[-1]:.0f} W. "
        "Running it",
    )


def _first(values: list[float], good: Callable[[float], bool]) -> int | None:
    return next((index for index, value in enumerate(values) if good(value)), None)
