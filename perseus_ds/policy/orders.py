"""Orders that a running job accepts, from its scripts and from ``perseus-ds control``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError
from perseus_ds.policy.policies import PolicyConfig, fraction_not_percentage


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Status(_Order):
    """Report the state of the job."""

    command: Literal["status"]


class SetPolicy(_Order):
    """Run under another policy."""

    command: Literal["policy"]
    policy: PolicyConfig


class SetStraggler(_Order):
    """Expect a pipeline to take ``slowdown`` times as long. A slowdown of 1 ends the report."""

    command: Literal["straggler"]
    pipeline: int = Field(ge=0, lt=2**31)
    slowdown: float = Field(ge=1, le=1e6, allow_inf_nan=False)
    after_iterations: int = Field(0, ge=0, le=10**12)


class Pause(_Order):
    """Run at default clocks."""

    command: Literal["pause"]


class Resume(_Order):
    """Run under plans again."""

    command: Literal["resume"]


class Reduce(_Order):
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
