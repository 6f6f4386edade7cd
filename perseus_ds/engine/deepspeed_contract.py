"""Every attribute and method of DeepSpeed that Perseus relies upon, and the check that the installed one has them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from perseus_ds.engine.versions import NEWEST_DEEPSPEED
from perseus_ds.errors import VersionError

ENGINE_CLASS: Mapping[str, str] = {
    "train_batch": "one training iteration",
    "eval_batch": "evaluation runs at default clocks",
    "_exec_schedule": "receives the schedule and runs its commands in order",
    "_INSTRUCTION_MAP": "which function runs a command; used to run a pass again",
    "save_checkpoint": "policy and stragglers are saved with a checkpoint",
    "load_checkpoint": "policy and stragglers are loaded with a checkpoint",
    "destroy": "the clock is restored",
    "train_batch_size": "samples of an iteration",
    "steps_per_print": "how often to print",
    "zero_grad": "drops gradients of repeated passes",
}
"""Methods and class attributes of ``PipelineEngine``, and what each is used for."""

ENGINE: Mapping[str, str] = {
    "module": "the layers of this stage",
    "optimizer": "drops gradients of repeated passes",
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
    "pipe_buffers": "inputs, labels and activations of a pass",
    "grad_layer": "gradient that a backward starts from",
    "total_loss": "sum of losses, which repeated passes add to",
    "_config._param_dict": "the perseus block, as DeepSpeed read it",
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

SCHEDULE: Mapping[str, str] = {
    "TrainSchedule": "the schedule 1f1b",
    "ForwardPass": "runs a forward again",
    "BackwardPass": "runs a backward again",
}
"""Names in ``deepspeed.runtime.pipe.schedule``, and what each is used for."""

SHAPES_KEPT: Sequence[str] = (
    "pipe_partition_input_meta_cache",
    "pipe_partition_output_meta_cache",
    "pipe_partition_grad_meta_cache",
    "grad_partition_grad_layer_meta_cache",
)
"""Attributes of an engine that keep the shapes of the last inputs where tensor-parallel ranks share activations."""

PASS_STATE: Sequence[str] = (
    *SHAPES_KEPT,
    "pipe_buffers",
    "grad_layer",
    "_grad_layer_buf",
    "pipe_recv_buf",
    "loss",
    "losses",
    "total_loss",
    "total_additional_losses",
    "fwd_outputs",
    "outputs",
    "_exec_instr",
    "_running_engine_backward",
)
"""Attributes of an engine that a forward or backward assigns, in some version from the oldest to the newest."""

CHECKPOINTING_STATE: Sequence[str] = (
    "contiguous_data_buffers",
    "contiguous_size_buffers",
    "data_offsets",
    "size_offsets",
    "buffer_0",
    "buffer_1",
    "buffer_0_offset",
    "buffer_1_offset",
)
"""Variables of DeepSpeed's activation checkpointing that a forward or backward assigns."""

GRADIENT_METHODS: Sequence[str] = ("zero_grad", "clear_lp_grads", "clear_hp_grads")
"""Methods of the optimizers that drop gradients; each optimizer has one or several, by version."""


def check_deepspeed(pipeline_engine: type, schedule: Any) -> None:
    """Check that DeepSpeed's modules have what Perseus relies upon.

    Args:
        pipeline_engine: DeepSpeed's ``PipelineEngine``.
        schedule: The module ``deepspeed.runtime.pipe.schedule``.

    Raises:
        VersionError: The message names what is missing, what it is used for, and what to install.
    """
    _check(pipeline_engine.__name__, pipeline_engine, ENGINE_CLASS)
    _check("deepspeed.runtime.pipe.schedule", schedule, SCHEDULE)


def check_engine(engine: Any) -> None:
    """Check that an engine has what Perseus relies upon.

    Raises:
        VersionError: As for :func:`check_deepspeed`.
    """
    name = type(engine).__name__
    _check(name, engine, {**ENGINE_CLASS, **ENGINE})
    _check(f"{name}.grid", engine.grid, GRID)


def _check(owner_name: str, owner: Any, needed: Mapping[str, str]) -> None:
    missing = [f"{name} ({use})" for name, use in needed.items() if not _has(owner, name)]
    if missing:
        version = importlib.metadata.version("deepspeed")
        raise VersionError(
            f"DeepSpeed {version} is not one that perseus-ds works with: {owner_name} has no {', '.join(missing)}. "
            f'Run: pip install --upgrade perseus-ds, or pip install "deepspeed<={NEWEST_DEEPSPEED}"'
        )


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
