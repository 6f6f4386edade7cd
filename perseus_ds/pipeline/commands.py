"""Reads a DeepSpeed ``PipeSchedule`` as the operations of all its ranks.

The engine's own schedule class is instantiated for every rank, and the commands that ``steps()`` yields are read. 1F1B
is not derived independently. Commands are recognised by class name, so that commands of other engines (Merak) need not
be importable. Clients can register their own commands.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from perseus_ds.errors import ConfigError, ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Load, Operation, Other, Payload, Schedule, Transfer

_LOAD, _NOTHING, _COMMIT = "load", "nothing", "commit"
_TRANSFERS = ("send_activation", "recv_activation", "send_grad", "recv_grad")
COMMAND_KINDS = (*(kind.value for kind in Kind if kind is not Kind.FORWARD_BACKWARD), _LOAD, *_TRANSFERS, _NOTHING)
"""The kinds as which a command can be registered."""

_KNOWN: dict[str, tuple[str, ...]] = {
    "LoadMicroBatch": (_LOAD,),
    "ForwardPass": ("forward",),
    "BackwardPass": ("backward",),
    # A split backward, as in zero-bubble schedules.
    "BackwardOnlyPass": ("backward_input",),
    "WeightPass": ("backward_weight",),
    "SendActivation": ("send_activation",),
    "RecvActivation": ("recv_activation",),
    "SendGrad": ("send_grad",),
    "RecvGrad": ("recv_grad",),
    "CommitP2P": (_COMMIT,),
    "ReduceTiedGrads": ("tail",),
    "ReduceGrads": ("tail",),
    "OptimizerStep": ("tail",),
    # Merak's commands.
    "PreCheckpointForwardPass": ("forward",),
    "SendActivationRecvGrad": ("send_activation", "recv_grad"),
    "SendGradRecvActivation": ("send_grad", "recv_activation"),
    "RecomputeRecvGrad": ("recompute", "recv_grad"),
    "RestoreRecomputeStatus": (_NOTHING,),
}
# Registration applies to the whole process, like DeepSpeed's own map of commands.
_REGISTERED: dict[str, tuple[str, ...]] = {}


def register_command(name: str, kind: str) -> None:
    """Declare the kind of a schedule command that perseus-ds does not know.

    Call this before the first iteration. The k-th command of a kind on a stage is assumed to process micro-batch k.

    Args:
        name: Class name of the command.
        kind: ``forward``, ``backward``, ``backward_input``, ``backward_weight``, ``recompute``, ``tail`` (gradient
            reduction and optimizer step), ``load``, ``send_activation``, ``recv_activation``, ``send_grad``,
            ``recv_grad``, or ``nothing`` for a command that takes no time.

    Raises:
        ConfigError: If ``kind`` is not one of these.
    """
    if kind not in COMMAND_KINDS:
        raise ConfigError(f"register_command: {name} as {kind!r}: expected one of {', '.join(COMMAND_KINDS)}.")
    _REGISTERED[name] = (kind,)


class CommandReader:
    """Converts one rank's commands into operations, one command at a time.

    The k-th command of a kind is assumed to process micro-batch k. If ``batched``, sends and receives are only queued
    until the next ``CommitP2P``.
    """

    def __init__(self, rank: int, ranks: int, batched: bool) -> None:
        self._rank = rank
        self._ranks = ranks
        self._batched = batched
        self._counts: Counter[tuple[str, int]] = Counter()
        # By stage: the micro-batches that have had their backward_input but not yet their backward_weight.
        self._split: defaultdict[int, deque[int]] = defaultdict(deque)
        self.queued: list[tuple[bool, Transfer]] = []

    def read(self, command_class: type, phase: int = 0) -> tuple[Operation, ...]:
        """Return the operations of a command, which are none if it only queues a transfer.

        The class is recognised by its own name or that of a base class. ``phase`` is the index of the stage on this
        rank (DualPipeV: 0 or 1).
        """
        names = [base.__name__ for base in command_class.__mro__]
        parts = next((parts for name in names if (parts := _REGISTERED.get(name) or _KNOWN.get(name))), None)
        stage = self._rank if phase == 0 else 2 * self._ranks - 1 - self._rank
        if parts is None:
            return (Other(names[0], stage, self._count(names[0], stage)),)
        if parts == (_COMMIT,):
            transfers, self.queued = self.queued, []
            return _exchange(transfers)
        transfers = [self._transfer(part, stage) for part in parts if part in _TRANSFERS]
        work = [self._work(part, stage, transfers) for part in parts if part not in _TRANSFERS and part != _NOTHING]
        if self._batched:
            self.queued += transfers
            return tuple(work)
        return (*work, *_exchange(transfers))

    def _work(self, part: str, stage: int, transfers: list[tuple[bool, Transfer]]) -> Operation:
        if part == _LOAD:
            return Load(stage, self._count(_LOAD, stage))
        kind = Kind(part)
        if kind is Kind.TAIL:
            return Compute(Instruction(stage, kind, 0))
        if kind is Kind.RECOMPUTE and transfers:
            # Merak recomputes the micro-batch first and receives its gradient afterwards.
            return Compute(Instruction(stage, kind, transfers[0][1].micro_batch))
        if kind is Kind.BACKWARD_WEIGHT and self._split[stage]:
            return Compute(Instruction(stage, kind, self._split[stage].popleft()))
        # Some micro-batches may have a whole backward and others a split one.
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        micro_batch = self._count(counted.value, stage)
        if kind is Kind.BACKWARD_INPUT:
            self._split[stage].append(micro_batch)
        return Compute(Instruction(stage, kind, micro_batch))

    def _count(self, name: str, stage: int) -> int:
        self._counts[name, stage] += 1
        return self._counts[name, stage] - 1

    def _transfer(self, part: str, stage: int) -> tuple[bool, Transfer]:
        sending = part.startswith("send")
        payload: Payload = "activation" if part.endswith("activation") else "grad"
        # Activations flow to the next stage, gradients to the previous one.
        neighbour = stage + 1 if sending == (payload == "activation") else stage - 1
        source, target = (stage, neighbour) if sending else (neighbour, stage)
        return sending, Transfer(payload, source, target, self._count(part, stage))


class RepeatedReader:
    """Like :class:`CommandReader`, but fast for an iteration that repeats the previous one."""

    def __init__(self, rank: int, ranks: int, batched: bool) -> None:
        self._of_rank = rank, ranks, batched
        # The class and phase of each command of the iteration, which determine its operations, and the operations.
        self._known: list[tuple[type, int, tuple[Operation, ...]]] = []
        self._position = 0
        # Created at the first command that differs from the previous iteration; has read all known commands.
        self._reader: CommandReader | None = None

    def begin_iteration(self) -> None:
        """Start a new iteration with the next command."""
        self._position = 0
        self._reader = None

    def read(self, command: Any) -> tuple[Operation, ...]:
        """Return the operations of the iteration's next command."""
        command_class, phase, position = type(command), getattr(command, "phase", 0), self._position
        self._position += 1
        if position < len(self._known):
            known_class, known_phase, operations = self._known[position]
            if known_class is command_class and known_phase == phase:
                return operations
            del self._known[position:]
            self._reader = None
        if self._reader is None:
            self._reader = CommandReader(*self._of_rank)
            for known_class, known_phase, _ in self._known:
                self._reader.read(known_class, known_phase)
        operations = self._reader.read(command_class, phase)
        self._known.append((command_class, phase, operations))
        return operations


