"""Perseus: pipeline-parallel training on less energy, without slowing down.

Importing this package is cheap: each name is imported when it is used, DeepSpeed, PyTorch and Megatron-Core when they
are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from perseus_ds.artifacts.frontier import Frontier
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.engines.deepspeed.engine import initialize
    from perseus_ds.engines.deepspeed.huggingface import pipeline_module
    from perseus_ds.engines.torch_pipelining.huggingface import pipeline_stage
    from perseus_ds.huggingface.partition import partition
    from perseus_ds.huggingface.stages import save_pretrained
    from perseus_ds.optimizer import optimize
    from perseus_ds.pipeline.commands import read_schedule, register_command, schedule_class
    from perseus_ds.pipeline.instruction import Instruction, Kind
    from perseus_ds.runtime.runtime import PerseusRuntime

T = TypeVar("T")
__all__ = [
    "Frontier",
    "Instruction",
    "Kind",
    "PerseusRuntime",
    "StageProfile",
    "attach",
    "detach",
    "initialize",
    "optimize",
    "partition",
    "pipeline_module",
    "pipeline_stage",
    "read_schedule",
    "register_command",
    "save_pretrained",
    "schedule_class",
]

_MODULES = {
    "Frontier": "perseus_ds.artifacts.frontier",
    "Instruction": "perseus_ds.pipeline.instruction",
    "Kind": "perseus_ds.pipeline.instruction",
    "PerseusRuntime": "perseus_ds.runtime.runtime",
    "StageProfile": "perseus_ds.artifacts.profile",
    "optimize": "perseus_ds.optimizer",
    "partition": "perseus_ds.huggingface.partition",
    "pipeline_module": "perseus_ds.engines.deepspeed.huggingface",
    "pipeline_stage": "perseus_ds.engines.torch_pipelining.huggingface",
    "read_schedule": "perseus_ds.pipeline.commands",
    "register_command": "perseus_ds.pipeline.commands",
    "save_pretrained": "perseus_ds.huggingface.stages",
    "schedule_class": "perseus_ds.pipeline.commands",
}


def attach(target: T, config: Mapping[str, Any] | None = None, *, pipeline: Any = None, data_parallel: Any = None) -> T:
    """Let an engine or schedule train under Perseus; every rank must do so at once.

    Args:
        target: An engine of any class derived from DeepSpeed's ``PipelineEngine``, a schedule of
            ``torch.distributed.pipelining``, or the module ``megatron.core`` or what its
            ``get_forward_backward_func()`` returns, for all that trains by Megatron-Core in this process.
        config: A ``perseus`` block; by default that of the engine's config, and without one the default settings. A key
            of the variable ``PERSEUS`` replaces the same key of it.
        pipeline: For a schedule, process group or one-dimensional ``DeviceMesh`` of this rank's pipeline; by default
            its stages' own.
        data_parallel: For a schedule, the same of the ranks that train the same stages on other data; by default,
            every pipeline trains on data of its own.

    Returns:
        The same object, now with ``target.perseus``; unchanged if the block is disabled. For a function of
        Megatron-Core, the function to train by; Perseus is ``megatron.core.perseus``.

    Raises:
        ConfigError: The block or a group is wrong, or the object is none of these.
        ScheduleError: The order of a schedule is not known.
        VersionError: The installed DeepSpeed, torch or Megatron-Core is not one that Perseus works with.
    """
    engine = _engine_of(target)
    if engine == "torch_pipelining":
        attached: T = _function_of(engine, "attach")(target, config, pipeline=pipeline, data_parallel=data_parallel)
        return attached
    if pipeline is not None or data_parallel is not None:
        from perseus_ds.errors import ConfigError

        raise ConfigError(
            f"perseus: {type(target).__name__} knows its own ranks. Leave out pipeline and data_parallel."
        )
    return _function_of(engine, "attach")(target, config)  # type: ignore[no-any-return]


def detach(target: T) -> T:
    """Leave an engine or schedule as it was before :func:`attach`; the clock is the default again.

    The last iteration of a schedule or of Megatron-Core ends here, so every rank must do so at once.
    """
    return _function_of(_engine_of(target), "detach")(target)  # type: ignore[no-any-return]


def _engine_of(target: object) -> str:
    """Return the folder in ``engines`` that is for an object; nothing is imported."""
    if any(base.__module__.startswith("torch.distributed.pipelining.") for base in type(target).__mro__):
        return "torch_pipelining"
    owners = (getattr(target, "__name__", ""), getattr(target, "__module__", ""), type(target).__module__)
    return "megatron" if any(f"{owner}.".startswith("megatron.core.") for owner in owners) else "deepspeed"


def _function_of(engine: str, name: str) -> Any:
    if engine == "deepspeed":
        from perseus_ds.engines.deepspeed.contract import require_deepspeed

        require_deepspeed()
    return getattr(importlib.import_module(f"perseus_ds.engines.{engine}.engine"), name)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "initialize":
        # Now, not when it is called: by then deepspeed.initialize may have been replaced by this function.
        return _function_of("deepspeed", name)
    raise AttributeError(f"module 'perseus_ds' has no attribute {name!r}")
