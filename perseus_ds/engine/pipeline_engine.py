"""DeepSpeed's pipeline engines with Perseus inside: the only subclasses, and how to get one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.config import PerseusConfig, parse_block
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.engine.deepspeed_contract import check_deepspeed
from perseus_ds.engine.replay import Replay
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import CommandReader, read_schedule
from perseus_ds.runtime.devices import execution_on, open_gpu
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime

logger = logging.getLogger("perseus_ds")
_CHECKPOINT_KEY = "perseus_ds"
check_deepspeed(PipelineEngine, deepspeed_schedule)


def _intercepted(instruction_map: Mapping[type, Callable[..., None]]) -> dict[type, Callable[..., None]]:
    """Surround every command of an engine by Perseus's begin and end.

    DeepSpeed looks commands up in this map by their exact type, and the map holds functions of the
    base class: overriding a method would have no effect.
    """
    return {command: _surrounded(command.__name__, execute) for command, execute in instruction_map.items()}


def _surrounded(command: str, execute: Callable[..., None]) -> Callable[..., None]:
    def execute_surrounded(engine: Any, **arguments: Any) -> None:
        engine.execute_command(command, execute, arguments)

    return execute_surrounded


class _PerseusEngine:
    """What Perseus adds to a pipeline engine of DeepSpeed.

    Attributes:
        perseus: The runtime of this rank.
    """

    _INSTRUCTION_MAP: dict[type, Callable[..., None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine: Any = self
        config = parse_block(engine._config._param_dict["perseus"])
        self._perseus_schedule = _schedule_class(engine)
        self._perseus_micro_batches = engine.micro_batches
        self._perseus_batched = any(c.__name__ == "CommitP2P" for c in self._INSTRUCTION_MAP)
        self._perseus_reader = self._new_reader()
        self._perseus_replay = Replay(engine, self._execute_again)
        gpu = open_gpu(config, engine.device, rank=engine.global_rank, local_rank=engine.local_rank)
        self.perseus = PerseusRuntime(
            _job(engine, config, gpu, self._perseus_schedule),
            communicator=Communicator(_topology(engine.grid)),
            gpu=gpu,
            timers=execution_on(gpu, engine.device, config),
            device=torch.device(engine.device),
            passes=self._perseus_replay,
            monitor=engine.monitor,
            steps_per_print=engine.steps_per_print(),
        )

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train one batch as DeepSpeed does, under Perseus's plan."""
        engine: Any = self
        if engine.micro_batches != self._perseus_micro_batches:
            self._perseus_micro_batches = engine.micro_batches
            self.perseus.schedule_changed()
        self._perseus_reader = self._new_reader()
        with self.perseus.iteration(samples=engine.global_samples + engine.train_batch_size()):
            return super().train_batch(data_iter)  # type: ignore[misc]

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch as DeepSpeed does, at default clocks."""
        with self.perseus.paused():
            return super().eval_batch(*args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save a checkpoint as DeepSpeed does; policy, stragglers told of and pause go with it."""
        state = {**(client_state or {}), _CHECKPOINT_KEY: self.perseus.state()}
        return super().save_checkpoint(save_dir, tag, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as DeepSpeed does, and go on under the plan it was saved under."""
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

    def execute_command(self, command: str, execute: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Execute one command of the schedule between Perseus's begin and end."""
        operations = self._perseus_reader.operations(command, arguments.get("phase", 0))
        if not operations:
            execute(self, **arguments)
            return
        if self.perseus.next.keeps_passes:
            self._perseus_replay.record(operations[0], arguments)
        with self.perseus.operation(operations[0]):
            execute(self, **arguments)

    def _new_reader(self) -> CommandReader:
        engine: Any = self
        return CommandReader(engine.stage_id, engine.num_stages, self._perseus_batched)

    def _execute_again(self, kind: Kind, arguments: dict[str, Any]) -> None:
        command = deepspeed_schedule.ForwardPass if kind is Kind.FORWARD else deepspeed_schedule.BackwardPass
        base: Any = super()
        base._INSTRUCTION_MAP[command](self, **arguments)


class PerseusPipelineEngine(_PerseusEngine, PipelineEngine):
    """DeepSpeed's ``PipelineEngine`` with Perseus."""

    _INSTRUCTION_MAP = _intercepted(PipelineEngine._INSTRUCTION_MAP)


_ENGINES: dict[str, type] = {"PipelineEngine": PerseusPipelineEngine}

if hasattr(deepspeed, "DualPipeVEngine"):

    class PerseusDualPipeVEngine(_PerseusEngine, deepspeed.DualPipeVEngine):
        """DeepSpeed's ``DualPipeVEngine`` with Perseus."""

        _INSTRUCTION_MAP = _intercepted(deepspeed.DualPipeVEngine._INSTRUCTION_MAP)

    _ENGINES["DualPipeVEngine"] = PerseusDualPipeVEngine


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Initialize DeepSpeed, with Perseus if the config has a ``perseus`` block that is enabled.

    Args:
        *args: As for ``deepspeed.initialize``.
        **kwargs: As for ``deepspeed.initialize``.

    Returns:
        As ``deepspeed.initialize``: engine, optimizer, data loader, learning-rate scheduler.

    Raises:
        ConfigError: The block is wrong, or the model is not a ``PipelineModule``.
    """
    arguments = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    block = _perseus_block(arguments)
    if block is None or not parse_block(block).enabled:
        return deepspeed.initialize(*args, **kwargs)  # type: ignore[no-any-return]
    model = arguments.get("model")
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"perseus: the model is a {type(model).__name__}, expected a deepspeed.pipe.PipelineModule: Perseus plans "
            'the clocks of pipeline stages. Write the model as a PipelineModule, or set "perseus": {"enabled": false}.'
        )
    with _engines_replaced():
        return deepspeed.initialize(*args, **kwargs)  # type: ignore[no-any-return]


_replacing = threading.Lock()


@contextmanager
def _engines_replaced() -> Iterator[None]:
    """Let ``deepspeed.initialize``, which finds its engine classes by name, find ours; only inside."""
    with _replacing:
        originals = {name: getattr(deepspeed, name) for name in _ENGINES}
        try:
            for name, engine in _ENGINES.items():
                setattr(deepspeed, name, engine)
            yield
        finally:
            for name, original in originals.items():
                setattr(deepspeed, name, original)


def _perseus_block(arguments: Mapping[str, Any]) -> object | None:
    """Return the ``perseus`` block of the config, wherever ``deepspeed.initialize`` takes it from."""
    config = arguments.get("config") or arguments.get("config_params")
    config = config or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(config, str | Path) and Path(config).is_file():
        config = hjson.loads(Path(config).read_text(encoding="utf-8"))
    return config.get("perseus") if isinstance(config, Mapping) else None


def _schedule_class(engine: Any) -> type:
    """Return the schedule that the engine trains by; before 0.19.8 there was but one, and no method to ask."""
    asked = getattr(engine, "_train_schedule", None)
    return type(asked()) if asked else deepspeed_schedule.TrainSchedule


def _topology(grid: Any) -> PipelineTopology:
    return PipelineTopology(
        rank=grid.get_global_rank(),
        pipeline=tuple(grid.pp_group),
        data_parallel_rank=grid.get_data_parallel_id(),
        data_parallel=grid.data_parallel_size,
        stage_peers=tuple(grid.slice_group or ()) if grid.slice_parallel_size > 1 else (),
    )


def _fingerprint(engine: Any) -> str:
    """Return a text that changes with whatever the times of this rank's instructions depend on."""
    module = engine.module
    content = [
        [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()],
        [type(layer).__name__ for layer in module.modules()],
        module.activation_checkpoint_interval,
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _job(engine: Any, config: PerseusConfig, gpu: Gpu, schedule_class: type) -> Job:
    schedule = read_schedule(schedule_class, ranks=engine.num_stages, micro_batches=engine.micro_batches)
    versions = {name: importlib.metadata.version(name) for name in ("deepspeed", "torch", "perseus-ds")}
    info = ProfileInfo(
        simulated=gpu.simulated,
        gpu=gpu.name,
        driver=gpu.driver,
        default_clock_mhz=gpu.supported_clocks_mhz()[-1],
        schedule=schedule.name,
        stages=schedule.num_stages,
        pipeline_ranks=engine.num_stages,
        data_parallel=engine.grid.data_parallel_size,
        tensor_parallel=engine.grid.slice_parallel_size,
        micro_batches=engine.micro_batches,
        micro_batch_size=engine.micro_batch_size,
        model=type(engine.module).__name__,
        versions=versions,
    )
    return Job(config, schedule, info, _fingerprint(engine))
