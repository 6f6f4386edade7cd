"""Reads the operations that a schedule of ``torch.distributed.pipelining`` executes on each rank.

The schedule's own code runs on stages that compute nothing and record each call. Transfers are recorded when they are
launched and when they are awaited. So the order is not derived again, it is known for every rank without a process
group, and it follows changes of torch: methods of torch's stages that this module does not know compute nothing here
either. Functions of ``register_custom_function`` are not run. Each is recorded as the action that it replaces.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Operation, Other, Schedule, Transfer, Wait

KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
    "OVERLAP_F_B": Kind.FORWARD_BACKWARD,
    "FULL_FORWARD_BACKWARD": Kind.FORWARD_BACKWARD,  # torchtitan's, with one pipeline rank
}
"""Kinds of the passes among torch's actions."""
REDUCTIONS = {"REDUCE_GRAD": "perform_reduce_grad", "WAIT_REDUCE_GRAD": "wait_for_gradient_reduction"}
"""By action, the name in schedules of the command that reduces and scales the gradients of a stage."""
_RECEIVES = {"FORWARD": "fwd_recv_ops", "FULL_BACKWARD": "bwd_recv_ops", "BACKWARD_INPUT": "bwd_recv_ops"}
"""By action, the attribute of a schedule with the receives that the action awaits."""
OF_STAGES = ("perform_reduce_grad", "start_gradient_reduction", "wait_for_gradient_reduction")
"""Methods of stages that reduce gradients, also the names of these commands. Torch before 2.15 has only the first."""


def read_order(schedule: Any) -> Schedule:
    """Return the operations of a schedule in one training iteration, on every rank."""
    name = f"{type(schedule).__module__}:{type(schedule).__qualname__}"
    try:
        if not schedule._has_backward:
            raise ScheduleError("it has no loss_fn, so it trains nothing")
        if not hasattr(schedule, "_stages"):
            rank_of_stage = {stage: stage for stage in range(schedule._num_stages)}
        elif hasattr(schedule, "stage_index_to_group_rank"):
            rank_of_stage = dict(schedule.stage_index_to_group_rank)
        else:  # torch 2.4
            rank_of_stage = {stage: stage % schedule.pp_group_size for stage in range(schedule._num_stages)}
        streams = [_stream_of(schedule, rank, rank_of_stage) for rank in range(1 + max(rank_of_stage.values()))]
        return Schedule(name=name, micro_batches=int(schedule._n_microbatches), ranks=tuple(streams))
    except Exception as error:
        raise ScheduleError(
            f"The order of {name} is not known, with torch {torch.__version__}: {type(error).__name__}: {error}. "
            "Expected a schedule of torch.distributed.pipelining, or a derived one that executes its order with "
            "torch's own functions."
        ) from error


