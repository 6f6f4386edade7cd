"""The instruction streams of a schedule as JSON, so that a file's reader need not import the schedule's class."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.limits import MOST_INSTRUCTIONS, MOST_STAGES, Index, MicroBatch, MicroBatchCount, Stage, Text
from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import (
    Compute,
    Exchange,
    Launch,
    Load,
    Operation,
    Other,
    Payload,
    Schedule,
    Transfer,
    Wait,
)

_Transfer = tuple[Payload, Stage, Stage, MicroBatch]
_Operation = (
    tuple[Literal["compute"], Stage, Kind, MicroBatch]
    | tuple[Literal["load"], Stage, MicroBatch]
    | tuple[Literal["other"], Text, Stage, Index]
    | tuple[Literal["exchange", "launch"], tuple[_Transfer, ...], tuple[_Transfer, ...]]
    | tuple[Literal["wait"], tuple[_Transfer, ...]]
)


class ScheduleStreams(FileModel):
    """A schedule as it is written: ``["compute", stage, kind, micro-batch]`` and the like, one list a rank.

    Attributes:
        name: Class of the schedule. A label for people; nothing imports it.
        micro_batches: Micro-batches per iteration.
        ranks: Operations of every pipeline rank, in program order.
    """

    name: Text
    micro_batches: MicroBatchCount
    ranks: Annotated[tuple[tuple[_Operation, ...], ...], Field(min_length=1, max_length=MOST_STAGES)]

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleStreams:
        """Return a schedule as it is written."""
        ranks = tuple(tuple(_written(operation) for operation in stream) for stream in schedule.ranks)
        return cls.model_construct(name=schedule.name, micro_batches=schedule.micro_batches, ranks=ranks)

    def to_schedule(self) -> Schedule:
        """Return the schedule.

        Raises:
            ScheduleError: No rank computes anything, or there is too much to compute.
        """
        if self.micro_batches * len(self.ranks) > MOST_INSTRUCTIONS:
            raise ScheduleError(
                f"{self.name}: {len(self.ranks)} ranks and {self.micro_batches} micro-batches; ranks times "
                f"micro-batches may be {MOST_INSTRUCTIONS} at most."
            )
        ranks = tuple(tuple(_read(operation) for operation in stream) for stream in self.ranks)
        schedule = Schedule(self.name, self.micro_batches, ranks)
        if not any(schedule.instructions):
            raise ScheduleError(f"{self.name}: no rank computes anything.")
        return schedule


def _written(operation: Operation) -> _Operation:
    match operation:
        case Compute(instruction=i):
            return ("compute", i.stage, i.kind, i.micro_batch)
        case Load(stage=stage, micro_batch=micro_batch):
            return ("load", stage, micro_batch)
        case Other(command=command, stage=stage, number=number):
            return ("other", command, stage, number)
        case Exchange(sends=sends, receives=receives):
            return ("exchange", _transfers(sends), _transfers(receives))
        case Launch(sends=sends, receives=receives):
            return ("launch", _transfers(sends), _transfers(receives))
        case Wait(transfers=transfers):
            return ("wait", _transfers(transfers))


def _transfers(transfers: tuple[Transfer, ...]) -> tuple[_Transfer, ...]:
    return tuple((t.payload, t.source, t.target, t.micro_batch) for t in transfers)


def _read(operation: _Operation) -> Operation:
    match operation:
        case ("compute", stage, kind, micro_batch):
            return Compute(Instruction(stage, kind, micro_batch))
        case ("load", stage, micro_batch):
            return Load(stage, micro_batch)
        case ("other", command, stage, number):
            return Other(command, stage, number)
        case ("exchange", sends, receives):
            return Exchange(tuple(Transfer(*t) for t in sends), tuple(Transfer(*t) for t in receives))
        case ("launch", sends, receives):
            return Launch(tuple(Transfer(*t) for t in sends), tuple(Transfer(*t) for t in receives))
        case ("wait", transfers):
            return Wait(tuple(Transfer(*t) for t in transfers))
    raise AssertionError(f"unknown operation {operation!r}")
