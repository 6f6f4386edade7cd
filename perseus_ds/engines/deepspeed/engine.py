"""Attaches Perseus to DeepSpeed's pipeline engines, and detaches it."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from perseus_ds.artifacts.layout import Part
from perseus_ds.client.meeting import EngineFacts
from perseus_ds.client.operations import NOTHING
from perseus_ds.config import PerseusConfig, settings_of
from perseus_ds.engines.deepspeed.contract import ENGINE, ENGINE_CLASS, GRID, NEWEST_DEEPSPEED
from perseus_ds.engines.engine import (
    Engine,
    Session,
    attach_to,
    fingerprint,
    report_disabled,
    reported_once,
    require,
)
from perseus_ds.engines.hooks import Hooks
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.pipeline.commands import RepeatedReader, is_batched, read_stream
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Other, Schedule

logger = logging.getLogger("perseus_ds")
E = TypeVar("E")


def check_deepspeed(pipeline_engine: type) -> None:
    """Check that DeepSpeed's engine class has the attributes that Perseus needs.

    Otherwise raise a ``VersionError``.
    """
    _require({pipeline_engine.__name__: (pipeline_engine, ENGINE_CLASS)})


def check_engine(engine: Any) -> None:
    """Check the attributes of an engine. Otherwise raise a ``VersionError``."""
    name = type(engine).__name__
    _require({name: (engine, ENGINE)})
    _require({f"{name}.grid": (engine.grid, GRID), f"{name}._config": (engine._config, ["_param_dict"])})


def _require(owners: Mapping[str, tuple[Any, Iterable[str]]]) -> None:
    require("deepspeed", importlib.metadata.version("deepspeed"), NEWEST_DEEPSPEED, owners)


check_deepspeed(PipelineEngine)


class DeepSpeedEngine(Engine):
    """A pipeline engine of DeepSpeed. Its commands are reported while it executes a training schedule."""

    def __init__(self, engine: Any) -> None:
        """Wrap an engine of any class derived from DeepSpeed's ``PipelineEngine``."""
        self._engine = engine
        self._session: Session
        self._schedule: Any = None  # of the current iteration
        self._order: tuple[type, int] | None = None
        self._reader = RepeatedReader(0, 1, batched=False)
        self._in_batch = False

    @property
    def model(self) -> str:
        return type(self._engine.module).__name__

    def facts(self) -> EngineFacts:
        engine, grid = self._engine, self._engine.grid
        module = engine.module
        # A stage of a Hugging Face model is a single layer of the PipelineModule.
        own = getattr(getattr(next(iter(module.forward_funcs), None), "stage", None), "layout_parts", None)
        return EngineFacts(
            pipeline=tuple(grid.pp_group),
            copies=tuple(dist.get_process_group_ranks(grid.get_data_parallel_group())),
            device=torch.device(engine.device),
            fingerprint=fingerprint([engine.module], engine.module.activation_checkpoint_interval),
            micro_batch_size=engine.micro_batch_size,
            monitor=engine.monitor,
            steps_per_print=engine.steps_per_print(),
            engine="deepspeed" if own is None else "huggingface",
            parts={engine.stage_id: _parts_of(module) if own is None else own},
            tied=bool(module.tied_comms),
        )

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
        self._engine.__class__ = _with_perseus(self._engine.__class__)

    def release(self) -> None:
        del self._engine.perseus
        self._engine.__class__ = type(self._engine).__mro__[2]  # after the class with Perseus, and what it adds

    def versions(self) -> dict[str, str]:
        return {"deepspeed": importlib.metadata.version("deepspeed")}

    def steps(self) -> int | None:
        return int(self._engine.global_steps)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context of one call of ``train_batch``, with which its iteration ends."""
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False
            self._end_iteration()

    @contextmanager
    def executing(self, pipe_schedule: Any) -> Iterator[None]:
        """Context of the execution of a schedule. With gradients, it is a training iteration."""
        if self._schedule is not None or not self._trains_by(pipe_schedule):
            yield
            return
        order = type(pipe_schedule), self._engine.micro_batches
        if order != self._order:
            batched = is_batched(_commands_of(pipe_schedule))
            self._reader = RepeatedReader(self._engine.stage_id, self._engine.num_stages, batched)
        self._schedule, self._order = pipe_schedule, order
        self._reader.begin_iteration()
        samples = self._engine.global_samples + self._engine.train_batch_size()
        try:
            with self._session.iteration(order, samples):
                if self._session.follows_operations:  # nothing in the engine's execution of commands is replaced
                    steps, surround = pipe_schedule.steps, self._surround
                    pipe_schedule.steps = lambda: (_Step(step, surround) for step in steps())
                yield
        finally:
            vars(pipe_schedule).pop("steps", None)
            if not self._in_batch:
                self._end_iteration()

    def _end_iteration(self) -> None:
        self._schedule = None
        self._session.end_iteration()

    def _trains_by(self, pipe_schedule: Any) -> bool:
        """Return True if the execution of a schedule is a training iteration."""
        if not torch.is_grad_enabled():
            return False
        return self._in_batch or any(type(c).__name__ == "OptimizerStep" for c in _commands_of(pipe_schedule))

    def _surround(self, command: Any) -> AbstractContextManager[None]:
        """Return the context of a command that the engine is about to execute. Not a generator, to be fast."""
        operations = self._reader.read(command)
        if not operations:
            return NOTHING
        operation = operations[0]
        if type(operation) is not Compute:
            return self._session.operation(operation) if self._session.follows_transfers else NOTHING
        if operation.instruction.kind is Kind.FORWARD:
            return self._session.operation(operation, self._input_shapes(command.kwargs))
        return self._session.operation(operation)

    def _input_shapes(self, arguments: Mapping[str, Any]) -> tuple[torch.Size, ...]:
        """Return the shapes of a command's inputs. Empty if the engine stores them in an unknown way."""
        try:
            inputs = self._engine.pipe_buffers["inputs"][arguments["buffer_id"]]
            tensors = [inputs] if isinstance(inputs, torch.Tensor) else inputs or ()
            return tuple([tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)])
        except (AttributeError, IndexError, KeyError, TypeError):
            return ()


