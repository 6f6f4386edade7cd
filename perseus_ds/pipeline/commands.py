"""Reads the commands of a schedule as operations, and lets clients register commands of their own."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from perseus_ds.errors import ConfigError, ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.operations import Compute, Exchange, Load, Operation, Other, Payload, Transfer

_LOAD, _NOTHING = "load", "nothing"
_TRANSFERS = {
    "send_activation": "SendActivation",
    "recv_activation": "RecvActivation",
    "send_grad": "SendGrad",
    "recv_grad": "RecvGrad",
}
COMMAND_KINDS = (*(kind.value for kind in Kind), _LOAD, *_TRANSFERS, _NOTHING)
"""What a command can be registered as."""

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
    "ReduceTiedGrads": ("tail",),
    "ReduceGrads": ("tail",),
    "OptimizerStep": ("tail",),
    # Of Merak.
    "PreCheckpointForwardPass": ("forward",),
    "SendActivationRecvGrad": ("send_activation", "recv_grad"),
    "SendGradRecvActivation": ("send_grad", "recv_activation"),
    "RecomputeRecvGrad": ("recompute", "recv_grad"),
    "RestoreRecomputeStatus": (_NOTHING,),
}
# Registering is for the whole process, like DeepSpeed's own map of commands.
_REGISTERED: dict[str, tuple[str, ...]] = {}


def register_command(name: str, kind: str) -> None:
    """Say what a command of a schedule does that perseus-ds does not know; before the first iteration.

    The k-th command of a kind on a stage is taken to be for micro-batch k.

    Args:
        name: Class name of the command.
        kind: ``forward``, ``backward``, ``backward_input``, ``backward_weight``, ``recompute``, ``tail`` (gradient
            reduction and optimizer step), ``load``, ``send_activation``, ``recv_activation``, ``send_grad``,
            ``recv_grad``, or ``nothing`` for a command that takes no time.

    Raises:
        ConfigError: There is no such kind.
    """
    if kind not in COMMAND_KINDS:
        raise ConfigError(f"register_command: {name} as {kind!r}: expected one of {', '.join(COMMAND_KINDS)}.")
    _REGISTERED[name] = (kind,)


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
        # By stage, micro-batches of which the gradients of the weights are still to be computed.
        self._split: defaultdict[int, deque[int]] = defaultdict(deque)
        self._names: dict[type, str] = {}
        self.queued: list[tuple[bool, Transfer]] = []

    def read(self, command_class: type, phase: int = 0) -> tuple[Operation, ...]:
        """Return the operations of a command; none for a transfer that is only queued.

        Args:
            command_class: Its class; it is known by the name of that, or of one that it is derived from.
            phase: As in :meth:`operations`.
        """
        if command_class not in self._names:
            self._names[command_class] = _known_name(command_class)
        return self.operations(self._names[command_class], phase)

    def operations(self, command: str, phase: int = 0) -> tuple[Operation, ...]:
        """Return the operations of a command; none for a transfer that is only queued.

        Args:
            command: Class name of the command.
            phase: Which of the rank's stages (DualPipeV: 0 or 1).
        """
        stage = self._stage(phase)
        if command == "CommitP2P":
            transfers, self.queued = self.queued, []
            return (_exchange(transfers),) if transfers else ()
        parts = parts_of(command)
        if parts is None:
            return (Other(command, stage, self._count(command, stage)),)
        transfers = [self._transfer(_TRANSFERS[part], stage) for part in parts if part in _TRANSFERS]
        work = [self._work(part, stage, transfers) for part in parts if part not in _TRANSFERS and part != _NOTHING]
        if self._batched:
            self.queued += transfers
            return tuple(work)
        return (*work, _exchange(transfers)) if transfers else tuple(work)

    def _work(self, part: str, stage: int, transfers: list[tuple[bool, Transfer]]) -> Operation:
        if part == _LOAD:
            return Load(stage, self._count(_LOAD, stage))
        kind = Kind(part)
        if kind is Kind.TAIL:
            return Compute(Instruction(stage, kind, 0))
        if kind is Kind.RECOMPUTE and transfers:
            # Merak first recomputes what the gradient is for, and then receives it.
            return Compute(Instruction(stage, kind, transfers[0][1].micro_batch))
        if kind is Kind.BACKWARD_WEIGHT and self._split[stage]:
            return Compute(Instruction(stage, kind, self._split[stage].popleft()))
        # Some micro-batches may have a whole backward and others a split one.
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        micro_batch = self._count(counted.value, stage)
        if kind is Kind.BACKWARD_INPUT:
            self._split[stage].append(micro_batch)
        return Compute(Instruction(stage, kind, micro_batch))

    def _stage(self, phase: int) -> int:
        return self._rank if phase == 0 else 2 * self._ranks - 1 - self._rank

    def _count(self, what: str, stage: int) -> int:
        self._counts[what, stage] += 1
        return self._counts[what, stage] - 1

    def _transfer(self, command: str, stage: int) -> tuple[bool, Transfer]:
        sending = command.startswith("Send")
        payload: Payload = "activation" if command.endswith("Activation") else "grad"
        # Activations flow to the next stage, gradients to the previous one.
        neighbour = stage + 1 if sending == (payload == "activation") else stage - 1
        source, target = (stage, neighbour) if sending else (neighbour, stage)
        return sending, Transfer(payload, source, target, self._count(command, stage))


def phase_of(command: Any) -> int:
    """Return which of the rank's stages a command is for, where a rank has several."""
    phase: int = getattr(command, "phase", 0)
    return phase


def _known_name(command_class: type) -> str:
    """Return the name of a command's class, or of the nearest base that is known."""
    names = [base.__name__ for base in command_class.__mro__]
    return next((name for name in names if name == "CommitP2P" or parts_of(name) is not None), names[0])


def parts_of(command: str) -> tuple[str, ...] | None:
    """Return what a command does, in order; None if that is not known."""
    return _REGISTERED.get(command) or _KNOWN.get(command)


def _exchange(transfers: list[tuple[bool, Transfer]]) -> Exchange:
    return Exchange(
        sends=tuple(t for sending, t in transfers if sending),
        receives=tuple(t for sending, t in transfers if not sending),
    )


def read_stream(commands: Sequence[Any], rank: int, ranks: int) -> tuple[Operation, ...]:
    """Return the operations of one rank's commands, in program order.

    Args:
        commands: Commands of the rank's schedule, in order.
        rank: Pipeline rank.
        ranks: Pipeline ranks.

    Raises:
        ScheduleError: A transfer is queued but never launched.
    """
    reader = CommandReader(rank, ranks, batched=is_batched(commands))
    stream: list[Operation] = []
    for command in commands:
        for operation in reader.read(type(command), phase_of(command)):
            # Reduction and step are several commands but one tail.
            if not stream or stream[-1] != operation:
                stream.append(operation)
    if reader.queued:
        raise ScheduleError(f"rank {rank} queues a transfer after its last CommitP2P: {reader.queued[0][1]}.")
    return tuple(stream)


def is_batched(commands: Iterable[Any]) -> bool:
    """Return whether sends and receives are only queued until the next ``CommitP2P``."""
    return any(type(command).__name__ == "CommitP2P" for command in commands)
