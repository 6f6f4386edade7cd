"""The ``simulated`` block: the GPU to simulate where there is none."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perseus_ds.artifacts.validation import StrictModel
from perseus_ds.device.gpu.simulated_conditions import CONDITIONS, Condition


class SimulatedConfig(StrictModel):
    """The GPU to simulate where there is none."""

    gpu: str = Field("a100-sxm", description="Device model: a100-sxm, a40, h100-sxm or h200.")
    longest_instruction_s: float = Field(
        0.1,
        gt=0,
        description="Time of the pipeline's longest forward or backward at the top clock [s]; the others follow "
        "from their floating-point operations.",
    )
    transfer_s: float = Field(0.0, ge=0, description="Time of a transfer between two stages [s].")
    tail_s: float = Field(0.0, ge=0, description="Time of gradient reduction and optimizer step at the top clock [s].")
    lock_latency_s: float = Field(0.015, ge=0, description="Time of a clock-setting call [s].")
    lock_latency: Literal["a100", "v100", "heavy-tail"] | None = Field(
        None, description="Distribution of that time, by target clock, instead of a constant."
    )
    counter_period_s: float = Field(0.1, gt=0, description="Refresh period of the energy counter [s].")
    time_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of instruction times.")
    power_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of power.")
    conditions: list[Condition] = Field(
        [],
        description="Conditions to simulate that make things harder: "
        + "; ".join(f"{name}: {text}" for name, text in CONDITIONS.items())
        + ".",
    )
    may_lock: bool = Field(True, description="Whether setting clocks is permitted.")
