"""A DeepSpeed ``PipeSchedule`` read as the instruction streams of all its ranks.

The engine's schedule is the truth: it is instantiated for every rank and its ``steps()`` are
read; 1F1B is never derived again. Instructions are recognised by class name, so that schedules of
other engines (Merak's) need not be importable.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perseus_ds.errors import ConfigError, ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind

Payload = Literal["activation", "grad"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an instruction."""

    instruction: Instruction

    def __str__(self) -> str:
        return str(self.instruction)


@dataclass(frozen=True, slots=True)
class Load:
    """Load the data of one micro-batch."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"load of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One tensor exchange between neighbouring stages, as both of its sides know it.

    The k-th send over a boundary in one direction meets the k-th receive there.
    """

    payload: Payload
    source: int
    """Sending stage."""
    target: int
    """Receiving stage."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.payload} of micro-batch {self.micro_batch} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Launch the transfers together and wait until all of them are complete."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.sends + self.receives

    def __str__(self) -> str:
        return ", ".join([f"send {t}" for t in self.sends] + [f"receive {t}" for t in self.receives])


Operation = Compute | Load | Exchange


@dataclass(frozen=True)
class Schedule:
    """The operations of every rank of a pipeline in one iteration, in program order.

    Attributes:
        name: Class of the schedule, as ``package.module:Class``.
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


def read_stream(commands: Sequence[Any], rank: int, ranks: int) -> tuple[Operation, ...]:
    """Return the operations of one rank's commands, in program order.

    Args:
        commands: Commands of the rank's schedule, in order.
        rank: Pipeline rank.
        ranks: Pipeline ranks.

    Raises:
        ScheduleError: A command is unknown, or a transfer is queued but never launched.
    """
    reader = CommandReader(rank, ranks, batched=is_batched(commands))
    stream: list[Operation] = []
    for command in commands:
        for operation in reader.read(command):
            # Reduction and step are several commands but one tail.
            if not stream or stream[-1] != operation:
                stream.append(operation)
    if reader.queued:
        raise ScheduleError(f"rank {rank} queues a transfer after its last CommitP2P: {reader.queued[0][1]}.")
    return tuple(stream)


def is_batched(commands: Iterable[Any]) -> bool:
    """Return whether sends and receives are only queued until the next ``CommitP2P``."""
    return any(type(command).__name__ == "CommitP2P" for command in commands)


def schedule_class(name: str) -> type:
    """Return the schedule class for ``1f1b``, ``dualpipev`` or ``package.module:Class``.

    Raises:
        ConfigError: There is no such schedule.
    """
    if name in ("1f1b", "dualpipev"):
        from deepspeed.runtime.pipe import schedule as deepspeed_schedule

        found = getattr(deepspeed_schedule, "TrainSchedule" if name == "1f1b" else "DualPipeVSchedule", None)
        if found is None:
            raise ConfigError(
                "schedule=dualpipev: the installed DeepSpeed has no DualPipeVSchedule. Upgrade DeepSpeed."
            )
        return found  # type: ignore[no-any-return]
    module_name, colon, class_name = name.partition(":")
    try:
        if not colon:
            raise ImportError("no colon in the name")
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"schedule={name}: not found ({error}). Write 1f1b, dualpipev, or package.module:Class of a class "
            "that can be imported here."
        ) from error
    if not hasattr(found, "steps"):
        raise ConfigError(f"schedule={name}: not a PipeSchedule, it has no steps().")
    return found  # type: ignore[no-any-return]


def stages_per_rank(schedule_class: type) -> int:
    """Return how many stages one rank holds under this schedule (2 for DualPipeV, otherwise 1)."""
    return 2 if any(base.__name__ == "DualPipeVSchedule" for base in schedule_class.__mro__) else 1


