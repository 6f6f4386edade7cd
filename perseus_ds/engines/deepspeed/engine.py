"""Attaches Perseus to DeepSpeed's pipeline engines, and detaches it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from perseus_ds.artifacts.layout import encode_parts
from perseus_ds.client.meeting import Monitor
from perseus_ds.client.operations import NOTHING
from perseus_ds.config import PerseusConfig, misspelt_block, settings_of
from perseus_ds.engines.deepspeed import NEWEST_DEEPSPEED, deepspeed_version
from perseus_ds.engines.engine import (
    Engine,
    Session,
    attach_to,
    detach_from,
    fingerprint,
    reported_once,
    require,
    token_ids,
    whole_number,
)
from perseus_ds.engines.hooks import Hooks, Method
from perseus_ds.engines.layers import parts_of_huggingface, parts_of_pipeline_module
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.pipeline.commands import RepeatedReader, is_batched, read_stream
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Other, Schedule
from perseus_ds.protocol.job_messages import RankFacts

logger = logging.getLogger("perseus_ds")
E = TypeVar("E")
_ENGINE = (
    *("train_batch", "eval_batch", "_exec_schedule", "load_checkpoint", "destroy", "train_batch_size"),
    *("steps_per_print", "module", "grid", "micro_batches", "micro_batch_size", "num_stages", "stage_id", "device"),
    *("global_rank", "global_samples", "global_steps", "monitor", "pipe_buffers", "_config"),
)
_GRID = ("pp_group", "get_data_parallel_group", "data_parallel_size")


class DeepSpeedEngine(Engine):
    """A pipeline engine of DeepSpeed. Its commands are reported while it executes a training schedule."""

    def __init__(self, engine: Any) -> None:
        """Wrap an engine of any class derived from DeepSpeed's ``PipelineEngine``."""
        self._engine = engine
        self._session: Session
        self._hooks: Hooks
        self._schedule: Any = None  # of the current iteration
        self._order: tuple[type, int] | None = None
        self._reader = RepeatedReader(0, 1, batched=False)
        self._in_batch = False

    @property
    def model(self) -> str:
        return type(self._engine.module).__name__

    def facts(self) -> RankFacts:
        engine, grid = self._engine, self._engine.grid
        first = next(iter(engine.module.forward_funcs), None)
        return RankFacts(
            pipeline=tuple(grid.pp_group),
            copies=tuple(dist.get_process_group_ranks(grid.get_data_parallel_group())),
            fingerprint=fingerprint([engine.module], engine.module.activation_checkpoint_interval),
            micro_batch_size=whole_number(engine.micro_batch_size),
            steps_per_print=whole_number(engine.steps_per_print()),
            steps=engine.global_steps,
            engine="deepspeed" if parts_of_huggingface(getattr(first, "stage", None)) is None else "huggingface",
            parts=encode_parts({engine.stage_id: parts_of_pipeline_module(engine.module)}),
            tied=bool(engine.module.tied_comms),
        )

    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    def monitor(self) -> Monitor | None:
        monitor: Monitor | None = self._engine.monitor
        return monitor if getattr(monitor, "enabled", True) else None

    def read(self) -> Schedule:
        name = f"{type(self._schedule).__module__}:{type(self._schedule).__qualname__}"
        try:
            stream = read_stream(_commands_of(self._schedule), self._engine.stage_id, self._engine.num_stages)
        except PerseusError as error:
            raise type(error)(f"{name}: {error}") from None
        return Schedule(name, self._engine.micro_batches, (stream,))

    def check(self, schedule: Schedule) -> None:
        unknown = sorted({op.command for stream in schedule.ranks for op in stream if isinstance(op, Other)})
        if unknown and self._engine.global_rank == 0:
            logger.warning(
                "perseus: the schedule has commands that perseus-ds does not know: %s. They run unchanged at the clock "
                'of their neighbours. Declare each of them by perseus_ds.register_command("%s", kind="…").',
                ", ".join(unknown),
                unknown[0],
            )

    def surround(self, session: Session) -> None:
        self._session = self._engine.perseus = session
        self._hooks = Hooks(session.step_aside)
        for name, around in (
            ("train_batch", self.train_batch),
            ("_exec_schedule", self.execute),
            ("eval_batch", self.evaluate),
            ("load_checkpoint", self.load),
            ("destroy", self.destroy),
        ):
            self._hooks.surround(self._engine, name, around)

    def release(self) -> None:
        self._hooks.remove()
        vars(self._engine).pop("perseus", None)

    def versions(self) -> dict[str, str]:
        return {"deepspeed": str(deepspeed_version())}

    def train_batch(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Train one batch, with which an iteration ends."""
        self._in_batch = True
        try:
            return method(*args, **kwargs)
        finally:
            self._in_batch = False
            self._end_iteration()

    def execute(self, method: Method, pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a schedule. With gradients, it is a training iteration."""
        if self._schedule is not None or not self._trains_by(pipe_schedule):
            return method(pipe_schedule, *args, **kwargs)
        order = type(pipe_schedule), self._engine.micro_batches
        if order != self._order:
            batched = is_batched(_commands_of(pipe_schedule))
            self._reader = RepeatedReader(self._engine.stage_id, self._engine.num_stages, batched)
        self._schedule, self._order = pipe_schedule, order
        self._reader.begin_iteration()
        samples = self._engine.global_samples + self._engine.train_batch_size()
        try:
            with self._session.iteration(order, samples):
                steps = pipe_schedule.steps  # nothing in the engine's execution of commands is replaced
                surround = partial(self._hooks.each_within, context_of=self._context_of)
                pipe_schedule.steps = lambda: (_Step(step, surround) for step in steps())
                return method(pipe_schedule, *args, **kwargs)
        finally:
            vars(pipe_schedule).pop("steps", None)
            if not self._in_batch:
                self._end_iteration()

    def evaluate(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch at default clocks."""
        with self._session.paused():
            return method(*args, **kwargs)

    def load(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, and report the training step at which it was saved."""
        loaded = method(*args, **kwargs)
        self._session.set_steps(self._engine.global_steps)
        return loaded

    def destroy(self, method: Method, *args: Any, **kwargs: Any) -> None:
        """Reset the clock and release DeepSpeed's resources."""
        self._session.close()
        method(*args, **kwargs)

    def _trains_by(self, pipe_schedule: Any) -> bool:
        # A train_batch of a client may also evaluate.
        if not torch.is_grad_enabled():
            return False
        return self._in_batch or any(type(c).__name__ == "OptimizerStep" for c in _commands_of(pipe_schedule))

    def _end_iteration(self) -> None:
        self._schedule = None
        self._session.end_iteration()

    def _context_of(self, command: Any) -> AbstractContextManager[None] | None:
        """Return the context of a command that the engine is about to execute. None if there is none."""
        operations = self._reader.read(command)
        if not operations:
            return None
        operation, shapes = operations[0], None
        if isinstance(operation, Compute) and operation.instruction.kind is Kind.FORWARD:
            inputs = self._inputs_of(command.kwargs)
            if operation.instruction.stage == 0:
                self._session.add_tokens(token_ids(inputs))
            shapes = tuple([tensor.shape for tensor in inputs])
        around = self._session.operation(operation, shapes)
        return None if around is NOTHING else around

    def _inputs_of(self, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a command reads. Empty if the engine stores them in an unknown way."""
        try:
            inputs = self._engine.pipe_buffers["inputs"][arguments["buffer_id"]]
            tensors = [inputs] if isinstance(inputs, torch.Tensor) else inputs or ()
            return tuple([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
        except (AttributeError, IndexError, KeyError, TypeError):
            return ()


def _commands_of(pipe_schedule: Any) -> list[Any]:
    """Return the commands of a schedule in order, without consuming the schedule."""
    return [command for step in copy.copy(pipe_schedule).steps() for command in step]


class _Step(list[Any]):
    """The commands of one step, at which an engine may look before it executes them, each in its context."""

    def __init__(self, commands: Iterable[Any], surround: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        super().__init__(commands)
        self._surround = surround

    def __iter__(self) -> Iterator[Any]:
        return self._surround(super().__iter__())


def attach(engine: E, block: Mapping[str, Any] | None = None) -> E:
    """Attach Perseus to an engine. See :func:`perseus_ds.attach`.

    The engine remains the same object. Some of its methods are wrapped.
    """
    return attach_if_configured(engine, block, otherwise=PerseusConfig.model_validate({}))


def detach(engine: E) -> E:
    """Restore an engine to its state before :func:`attach`, and reset the clock."""
    detach_from(engine)
    return engine


@reported_once()
def attach_if_configured(
    engine: E, block: Any = None, otherwise: PerseusConfig | None = None, *, is_launched: bool = False
) -> E:
    """Attach Perseus to an engine if there is a ``perseus`` block, or ``PERSEUS`` is set, or else settings are given.

    By default, the block is that of the engine's config. ``is_launched`` is True under the launcher, which reports on
    rank 0 if there are no settings.
    """
    if "perseus" in vars(engine):
        return engine
    of_deepspeed: Any = engine
    count_tokens(of_deepspeed)
    settings = settings_of(_block_of(of_deepspeed) if block is None else block) or otherwise
    if settings is not None:
        attach_to(lambda: _checked(engine), settings)
    elif is_launched and of_deepspeed.global_rank == 0:
        logger.warning(
            'perseus: the job trains without Perseus: its DeepSpeed config has no block "perseus", and the '
            "variable PERSEUS is not set."
        )
    return engine


def _checked(engine: Any) -> DeepSpeedEngine:
    """Return the engine to which Perseus can be attached. Raises an error if it cannot."""
    if not isinstance(engine, PipelineEngine):
        raise ConfigError(
            f"perseus: the model is a {type(engine.module).__name__}, expected a deepspeed.pipe.PipelineModule: "
            "Perseus plans the clocks of pipeline stages. Write the model as a PipelineModule, or set "
            '"perseus": {"enabled": false}.'
        )
    check_engine(engine)
    return DeepSpeedEngine(engine)


def _block_of(engine: Any) -> Any:
    """Return the ``perseus`` block of an engine's config. DeepSpeed ignores blocks that it does not know."""
    config = engine._config._param_dict
    if "perseus" not in config and (misspelt := misspelt_block(config)) and engine.global_rank == 0:
        logger.warning('perseus: the block "%s" of the DeepSpeed config is not used. Rename it to "perseus".', misspelt)
    return config.get("perseus")


def check_engine(engine: Any) -> None:
    """Raise a ``VersionError`` if an engine lacks attributes that Perseus needs."""
    version, name = str(deepspeed_version()), type(engine).__name__
    require("deepspeed", version, NEWEST_DEEPSPEED, {name: (engine, _ENGINE)})
    require("deepspeed", version, NEWEST_DEEPSPEED, {f"{name}.grid": (engine.grid, _GRID)})


def count_tokens(engine: Any) -> None:
    """Let the loss of a Hugging Face model count the trained tokens of each batch, also after Perseus is detached.

    All micro-batches of a batch are then loaded before the first is trained. Other losses are not changed.
    """
    loss: Any = getattr(engine.module, "loss_fn", None)
    if not hasattr(loss, "counting_tokens") or hasattr(engine._exec_schedule, "counts_tokens"):
        return

    def execute(method: Method, pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.is_last_stage() or not engine._compute_loss:
            return method(pipe_schedule, *args, **kwargs)
        batches = [engine._next_batch() for _ in range(pipe_schedule.num_micro_batches)]
        group = engine.grid.get_data_parallel_group() if engine.grid.data_parallel_size > 1 else None
        hooks = Hooks()
        loaded = iter(batches)
        hooks.surround(engine, "_next_batch", lambda _: next(loaded))
        try:
            with loss.counting_tokens([batch[1] for batch in batches], group=group, device=engine.device):
                return method(pipe_schedule, *args, **kwargs)
        finally:
            hooks.remove()

    Hooks().surround(engine, "_exec_schedule", execute)
    engine._exec_schedule.counts_tokens = True


_deepspeeds_initialize = deepspeed.initialize
_initializing: ContextVar[bool] = ContextVar("perseus_ds_initializing", default=False)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Initialize DeepSpeed, with Perseus if its config has a ``perseus`` block or ``PERSEUS`` is set.

    A drop-in replacement of ``deepspeed.initialize`` with the same arguments and the same tuple of engine, optimizer,
    data loader and learning-rate scheduler. Without a block, the result is DeepSpeed's own.

    Raises:
        ConfigError: The block is invalid, or the model is not a ``PipelineModule``.
        VersionError: The installed DeepSpeed is not supported.
    """
    if _initializing.get():  # deepspeed.initialize was replaced by this function or by a caller of it
        return _deepspeeds_initialize(*args, **kwargs)  # type: ignore[no-any-return]
    token = _initializing.set(True)
    try:
        made: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    finally:
        _initializing.reset(token)
    attach_if_configured(made[0])
    return made
