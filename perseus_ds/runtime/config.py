"""The ``perseus`` block of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from perseus_ds.artifacts.validation import StrictModel, explain
from perseus_ds.device.gpu.simulated_config import SimulatedConfig
from perseus_ds.errors import ConfigError
from perseus_ds.policy.policies import PolicyConfig, SlowdownPolicy
from perseus_ds.profiler.profile_config import ProfileConfig


class MetricsConfig(StrictModel):
    """Figures of the job for Prometheus, from rank 0."""

    port: int | None = Field(None, ge=1, le=65535, description="Serve them over HTTP (OpenMetrics) at this port.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen at; 0.0.0.0 for all of the node's.")
    textfile: str | None = Field(
        None, pattern=r"\.prom$", description="Write them to this file, *.prom, for node_exporter's textfile collector."
    )

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if self.port is None and self.textfile is None:
            raise ValueError(
                'expected "port", such as 9400, or "textfile", such as "/var/lib/node_exporter/perseus.prom"'
            )
        return self


class PerseusConfig(StrictModel):
    """The settings of Perseus for a training run."""

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
        '{"name": "power_cap", "watts": 5000}: of all GPUs together; {"name": "energy_optimal"}; '
        '{"name": "schedule", "timezone": "Europe/Berlin", "windows": [{"begin": "17:00", "end": "21:00", '
        '"policy": {"name": "power_cap", "watts": 5000}}]}; {"name": "cheapest", "finish_by": …, "total_steps": …, '
        '"signal": "prices.csv"}: by the hours of a price or a carbon intensity.',
    )
    cache: bool = Field(True, description="auto mode: start under the plan of an earlier run of the same job.")
    max_drift: float = Field(
        0.05,
        gt=0,
        description="Largest deviation of instruction times from the profile, as a fraction; beyond it auto mode "
        "profiles again and run mode prints a warning.",
    )
    metrics: MetricsConfig | None = Field(
        None,
        description='Figures for Prometheus: {"port": 9400} serves them, {"textfile": "…/perseus.prom"} writes them.',
    )
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)

    @model_validator(mode="after")
    def _run_needs_a_frontier(self) -> Self:
        # Only rank 0's node can tell whether the file exists.
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
        raise ConfigError(explain(error, PerseusConfig, "perseus.")) from None
