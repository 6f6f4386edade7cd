"""``profile.json``: the device and job that were measured, fixed durations, and the quality of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, read_json, validated
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Payload

SCHEMA_VERSION = 1
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class TransferDuration(FileModel):
    """How long a transfer over one boundary takes, without waiting for the other rank."""

    payload: Payload
    source: int
    target: int
    time_s: Duration


class OtherDuration(FileModel):
    """How long a command that perseus-ds does not know takes on one stage."""

    command: str
    stage: int
    time_s: Duration


class RowQuality(FileModel):
    """How well one row was measured.

    Attributes:
        samples: How often it was measured; 0 for a clock that was estimated from others.
        time_relative_error: Standard error; None where unknown.
        energy_relative_error: Standard error; None where unknown.
        reached_mhz: The clock at which the GPU ran, where a limit kept it lower.
        temperature_c: Of the GPU, when the measurement ended; None where unknown.
        power_state: The same of its performance state, such as ``P0``.
    """

    stage: int
    kind: Kind
    clock_mhz: int
    samples: int
    time_relative_error: float | None = None
    energy_relative_error: float | None = None
    reached_mhz: int | None = None
    temperature_c: float | None = None
    power_state: str | None = None


class ProfileInfo(FileModel):
    """The contents of ``profile.json``; all values are optional, since profiles of other programs have none of them."""

    schema_version: int = SCHEMA_VERSION
    simulated: bool | None = None
    gpu: str | None = None
    driver: str | None = None
    blocking_power_w: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    default_clock_mhz: int | None = None
    schedule: str | None = None
    stages: Count | None = None
    pipeline_ranks: Count | None = None
    data_parallel: Count | None = None
    tensor_parallel: Count | None = None
    micro_batches: Count | None = None
    micro_batch_size: Count | None = None
    model: str | None = None
    job: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    load_s: dict[int, Duration] = Field(default_factory=dict)
    tail_s: dict[int, Duration] = Field(default_factory=dict)
    transfers: list[TransferDuration] = Field(default_factory=list)
    others: list[OtherDuration] = Field(default_factory=list)
    rows: list[RowQuality] = Field(default_factory=list)

    @property
    def fixed_durations(self) -> FixedDurations:
        """Durations of loads, tails and transfers, which have no clock to choose."""
        return FixedDurations(
            load_s=dict(self.load_s),
            tail_s=dict(self.tail_s),
            transfer_s={(t.payload, t.source, t.target): t.time_s for t in self.transfers},
            other_s={(o.command, o.stage): o.time_s for o in self.others},
        )


def load_info(path: Path) -> ProfileInfo:
    """Read ``profile.json``.

    Raises:
        ProfileError: The file is cut off, foreign or of another version; the message names file and key.
    """
    raw = read_json(path, ProfileError, "profile.json")
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ProfileError(
            f"{path}: schema_version is {raw.get('schema_version')!r}, this perseus-ds reads {SCHEMA_VERSION}. "
            "Measure the profile again, or remove the file to use the rows alone."
        )
    return validated(raw, ProfileInfo, path, ProfileError)
