"""A DeepSpeed ``PipeSchedule`` read as the instruction streams of all its ranks.

The engine's own schedule is used: it is instantiated for every rank and its ``steps()`` are
read; 1F1B is never derived again. Instructions are recognised by class name, so that schedules of
other engines (Merak's) need not be importable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perseus_ds.errors import ConfigError, ScheduleError
from perseus_ds.pipeline.commands import read_stream
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.operations import Compute, Exchange, Launch, Load, Operation, Other, Payload, Transfer, Wait

__all__ = [
    "Compute",
    "Exchange",
    "Launch",
    "Load",
    "Operation",
    "Other",
    "Payload",
    "Schedule",
    "Transfer",
    "Wait",
    "is_of_torch",
    "read_schedule",
    "schedule_class",
    "stages_per_rank",
]


@dataclass(frozen=True)
class Schedule:
    """The operations of every rank of a pipeline in one iteration, in program order.

    Attributes:
        name: Class of the schedule, as ``package.module:Class``. A label for people; nothing imports it.
        micro_batches: Micro-batches per iteration.
        ranks: One stream of operations per pipeline rank.
    """

    name: str
    micro_batches: int
    ranks: tuple[tuple[Operation, ...], ...]

    @property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """The compute instructions of every rank, in program order."""
        return tuple(tuple(op.instruction for op in stream if isinstance(op, Compute)) for stream in self.ranks)

    @property
    def num_stages(self) -> int:
        return 1 + max(i.stage for stream in self.instructions for i in stream)


def read_schedule(schedule_class: Callable[..., Any], *, ranks: int, micro_batches: int) -> Schedule:
    """Read the instruction streams of a ``PipeSchedule`` class for every pipeline rank.

    Args:
        schedule_class: A subclass of DeepSpeed's ``PipeSchedule`` (or anything with its
            constructor and ``steps()``).
        ranks: Pipeline ranks (for DualPipeV, half the number of stages).
        micro_batches: Micro-batches per iteration.

    Raises:
        ScheduleError: The schedule cannot be built for these sizes, or holds an instruction
            perseus-ds does not know.
    """
    if ranks < 1 or micro_batches < 1:
        raise ScheduleError(
            f"A pipeline needs at least 1 rank and 1 micro-batch, got {ranks} ranks and {micro_batches} micro-batches."
        )
    name = f"{schedule_class.__module__}:{schedule_class.__qualname__}"
    streams = []
    for rank in range(ranks):
        try:
            schedule = schedule_class(micro_batches=micro_batches, stages=ranks, stage_id=rank)
            commands = [command for step in schedule.steps() for command in step]
        except (ValueError, TypeError, AssertionError) as error:
            raise ScheduleError(
                f"{name} cannot schedule {micro_batches} micro-batches on {ranks} pipeline ranks: {error}"
            ) from error
        try:
            streams.append(read_stream(commands, rank, ranks))
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from None
    return Schedule(name=name, micro_batches=micro_batches, ranks=tuple(streams))


_MODULE = "deepspeed.runtime.pipe.schedule"
KNOWN = {
    "1f1b": "TrainSchedule",
    "dualpipev": "DualPipeVSchedule",
    f"{_MODULE}:TrainSchedule": "TrainSchedule",
    f"{_MODULE}:DualPipeVSchedule": "DualPipeVSchedule",
}
"""Schedules of DeepSpeed, by the names that files may have for them."""
OF_TORCH = "torch.distributed.pipelining.schedules:"
"""Begin of the names that files may have for schedules of torch. No other name in a file is imported."""


def schedule_class(name: str) -> type:
    """Return the schedule class for ``1f1b``, ``dualpipev`` or ``package.module:Class``.

    The module is imported, so the name must come from a user and not from a file, unless it is one of :data:`KNOWN`.

    Raises:
        ConfigError: There is no such schedule.
    """
    if name in KNOWN:
        from deepspeed.runtime.pipe import schedule as deepspeed_schedule

        found = getattr(deepspeed_schedule, KNOWN[name], None)
        if found is None:
            raise ConfigError(f"schedule={name}: the installed DeepSpeed has no {KNOWN[name]}. Upgrade DeepSpeed.")
        return found  # type: ignore[no-any-return]
    module_name, colon, class_name = name.partition(":")
    try:
        if not colon:
            raise ImportError("no colon in the name")
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule={name}: not found ({error}). Write 1f1b, dualpipev, or package.module:Class of a class "
            "that can be imported here."
        ) from error
    if not hasattr(found, "steps") and not is_of_torch(found):
        raise ConfigError(f"schedule={name}: not a PipeSchedule, it has no steps().")
    return found  # type: ignore[no-any-return]


def is_of_torch(schedule_class: type) -> bool:
    """Return whether a schedule class is one of ``torch.distributed.pipelining``, or derived from one."""
    bases = getattr(schedule_class, "__mro__", ())
    return any(f"{base.__module__}:" == OF_TORCH for base in bases)


def stages_per_rank(schedule_class: type) -> int:
    """Return how many stages one rank holds under this schedule (2 for DualPipeV, otherwise 1)."""
    return 2 if any(base.__name__ == "DualPipeVSchedule" for base in schedule_class.__mro__) else 1
