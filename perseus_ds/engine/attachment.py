"""Perseus on one engine: made when the engine first trains, told of every command that the engine executes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from perseus_ds.device.timers import Execution, SimulatedExecution
from perseus_ds.engine.engine_job import commands_of, make_runtime, model_name
from perseus_ds.engine.replay import Replay, tensors_of
from perseus_ds.engine.watched_schedule import watched
from perseus_ds.pipeline.commands import is_batched
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.repeated_commands import RepeatedReader
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.runtime.attachment import Attachment
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.runtime import PerseusRuntime

_NOTHING: AbstractContextManager[None] = nullcontext()
_PASSES = {Kind.FORWARD: deepspeed_schedule.ForwardPass, Kind.BACKWARD: deepspeed_schedule.BackwardPass}


class EngineAttachment(Attachment):
    """Perseus on one DeepSpeed engine, as ``engine.perseus``."""

    def __init__(self, engine: Any, config: PerseusConfig) -> None:
        super().__init__(config, model_name(engine))
        self._engine = engine
        self._replay = Replay(engine, self._execute_again)
        self._reader = RepeatedReader(0, 1, batched=False)
        self._timers: Execution | None = None
        self._batch: ExitStack | None = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Surround one call of ``train_batch``: its iteration ends with the call."""
        with ExitStack() as stack:
            self._batch = stack
            try:
                yield
            finally:
                self._batch = None

    @contextmanager
    def executing(self, pipe_schedule: Any) -> Iterator[None]:
        """Surround the execution of a schedule; one with gradients is a training iteration."""
        if self._in_iteration or not self._trains_by(pipe_schedule):
            yield
            return
        with ExitStack() as own:
            runtime = self._of_schedule(pipe_schedule)
            if runtime is None:
                own.enter_context(self.paused())
                yield
                return
            stack = self._batch or own
            samples = self._engine.global_samples + self._engine.train_batch_size()
            stack.callback(self._end_iteration)
            self._in_iteration = True
            stack.enter_context(runtime.iteration(samples))
            self._reader.begin_iteration()
            own.enter_context(watched(pipe_schedule, partial(self._surround, runtime)))
            yield

    def _trains_by(self, pipe_schedule: Any) -> bool:
        """Whether the execution of a schedule is a training iteration."""
        if not torch.is_grad_enabled():
            return False
        return self._batch is not None or any(type(c).__name__ == "OptimizerStep" for c in commands_of(pipe_schedule))

    def _end_iteration(self) -> None:
        self._in_iteration = False

    def _surround(self, runtime: PerseusRuntime, command: Any) -> AbstractContextManager[None]:
        """Return what surrounds one command that the engine is about to execute; no generator, for its speed."""
        operations = self._reader.read(command)
        if not operations:
            return _NOTHING
        inputs = 0.0
        if isinstance(operations[0], Compute):
            inputs = self._note_shapes(operations[0].instruction.kind, command.kwargs)
        if runtime.next.keeps_passes:
            self._replay.record(operations[0], command.kwargs)
        return runtime.operation(operations[0], inputs)

    def _note_shapes(self, kind: Kind, arguments: Mapping[str, Any]) -> float:
        """Tell simulated GPUs the shapes of an instruction's inputs; return a number for those of a forward, else 0."""
        if isinstance(self._timers, SimulatedExecution):
            shapes = self._timers.input_shapes = self._input_shapes(arguments)
        elif kind is Kind.FORWARD:
            shapes = self._input_shapes(arguments)
        else:
            return 0.0
        return float((hash(shapes) & 0xFFFFFFFF) + 1) if kind is Kind.FORWARD else 0.0

    def _input_shapes(self, arguments: Mapping[str, Any]) -> tuple[torch.Size, ...]:
        """Return the shapes of the inputs that a command works on; none where the engine keeps them in its own way."""
        try:
            buffers, slot = self._engine.pipe_buffers["inputs"], arguments.get("buffer_id")
            inputs = buffers[slot] if slot is not None and slot < len(buffers) else None
            return tuple(tensor.shape for tensor in tensors_of(inputs))
        except (AttributeError, KeyError, TypeError, IndexError):
            return ()

    def _execute_again(self, kind: Kind, arguments: dict[str, Any]) -> None:
        """Run a pass again by the function that the engine runs it by now."""
        self._engine._INSTRUCTION_MAP[_PASSES[kind]](self._engine, **arguments)

    def _steps(self) -> int | None:
        return int(self._engine.global_steps)

    def _of_schedule(self, pipe_schedule: Any) -> PerseusRuntime | None:
        """Return the runtime for a schedule; None if another engine of this process trains under Perseus."""
        schedule = type(pipe_schedule), self._engine.micro_batches
        if schedule != self._trained:
            batched = is_batched(commands_of(pipe_schedule))
            self._reader = RepeatedReader(self._engine.stage_id, self._engine.num_stages, batched)
        return self._runtime_for(schedule, lambda others: self._make(pipe_schedule, others))

    def _make(self, pipe_schedule: Any, others: Sequence[str]) -> PerseusRuntime:
        self._replay.forget()
        runtime, self._timers = make_runtime(self._engine, self._config, pipe_schedule, self._replay, others)
        return runtime