def read_class(schedule_class: Callable[..., Any], *, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    """Return the operations that a schedule would execute on every rank, without processes or a model.

    Args:
        schedule_class: A schedule class of ``torch.distributed.pipelining``, as returned by ``get_schedule_class``.
        ranks: Number of pipeline ranks.
        stages_per_rank: Number of stages per rank: 1 for ``ScheduleGPipe`` and ``Schedule1F1B``, 2 for
            ``ScheduleZBVZeroBubble`` and ``ScheduleDualPipeV``.
        micro_batches: Number of micro-batches per iteration.

    Raises:
        ScheduleError: The schedule does not support these numbers. The message gives the reason.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    name = f"{schedule_class.__module__}:{schedule_class.__qualname__}"
    asked_for = f"{name} for {ranks} ranks, {stages_per_rank} stages on each and {micro_batches} micro-batches"
    single = isinstance(schedule_class, type) and issubclass(schedule_class, PipelineScheduleSingle)
    if min(ranks, stages_per_rank, micro_batches) < 1:
        raise ScheduleError(f"{asked_for}: expected at least 1 of each.")
    if single and stages_per_rank != 1:
        raise ScheduleError(f"{asked_for}: it has one stage on each rank.")
    # The schedule determines the rank of each stage. It uses this mapping only for the number of stages.
    looped = {stage: stage % ranks for stage in range(ranks * stages_per_rank)}
    stages = [_Stage(stage, looped, []) for stage in looped if looped[stage] == 0]
    try:
        schedule = schedule_class(stages[0] if single else stages, micro_batches, loss_fn=_nothing)
    except (ValueError, TypeError, AssertionError) as error:
        raise ScheduleError(f"{asked_for}: {error}") from error
    return read_order(schedule)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank in the schedule's order."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def computes_input_gradients(stage: Any) -> bool:
    """Return True if a stage computes anything in the first part of a split backward.

    Without a ``dw_builder``, torch runs the whole backward of the first stage in the second part.
    """
    return not stage.is_first or getattr(stage, "dw_builder", None) is not None


def _stream_of(schedule: Any, rank: int, rank_of_stage: dict[int, int]) -> tuple[Operation, ...]:
    """Run the schedule's code as a rank would, and return the recorded operations."""
    operations: list[Operation] = []
    indices = sorted(stage for stage, its_rank in rank_of_stage.items() if its_rank == rank)
    own = {stage.stage_index: stage for stage in stages_of(schedule)}
    stages = [_Stage(index, rank_of_stage, operations, own.get(index)) for index in indices]
    micro_batches = schedule._n_microbatches
    execute = _rebound(type(schedule)._step_microbatches, _batch_p2p=partial(_launch, operations))
    execute(_for_reading(schedule, rank, stages), [()] * micro_batches, [{}] * micro_batches)
    return (*_simplified(operations), Compute(Instruction(indices[0], Kind.TAIL, 0)))


def _for_reading(schedule: Any, rank: int, stages: list[_Stage]) -> Any:
    """Return a copy of a schedule for another rank, with that rank's stages and no pending transfers."""
    copied = copy.copy(schedule)
    for name, value in vars(schedule).items():
        if isinstance(value, (dict, list, set)):  # modified while it runs
            setattr(copied, name, copy.copy(value))
    copied._internal_losses, copied._finalize_gradients, copied._deferred_stages = [], True, set()
    copied._maybe_compute_loss = copied._maybe_get_loss = _nothing
    if not hasattr(schedule, "_stages"):
        copied._stage, copied._initialize_stage = stages[0], _nothing
        return copied
    copied._stages, copied._initialize_stages, copied.rank = stages, _nothing, rank
    copied.backward_counter = Counter()
    copied.fwd_recv_ops, copied.bwd_recv_ops = {}, {}
    copied.unshard_ops, copied.unsharded_stages = defaultdict(list), set()
    registered = getattr(schedule, "_comp_type_to_function_map", {})
    copied._comp_type_to_function_map = {
        action: partial(_custom, stages[0].operations)
        for action in registered
        if action.name in KINDS or action.name in REDUCTIONS
    }
    return copied


def _custom(operations: list[Operation], action: Any, context: Any) -> None:
    """Record an action that a user's function runs: a pass, or a reduction."""
    if action.computation_type.name in REDUCTIONS:
        operations.append(Other(REDUCTIONS[action.computation_type.name], action.stage_index, 0))
        return
    await_receives(context.schedule_ref, action)
    operations.append(Compute(instruction_of(action)))


class _Awaited:
    """A receive that is complete. Waiting for it again returns immediately, because gloo waits for a work only once."""

    def wait(self) -> None:
        """Return immediately."""


def await_receives(schedule: Any, action: Any) -> None:
    """Wait for the launched receives that an action needs, so that its function does not wait for them again."""
    for part in action.sub_actions or (action,):
        kept = getattr(schedule, _RECEIVES.get(part.computation_type.name, ""), {})
        key = (part.stage_index, part.microbatch_index)
        if key in kept:
            for work in kept[key]:
                work.wait()
            kept[key] = [_Awaited() for _ in kept[key]]


def instruction_of(action: Any) -> Instruction:
    """Return the pass that an action runs. A combined one has the stage and micro-batch of its forward."""
    parts = action.sub_actions or (action,)
    first = next((part for part in parts if part.computation_type.name == "FORWARD"), parts[0])
    return Instruction(first.stage_index, KINDS[action.computation_type.name], first.microbatch_index)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _rebound(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a function, and of functions of its module, with other values of some global names."""
    own = function.__globals__
    variables = dict(own)
    for name, value in own.items():
        if isinstance(value, FunctionType) and value.__globals__ is own:
            variables[name] = _with_globals(value, variables)
    variables.update(names)
    return _with_globals(function, variables)


def _with_globals(function: Any, variables: dict[str, Any]) -> FunctionType:
    new = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


class _Works(list[Any]):
    """A list of works, or in torch 2.4 a single work, for which torch waits."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def _launch(operations: list[Operation], batch: Sequence[_P2POp], desc: str | None = None) -> _Works:
    """Replace torch's ``_batch_p2p`` on a rank that has recorded these operations."""
    if not batch:
        return _Works()
    sends = tuple(op.transfer for op in batch if op.sends)
    receives = tuple(op.transfer for op in batch if not op.sends)
    operations.append(Launch(sends, receives))
    return _Works([SimpleNamespace(wait=lambda: operations.append(Wait(sends + receives)))])


@dataclass(frozen=True)
class _P2POp:
    """A send or receive of a stage."""

    transfer: Transfer
    sends: bool
    peer: int


class _Sharded:
    """Parameters sharded by FSDP. Gathering and freeing them does nothing here."""

    def __init__(self) -> None:
        self.__class__ = type("_Sharded", (_Sharded, _fsdp_module()), {})

    def modules(self) -> list[Any]:
        return [self]

    def unshard(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(wait=_nothing)

    def reshard(self) -> None:
        """Do nothing, because nothing was gathered."""


def _fsdp_module() -> type:
    """Return the class by which torch recognises a stage that is sharded by FSDP."""
    from torch.distributed.pipelining import schedules

    return getattr(schedules, "FSDPModule", type("_NoFsdp", (), {}))


class _Stage:
    """A stage that computes nothing and records each call, with the methods of torch's stages."""

    has_backward = True
    group = None
    p2p_per_edge = False

    def __init__(
        self, stage_index: int, rank_of_stage: dict[int, int], operations: list[Operation], original: Any = None
    ) -> None:
        # Only the rank of a stage has the original.
        self.submod = _Sharded() if isinstance(getattr(original, "submod", None), _fsdp_module()) else None
        self.dw_builder = getattr(original, "dw_builder", None)
        self.stage_index = stage_index
        self.num_stages = len(rank_of_stage)
        self.group_size = 1 + max(rank_of_stage.values())
        self.group_rank = rank_of_stage[stage_index]
        self.is_first = stage_index == 0
        self.is_last = stage_index == self.num_stages - 1
        self.stage_index_to_group_rank = rank_of_stage
        self.operations = operations

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a no-op for any other method of torch's stages."""
        from torch.distributed.pipelining.stage import _PipelineStageBase

        if name.startswith("__") or not callable(getattr(_PipelineStageBase, name, None)):
            raise AttributeError(f"a schedule uses {name!r} of a stage, which perseus-ds does not know")
        return _nothing

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self._compute(Kind.FORWARD, fwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **_: Any) -> None:
        if full_backward:
            self._compute(Kind.BACKWARD, bwd_chunk_id)
        elif computes_input_gradients(self):
            self._compute(Kind.BACKWARD_INPUT, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self._compute(Kind.BACKWARD_WEIGHT, bwd_chunk_id)

    def perform_reduce_grad(self, *_: Any) -> None:
        self.operations.append(Other("perform_reduce_grad", self.stage_index, 0))

    def start_gradient_reduction(self) -> None:
        self.operations.append(Other("start_gradient_reduction", self.stage_index, 0))

    def wait_for_gradient_reduction(self, *_: Any) -> None:
        self.operations.append(Other("wait_for_gradient_reduction", self.stage_index, 0))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[_P2POp]:
        return self._transfer(Transfer("activation", self.stage_index - 1, self.stage_index, fwd_chunk_id), False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[_P2POp]:
        return self._transfer(Transfer("activation", self.stage_index, self.stage_index + 1, fwd_chunk_id), True)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[_P2POp]:
        return self._transfer(Transfer("grad", self.stage_index + 1, self.stage_index, bwd_chunk_id), False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[_P2POp]:
        return self._transfer(Transfer("grad", self.stage_index, self.stage_index - 1, bwd_chunk_id), True)

    def _compute(self, kind: Kind, micro_batch: int) -> None:
        self.operations.append(Compute(Instruction(self.stage_index, kind, micro_batch)))

    def _transfer(self, transfer: Transfer, sends: bool) -> list[_P2POp]:
        """Return the send or receive. Empty before the first stage and after the last one."""
        peer = self.stage_index_to_group_rank.get(transfer.target if sends else transfer.source)
        return [] if peer is None else [_P2POp(transfer, sends, peer)]


def _simplified(operations: Sequence[Operation]) -> list[Operation]:
    """Combine each launch that is awaited immediately into an exchange, and consecutive waits into one."""
    result: list[Operation] = []
    for operation in operations:
        before = result[-1] if result else None
        if isinstance(before, Launch) and operation == Wait(before.transfers):
            result[-1] = Exchange(before.sends, before.receives)
        elif isinstance(before, Wait) and isinstance(operation, Wait):
            result[-1] = Wait(before.transfers + operation.transfers)
        else:
            result.append(operation)
    return result
