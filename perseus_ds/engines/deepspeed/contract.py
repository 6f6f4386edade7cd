"""Supported versions of DeepSpeed, and all of its attributes and methods that Perseus needs."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_DEEPSPEED = "0.14.4"
"""Oldest version that works with the torch of ``requirements.lock``. Tested by ``make test-oldest``."""
NEWEST_DEEPSPEED = "0.19.8"
"""Version in ``requirements.lock``, used by all tests."""
REMEDY = f'Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'

ENGINE_CLASS = (
    *("train_batch", "eval_batch", "_exec_schedule", "save_checkpoint", "load_checkpoint", "destroy"),
    *("train_batch_size", "steps_per_print"),
)
ENGINE = (
    *("module", "grid", "micro_batches", "micro_batch_size", "num_stages", "stage_id", "device", "global_rank"),
    *("global_samples", "global_steps", "monitor", "pipe_buffers", "_config"),
)
GRID = (
    *("get_global_rank", "get_data_parallel_id", "data_parallel_size", "slice_parallel_size", "slice_group"),
    "pp_group",
)


def require_deepspeed() -> None:
    """Check the version of the installed DeepSpeed without importing it.

    Raises:
        VersionError: It is missing or too old. The message names the installed version and the one to install.
    """
    problem = deepspeed_problem()
    if problem:
        raise VersionError(f"{problem}. {REMEDY}")


def deepspeed_problem() -> str:
    """Return why the installed DeepSpeed cannot be used. Empty if it can."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed, expected deepspeed>={OLDEST_DEEPSPEED}"
    if Version(found) < Version(OLDEST_DEEPSPEED):
        return f"DeepSpeed {found} is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    return ""
