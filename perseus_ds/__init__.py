"""Perseus for DeepSpeed: pipeline-parallel training on less energy, without slowing down.

Importing this package is cheap; DeepSpeed and PyTorch are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_ds.engine.pipeline_engine import attach, detach, initialize
    from perseus_ds.pipeline.commands import register_command
    from perseus_ds.runtime.runtime import PerseusRuntime

__all__ = ["PerseusRuntime", "attach", "detach", "initialize", "register_command"]


def __getattr__(name: str) -> Any:
    if name == "PerseusRuntime":
        from perseus_ds.runtime.runtime import PerseusRuntime

        return PerseusRuntime
    if name == "register_command":
        from perseus_ds.pipeline.commands import register_command

        return register_command
    if name in ("attach", "detach", "initialize"):
        from perseus_ds.engine.versions import require_deepspeed

        require_deepspeed()
        # Now, not when it is called: by then deepspeed.initialize may have been replaced by this function.
        from perseus_ds.engine import pipeline_engine

        return getattr(pipeline_engine, name)
    raise AttributeError(f"module 'perseus_ds' has no attribute {name!r}")
