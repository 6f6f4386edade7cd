"""The ``perseus`` block of a job: its keys and its sources."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from perseus_ds.artifacts.io import MOST_JSON_BYTES, parse_json, read_text
from perseus_ds.artifacts.validation import StrictModel, explain
from perseus_ds.errors import ConfigError
from perseus_ds.policy.goal import Goal, replacement_of_policy
from perseus_ds.simulation.gpu import SimulatedConfig

VARIABLE = "PERSEUS"
# Similarity of ``perseus`` and ``perseus_config`` is 0.67, and of ``perseus`` and any key of DeepSpeed at most 0.6.
_SIMILAR = 0.65
# Every measured clock costs slower iterations, so adaptive sampling measures at most this number, and a third of all.
MOST_CLOCKS = 8


class MetricsConfig(StrictModel):
    """Figures of the job for Prometheus, from rank 0."""

    port: int | None = Field(None, ge=1, le=65535, description="Serve them over HTTP (OpenMetrics) at this port.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen at; 0.0.0.0 for all of the node's.")
    textfile: str | None = Field(
        None, pattern=r"\.prom$", description="Write them to this file, *.prom, for node_exporter's textfile collector."
    )

    @model_validator(mode="after")
    def _check_destination(self) -> Self:
        if self.port is None and self.textfile is None:
            raise ValueError(
                'expected "port", such as 9400, or "textfile", such as "/var/lib/node_exporter/perseus.prom"'
            )
        return self


class ServerConfig(StrictModel):
    """Address of the job's server on rank 0's node."""

    host: str | None = Field(
        None,
        min_length=1,
        description="Name or address by which other nodes reach it; MASTER_ADDR or the host of init_method by default.",
    )
    port: int | None = Field(None, ge=1, le=65535, description="TCP port; any free one by default.")


class ProfileConfig(StrictModel):
    """Measurement of a profile."""

    min_clock_mhz: int | None = Field(
        None, gt=0, description="Lowest clock to measure [MHz]; the GPU's lowest by default."
    )
    max_clock_mhz: int | None = Field(
        None, gt=0, description="Highest clock to measure [MHz]; the GPU's highest by default."
    )
    sampling: Literal["full", "stride", "adaptive"] = Field(
        "adaptive",
        description="Clocks to measure. full: each one; stride: every n-th; adaptive: a few, chosen from the rows "
        "measured so far, and a fitted model in between.",
    )
    clock_stride: int = Field(1, ge=1, description="The n of stride.")
    warm_up: int = Field(
        3,
        ge=2,
        description="Minimum number of iterations at default clocks before the measurement; more while times drift.",
    )

    def clocks_among(self, supported: Sequence[int], gpu: str) -> list[int]:
        """Return the clocks that may be measured, of those that a GPU supports, ascending [MHz]. There must be two."""
        if not supported:
            raise ConfigError(f"perseus.profile: {gpu} has no clocks that all GPUs of the job support.")
        low, high = self.min_clock_mhz or supported[0], self.max_clock_mhz or supported[-1]
        chosen = [clock for clock in supported if low <= clock <= high]
        if len(chosen) < 2:
            raise ConfigError(
                f"perseus.profile: {gpu} supports {len(chosen)} clocks from {low} to {high} MHz; a profile needs "
                f"at least 2. It supports {supported[0]} to {supported[-1]} MHz."
            )
        return chosen

    def most_clocks(self, clocks: int) -> int:
        """Return the maximum number of clocks that are measured, given their total number."""
        if self.sampling == "adaptive":
            return min(MOST_CLOCKS, max(4, clocks // 3))
        return clocks if self.sampling == "full" else -(-clocks // self.clock_stride)


class PerseusConfig(StrictModel):
    """The settings of Perseus for a training run."""

    enabled: bool = Field(True, description="Without it, DeepSpeed runs as if there were no block.")
    mode: Literal["auto", "observe", "profile", "run"] = Field(
        "auto",
        description="auto: profile during training, optimise in the background, then run with the plan; "
        "observe: measure time and energy at default clocks; profile: measure and write a profile, "
        "then continue at default clocks; run: train with a plan of a frontier.",
    )
    device: Literal["auto", "nvml", "zeus", "simulated"] = Field(
        "auto",
        description="auto: NVML for NVIDIA's GPUs, Zeus for AMD's, a simulated GPU if the engine runs on the CPU; "
        "zeus: Zeus's device layer, for zeusd and AMD GPUs.",
    )
    required: bool = Field(
        False,
        description="auto and observe mode: an error if a GPU cannot be used or, in auto mode, its clocks cannot be "
        "set; without it, a warning, and the job trains at default clocks. Also an error if another job is writing to "
        "the output folder; without it, a warning, and the job writes to another folder.",
    )
    output_dir: str = Field("perseus", description="Folder for profile.csv, profile.json and run.jsonl.")
    frontier: str | None = Field(None, description="frontier.json (or its folder), for run mode.")
    goal: Goal = Field(default_factory=Goal, description="What the plan in use must keep.")
    cache: bool = Field(True, description="auto mode: start with the plan of an earlier run of the same job.")
    max_drift: float = Field(
        0.05,
        gt=0,
        description="Largest deviation of instruction times from the profile, as a fraction, beyond what they vary by; "
        "a larger one is printed, and auto mode profiles again if the plan is dropped or cannot be compared.",
    )
    log_level: Literal["info", "warning"] = Field(
        "info", description="info: print a line for each event of the job; warning: only warnings."
    )
    metrics: MetricsConfig | None = Field(
        None,
        description='Figures for Prometheus: {"port": 9400} serves them, {"textfile": "…/perseus.prom"} writes them.',
    )
    server: ServerConfig = Field(default_factory=ServerConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)

    @property
    def needs_gpu(self) -> bool:
        return self.required or self.mode in ("profile", "run")

    @property
    def needs_clocks(self) -> bool:
        return self.mode in ("profile", "run") or (self.mode == "auto" and self.required)

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, given: object) -> object:
        if isinstance(given, Mapping) and "policy" in given:
            goal = replacement_of_policy(given["policy"])
            raise ValueError(f'"policy" is now "goal": {goal} (docs/power-and-deadlines.md)')
        return given

    @model_validator(mode="after")
    def _check_frontier(self) -> Self:
        # Only rank 0's node can determine whether the file exists.
        if self.enabled and self.mode == "run" and self.frontier is None:
            raise ValueError('"mode": "run" needs "frontier": the frontier.json that "perseus-ds optimize" wrote')
        return self


def parse_block(block: object) -> PerseusConfig:
    """Validate a ``perseus`` block. The error names the key and a valid value."""
    if not isinstance(block, Mapping):
        raise ConfigError(f'perseus: expected an object such as {{"enabled": true}}, got {block!r}.')
    try:
        return PerseusConfig.model_validate(_plain(block))
    except ValidationError as error:
        raise ConfigError(explain(error, PerseusConfig, "perseus.")) from None


def _plain(value: Any) -> Any:
    """Return a value with dictionaries and lists instead of other containers such as those of OmegaConf."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(each) for each in value]
    return value


