"""Which DeepSpeed Perseus works with: versions, and every attribute and method that it relies upon."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_DEEPSPEED = "0.14.4"
"""The first that can be imported beside the torch of ``requirements.lock``; tested by ``make test-oldest``."""
NEWEST_DEEPSPEED = "0.19.8"
"""The version of ``requirements.lock``, which all tests run with."""
REMEDY = f'Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'

ENGINE_CLASS: Mapping[str, str] = {
    "train_batch": "one training iteration",
    "eval_batch": "evaluation runs at default clocks",
    "_exec_schedule": "receives the schedule and runs its commands in order",
    "save_checkpoint": "policy and stragglers are saved with a checkpoint",
    "load_checkpoint": "policy and stragglers are loaded with a checkpoint",
    "destroy": "the clock is restored",
    "train_batch_size": "samples of an iteration",
    "steps_per_print": "how often to print",
}
"""Methods and class attributes of ``PipelineEngine``, and what each is used for."""

ENGINE: Mapping[str, str] = {
    "module": "the layers of this stage",
    "grid": "ranks of the pipeline, of data and of tensor parallelism",
    "micro_batches": "micro-batches of an iteration",
    "micro_batch_size": "written into the profile",
    "num_stages": "pipeline ranks",
    "stage_id": "which of them this rank is",
    "device": "where tensors live",
    "global_rank": "which rank speaks for the job",
    "local_rank": "which GPU of the node",
    "global_samples": "x-axis of DeepSpeed's monitor",
    "global_steps": "iterations done, after a checkpoint is loaded",
    "monitor": "receives energy and time",
    "pipe_buffers": "shapes of a pass's inputs",
    "_config": "has the perseus block",
}
"""Attributes of an engine that was made, and what each is used for."""

GRID: Mapping[str, str] = {
    "get_global_rank": "global rank",
    "get_data_parallel_id": "which data-parallel pipeline",
    "data_parallel_size": "number of data-parallel pipelines",
    "slice_parallel_size": "ranks that share a stage",
    "slice_group": "which ranks share this stage",
    "pp_group": "ranks of this pipeline",
}
"""Attributes of the engine's grid, and what each is used for."""


def require_deepspeed() -> None:
    """Check the version of the installed DeepSpeed, without importing it.

    Raises:
        VersionError: It is missing or too old; the message names the version found and what to install.
    """
    problem = deepspeed_problem()
    if problem:
        raise VersionError(f"{problem}. {REMEDY}")


def deepspeed_problem() -> str:
    """Return why the installed DeepSpeed cannot be used; empty if it can."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed, expected deepspeed>={OLDEST_DEEPSPEED}"
    if Version(found) < Version(OLDEST_DEEPSPEED):
        return f"DeepSpeed {found} is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    return ""


def check_deepspeed(pipeline_engine: type) -> None:
    """Check that DeepSpeed's class of engines has what Perseus relies upon.

    Raises:
        VersionError: The message names what is missing, what it is used for, and what to install.
    """
    _check(pipeline_engine.__name__, pipeline_engine, ENGINE_CLASS)


def check_engine(engine: Any) -> None:
    """Check the same of an engine that was made; raises the same."""
    name = type(engine).__name__
    _check(name, engine, ENGINE)
    _check(f"{name}.grid", engine.grid, GRID)
    _check(f"{name}._config", engine._config, {"_param_dict": "the perseus block, as DeepSpeed read it"})


def _check(owner_name: str, owner: Any, needed: Mapping[str, str]) -> None:
    missing = [f"{name} ({use})" for name, use in needed.items() if not hasattr(owner, name)]
    if missing:
        version = importlib.metadata.version("deepspeed")
        raise VersionError(
            f"DeepSpeed {version} is not one that perseus-ds works with: {owner_name} has no {', '.join(missing)}. "
            f'Run: pip install --upgrade perseus-ds, or pip install "deepspeed<={NEWEST_DEEPSPEED}"'
        )
