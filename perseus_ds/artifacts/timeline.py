"""``timeline.json``: measured iterations, operation by operation, on all ranks of one pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, read_model
from perseus_ds.artifacts.profile import ProfileInfo
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
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer

RelativeTime = Annotated[float, Field(ge=-MOST_SECONDS, le=MOST_SECONDS)]
_TRANSFERS = ("activation", "grad")
Work = Instruction | Load | Other | Transfer


def described(work: Work) -> tuple[str, int, int | None, int]:
    """Return kind, stage (the sending one of a transfer), receiving stage (None if it is none) and micro-batch."""
    match work:
        case Transfer():
            return work.payload, work.source, work.target, work.micro_batch
        case Load():
            return "load", work.stage, None, work.micro_batch
        case Other():
            return "other", work.stage, None, work.number
        case Instruction():
            return work.kind.value, work.stage, None, work.micro_batch


class MeasuredOperation(FileModel):
    """One operation of one rank. An exchange of several transfers is several operations with the same start and end.

    Attributes:
        kind: An instruction's kind, ``load``, what is transferred, or ``other`` for a command that is not known.
        start_s: Time since the start of the pipeline's first rank [s].
        end_s: Likewise. A transfer includes waiting for the other rank.
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

    @classmethod
    def of(cls, work: Work, start_s: float, end_s: float, clock_mhz: int | None = None) -> MeasuredOperation:
        """Return what a rank did, and when."""
        kind, stage, target, micro_batch = described(work)
        fields = {"kind": kind, "stage": stage, "target": target, "micro_batch": micro_batch}
        command = work.command if isinstance(work, Other) else None
        return cls.model_validate(
            {**fields, "command": command, "start_s": start_s, "end_s": end_s, "clock_mhz": clock_mhz}
        )

    @property
    def work(self) -> Work:
        """What the rank did."""
        match self.kind:
            case "activation" | "grad" as payload:
                return Transfer(payload, self.stage, self.target or 0, self.micro_batch)
            case "load":
                return Load(self.stage, self.micro_batch)
            case "other":
                return Other(self.command or "command", self.stage, self.micro_batch)
            case kind:
                return Instruction(self.stage, Kind(kind), self.micro_batch)


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

    @property
    def time_s(self) -> float:
        """From the first operation's start to the last one's end, on whatever rank [s]."""
        times = [(op.start_s, op.end_s) for operations in self.ranks for op in operations]
        return max((end_s for _, end_s in times), default=0.0) - min((start_s for start_s, _ in times), default=0.0)

    @property
    def busy_s(self) -> list[float]:
        """By pipeline rank, the time of all that is no transfer: passes, loads, the tail [s]."""
        return [sum(op.end_s - op.start_s for op in ops if op.kind not in _TRANSFERS) for ops in self.ranks]

    @property
    def waits(self) -> list[float]:
        """By pipeline rank, the part of the iteration in which it waits or transfers: the measured bubble."""
        time_s = self.time_s
        return [max(0.0, 1 - busy_s / time_s) if time_s > 0 else 0.0 for busy_s in self.busy_s]


class TimelineFile(FileModel):
    """The contents of ``timeline.json``.

    Attributes:
        job: What trains, with its schedule and layout; None in files of earlier versions.
    """

    format: Literal["perseus-ds timeline"] = "perseus-ds timeline"
    schema_version: Literal[1] = 1
    simulated: bool
    gpu: Text
    job: ProfileInfo | None = None
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