def _exchange(transfers: list[tuple[bool, Transfer]]) -> tuple[Exchange, ...]:
    """Return the exchange of transfers, each with whether it is a send, or nothing if there are none."""
    sends = tuple(transfer for is_send, transfer in transfers if is_send)
    receives = tuple(transfer for is_send, transfer in transfers if not is_send)
    return (Exchange(sends, receives),) if transfers else ()


def read_stream(commands: Sequence[Any], rank: int, ranks: int) -> tuple[Operation, ...]:
    """Return the operations of one rank's commands, in program order.

    Raises:
        ScheduleError: If a transfer is queued but never launched.
    """
    reader = CommandReader(rank, ranks, batched=is_batched(commands))
    stream: list[Operation] = []
    for command in commands:
        for operation in reader.read(type(command), getattr(command, "phase", 0)):
            # Gradient reduction and optimizer step are several commands but one tail.
            if not stream or stream[-1] != operation:
                stream.append(operation)
    if reader.queued:
        raise ScheduleError(f"rank {rank} queues a transfer after its last CommitP2P: {reader.queued[0][1]}.")
    return tuple(stream)


def is_batched(commands: Iterable[Any]) -> bool:
    """Return whether sends and receives are only queued until the next ``CommitP2P``."""
    return any(type(command).__name__ == "CommitP2P" for command in commands)


def read_schedule(schedule_class: Callable[..., Any], *, ranks: int, micro_batches: int) -> Schedule:
    """Read the instruction streams of a ``PipeSchedule`` class for every pipeline rank.

    Args:
        schedule_class: A subclass of DeepSpeed's ``PipeSchedule``, or a class with the same constructor and
            ``steps()``.
        ranks: Number of pipeline ranks (for DualPipeV, half the number of stages).
        micro_batches: Number of micro-batches per iteration.

    Raises:
        ScheduleError: If the schedule cannot be built for these sizes.
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
"""DeepSpeed's schedules, by the names that are accepted in files."""
OF_TORCH = "torch.distributed.pipelining.schedules:"
"""Prefix of the names of torch's schedules that are accepted in files. No other name in a file is imported."""


def schedule_class(name: str) -> type:
    """Return the schedule class for ``1f1b``, ``dualpipev`` or ``package.module:Class``.

    The module is imported, so a name that is not in :data:`KNOWN` must come from the user and not from a file.

    Raises:
        ConfigError: If there is no such schedule.
    """
    if name in KNOWN:
        from deepspeed.runtime.pipe import schedule as deepspeed_schedule

        found = getattr(deepspeed_schedule, KNOWN[name], None)
        if found is None:
            raise ConfigError(f"schedule {name}: the installed DeepSpeed has no {KNOWN[name]}. Upgrade DeepSpeed.")
        return found  # type: ignore[no-any-return]
    module_name, colon, class_name = name.partition(":")
    try:
        if not colon:
            raise ImportError("no colon in the name")
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule {name}: not found ({error}). Write 1f1b, dualpipev, or package.module:Class of a class "
            "that can be imported here."
        ) from error
    if not hasattr(found, "steps") and not is_of_torch(found):
        raise ConfigError(f"schedule {name}: not a PipeSchedule, it has no steps().")
    return found  # type: ignore[no-any-return]


def is_of_torch(schedule_class: type) -> bool:
    """Return whether a schedule class is, or derives from, one of ``torch.distributed.pipelining``."""
    bases = getattr(schedule_class, "__mro__", ())
    return any(f"{base.__module__}:" == OF_TORCH for base in bases)


def stages_per_rank(schedule_class: type) -> int:
    """Return the number of stages on one rank under this schedule (2 for DualPipeV, otherwise 1)."""
    return 2 if any(base.__name__ == "DualPipeVSchedule" for base in schedule_class.__mro__) else 1
