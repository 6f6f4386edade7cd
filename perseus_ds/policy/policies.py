"""The policies that a user may ask for: the rules that choose a plan."""

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
    model_validator,
)
from typing_extensions import Self

from perseus_ds.errors import ConfigError


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


REMOVED = {
    "schedule": 'removed in 0.2.0; have cron call "perseus-ds control policy" at the times of day (docs/policies.md)',
    "cheapest": 'removed in 0.2.0; use {"name": "deadline", ...} to finish by a time, or {"name": "power_cap", '
    '"signal": ...} for less power in the hours in which it is dear (docs/policies.md)',
    "least_swing": "removed in 0.2.0; leave it out: plans without it use 0.1 to 0.2 % less energy",
}
"""Names and keys of policies that earlier versions had: since when they are gone, and what to write instead."""


def _of_this_version(policy: object) -> object:
    if isinstance(policy, Mapping):
        for word, what_to_do in REMOVED.items():
            if word in policy or policy.get("name") == word:
                raise ValueError(f'"{word}" was {what_to_do}')
    return policy


def fraction_not_percentage(value: object) -> object:
    """Return a value that is to be a fraction, for the check of its limits.

    Raises:
        ValueError: It is above 1; the text asks whether a percentage was meant.
    """
    if isinstance(value, (int, float)) and value > 1:
        question = f"; was {value / 100:.4g} meant?" if 2 <= value <= 100 else ""
        raise ValueError(f"expected a fraction, at most 1, got {value:g}{question}")
    return value


def _slowdown(value: float) -> float:
    if value >= 1:
        meant = value - 1 if 1 < value < 2 else value / 100
        question = f"; was {meant:.4g} meant, {100 * meant:.4g} % slower?" if meant < 1 else ""
        raise ValueError(f"expected a fraction below 1, got {value:g}{question}")
    return value


class SlowdownPolicy(_Policy):
    """At most so much slower than the fastest iteration."""

    name: Literal["slowdown"] = "slowdown"
    max_slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_slowdown)] = Field(
        0.0, description="As a fraction of T_min, below 1."
    )


class DeadlinePolicy(_Policy):
    """Finish by a time, with the least energy that allows it."""

    name: Literal["deadline"]
    finish_by: AwareDatetime = Field(description="When the last step must be done, such as 2030-01-31T08:00:00+00:00.")
    total_steps: int = Field(
        gt=0, le=10**12, description="Steps of the whole training, those before a checkpoint included."
    )


class PowerCapPolicy(_Policy):
    """Keep the average power of the job's GPUs under a budget, by `watts` or by `signal`."""

    name: Literal["power_cap"]
    watts: float | None = Field(
        None, gt=0, le=1e12, allow_inf_nan=False, description="Of all GPUs of the job together [W]."
    )
    signal: str | None = Field(
        None, description="File with the same over time, or with one number; read again when it changes."
    )

    @model_validator(mode="after")
    def _has_one_cap(self) -> Self:
        if (self.watts is None) == (self.signal is None):
            raise ValueError('expected either "watts" or "signal", the file of a cap that changes')
        return self


class EnergyOptimalPolicy(_Policy):
    """The least energy, however long it takes: T*."""

    name: Literal["energy_optimal"]


_Simple = SlowdownPolicy | DeadlinePolicy | PowerCapPolicy | EnergyOptimalPolicy
Policy = Annotated[_Simple, Field(discriminator="name"), BeforeValidator(_of_this_version)]


class ReducePolicy(_Policy):
    """Less power for a while: another policy and a power cap beside it, until a time or by a file."""

    name: Literal["reduce"]
    power_fraction: Annotated[float | None, BeforeValidator(fraction_not_percentage)] = Field(
        None,
        gt=0,
        le=1,
        description="Of the average power of the job's GPUs at default clocks, as measured in the job; until `until`.",
    )
    until: AwareDatetime | None = Field(None, description="When that ends, such as 2030-01-31T08:00:00+00:00.")
    signal: str | None = Field(
        None,
        description="File with such fractions over time, or with one, 1 for no reduction; read again when it changes. "
        "Where both ask for one, the smaller counts.",
    )
    policy: Policy = Field(default_factory=SlowdownPolicy, description="Any other policy.")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if (self.power_fraction is None) != (self.until is None):
            raise ValueError('"power_fraction" and "until" belong together: how much less, and for how long')
        if self.power_fraction is None and self.signal is None:
            raise ValueError('expected "power_fraction" and "until", or "signal", the file of a fraction that changes')
        return self

    def is_over(self, now: datetime) -> bool:
        """Whether nothing asks for less power any more."""
        return self.signal is None and self.until is not None and now >= self.until

    def fraction_until(self, now: datetime) -> float:
        """Return the fraction that is asked for without a file; 1 for none."""
        return 1.0 if self.power_fraction is None or self.until is None or now >= self.until else self.power_fraction


PolicyConfig = Annotated[_Simple | ReducePolicy, Field(discriminator="name"), BeforeValidator(_of_this_version)]
POLICY: TypeAdapter[PolicyConfig] = TypeAdapter(PolicyConfig)
"""Checks a policy that is given as plain values."""


def reduced(policy: PolicyConfig, power_fraction: float, until: datetime) -> ReducePolicy:
    """Return a policy with less power beside it until some time; a file that asks for less is followed as before."""
    signal = policy.signal if isinstance(policy, ReducePolicy) else None
    return ReducePolicy(
        name="reduce", power_fraction=power_fraction, until=until, signal=signal, policy=without_reduction(policy)
    )


def without_reduction(policy: PolicyConfig) -> Policy:
    """Return the policy beside which power is reduced, or the policy itself."""
    return policy.policy if isinstance(policy, ReducePolicy) else policy


def check_deadline(policy: PolicyConfig, now: datetime) -> None:
    """Check that the time by which a policy is to finish lies ahead.

    Raises:
        ConfigError: It has passed.
    """
    policy = without_reduction(policy)
    if isinstance(policy, DeadlinePolicy) and policy.finish_by <= now:
        raise ConfigError(
            f"policy.finish_by: {policy.finish_by.isoformat()} has passed; it is "
            f"{now.isoformat(timespec='seconds')}. Give a time to come."
        )


SignalUse = Literal["cap", "fraction"]


def signal_files(policy: PolicyConfig) -> dict[str, SignalUse]:
    """Return the files of the signals that a policy is decided by, and what their values are."""
    uses: dict[str, SignalUse] = {}
    main = without_reduction(policy)
    if isinstance(main, PowerCapPolicy) and main.signal is not None:
        uses[main.signal] = "cap"
    if isinstance(policy, ReducePolicy) and policy.signal is not None:
        uses[policy.signal] = "fraction"
    return uses
