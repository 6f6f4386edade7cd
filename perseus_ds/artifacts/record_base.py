"""The common parts of a job's records."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.limits import UnixTime


class RunRecord(BaseModel):
    """A line of ``run.jsonl``."""

    # A later version may have more keys.
    model_config = ConfigDict(extra="ignore", frozen=True)

    simulated: bool = False


class Event(RunRecord):
    """Something that happened between iterations; kinds that this version does not know are read as such."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event: str
    time: UnixTime = Field(0.0, description="When [Unix seconds].")
