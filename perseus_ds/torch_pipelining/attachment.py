"""Perseus on one schedule of torch: made when it first trains, told of every pass that its stages run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Other
from perseus_ds.runtime.attachment import Attachment
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.runtime import PerseusRuntime
from perseus_ds.torch_pipelining.hooks import Hooks
from perseus_ds.torch_pipelining.order import REDUCE_GRAD, computes_input_gradients, stages_of
from perseus_ds.torch_pipelining.schedule_job import make_runtime, model_name
from perseus_ds.torch_pipelining.topology import RankGroups

Method = Callable[..., Any]


class ScheduleAttachment(Attachment):
    """Perseus on one schedule, as ``schedule.perseus``.

    An iteration begins with ``step()``. Its tail is what comes after, such as the optimizer's step, and lasts until
    the next ``step()``, an ``eval()``, or the end of the attachment.
    """

    def __init__(self, schedule: Any, config: PerseusConfig, groups: RankGroups) -> None:
        super().__init__(config, model_name(schedule))
        self._schedule = schedule
        self._groups = groups
        self._iteration = ExitStack()
        # Set while step() trains: the passes that stages run then are those of the iteration.
        self._training: PerseusRuntime | None = None
        # The loss belongs to the last stage's forward, which ends with it.
        self._until_loss: AbstractContextManager[Any] | None = None
        self._hooks = Hooks()
        self._hooks.surround(schedule, "step", self._step)
        self._hooks.surround(schedule, "_maybe_compute_loss", self._compute_loss)
        for stage in stages_of(schedule):
            self._hooks.surround(stage, "forward_one_chunk", partial(self._forward, stage))
            self._hooks.surround(stage, "backward_one_chunk", partial(self._backward, stage))
            self._hooks.surround(stage, "backward_weight_one_chunk", partial(self._backward_weight, stage))
            self._hooks.surround(stage, REDUCE_GRAD, partial(self._reduce_grad, stage))

    def end_iteration(self) -> None:
        """End the iteration whose tail is going on; every rank must do so at once."""
        self._in_iteration = False
        self._iteration.close()

    def remove(self) -> None:
        """End the last iteration, restore the default clock, and leave schedule and stages as they were."""
        self._hooks.remove()
        try:
            self.end_iteration()
        finally:
            self.close()

    def _step(self, step: Method, *args: Any, **kwargs: Any) -> Any:
        self.end_iteration()
        if not self._schedule._has_backward:  # eval()
            with self.paused():
                return step(*args, **kwargs)
        runtime = self._runtime_for(self._order_in_use(), self._make)
        if runtime is None:
            with self.paused():
                return step(*args, **kwargs)
        with ExitStack() as iteration:
            self._in_iteration = True
            iteration.callback(self._leave)
            iteration.enter_context(runtime.iteration())
            self._training = runtime
            result = step(*args, **kwargs)
            self._training = None
            self._end_forward()
            tail = Compute(Instruction(stages_of(self._schedule)[0].stage_index, Kind.TAIL, 0))
            iteration.enter_context(runtime.operation(tail))
            runtime.tail_begins()
            self._iteration = iteration.pop_all()
        return result

    def _leave(self) -> None:
        self._in_iteration = False
        self._training = self._until_loss = None

    def _order_in_use(self) -> object:
        """Return what changes when the schedule's order does."""
        schedule = self._schedule
        return schedule._n_microbatches, id(getattr(schedule, "pipeline_order_with_comms", None))

    def _make(self, others: Sequence[str]) -> PerseusRuntime:
        return make_runtime(self._schedule, self._config, self._groups, others)

    def _forward(self, stage: Any, method: Method, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
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

    def _backward(
        self, stage: Any, method: Method, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
    ) -> Any:
        kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
        if not full_backward and not computes_input_gradients(stage):
            return method(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)
        with self._pass(stage, kind, bwd_chunk_id):
            return method(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)

    def _backward_weight(self, stage: Any, method: Method, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pass(stage, Kind.BACKWARD_WEIGHT, bwd_chunk_id):
            return method(bwd_chunk_id, *args, **kwargs)

    def _reduce_grad(self, stage: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
        with self._surround(Other(REDUCE_GRAD, stage.stage_index, 0)):
            return method(*args, **kwargs)

    def _pass(self, stage: Any, kind: Kind, micro_batch: int) -> AbstractContextManager[Any]:
        return self._surround(Compute(Instruction(stage.stage_index, kind, micro_batch)))

    def _surround(self, operation: Operation) -> AbstractContextManager[Any]:
        self._end_forward()
        return ExitStack() if self._training is None else self._training.operation(operation)

    def _end_forward(self) -> None:
        scope, self._until_loss = self._until_loss, None
        if scope is not None:
            scope.__exit__(None, None, None)
