"""Perseus on DeepSpeed's pipeline engines: attach to an engine that is there, and detach from it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import deepspeed
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from perseus_ds.engine.attachment import EngineAttachment
from perseus_ds.engine.deepspeed_contract import check_deepspeed, check_engine
from perseus_ds.errors import ConfigError
from perseus_ds.runtime.config import PerseusConfig, parse_block
from perseus_ds.runtime.settings import settings_of

E = TypeVar("E")
_CHECKPOINT_KEY = "perseus_ds"
check_deepspeed(PipelineEngine, deepspeed_schedule)


class _PerseusEngine:
    """What Perseus adds to the class of an engine.

    Attributes:
        perseus: Perseus on this engine.
    """

    perseus: EngineAttachment

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train one batch as the engine does, under Perseus's plan."""
        with self.perseus.batch():
            return super().train_batch(*args, **kwargs)  # type: ignore[misc]

    def _exec_schedule(self, pipe_schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with self.perseus.executing(pipe_schedule):
            return super()._exec_schedule(pipe_schedule, *args, **kwargs)  # type: ignore[misc]

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch as the engine does, at default clocks."""
        with self.perseus.paused():
            return super().eval_batch(*args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save a checkpoint as the engine does, with policy and reported stragglers."""
        state = {**(client_state or {}), _CHECKPOINT_KEY: self.perseus.state()}
        return super().save_checkpoint(save_dir, tag, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as the engine does, and continue under the plan with which it was saved."""
        engine: Any = self
        path, client_state = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if path is not None:
            state = (client_state or {}).pop(_CHECKPOINT_KEY, {})
            self.perseus.restore(state, steps=engine.global_steps)
        return path, client_state

    def destroy(self) -> None:
        """Restore the clock and release what DeepSpeed holds."""
        self.perseus.close()
        super().destroy()  # type: ignore[misc]


@functools.cache
def _with_perseus(engine_class: type) -> type:
    """Return a subclass of an engine's class; under the same name, which some versions of DeepSpeed test."""
    names = {name: getattr(engine_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(engine_class.__name__, (_PerseusEngine, engine_class), names)


def attach(engine: E, block: Mapping[str, Any] | None = None) -> E:
    """Let an engine train under Perseus; every rank must do so at once.

    The engine stays the object it is, and becomes an instance of a subclass of its class.

    Args:
        engine: An engine of any class derived from DeepSpeed's ``PipelineEngine``.
        block: A ``perseus`` block; by default that of the engine's config and of the variable ``PERSEUS``, and
            without these the default settings.

    Returns:
        The same engine, now with ``engine.perseus``; unchanged if the block is disabled.

    Raises:
        ConfigError: The block is wrong, or it is no pipeline engine.
        VersionError: The installed DeepSpeed is not one that Perseus works with.
    """
    if isinstance(engine, _PerseusEngine):
        return engine
    settings = settings_of(_block_of(engine)) if block is None else parse_block(block)
    _attach(engine, settings or PerseusConfig.model_validate({}))
    return engine


def _block_of(engine: Any) -> Any:
    """Return the ``perseus`` block of a DeepSpeed config, as DeepSpeed has read it from a dict, a file or base64."""
    return engine._config._param_dict.get("perseus")


def _attach(engine: Any, settings: PerseusConfig) -> None:
    if not settings.enabled:
        return
    if not isinstance(engine, PipelineEngine):
        raise ConfigError(
            f"perseus: the model is a {type(engine.module).__name__}, expected a deepspeed.pipe.PipelineModule: "
            "Perseus plans the clocks of pipeline stages. Write the model as a PipelineModule, or set "
            '"perseus": {"enabled": false}.'
        )
    check_engine(engine)
    engine.perseus = EngineAttachment(engine, settings)
    engine.__class__ = _with_perseus(engine.__class__)


def detach(engine: E) -> E:
    """Leave an engine as it was before :func:`attach`; the clock is the default again."""
    if isinstance(engine, _PerseusEngine):
        engine.perseus.close()
        del engine.perseus
        engine.__class__ = type(engine).__mro__[2]  # after the class with Perseus, and what it adds
    return engine


_deepspeeds_initialize = deepspeed.initialize
_initializing: ContextVar[bool] = ContextVar("perseus_ds_initializing", default=False)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Initialize DeepSpeed, with Perseus if its config has an enabled ``perseus`` block or ``PERSEUS`` is set.

    A drop-in for ``deepspeed.initialize``: the same arguments, the same tuple of engine, optimizer,
    data loader and learning-rate scheduler. Without a block, exactly what DeepSpeed returns.

    Raises:
        ConfigError: The block is wrong, or the model is not a ``PipelineModule``.
        VersionError: The installed DeepSpeed is not one that Perseus works with.
    """
    if _initializing.get():  # deepspeed.initialize has been replaced by this function, or by one that calls it
        return _deepspeeds_initialize(*args, **kwargs)  # type: ignore[no-any-return]
    token = _initializing.set(True)
    try:
        made: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    finally:
        _initializing.reset(token)
    settings = settings_of(_block_of(made[0]))
    if settings is not None and not isinstance(made[0], _PerseusEngine):
        _attach(made[0], settings)
    return made


def attach_to_engines_as_they_are_made(pipeline_engine: Any) -> None:
    """Attach to every engine with a ``perseus`` block or ``PERSEUS`` when it is made, in whatever way that is.

    Args:
        pipeline_engine: DeepSpeed's ``PipelineEngine``; its constructor is extended.
    """
    construct = pipeline_engine.__init__

    @functools.wraps(construct)
    def construct_and_attach(engine: Any, *args: Any, **kwargs: Any) -> None:
        construct(engine, *args, **kwargs)
        settings = settings_of(_block_of(engine))
        if settings is not None and not isinstance(engine, _PerseusEngine):
            _attach(engine, settings)

    pipeline_engine.__init__ = construct_and_attach
