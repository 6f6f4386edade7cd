"""Attaches Perseus to a schedule of ``torch.distributed.pipelining``, and detaches it."""

from __future__ import annotations

import hashlib
import inspect
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from perseus_ds.artifacts.layout import encode_parts
from perseus_ds.config import PerseusConfig, settings_of
from perseus_ds.engines.engine import (
    Engine,
    Session,
    attach_to,
    detach_from,
    fingerprint,
    ranks_of,
    reported_once,
    require,
    token_ids,
)
from perseus_ds.engines.hooks import Hooks, Method
from perseus_ds.engines.layers import parts_of_huggingface, parts_of_module, unwrapped
from perseus_ds.engines.torch_pipelining.order import (
    KINDS,
    OF_STAGES,
    REDUCTIONS,
    await_receives,
    computes_input_gradients,
    instruction_of,
    read_order,
    stages_of,
)
from perseus_ds.errors import ConfigError, ScheduleError, VersionError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Other, Schedule
from perseus_ds.protocol.job_messages import RankFacts

logger = logging.getLogger("perseus_ds")
S = TypeVar("S")


@reported_once()
def attach(
    schedule: S, config: Mapping[str, Any] | None = None, *, pipeline: Any = None, data_parallel: Any = None
) -> S:
    """Attach Perseus to a schedule of torch. See :func:`perseus_ds.attach`."""
    settings = settings_of(config) or PerseusConfig.model_validate({})
    count_tokens(schedule, pipeline, data_parallel)
    check_huggingface_stages(schedule)
    if "perseus" in vars(schedule):
        return schedule
    try:
        attach_to(lambda: _checked(schedule, pipeline, data_parallel), settings)
    except ScheduleError as error:  # on all ranks, if on one
        if settings.mode != "auto" or settings.required:
            raise
        if dist.get_rank() == 0:
            logger.warning("perseus: %s This job is only observed, without plans.", error)
        observing = settings.model_copy(update={"mode": "observe"})
        attach_to(lambda: _checked(schedule, pipeline, data_parallel, order_is_known=False), observing)
    return schedule


def _checked(schedule: Any, pipeline: Any, data_parallel: Any, *, order_is_known: bool = True) -> TorchSchedule:
    """Return the engine of a schedule to which Perseus can be attached. Raises an error if it cannot."""
    check_schedule(schedule)
    stage = stages_of(schedule)[0]
    rank, ours = dist.get_rank(), ranks_of(stage.group if pipeline is None else pipeline)
    copies = None if data_parallel is None else ranks_of(data_parallel)
    if rank not in ours or (copies is not None and rank not in copies):
        raise ConfigError(f"perseus: rank {rank} is not in its own pipeline {ours} or data_parallel group {copies}.")
    if len(ours) != stage.group_size:
        raise ConfigError(
            f"perseus: the pipeline has ranks {ours}, expected the {stage.group_size} ranks of the process group of "
            "its stages."
        )
    return TorchSchedule(schedule, ours, copies, order_is_known=order_is_known)


def count_tokens(schedule: Any, pipeline: Any, data_parallel: Any) -> None:
    """Let the loss of a Hugging Face model count the trained tokens of each batch, also after Perseus is detached.

    Other losses are not changed.
    """
    loss: Any = getattr(schedule, "_loss_fn", None)
    if not hasattr(loss, "counting_tokens") or hasattr(schedule._step_microbatches, "counts_tokens"):
        return
    ranks = ranks_of(stages_of(schedule)[0].group if pipeline is None else pipeline)
    if data_parallel is None and dist.get_world_size() > len(ranks):
        raise ConfigError(
            f"perseus: the job has {dist.get_world_size()} ranks, the pipeline {len(ranks)}. The loss of a Hugging "
            "Face model counts the trained tokens of all pipelines that train on one batch. Pass the group of ranks "
            "that train the same stages to attach as data_parallel=."
        )
    group = data_parallel.get_group() if hasattr(data_parallel, "get_group") else data_parallel
    signature = inspect.signature(schedule._step_microbatches)

    def counted(method: Method, *args: Any, **kwargs: Any) -> Any:
        labels = signature.bind(*args, **kwargs).arguments.get("target_mbs")
        if labels is None:
            return method(*args, **kwargs)
        with loss.counting_tokens(labels, group=group, averaged=schedule.scale_grads):
            return method(*args, **kwargs)

    Hooks().surround(schedule, "_step_microbatches", counted)
    schedule._step_microbatches.counts_tokens = True


