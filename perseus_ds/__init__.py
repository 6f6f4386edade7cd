"""Perseus for DeepSpeed: pipeline-parallel training on less energy, without slowing down.

Importing this package is cheap; DeepSpeed and PyTorch are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_ds.runtime.runtime import PerseusRuntime

__all__ = ["PerseusRuntime", "initialize"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Initialize DeepSpeed, with Perseus if its config has an enabled ``perseus`` block.

    A drop-in for ``deepspeed.initialize``: the same arguments, the same tuple of engine, optimizer,
    data loader and learning-rate scheduler. Without the block, exactly what DeepSpeed returns.

    Raises:
        ConfigError: The block is wrong, or the model is not a ``PipelineModule``.
        VersionError: The installed DeepSpeed is not one that Perseus works with.
    """
    from perseus_ds.engine.versions import require_deepspeed

    require_deepspeed()
    from perseus_ds.engine.pipeline_engine import initialize as initialize_engine

    return initialize_engine(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "PerseusRuntime":
        from perseus_ds.runtime.runtime import PerseusRuntime

        return PerseusRuntime
    raise AttributeError(f"module 'perseus_ds' has no attribute {name!r}")
