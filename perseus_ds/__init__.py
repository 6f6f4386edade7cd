"""Perseus: energy-optimal clocks for pipeline-parallel training, without slowing it down.

Importing this package is fast: names are imported at their first use, and DeepSpeed, PyTorch and Megatron-Core when
they are needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from perseus_ds.artifacts.frontier import Frontier as Frontier
    from perseus_ds.artifacts.profile import StageProfile as StageProfile
    from perseus_ds.client.runtime import PerseusRuntime as PerseusRuntime
    from perseus_ds.engines.deepspeed.engine import initialize as initialize
    from perseus_ds.engines.deepspeed.huggingface import pipeline_module as pipeline_module
    from perseus_ds.engines.torch_pipelining.huggingface import pipeline_stage as pipeline_stage
    from perseus_ds.huggingface.partition import partition as partition
    from perseus_ds.huggingface.stages import save_pretrained as save_pretrained
    from perseus_ds.optimizer import optimize as optimize
    from perseus_ds.pipeline.commands import read_schedule as read_schedule
    from perseus_ds.pipeline.commands import register_command as register_command
    from perseus_ds.pipeline.commands import schedule_class as schedule_class
    from perseus_ds.pipeline.instruction import Instruction as Instruction
    from perseus_ds.pipeline.instruction import Kind as Kind

T = TypeVar("T")
_MODULES = {
    "Frontier": "perseus_ds.artifacts.frontier",
    "Instruction": "perseus_ds.pipeline.instruction",
    "Kind": "perseus_ds.pipeline.instruction",
    "PerseusRuntime": "perseus_ds.client.runtime",
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
__all__ = ["attach", "detach", "initialize", "paused", *_MODULES]  # noqa: PLE0604 - all of them are texts


def attach(target: T, config: Mapping[str, Any] | None = None, *, pipeline: Any = None, data_parallel: Any = None) -> T:
    """Attach Perseus to an engine or schedule. All ranks call this together.

    Args:
        target: An engine of any class derived from DeepSpeed's ``PipelineEngine``, a schedule of
            ``torch.distributed.pipelining``, or the module ``megatron.core`` or the result of its
            ``get_forward_backward_func()``, for all training with Megatron-Core in this process.
        config: A ``perseus`` block. By default that of the engine's config, or the default settings. Keys of the
            variable ``PERSEUS`` override it.
        pipeline: For a schedule, process group or one-dimensional ``DeviceMesh`` of this rank's pipeline. By default
            that of its stages.
        data_parallel: For a schedule, process group or one-dimensional ``DeviceMesh`` of the ranks that train the same
            stages on other data. By default, every pipeline has its own data.

    Returns:
        The same object with ``target.perseus``, or unchanged if the block is disabled. For a function of Megatron-Core,
        the function with which to train. Perseus is then ``megatron.core.perseus``.

    Raises:
        ConfigError: The block or a group is invalid, or the object is of another type.
        ScheduleError: The order of a schedule is not known.
        VersionError: The installed DeepSpeed, torch or Megatron-Core is not supported.
    """
    engine = _engine_of(target)
    if engine == "torch_pipelining":
        attached: T = function_of(engine, "attach")(target, config, pipeline=pipeline, data_parallel=data_parallel)
        return attached
    if pipeline is not None or data_parallel is not None:
        from perseus_ds.errors import ConfigError

        raise ConfigError(
            f"perseus: {type(target).__name__} knows its own ranks. Leave out pipeline and data_parallel."
        )
    return function_of(engine, "attach")(target, config)  # type: ignore[no-any-return]


def detach(target: T) -> T:
    """Restore an engine or schedule to its state before :func:`attach`, and reset the clock.

    All ranks call this together, because the last iteration of a schedule or of Megatron-Core ends here.
    """
    return function_of(_engine_of(target), "detach")(target)  # type: ignore[no-any-return]


def paused() -> AbstractContextManager[None]:
    """Return a context manager for code between training iterations, which runs at default clocks.

    Clocks are default ones between iterations anyway, from some milliseconds on. Use it around code whose first
    milliseconds matter, such as a check of the GPU's speed, and around code between the passes and the optimizer's
    step. It has no effect without Perseus, and does not wait: the clock follows after the GPU has finished its work.
    """
    engines = sys.modules.get("perseus_ds.engines.engine")
    return nullcontext() if engines is None else engines.paused()


def _engine_of(target: object) -> str:
    """Return the name of the folder in ``engines`` for an object, without importing it."""
    if any(base.__module__.startswith("torch.distributed.pipelining.") for base in type(target).__mro__):
        return "torch_pipelining"
    owners = (getattr(target, "__name__", ""), getattr(target, "__module__", ""), type(target).__module__)
    return "megatron" if any(f"{owner}.".startswith("megatron.core.") for owner in owners) else "deepspeed"


def function_of(engine: str, name: str) -> Any:
    """Return a function of the module ``engine.py`` in a folder of ``engines``."""
    if engine == "deepspeed":
        from perseus_ds.engines.deepspeed import require_deepspeed

        require_deepspeed()
    return getattr(importlib.import_module(f"perseus_ds.engines.{engine}.engine"), name)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "initialize":
        # Not deferred to the call, because deepspeed.initialize may have been replaced by this function then.
        return function_of("deepspeed", name)
    raise AttributeError(f"module 'perseus_ds' has no attribute {name!r}")