def check_huggingface_stages(schedule: Any) -> None:
    """Raise a ``ConfigError`` before training if stages of a Hugging Face model could not be saved after it."""
    for stage in stages_of(schedule):
        if parts_of_huggingface(getattr(stage, "submod", None)) is not None:
            from perseus_ds.huggingface.stages import check_can_be_saved  # it needs transformers

            check_can_be_saved(stage.submod)


def detach(schedule: S) -> S:
    """End the last iteration and restore the schedule to its state before :func:`attach`.

    All ranks call this together.
    """
    detach_from(schedule)
    return schedule


class TorchSchedule(Engine):
    """A schedule of torch. All passes of its stages are reported.

    An iteration begins with ``step()``. Its tail begins when ``step()`` returns, and ends when optimizers have stepped
    as often as in the first iteration, or else with the next ``step()``, an ``eval()``, or the end of the session.
    """

    def __init__(
        self,
        schedule: Any,
        pipeline: tuple[int, ...],
        data_parallel: tuple[int, ...] | None,
        *,
        order_is_known: bool,
    ) -> None:
        self._schedule = schedule
        self._pipeline = pipeline
        self._data_parallel = data_parallel
        self._order_is_known = order_is_known
        self._hooks: Hooks
        # Original functions of register_custom_function by their actions.
        self._custom: dict[Any, Method] = {}
        # Whether a user's function is running a whole pass, or torch a whole reduction.
        self._is_inside = False
        # Order of the multi-stage schedule that ran last, and its digest. The reference keeps its memory address from
        # being reused by another order.
        self._last_order: Any = None
        self._digest = ""
        # The loss is part of the last stage's forward, which ends with it.
        self._until_loss: AbstractContextManager[Any] | None = None
        # Steps of optimizers in the current tail, and the number with which a tail ends. It is None until a tail has a
        # step, because a gradient scaler may skip the first ones.
        self._is_tail = False
        self._optimizer_steps = 0
        self._last_optimizer_step: int | None = None
        # Iterations since the last optimizer step. They accumulate gradients, and are one training step.
        self._accumulated = 0
        self._optimizer_hook: RemovableHandle | None = None

    @property
    def model(self) -> str:
        return type(unwrapped(stages_of(self._schedule)[0].submod)).__name__

    def facts(self) -> RankFacts:
        stages = stages_of(self._schedule)
        parts = {
            stage.stage_index: parts_of_module(stage.submod, is_first=stage.is_first, is_last=stage.is_last)
            for stage in stages
        }
        is_huggingface = parts_of_huggingface(stages[0].submod) is not None
        return RankFacts(
            pipeline=self._pipeline,
            copies=self._data_parallel,
            fingerprint=fingerprint([stage.submod for stage in stages], [stage.stage_index for stage in stages]),
            engine="huggingface" if is_huggingface else "torch",
            parts=encode_parts(parts),
        )

    def device(self) -> torch.device:
        return torch.device(stages_of(self._schedule)[0].device)

    def check_order(self) -> None:
        if self._order_is_known:
            read_order(self._schedule)

    def read(self) -> Schedule:
        if not self._order_is_known:
            tail = Compute(Instruction(stages_of(self._schedule)[0].stage_index, Kind.TAIL, 0))
            return Schedule(type(self._schedule).__name__, int(self._schedule._n_microbatches), ((tail,),))
        order = read_order(self._schedule)
        return replace(order, ranks=(order.ranks[self._pipeline.index(dist.get_rank())],))

    def surround(self, session: Session) -> None:
        self._session = self._schedule.perseus = session
        self._hooks = Hooks(session.step_aside)
        self._hooks.surround(self._schedule, "step", self._step)
        # Torch keeps the hook, which must not keep a schedule that is dropped.
        has_stepped = weakref.WeakMethod(self._optimizer_has_stepped)
        self._optimizer_hook = register_optimizer_step_post_hook(lambda *_: (found := has_stepped()) and found())
        weakref.finalize(self, self._optimizer_hook.remove).atexit = False
        if not self._order_is_known:
            return
        self._hooks.surround(self._schedule, "_maybe_compute_loss", self._compute_loss)
        for stage in stages_of(self._schedule):
            self._hooks.surround(stage, "forward_one_chunk", partial(self._forward, stage))
            self._hooks.surround(stage, "backward_one_chunk", partial(self._backward, stage))
            for name, around in (
                ("backward_weight_one_chunk", partial(self._backward_weight, stage)),
                *((command, partial(self._reduce, command, stage)) for command in OF_STAGES),
            ):
                if hasattr(stage, name):
                    self._hooks.surround(stage, name, around)

    def release(self) -> None:
        self._hooks.remove()
        vars(self._schedule).pop("perseus", None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        for action, function in self._custom.items():
            self._schedule._comp_type_to_function_map[action] = function
        self._custom.clear()

    def _step(self, step: Method, *args: Any, **kwargs: Any) -> Any:
        if not self._schedule._has_backward:  # eval()
            with self._session.evaluation():
                return step(*args, **kwargs)
        if self._is_tail and self._last_optimizer_step is None and self._optimizer_steps:
            self._last_optimizer_step = self._optimizer_steps
        if self._is_tail and not self._optimizer_steps:
            self._accumulated += 1
        self._is_tail = False
        self._until_loss = None
        self._surround_custom_functions()
        functions = tuple(sorted(action.name for action in self._custom))  # some combine two passes
        with self._session.iteration((self._schedule._n_microbatches, self._order_digest(), functions)):
            result = step(*args, **kwargs)
            self._end_forward()
            self._session.begin_tail(stages_of(self._schedule)[0].stage_index)
        self._is_tail, self._optimizer_steps = True, 0
        return result

    def _optimizer_has_stepped(self) -> None:
        self._hooks.guarded(self._count_optimizer_step)()

    def _count_optimizer_step(self) -> None:
        self._optimizer_steps += 1
        if self._is_tail and self._accumulated:
            self._session.add_steps(-self._accumulated)
            self._accumulated = 0
        if self._is_tail and self._optimizer_steps == self._last_optimizer_step:
            self._session.end_iteration()

    def _order_digest(self) -> str:
        """Return a digest of the schedule's order. Empty if its class alone determines the order."""
        order = getattr(self._schedule, "pipeline_order_with_comms", None)
        if order is not self._last_order:
            self._last_order = order
            self._digest = hashlib.sha256(repr(order).encode()).hexdigest()
        return self._digest

    def _forward(self, stage: Any, method: Method, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if stage.is_first:
            self._session.add_tokens(token_ids(_inputs_of(*args, **kwargs)))
        with ExitStack() as scope:
            scope.enter_context(self._pass(stage, Kind.FORWARD, fwd_chunk_id))
            result = method(fwd_chunk_id, *args, **kwargs)
            if stage.is_last:
                self._until_loss = scope.pop_all()
        return result

    def _compute_loss(self, method: Method, stage: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(stage, *args, **kwargs)
        finally:
            if stage.is_last:
                self._end_forward()

    def _backward(self, stage: Any, method: Method, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        full_backward = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
        if not full_backward and not computes_input_gradients(stage):
            return method(bwd_chunk_id, *args, **kwargs)
        with self._pass(stage, kind, bwd_chunk_id):
            return method(bwd_chunk_id, *args, **kwargs)

    def _backward_weight(self, stage: Any, method: Method, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pass(stage, Kind.BACKWARD_WEIGHT, bwd_chunk_id):
            return method(bwd_chunk_id, *args, **kwargs)

    def _reduce(self, command: str, stage: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
        with self._whole(Other(command, stage.stage_index, 0)):  # torch calls one such method by another
            return method(*args, **kwargs)

    def _surround_custom_functions(self) -> None:
        """Wrap functions of ``register_custom_function``, including those registered since the last step."""
        registered = getattr(self._schedule, "_comp_type_to_function_map", {})
        for action, function in registered.items():
            is_new = not hasattr(function, "is_of_perseus")
            if is_new and (action.name in KINDS or action.name in REDUCTIONS):
                self._custom[action] = function
                registered[action] = self._hooks.surrounded(function, self._run_custom)
                registered[action].is_of_perseus = True

    def _run_custom(self, function: Method, action: Any, context: Any) -> Any:
        name = action.computation_type.name
        if name in REDUCTIONS:
            operation: Operation = Other(REDUCTIONS[name], action.stage_index, 0)
        else:
            operation = Compute(instruction_of(action))
        await_receives(self._schedule, action)  # before the pass, as in torch
        with self._whole(operation):
            return function(action, context)

    @contextmanager
    def _whole(self, operation: Operation) -> Iterator[None]:
        """Context of an operation that hides the operations inside it."""
        with self._surround(operation):
            was_inside, self._is_inside = self._is_inside, True
            try:
                yield
            finally:
                self._is_inside = was_inside

    def _pass(self, stage: Any, kind: Kind, micro_batch: int) -> AbstractContextManager[Any]:
        return self._surround(Compute(Instruction(stage.stage_index, kind, micro_batch)))

    def _surround(self, operation: Operation) -> AbstractContextManager[Any]:
        self._end_forward()
        return nullcontext() if self._is_inside else self._session.operation(operation)

    def _end_forward(self) -> None:
        scope, self._until_loss = self._until_loss, None
        if scope is not None:
            scope.__exit__(None, None, None)


def _inputs_of(args: Any = (), kwargs: Mapping[str, Any] | None = None, *_: Any, **__: Any) -> list[Any]:
    """Return the inputs of a stage among the arguments of torch's ``forward_one_chunk``."""
    return [*args, *(kwargs or {}).values()]


OLDEST_TORCH, NEWEST_TORCH = "2.4", "2.15"
"""Versions of torch with tested schedules."""

SCHEDULE = (
    *("step", "_step_microbatches", "_maybe_compute_loss", "_maybe_get_loss", "_has_backward", "_n_microbatches"),
    *("_internal_losses", "_num_stages"),
)
STAGE = (
    *("forward_one_chunk", "backward_one_chunk", "stage_index"),
    *("is_first", "is_last", "submod", "device", "group", "group_size"),
)


def check_schedule(schedule: Any) -> None:
    """Check that a schedule and its stages are those of torch, and have the attributes that Perseus needs."""
    if not isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
        raise ConfigError(
            f"perseus: expected a schedule of torch.distributed.pipelining, got a {type(schedule).__name__}."
        )
    found = str(torch.__version__)
    if Version(found).release < Version(OLDEST_TORCH).release:
        raise VersionError(
            f"torch {found}: perseus-ds attaches to pipeline schedules of torch>={OLDEST_TORCH}. "
            f'Run: pip install "torch>={OLDEST_TORCH}"'
        )
    if Version(found).release[:2] > Version(NEWEST_TORCH).release and dist.get_rank() == 0:
        logger.warning("perseus: torch %s is newer than %s, the newest with tested schedules.", found, NEWEST_TORCH)
    require("torch", found, NEWEST_TORCH, {type(schedule).__name__: (schedule, SCHEDULE)})
    for stage in stages_of(schedule):
        if not isinstance(stage, _PipelineStageBase):
            raise ConfigError(
                f"perseus: {type(schedule).__name__} has a {type(stage).__name__} as a stage, expected a PipelineStage "
                "of torch.distributed.pipelining."
            )
        require("torch", found, NEWEST_TORCH, {type(stage).__name__: (stage, STAGE)})