def _parts_of(module: Any) -> list[Part]:
    """Return the layers of this rank's stage of a ``PipelineModule``, some of which may be functions."""
    parts = []
    for index, layer in enumerate(module.forward_funcs, module.parts[module.stage_id]):
        inner, run = layer, layer
        if isinstance(layer, functools.partial) and layer.args:  # a tied layer with its own forward function
            inner, run = layer.args[0], layer.func
        kind = getattr(run, "__name__", type(run).__name__)
        parameters = sum(p.numel() for p in inner.parameters()) if isinstance(inner, torch.nn.Module) else 0
        parts.append(Part(kind=kind, names=[str(index)], parameters=parameters))
    return parts


def _commands_of(pipe_schedule: Any) -> list[Any]:
    """Return the commands of a schedule in order, without consuming the schedule."""
    return [command for step in copy.copy(pipe_schedule).steps() for command in step]


class _Step(list[Any]):
    """The commands of one step, each surrounded from when the engine takes it until it takes the next one."""

    def __init__(self, commands: Any, surround: Callable[[Any], AbstractContextManager[None]]) -> None:
        super().__init__(commands)
        self._surround = surround

    def __iter__(self) -> Iterator[Any]:
        for command in super().__iter__():
            around = self._surround(command)
            if around is NOTHING:  # a no-op in most cases, for which two calls are saved
                yield command
            else:
                with around:
                    yield command


class _PerseusEngine:
    """Methods that Perseus adds to the class of an engine."""

    perseus: Any  # a session with a DeepSpeedEngine

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train one batch with Perseus's plan."""
        with self.perseus.engine.batch():
            return super().train_batch(*args, **kwargs)  # type: ignore[misc]

    def _exec_schedule(self, pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with self.perseus.engine.executing(pipe_schedule):
            return super()._exec_schedule(pipe_schedule, *args, **kwargs)  # type: ignore[misc]

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch at default clocks."""
        with self.perseus.paused():
            return super().eval_batch(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, and report the training step at which it was saved."""
        engine: Any = self
        path, client_state = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if path is not None:
            (client_state or {}).pop("perseus_ds", None)  # of versions before 0.2.0
            self.perseus.set_steps(engine.global_steps)
        return path, client_state

    def destroy(self) -> None:
        """Reset the clock and release DeepSpeed's resources."""
        self.perseus.close()
        super().destroy()  # type: ignore[misc]


@functools.cache
def _with_perseus(engine_class: type) -> type:
    """Return a subclass of an engine's class with the same name, which some versions of DeepSpeed test."""
    names = {name: getattr(engine_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(engine_class.__name__, (_PerseusEngine, engine_class), names)


def attach(engine: E, block: Mapping[str, Any] | None = None) -> E:
    """Attach Perseus to an engine. See :func:`perseus_ds.attach`.

    The engine remains the same object, with a subclass of its class.
    """
    if not isinstance(engine, _PerseusEngine):
        with reported_once():
            settings = settings_of(_block_of(engine) if block is None else block)
            count_tokens(engine)
            _attach(engine, settings or PerseusConfig.model_validate({}))
    return engine


def detach(engine: E) -> E:
    """Restore an engine to its state before :func:`attach`, and reset the clock."""
    if isinstance(engine, _PerseusEngine):
        engine.perseus.detach()
    return engine


def _block_of(engine: Any) -> Any:
    """Return the ``perseus`` block of an engine's config."""
    return engine._config._param_dict.get("perseus")


def attach_if_configured(engine: Any) -> None:
    """Attach Perseus to an engine if its config has a ``perseus`` block or ``PERSEUS`` is set."""
    with reported_once():
        count_tokens(engine)
        settings = settings_of(_block_of(engine))
        if settings is not None and not isinstance(engine, _PerseusEngine):
            _attach(engine, settings)


def count_tokens(engine: Any) -> None:
    """Let the loss of a Hugging Face model count the trained tokens of each batch.

    Other losses are not changed.

    The change remains after Perseus is detached. All micro-batches of a batch are loaded before the first is trained.
    """
    loss: Any = getattr(engine.module, "loss_fn", None)
    if not hasattr(loss, "counting_tokens") or hasattr(vars(engine).get("_exec_schedule"), "counts_tokens"):
        return
    own = vars(engine).get("_exec_schedule")

    def execute(pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up here, because attaching and detaching change the class of the engine.
        method = own or functools.partial(type(engine)._exec_schedule, engine)
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

    execute.counts_tokens = True  # type: ignore[attr-defined]
    engine._exec_schedule = execute


def _attach(engine: Any, settings: PerseusConfig) -> None:
    if not settings.enabled:
        report_disabled()
        return
    if not isinstance(engine, PipelineEngine):
        raise ConfigError(
            f"perseus: the model is a {type(engine.module).__name__}, expected a deepspeed.pipe.PipelineModule: "
            "Perseus plans the clocks of pipeline stages. Write the model as a PipelineModule, or set "
            '"perseus": {"enabled": false}.'
        )
    check_engine(engine)
    attach_to(DeepSpeedEngine(engine), settings)


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
