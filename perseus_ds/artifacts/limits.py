"""The limits of what is read from files, which ``docs/file-formats.md`` states; beyond them is an error."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

MIB = 2**20
MOST_RECORD_BYTES = 2048 * MIB
MOST_RECORD_LINE_BYTES = 4 * MIB
MOST_RECORDS = 1_000_000
MOST_EVENTS, MOST_EVENT_BYTES = 50_000, 12 * MIB
MOST_TIMELINE_BYTES, MOST_OPERATIONS = 16 * MIB, 100_000
MOST_EVIDENCE_BYTES = 4 * MIB

MOST_STAGES = 4_096
MOST_MICRO_BATCHES = 65_536
MOST_PLANS = 10_000
"""Of one frontier."""
MOST_INSTRUCTIONS = 65_536
"""Stages times micro-batches: an iteration with more does not fit into memory as a DAG."""
MOST_CLOCK_MHZ = 100_000
LEAST, MOST_SECONDS, MOST_JOULES, MOST_WATTS = 1e-9, 1e9, 1e15, 1e9
"""Times, energies and powers beyond these are no measurements, and their products could overflow."""
MOST_UNIX_SECONDS = 1e11
"""In the year 5138: later moments are none that a calendar can show."""

Index = Annotated[int, Field(ge=0, lt=2**31)]
Stage = Annotated[int, Field(ge=0, lt=MOST_STAGES)]
MicroBatch = Annotated[int, Field(ge=0, lt=MOST_MICRO_BATCHES)]
StageCount = Annotated[int, Field(ge=1, le=MOST_STAGES)]
MicroBatchCount = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Clock = Annotated[int, Field(gt=0, le=MOST_CLOCK_MHZ)]
Time = Annotated[float, Field(ge=LEAST, le=MOST_SECONDS)]
Energy = Annotated[float, Field(ge=LEAST, le=MOST_JOULES)]
Duration = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
UnixTime = Annotated[float, Field(ge=0, le=MOST_UNIX_SECONDS)]
Power = Annotated[float, Field(ge=0, le=MOST_WATTS)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A name or a path, on one line: no control characters."""

Value = TypeVar("Value")
Many = Annotated[list[Value], Field(fail_fast=True)]
"""Read up to the first value that is wrong: what is wrong with each of millions does not fit into memory."""
