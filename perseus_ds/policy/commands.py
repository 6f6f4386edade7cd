"""The commands that a running job accepts, from ``perseus-ds control`` and from its own script."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError
from perseus_ds.policy.goal import Goal


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GetStatus(_Command):
    """Report the state of the job."""

    command: Literal["status"]


class SetGoal(_Command):
    """Replace the time limit of the goal, its power limit, or both."""

    command: Literal["set"]
    goal: Goal

    @field_validator("goal", mode="before")
    @classmethod
    def _check_keys(cls, goal: Any) -> Any:
        if isinstance(goal, dict):
            removed = [key for key, value in goal.items() if value is None and key != "max_slowdown"]
            if removed or not goal:
                raise ValueError('expected keys with values; the command "clear" ends a limit')
        return goal


class ClearGoal(_Command):
    """Return to the time limit of the job's configuration, to its power limit, or to both."""

    command: Literal["clear"]
    limit: Literal["time", "power"] | None = None


class SetStraggler(_Command):
    """Expect a pipeline to take ``slowdown`` times as long. A slowdown of 1 ends the report."""

    command: Literal["straggler"]
    pipeline: int = Field(ge=0, lt=2**31)
    slowdown: float = Field(ge=1, le=1e6, allow_inf_nan=False)
    after_iterations: int = Field(0, ge=0, le=10**12)


class Pause(_Command):
    """Run at default clocks."""

    command: Literal["pause"]


class Resume(_Command):
    """Run under plans again."""

    command: Literal["resume"]


AnyCommand = GetStatus | SetGoal | ClearGoal | SetStraggler | Pause | Resume
Command = Annotated[AnyCommand, Field(discriminator="command")]
_COMMAND: TypeAdapter[AnyCommand] = TypeAdapter(Command)


def parse_command(words: object) -> AnyCommand:
    """Validate a command.

    Raises:
        ConfigError: It is not a valid command. The message names the key.
    """
    try:
        return _COMMAND.validate_python(words)
    except ValidationError as error:
        raise ConfigError(explain(error, Command, "command: ")) from None
