"""Perseus for DeepSpeed: pipeline-parallel training on less energy, without slowing down.

Importing this package is cheap: each name is imported when it is used, DeepSpeed and PyTorch when they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus_ds.artifacts.frontier import Frontier
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.engine.pipeline_engine import attach, detach, initialize
    from perseus_ds.optimizer import optimize
    from perseus_ds.pipeline.commands import register_command
    from perseus_ds.pipeline.instruction import Instruction, Kind
    from perseus_ds.pipeline.schedule import read_schedule, schedule_class
    from perseus_ds.runtime.runtime import PerseusRuntime

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
    "read_schedule",
    "register_command",
    "schedule_class",
]

_MODULES = {
    "Frontier": "perseus_ds.artifacts.frontier",
    "Instruction": "perseus_ds.pipeline.instruction",
    "Kind": "perseus_ds.pipeline.instruction",
    "PerseusRuntime": "perseus_ds.runtime.runtime",
    "StageProfile": "perseus_ds.artifacts.profile",
    "optimize": "perseus_ds.optimizer",
    "read_schedule": "perseus_ds.pipeline.schedule",
    "register_command": "perseus_ds.pipeline.commands",
    "schedule_class": "perseus_ds.pipeline.schedule",
}
_OF_DEEPSPEED = ("attach", "detach", "initialize")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _OF_DEEPSPEED:
        from perseus_ds.engine.versions import require_deepspeed

        require_deepspeed()
        # Now, not when it is called: by then deepspeed.initialize may have been replaced by this function.
        return getattr(importlib.import_module("perseus_ds.engine.pipeline_engine"), name)
    raise AttributeError(f"module 'perseus_ds' has no attribute {name!r}")
