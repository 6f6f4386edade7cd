"""``timeline.json``: measured iterations, operation by operation, on all ranks of one pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, read_model
from perseus_ds.artifacts.validation import (
    MOST_SECONDS,
    MOST_TIMELINE_BYTES,
    Clock,
    Index,
    Many,
    MicroBatch,
    Stage,
    Text,
)
from perseus_ds.errors import ConfigError

RelativeTime = Annotated[float, Field(ge=-MOST_SECONDS, le=MOST_SECONDS)]


class MeasuredOperation(FileModel):
    """One operation of one rank. An exchange of several transfers is several operations with the same start and end.

    Attributes:
        kind: An instruction's kind, ``load``, what is transferred, or ``other`` for a command that is not known.
        stage: Stage of an instruction or load; the sending stage of a transfer.
        start_s: Time since the start of the pipeline's first rank [s].
        end_s: Likewise. A transfer includes waiting for the other rank.
        command: Class name of a command that is not known.
        target: The receiving stage of a transfer.
        clock_mhz: The plan's clock; None at default clocks and for operations without a clock.
    """

    kind: Literal[
        "forward",
        "backward",
        "backward_input",
        "backward_weight",
        "recompute",
        "forward_backward",
        "tail",
        "load",
        "other",
        "activation",
        "grad",
    ]
    stage: Stage
    micro_batch: MicroBatch
    start_s: RelativeTime
    end_s: RelativeTime
    target: Stage | None = None
    command: Text | None = None
    clock_mhz: Clock | None = None


class MeasuredIteration(FileModel):
    """One measured iteration.

    Attributes:
        iteration: Its number in ``run.jsonl``.
        ranks: By pipeline rank, in program order.
        plan: The plan's index in the frontier; None at default clocks.
    """

    iteration: Index
    phase: Text
    ranks: Annotated[Many[Many[MeasuredOperation]], Field(min_length=1)]
    plan: Index | None = None

    @property
    def operations(self) -> int:
        """Number of operations of all ranks."""
        return sum(map(len, self.ranks))


class TimelineFile(FileModel):
    """The contents of ``timeline.json``."""

    format: Literal["perseus-ds timeline"] = "perseus-ds timeline"
    schema_version: Literal[1] = 1
    simulated: bool
    gpu: Text
    iterations: Many[MeasuredIteration] = Field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> TimelineFile:
        """Read the file.

        Raises:
            ConfigError: It is missing, cut off, foreign or of another version; the message names file and key.
        """
        what, remedy = "timeline.json of a training run", "Train again to have it written anew."
        return read_model(cls, path, ConfigError, what, most_bytes=MOST_TIMELINE_BYTES, remedy=remedy)

    @property
    def operations(self) -> int:
        """Number of operations of all iterations."""
        return sum(iteration.operations for iteration in self.iterations)
