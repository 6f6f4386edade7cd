"""Policies that a user may choose, and the orders that a running job accepts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Names and keys of policies in earlier versions, with the replacement.
_REMOVED = {
    "schedule": 'removed in 0.2.0. Run "perseus-ds control policy" from cron instead (docs/policies.md)',
    "cheapest": 'removed in 0.2.0. Use {"name": "deadline", ...} to finish by a time, or run "perseus-ds control '
    'reduce" when energy is expensive (docs/policies.md)',
    "least_swing": "removed in 0.2.0. Omit it: plans without it use 0.1 to 0.2 % less energy",
    "signal": 'removed in 0.2.0. Give "watts", or "power_fraction" and "until", and run "perseus-ds control policy" or '
    '"perseus-ds control reduce" when they change (docs/policies.md)',
}


def _of_this_version(policy: object) -> object:
    if isinstance(policy, Mapping):
        for word, what_to_do in _REMOVED.items():
            if word in policy or policy.get("name") == word:
                raise ValueError(f'"{word}" was {what_to_do}')
    return policy


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


class SlowdownPolicy(_Given):
    """Limit the slowdown relative to the fastest iteration."""

    name: Literal["slowdown"] = "slowdown"
    max_slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_slowdown)] = Field(
        0.0, description="Maximum slowdown relative to default clocks, as a fraction below 1."
    )


class DeadlinePolicy(_Given):
    """Finish by a given time with the least energy."""

    name: Literal["deadline"]
    finish_by: AwareDatetime = Field(description="Time by which to finish, such as 2030-01-31T08:00:00+00:00.")
    total_steps: int = Field(
        gt=0, le=10**12, description="Number of steps of the whole training, including those before a checkpoint."
    )


class PowerCapPolicy(_Given):
    """Keep the average power of the job's GPUs under a budget."""

    name: Literal["power_cap"]
    watts: float = Field(gt=0, le=1e12, allow_inf_nan=False, description="Limit for all GPUs of the job together [W].")


class EnergyOptimalPolicy(_Given):
    """Minimise energy regardless of time: T*."""

    name: Literal["energy_optimal"]


_Simple = SlowdownPolicy | DeadlinePolicy | PowerCapPolicy | EnergyOptimalPolicy
Policy = Annotated[_Simple, Field(discriminator="name"), BeforeValidator(_of_this_version)]


class ReducePolicy(_Given):
    """Reduce power for a time, in addition to another policy."""

    name: Literal["reduce"]
    power_fraction: Annotated[float, BeforeValidator(fraction_not_percentage)] = Field(
        gt=0,
        le=1,
        description="Fraction of the average power of the job's GPUs at default clocks, as measured in the job, until "
        "`until`.",
    )
    until: AwareDatetime = Field(description="End of the reduction, such as 2030-01-31T08:00:00+00:00.")
    policy: Policy = Field(default_factory=SlowdownPolicy, description="Base policy, any other one.")

    def is_over(self, now: datetime) -> bool:
        """Return True if power is no longer to be reduced."""
        return now >= self.until


PolicyConfig = Annotated[_Simple | ReducePolicy, Field(discriminator="name"), BeforeValidator(_of_this_version)]
POLICY: TypeAdapter[PolicyConfig] = TypeAdapter(PolicyConfig)


def reduced(policy: PolicyConfig, power_fraction: float, until: datetime) -> ReducePolicy:
    """Return a policy with a reduction until the given time, which replaces its present one."""
    return ReducePolicy(name="reduce", power_fraction=power_fraction, until=until, policy=without_reduction(policy))


def without_reduction(policy: PolicyConfig) -> Policy:
    """Return the base policy of a reduction, or the policy itself."""
    return policy.policy if isinstance(policy, ReducePolicy) else policy


def check_deadline(policy: PolicyConfig, now: datetime) -> None:
    """Raise ConfigError if the deadline of a policy has passed."""
    policy = without_reduction(policy)
    if isinstance(policy, DeadlinePolicy) and policy.finish_by <= now:
        raise ConfigError(
            f"policy.finish_by: {policy.finish_by.isoformat()} has passed. It is "
            f"{now.isoformat(timespec='seconds')}. Set a time in the future."
        )


# Orders, from the job's scripts and from ``perseus-ds control``.


class Status(_Given):
    """Report the state of the job."""

    command: Literal["status"]


class SetPolicy(_Given):
    """Run under another policy."""

    command: Literal["policy"]
    policy: PolicyConfig


class SetStraggler(_Given):
    """Expect a pipeline to take ``slowdown`` times as long. A slowdown of 1 ends the report."""

    command: Literal["straggler"]
    pipeline: int = Field(ge=0, lt=2**31)
    slowdown: float = Field(ge=1, le=1e6, allow_inf_nan=False)
    after_iterations: int = Field(0, ge=0, le=10**12)


class Pause(_Given):
    """Run at default clocks."""

    command: Literal["pause"]


class Resume(_Given):
    """Run under plans again."""

    command: Literal["resume"]


class Reduce(_Given):
    """Draw less power for a given time."""

    command: Literal["reduce"]
    power_fraction: Annotated[float, BeforeValidator(fraction_not_percentage)] = Field(gt=0, le=1)
    duration_s: float = Field(gt=0, le=1e9, allow_inf_nan=False)
    within_s: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)


AnyOrder = Status | SetPolicy | SetStraggler | Reduce | Pause | Resume
Order = Annotated[AnyOrder, Field(discriminator="command")]
_ORDER: TypeAdapter[AnyOrder] = TypeAdapter(Order)


def parse_order(words: object) -> AnyOrder:
    """Validate an order.

    Raises:
        ConfigError: It is not a valid order. The message names the key.
    """
    try:
        return _ORDER.validate_python(words)
    except ValidationError as error:
        raise ConfigError(explain(error, Order, "order: ")) from None
