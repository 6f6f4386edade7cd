"""The ``perseus`` block of a DeepSpeed config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from perseus_ds.errors import ConfigError
from perseus_ds.policy import PolicyConfig, SlowdownPolicy


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ProfileConfig(_Block):
    """How a profile is measured."""

    min_clock_mhz: int | None = Field(
        None, gt=0, description="Lowest clock to measure [MHz]; the GPU's lowest by default."
    )
    max_clock_mhz: int | None = Field(
        None, gt=0, description="Highest clock to measure [MHz]; the GPU's highest by default."
    )
    sampling: Literal["full", "stride", "adaptive"] = Field(
        "adaptive",
        description="Clocks to measure. full: each one; stride: every n-th; adaptive: a few, chosen from what was "
        "measured so far, and a fitted model in between.",
    )
    clock_stride: int = Field(1, ge=1, description="The n of stride.")
    warm_up: int = Field(
        3,
        ge=2,
        description="Least number of ordinary training iterations before the measurement; more while times drift.",
    )
    relative_error: float = Field(
        0.01, gt=0, lt=1, description="Instructions are repeated until their time and energy are known this well."
    )
    max_window_s: float = Field(4.0, gt=0, description="Longest time an instruction is repeated at one clock [s].")


class SimulatedConfig(_Block):
    """The GPU to simulate where there is none."""

    gpu: str = Field("a100-sxm", description="Device model: a100-sxm or a40.")
    longest_instruction_s: float = Field(
        0.1,
        gt=0,
        description="Time of the pipeline's longest forward or backward at the top clock [s]; the others follow "
        "from their floating-point operations.",
    )
    transfer_s: float = Field(0.0, ge=0, description="Time of a transfer between two stages [s].")
    tail_s: float = Field(0.0, ge=0, description="Time of gradient reduction and optimizer step at the top clock [s].")
    lock_latency_s: float = Field(0.015, ge=0, description="Time of a clock-setting call [s].")
    counter_period_s: float = Field(0.1, gt=0, description="Refresh period of the energy counter [s].")
    time_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of instruction times.")
    power_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of power.")
    may_lock: bool = Field(True, description="Whether setting clocks is permitted.")


class PerseusConfig(_Block):
    """What Perseus does in this training run."""

    enabled: bool = Field(True, description="Without it, DeepSpeed runs as if there were no block.")
    mode: Literal["auto", "observe", "profile", "run"] = Field(
        "auto",
        description="auto: profile while training goes on, optimise in the background, then run under the plan; "
        "observe: measure time and energy at default clocks; profile: measure every clock, write "
        "profile.csv, train on at default clocks; run: train under the plan chosen from a frontier.",
    )
    device: Literal["auto", "nvml", "zeus", "simulated"] = Field(
        "auto",
        description="auto: NVML where the engine runs on CUDA, otherwise a simulated GPU; zeus: Zeus's device layer, "
        "for zeusd and AMD GPUs.",
    )
    output_dir: str = Field("perseus", description="Folder for profile.csv, profile.json and run.jsonl.")
    frontier: str | None = Field(None, description="frontier.json (or its folder), for run mode.")
    policy: PolicyConfig = Field(
        default_factory=SlowdownPolicy,
        description='Plan to run. {"name": "slowdown", "max_slowdown": 0.05}: 5 % above T_min at most (default 0); '
        '{"name": "deadline", "finish_by": "2026-11-22T08:00:00+00:00", "total_steps": 1000}; '
        '{"name": "power_cap", "watts": 5000}: of all GPUs together; {"name": "energy_optimal"}.',
    )
    cache: bool = Field(True, description="auto mode: start under the plan of an earlier run of the same job.")
    max_drift: float = Field(
        0.05,
        gt=0,
        description="How far instructions may be from the profile, as a fraction: auto mode then profiles again, run "
        "mode says so.",
    )
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)

    @model_validator(mode="after")
    def _run_needs_a_frontier(self) -> Self:
        # Whether it is there, only rank 0's node can tell.
        if self.enabled and self.mode == "run" and self.frontier is None:
            raise ValueError('"mode": "run" needs "frontier": the frontier.json that "perseus-ds optimize" wrote')
        return self


def parse_block(block: object) -> PerseusConfig:
    """Validate a ``perseus`` block.

    Raises:
        ConfigError: The message names the key and says what to write instead.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'perseus: expected an object such as {{"enabled": true}}, got {block!r}.')
    try:
        return PerseusConfig.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _owner(location: list[str]) -> Any:
    owner: Any = PerseusConfig
    for part in location:
        # A union is followed by the name of the member that was meant.
        owner = owner.model_fields[part].annotation if hasattr(owner, "model_fields") else _member(owner, part)
    return owner


def _member(union: Any, name: str) -> Any:
    return next(member for member in get_args(union) if get_args(member.model_fields["name"].annotation) == (name,))


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(["perseus", *location])
    if problem["type"] == "extra_forbidden":
        known = list(_owner(location[:-1]).model_fields)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}."
        return f"{key}: unknown key; {hint}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}."
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{key}: expected {expected}, got {problem['input']!r}."
