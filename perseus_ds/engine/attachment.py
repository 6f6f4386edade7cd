"""Perseus on one engine: made when the engine first trains, told of every command that the engine executes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from perseus_ds.device.timers import Execution, SimulatedExecution
from perseus_ds.engine.engine_job import commands_of, make_runtime, model_name
from perseus_ds.engine.replay import Replay, tensors_of
from perseus_ds.engine.watched_schedule import watched
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.commands import CommandReader, is_batched
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.runtime import PerseusRuntime

logger = logging.getLogger("perseus_ds")
_NOTHING: AbstractContextManager[None] = nullcontext()
_PASSES = {Kind.FORWARD: deepspeed_schedule.ForwardPass, Kind.BACKWARD: deepspeed_schedule.BackwardPass}
# A batch size that changes all the time fits no profile; to go on measuring would only cost.
_MOST_SCHEDULES = 8
# Engines share the GPU of the process, so the one that evaluates must be able to ask the one that trains.
_ATTACHMENTS: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """Perseus on one engine, as ``engine.perseus``.

    The runtime is made at the first training iteration: only then is the schedule final. What is asked for
    before is kept until then. Of several engines in a process, the first that trains is measured and planned;
    the others run at default clocks.

    Attributes:
        runtime: Perseus on this rank; None before the engine has trained.
    """

    def __init__(self, engine: Any, config: PerseusConfig) -> None:
        self.runtime: PerseusRuntime | None = None
        self._engine = engine
        self._config = config
        self._model = model_name(engine)
        self._waiting: list[Callable[[PerseusRuntime], None]] = []
        self._restored: dict[str, Any] = {}
        self._replay = Replay(engine, self._execute_again)
        self._trained: object = None
        self._schedules = 0
        self._batched = False
        # Of the forwards of an iteration, whatever their order.
        self._shapes = 0
        self._timers: Execution | None = None
        self._batch: ExitStack | None = None
        self._in_iteration = False
        self._closed = False
        _ATTACHMENTS.add(self)

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.runtime is not None and self.runtime.profiled

    @property
    def phase(self) -> str:
        """The phase of the next iteration; ``start`` before the first one."""
        return "start" if self.runtime is None else self.runtime.next.phase

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Run under another policy from the next iterations on; rank 0's counts.

        Args:
            policy: As in the ``perseus`` block, such as ``{"name": "energy_optimal"}``.

        Raises:
            ConfigError: It is no policy; the message names the key.
        """
        parse_order({"command": "policy", "policy": policy})
        self._when_started(lambda runtime: runtime.set_policy(policy))

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Expect a data-parallel pipeline to take longer; see :meth:`PerseusRuntime.set_straggler`."""
        self._when_started(lambda runtime: runtime.set_straggler(pipeline, slowdown, after_iterations))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of Perseus."""
        return self._restored if self.runtime is None else self.runtime.state()

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Take up what a checkpoint kept; every rank must do so at once."""
        self._restored = dict(state)
        self._when_started(lambda runtime: runtime.restore(state, steps))

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again."""
        self._closed = True
        if self.runtime is not None:
            self.runtime.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training: it runs at default clocks."""
        with ExitStack() as stack:
            for attachment in list(_ATTACHMENTS):
                if attachment.runtime is not None and not attachment._in_iteration:
                    stack.enter_context(attachment.runtime.paused())
            yield

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
            runtime = self._runtime_for(pipe_schedule)
            if runtime is None:
                own.enter_context(self.paused())
                yield
                return
            stack = self._batch or own
            samples = self._engine.global_samples + self._engine.train_batch_size()
            stack.callback(self._end_iteration)
            self._in_iteration = True
            self._shapes = 0
            stack.enter_context(runtime.iteration(samples, lambda: float(self._shapes)))
            reader = CommandReader(self._engine.stage_id, self._engine.num_stages, self._batched)
            own.enter_context(watched(pipe_schedule, lambda command: self._surround(runtime, reader, command)))
            yield

    def _trains_by(self, pipe_schedule: Any) -> bool:
        """Whether the execution of a schedule is a training iteration."""
        if not torch.is_grad_enabled():
            return False
        return self._batch is not None or any(type(c).__name__ == "OptimizerStep" for c in commands_of(pipe_schedule))

    def _end_iteration(self) -> None:
        self._in_iteration = False

    def _surround(self, runtime: PerseusRuntime, reader: CommandReader, command: Any) -> AbstractContextManager[None]:
        """Return what surrounds one command that the engine is about to execute; no generator, for its speed."""
        operations = reader.read(command)
        if not operations:
            return _NOTHING
        if isinstance(operations[0], Compute):
            self._note_shapes(operations[0].instruction.kind, command.kwargs)
        if runtime.next.keeps_passes:
            self._replay.record(operations[0], command.kwargs)
        return runtime.operation(operations[0])

    def _note_shapes(self, kind: Kind, arguments: Mapping[str, Any]) -> None:
        """Take in the shapes of the inputs of an instruction, for the report of the iteration and simulated GPUs."""
        if isinstance(self._timers, SimulatedExecution):
            self._timers.input_shapes = self._input_shapes(arguments)
        if kind is Kind.FORWARD:
            self._shapes += hash(self._input_shapes(arguments)) & 0xFFFFFFFF

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

    def _when_started(self, action: Callable[[PerseusRuntime], None]) -> None:
        if self.runtime is None:
            self._waiting.append(action)
        else:
            action(self.runtime)

    def _runtime_for(self, pipe_schedule: Any) -> PerseusRuntime | None:
        """Return the runtime for a schedule; None if another engine of this process trains under Perseus."""
        if self._closed and self.runtime is None:
            return None
        schedule = type(pipe_schedule), self._engine.micro_batches
        if schedule != self._trained:
            self._batched = is_batched(commands_of(pipe_schedule))
        if self.runtime is None:
            if self._another_trains():
                return None
            self._start(pipe_schedule)
        elif schedule != self._trained:
            self._change_schedule(pipe_schedule)
        self._trained = schedule
        return self.runtime

    def _others(self) -> list[Attachment]:
        """Return the other engines of this process that have Perseus."""
        return [other for other in _ATTACHMENTS if other is not self and not other._closed]

    def _another_trains(self) -> bool:
        others = [other for other in self._others() if other.runtime is not None]
        if others:
            self._closed = True
            if self._engine.global_rank == 0:
                logger.warning(
                    "perseus: this process trains two engines, %s and %s. Only the first is measured and planned.",
                    others[0]._model,
                    self._model,
                )
        return bool(others)

    def _start(self, pipe_schedule: Any) -> None:
        runtime, self._timers = make_runtime(
            self._engine, self._config, pipe_schedule, self._replay, [other._model for other in self._others()]
        )
        self.runtime = runtime
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action(runtime)

    def _change_schedule(self, pipe_schedule: Any) -> None:
        """Go on with another schedule, such as after ``set_train_batch_size``: auto mode profiles and plans again."""
        assert self.runtime is not None
        self._schedules += 1
        measures = self._config.mode == "auto" or (self._config.mode == "profile" and not self.runtime.profiled)
        if not measures or self._schedules > _MOST_SCHEDULES:
            self.runtime.schedule_changed()
            return
        state = {key: value for key, value in self.runtime.state().items() if key != "progress"}
        self.runtime.close()
        self._replay.forget()
        try:
            self._start(pipe_schedule)
        except PerseusError as error:  # training has started, so that no error of Perseus may end it
            self.runtime, self._closed = None, True
            logger.warning("perseus: %s. Training goes on without Perseus.", str(error).rstrip("."))
            return
        self.runtime.restore(state, steps=self._engine.global_steps)
