"""What a user allows or demands of a job: how much slower, finished by when, with how much power."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from perseus_ds.errors import ConfigError

LIMITS: Mapping[str, tuple[str, ...]] = {
    "time": ("max_slowdown", "finish_by"),
    "power": ("watts", "power_fraction", "until"),
}
"""The keys of each of the two limits of a goal. Another limit of the same kind replaces all of them."""


def fraction_not_percentage(value: object) -> object:
    """Check that a value is at most 1, before its other limits are checked.

    Raises:
        ValueError: It is above 1. If it may be a percentage, the message suggests the fraction.
    """
    if isinstance(value, (int, float)) and value > 1:
        question = f". Did you mean {value / 100:.4g}?" if 2 <= value <= 100 else ""
        raise ValueError(f"expected a fraction, at most 1, got {value:g}{question}")
    return value


def _slowdown(value: float) -> float:
    if value >= 1:
        meant = value - 1 if 1 < value < 2 else value / 100
        question = f". Did you mean {meant:.4g}, {100 * meant:.4g} % slower?" if meant < 1 else ""
        raise ValueError(f"expected a fraction below 1, got {value:g}{question}")
    return value


class Goal(BaseModel):
    """What the plan in use must keep. Of all plans that keep it, the one of least energy runs.

    A power limit comes first: if it requires a slower plan than the other keys allow, that plan runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_slowdown)] | None = Field(
        0.0,
        description="Maximum slowdown relative to default clocks, as a fraction below 1; null for least energy, "
        "regardless of time. With a deadline, the default is null.",
    )
    finish_by: AwareDatetime | None = Field(
        None, description="Time by which to finish, such as 2030-01-31T08:00:00+00:00. It needs `total_steps`."
    )
    total_steps: int | None = Field(
        None,
        gt=0,
        le=10**12,
        description="Number of steps of the whole training, including those before a checkpoint.",
    )
    watts: float | None = Field(
        None,
        gt=0,
        le=1e12,
        allow_inf_nan=False,
        description="Limit of the average power of all GPUs of the job together [W].",
    )
    power_fraction: Annotated[float, BeforeValidator(fraction_not_percentage)] | None = Field(
        None,
        gt=0,
        lt=1,
        description="The same limit as a fraction of the power at default clocks, as measured in the job.",
    )
    until: AwareDatetime | None = Field(
        None, description="End of the power limit, such as 2030-01-31T18:00:00+00:00; none by default."
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_time_to_the_deadline(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("finish_by") is not None:
            return {"max_slowdown": None, **given}
        return given

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.finish_by is not None and self.total_steps is None:
            raise ValueError('"finish_by" needs "total_steps", the number of steps of the whole training')
        if self.watts is not None and self.power_fraction is not None:
            raise ValueError('expected "watts" or "power_fraction", got both')
        if self.until is not None and self.watts is None and self.power_fraction is None:
            raise ValueError('"until" is the end of a power limit: give "watts" or "power_fraction"')
        return self

    def power_limit_w(self, default_power_w: float) -> float | None:
        """Return the power limit of all GPUs, given their power at default clocks [W]. None without a limit."""
        if self.power_fraction is not None:
            return self.power_fraction * default_power_w
        return self.watts

    def without_power_limit(self) -> Goal:
        return self.model_copy(update=dict.fromkeys(LIMITS["power"]))

    def at(self, now: datetime) -> Goal:
        """Return the goal at a time: without its power limit if that has ended."""
        return self.without_power_limit() if self.until is not None and self.until <= now else self

    def given(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, as plain values."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def changed(self, keys: Mapping[str, Any]) -> Goal:
        """Return the goal with other values of some keys. A limit that they concern is replaced as a whole."""
        kept = self.model_dump(exclude_unset=True)
        for limit in LIMITS.values():
            if not keys.keys().isdisjoint(limit):
                kept = {key: value for key, value in kept.items() if key not in limit}
        return Goal.model_validate({**kept, **keys})


def check_deadline(goal: Goal, now: datetime) -> None:
    """Raise ConfigError if the deadline of a goal has passed."""
    if goal.finish_by is not None and goal.finish_by <= now:
        raise ConfigError(
            f"goal.finish_by: {goal.finish_by.isoformat()} has passed. It is "
            f"{now.isoformat(timespec='seconds')}. Set a time in the future."
        )


def replacement_of_policy(policy: object) -> str:
    """Return what to write instead of a policy, which versions before 0.2.0 had instead of a goal."""
    goal = _goal_of(policy) if isinstance(policy, Mapping) else None
    if goal is None:
        return "give max_slowdown, finish_by and total_steps, watts or power_fraction"
    return json.dumps({"goal": goal})


def _goal_of(policy: Mapping[str, Any]) -> dict[str, Any] | None:
    keys = {key: value for key, value in policy.items() if key not in ("name", "policy")}
    match policy.get("name"):
        case "slowdown" | "deadline" | "power_cap":
            return keys
        case "energy_optimal":
            return {"max_slowdown": None}
        case "reduce":
            base = policy.get("policy", {"name": "slowdown"})
            goal = _goal_of(base) if isinstance(base, Mapping) else None
            return None if goal is None else {**goal, **keys}
    return None
