"""``profile.json``: the device and job that were measured, fixed durations, and the quality of each row."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, read_json, validated
from perseus_ds.artifacts.limits import (
    MOST_CSV_ROWS,
    MOST_DURATIONS,
    Clock,
    Count,
    Duration,
    Index,
    Keyed,
    Many,
    MicroBatchCount,
    Power,
    Stage,
    StageCount,
    Text,
)
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Payload

SCHEMA_VERSION = 1
RelativeError = Annotated[float, Field(ge=0, le=1e9)]


class TransferDuration(FileModel):
    """How long a transfer over one boundary takes, without waiting for the other rank."""

    payload: Payload
    source: Stage
    target: Stage
    time_s: Duration


class OtherDuration(FileModel):
    """How long a command that perseus-ds does not know takes on one stage."""

    command: Text
    stage: Stage
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

    stage: Stage
    kind: Kind
    clock_mhz: Clock
    samples: Index
    time_relative_error: RelativeError | None = None
    energy_relative_error: RelativeError | None = None
    reached_mhz: Index | None = None
    temperature_c: Annotated[float, Field(ge=-300, le=1e4)] | None = None
    power_state: Text | None = None


class ProfileInfo(FileModel):
    """The contents of ``profile.json``; all values are optional, since profiles of other programs have none of them."""

    schema_version: int = SCHEMA_VERSION
    simulated: bool | None = None
    gpu: Text | None = None
    driver: Text | None = None
    blocking_power_w: Power | None = None
    default_clock_mhz: Clock | None = None
    schedule: Text | None = None
    streams: ScheduleStreams | None = None
    stages: StageCount | None = None
    pipeline_ranks: StageCount | None = None
    data_parallel: Count | None = None
    tensor_parallel: Count | None = None
    micro_batches: MicroBatchCount | None = None
    micro_batch_size: Count | None = None
    model: Text | None = None
    job: Text | None = None
    versions: Keyed[Text, Text] = Field(default_factory=dict)
    load_s: Keyed[Stage, Duration] = Field(default_factory=dict)
    tail_s: Keyed[Stage, Duration] = Field(default_factory=dict)
    transfers: Many[TransferDuration] = Field(default_factory=list, max_length=MOST_DURATIONS)
    others: Many[OtherDuration] = Field(default_factory=list, max_length=MOST_DURATIONS)
    rows: Many[RowQuality] = Field(default_factory=list, max_length=MOST_CSV_ROWS)

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
            f"{path}: schema_version is {shortened(raw.get('schema_version'))}, this perseus-ds reads "
            f"{SCHEMA_VERSION}. Measure the profile again, or remove the file to use the rows alone."
        )
    return validated(raw, ProfileInfo, path, ProfileError)