def settings_of(block: Any) -> PerseusConfig | None:
    """Return the settings of a job, or None if it has neither a ``perseus`` block nor the variable ``PERSEUS``.

    Keys of the variable (JSON, or the path of a JSON file) override those of the block, also within its objects.
    """
    variable = _from_environment()
    if variable is None and block is None:
        return None
    if block is not None and not isinstance(block, Mapping):
        return parse_block(block)
    return parse_block(_merged(_plain(block or {}), variable or {}))


def _merged(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with changes. Objects that both have are merged, and other values are replaced."""
    merged = dict(block)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    return merged


def misspelt_block(keys: Iterable[str]) -> str | None:
    """Return the key of a config that is probably meant to be ``perseus``. None if there is none."""
    by_name = {key.lower(): key for key in keys}
    similar = difflib.get_close_matches("perseus", by_name, n=1, cutoff=_SIMILAR)
    return by_name[similar[0]] if similar else None


def _from_environment() -> Mapping[str, Any] | None:
    """Return the block in the variable ``PERSEUS``. None if it is not set or empty."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    source = VARIABLE
    if not text.startswith("{"):
        source = f"{VARIABLE}={text}"
        try:
            text = read_text(Path(text), ConfigError, "JSON file", MOST_JSON_BYTES)
        except ConfigError as error:
            raise ConfigError(
                f'{source}: expected JSON such as {{"mode": "auto"}} or the path of a JSON file: {error}'
            ) from None
    try:
        block = parse_json(text)
    except ValueError as error:
        if source == VARIABLE and '"' not in text and ":" in text:
            raise ConfigError(
                f"{VARIABLE}={text}: this is JSON without its quotes, which a shell has removed, as it does on the way "
                f"of {VARIABLE} from .deepspeed_env to the ranks. Write the block to a file that all nodes see and set "
                f"{VARIABLE} to its path."
            ) from None
        raise ConfigError(f"{source}: this is not JSON: {error}.") from None
    if not isinstance(block, Mapping):
        raise ConfigError(f'{source}: expected an object such as {{"mode": "auto"}}, got {block!r}.')
    return block