_TAIL = {"ReduceTiedGrads", "ReduceGrads", "OptimizerStep"}
_NO_WORK = {"RestoreRecomputeStatus"}
_TRANSFERS = {
    "SendActivation": ("SendActivation",),
    "RecvActivation": ("RecvActivation",),
    "SendGrad": ("SendGrad",),
    "RecvGrad": ("RecvGrad",),
    "SendActivationRecvGrad": ("SendActivation", "RecvGrad"),
    "SendGradRecvActivation": ("SendGrad", "RecvActivation"),
    "RecomputeRecvGrad": ("RecvGrad",),
}
_COMPUTE = {
    "ForwardPass": Kind.FORWARD,
    "PreCheckpointForwardPass": Kind.FORWARD,
    "BackwardPass": Kind.BACKWARD,
}


class CommandReader:
    """Turns one rank's commands into operations, one after the other; the k-th of a kind is micro-batch k.

    Args:
        rank: Pipeline rank.
        ranks: Pipeline ranks.
        batched: Sends and receives are only queued until the next ``CommitP2P``.
    """

    def __init__(self, rank: int, ranks: int, batched: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self._batched = batched
        self._counts: Counter[tuple[str, int]] = Counter()
        self.queued: list[tuple[bool, Transfer]] = []

    def read(self, command: Any) -> tuple[Operation, ...]:
        """Return what a command of a schedule does; see :meth:`operations`."""
        return self.operations(type(command).__name__, getattr(command, "phase", 0))

    def operations(self, command: str, phase: int = 0) -> tuple[Operation, ...]:
        """Return the operations of a command; none for a transfer that is only queued.

        Args:
            command: Class name of the command.
            phase: Which of the rank's stages (DualPipeV: 0 or 1).

        Raises:
            ScheduleError: The command is unknown.
        """
        stage = self._stage(phase)
        if command in _COMPUTE:
            return (self._compute(_COMPUTE[command], stage),)
        if command in _TAIL:
            return (Compute(Instruction(stage, Kind.TAIL, 0)),)
        if command == "LoadMicroBatch":
            return (Load(stage, self._count("load", stage)),)
        if command not in _NO_WORK:
            return self._communication(command, stage)
        return ()

    def _communication(self, command: str, stage: int) -> tuple[Operation, ...]:
        if command == "CommitP2P":
            transfers, self.queued = self.queued, []
            return (_exchange(transfers),) if transfers else ()
        if command not in _TRANSFERS:
            raise ScheduleError(f"rank {self._rank} has an instruction perseus-ds does not know: {command}.")
        transfers = [self._transfer(part, stage) for part in _TRANSFERS[command]]
        if self._batched:
            self.queued += transfers
            return ()
        if command == "RecomputeRecvGrad":
            # Merak first recomputes what the gradient is for, and then receives it.
            recompute = Compute(Instruction(stage, Kind.RECOMPUTE, transfers[0][1].micro_batch))
            return (recompute, _exchange(transfers))
        return (_exchange(transfers),)

    def _stage(self, phase: int) -> int:
        return self._rank if phase == 0 else 2 * self._ranks - 1 - self._rank

    def _count(self, what: str, stage: int) -> int:
        self._counts[what, stage] += 1
        return self._counts[what, stage] - 1

    def _compute(self, kind: Kind, stage: int) -> Compute:
        return Compute(Instruction(stage, kind, self._count(kind.value, stage)))

    def _transfer(self, command: str, stage: int) -> tuple[bool, Transfer]:
        sending = command.startswith("Send")
        payload: Payload = "activation" if command.endswith("Activation") else "grad"
        # Activations flow to the next stage, gradients to the previous one.
        neighbour = stage + 1 if sending == (payload == "activation") else stage - 1
        source, target = (stage, neighbour) if sending else (neighbour, stage)
        return sending, Transfer(payload, source, target, self._count(command, stage))


def _exchange(transfers: list[tuple[bool, Transfer]]) -> Exchange:
    return Exchange(
        sends=tuple(t for sending, t in transfers if sending),
        receives=tuple(t for sending, t in transfers if not sending),
    )
