"""The operation streams of a schedule as JSON.

Readers of a file with these streams need not import the class of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.validation import (
    MOST_INSTRUCTIONS,
    MOST_STAGES,
    Index,
    MicroBatch,
    MicroBatchCount,
    Stage,
    Text,
)
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


def _command(operation: Any) -> Any:
    return operation[0] if isinstance(operation, (list, tuple)) and operation else None


_Transfer = tuple[Payload, Stage, Stage, MicroBatch]
_Transfers = Annotated[tuple[_Transfer, ...], Field(fail_fast=True)]
_Operation = Annotated[
    Annotated[tuple[Literal["compute"], Stage, Kind, MicroBatch], Tag("compute")]
    | Annotated[tuple[Literal["load"], Stage, MicroBatch], Tag("load")]
    | Annotated[tuple[Literal["other"], Text, Stage, Index], Tag("other")]
    | Annotated[tuple[Literal["exchange"], _Transfers, _Transfers], Tag("exchange")]
    | Annotated[tuple[Literal["launch"], _Transfers, _Transfers], Tag("launch")]
    | Annotated[tuple[Literal["wait"], _Transfers], Tag("wait")],
    Discriminator(
        _command,
        custom_error_type="operation",
        custom_error_message="Input should be an operation: compute, load, other, exchange, launch or wait",
    ),
]
_Stream = Annotated[tuple[_Operation, ...], Field(fail_fast=True)]


class ScheduleStreams(FileModel):
    """A schedule in its file format: its class, which is never imported, and each rank's operations in program order.

    Operations are lists such as ``["compute", stage, kind, micro-batch]``.
    """

    name: Text = Field(description="`package.module:Class` of the schedule.")
    micro_batches: MicroBatchCount = Field(description="Number of micro-batches.")
    ranks: Annotated[tuple[_Stream, ...], Field(fail_fast=True, max_length=MOST_STAGES)] = Field(
        description="Operations of each rank in program order."
    )

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleStreams:
        ranks = tuple(tuple(_written(operation) for operation in stream) for stream in schedule.ranks)
        return cls.model_construct(name=schedule.name, micro_batches=schedule.micro_batches, ranks=ranks)

    def to_schedule(self) -> Schedule:
        """Return the schedule. Raises a ``ScheduleError`` if it has no instruction, or too many."""
        ranks = tuple(tuple(_read(operation) for operation in stream) for stream in self.ranks)
        schedule = Schedule(self.name, self.micro_batches, ranks)
        if not any(schedule.instructions):
            raise ScheduleError(f"{self.name}: no rank has an instruction.")
        if self.micro_batches * schedule.num_stages > MOST_INSTRUCTIONS:
            raise ScheduleError(
                f"{self.name}: {schedule.num_stages} stages and {self.micro_batches} micro-batches; stages times "
                f"micro-batches may be at most {MOST_INSTRUCTIONS}."
            )
        return schedule


_CLASSES: dict[str, Callable[..., Operation]] = {
    "load": Load, "other": Other, "exchange": Exchange, "launch": Launch, "wait": Wait,
}  # fmt: skip


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


def _transfers(transfers: tuple[Transfer, ...]) -> _Transfers:
    return tuple((t.payload, t.source, t.target, t.micro_batch) for t in transfers)


def _read(written: _Operation) -> Operation:
    name, *fields = written
    if written[0] == "compute":
        return Compute(Instruction(*written[1:]))
    arguments: list[object] = []
    for field in fields:
        if isinstance(field, tuple):
            arguments.append(tuple(Transfer(*transfer) for transfer in field))
        else:
            arguments.append(field)
    return _CLASSES[name](*arguments)
