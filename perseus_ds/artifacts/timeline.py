"""``timeline.json``: measured iterations with the operations of all ranks of one pipeline."""

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
    Energy,
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
    """Return kind, stage or sending stage, receiving stage or None, and micro-batch."""
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
        kind: Kind of an instruction, ``load``, payload of a transfer, or ``other`` for an unknown command.
        stage: Stage of the operation; of a transfer, the sending one.
        micro_batch: Micro-batch; of an unknown command, its number on the stage.
        start_s: Start relative to the start of the pipeline's first rank [s]; likewise the end. A transfer includes
            waiting for the other rank.
        target: Receiving stage of a transfer.
        command: Class name of an unknown command.
        clock_mhz: Clock in the plan, or None at default clocks and for operations without a clock.
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
        kind, stage, target, micro_batch = described(work)
        fields = {"kind": kind, "stage": stage, "target": target, "micro_batch": micro_batch}
        command = work.command if isinstance(work, Other) else None
        return cls.model_validate(
            {**fields, "command": command, "start_s": start_s, "end_s": end_s, "clock_mhz": clock_mhz}
        )

    @property
    def work(self) -> Work:
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
    """One measured iteration, with its number in ``run.jsonl`` and each rank's operations in program order.

    ``plan`` is the plan's index on the frontier, or None at default clocks. ``energy_j`` is the energy of all GPUs of
    the job [J], or None if it is unknown.
    """

    iteration: Index
    phase: Text
    ranks: Annotated[Many[Many[MeasuredOperation]], Field(min_length=1)]
    plan: Index | None = None
    energy_j: Energy | None = None

    @property
    def operations(self) -> int:
        """Number of operations of all ranks."""
        return sum(map(len, self.ranks))

    @property
    def time_s(self) -> float:
        """Time from the first start to the last end of an operation on any rank [s]."""
        times = [(op.start_s, op.end_s) for operations in self.ranks for op in operations]
        return max((end_s for _, end_s in times), default=0.0) - min((start_s for start_s, _ in times), default=0.0)

    @property
    def busy_s(self) -> list[float]:
        """By pipeline rank, the total time of all operations except transfers [s]."""
        return [sum(op.end_s - op.start_s for op in ops if op.kind not in _TRANSFERS) for ops in self.ranks]

    @property
    def waits(self) -> list[float]:
        """By pipeline rank, the fraction of time spent waiting or transferring (bubble)."""
        time_s = self.time_s
        return [max(0.0, 1 - busy_s / time_s) if time_s > 0 else 0.0 for busy_s in self.busy_s]


class TimelineFile(FileModel):
    """The contents of ``timeline.json``. Files of earlier versions have no ``job``, the schedule and the layout."""

    format: Literal["perseus-ds timeline"] = "perseus-ds timeline"
    schema_version: Literal[1] = 1
    simulated: bool
    gpu: Text
    job: ProfileInfo | None = None
    iterations: Many[MeasuredIteration] = Field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> TimelineFile:
        what, remedy = "timeline.json of a training run", "Train again to write a new one."
        return read_model(cls, path, ConfigError, what, most_bytes=MOST_TIMELINE_BYTES, remedy=remedy)

    @property
    def operations(self) -> int:
        """Number of operations of all iterations."""
        return sum(iteration.operations for iteration in self.iterations)
