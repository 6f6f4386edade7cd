"""Every attribute and method of ``torch.distributed.pipelining`` that Perseus relies upon, and the check for them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from perseus_ds.engines.torch_pipelining.order import stages_of
from perseus_ds.errors import ConfigError, VersionError

OLDEST_TORCH = "2.13"
"""The first whose schedules were tried, and the newest at that time."""

SCHEDULE: Mapping[str, str] = {
    "step": "one training iteration, but for its tail",
    "_step_microbatches": "executes the order; run on stages that compute nothing, to read it",
    "_maybe_compute_loss": "ends the last stage's forward",
    "_maybe_get_loss": "left out while the order is read",
    "_has_backward": "tells training from eval()",
    "_n_microbatches": "micro-batches of an iteration",
    "_internal_losses": "must be empty while the order is read",
    "_num_stages": "stages of the pipeline",
}
"""Attributes of every schedule, and what each is used for."""

MULTI: Mapping[str, str] = {
    "stage_index_to_group_rank": "which rank runs a stage",
    "pp_group_size": "pipeline ranks",
    "_initialize_stages": "left out while the order is read",
}
"""Attributes of a schedule with several stages on a rank, and what each is used for."""

SINGLE: Mapping[str, str] = {"_initialize_stage": "left out while the order is read"}
"""Attributes of a schedule with one stage on a rank, and what each is used for."""

STAGE: Mapping[str, str] = {
    "forward_one_chunk": "runs a forward",
    "backward_one_chunk": "runs a backward, or that of the activations",
    "backward_weight_one_chunk": "runs the backward of the weights",
    "perform_reduce_grad": "reduces and scales the gradients of a stage",
    "stage_index": "which stage it is",
    "is_first": "its input needs no gradient",
    "is_last": "its forward ends with the loss",
    "submod": "its layers",
    "device": "where its tensors live",
    "dw_builder": "whether the first stage computes anything before its weights' gradients",
    "group": "the ranks of the pipeline",
    "group_size": "how many they are",
}
"""Attributes of a stage, and what each is used for."""


def check_schedule(schedule: Any) -> None:
    """Check that a schedule and its stages are torch's, and have what Perseus relies upon.

    Raises:
        ConfigError: They are something else.
        VersionError: The message names what is missing, what it is used for, and what to install.
    """
    if not isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
        raise ConfigError(
            f"perseus: expected a schedule of torch.distributed.pipelining, got a {type(schedule).__name__}."
        )
    found = importlib.metadata.version("torch")
    if Version(found).release < Version(OLDEST_TORCH).release:
        raise VersionError(
            f"torch {found}: perseus-ds attaches to pipeline schedules of torch>={OLDEST_TORCH}. "
            f'Run: pip install "torch>={OLDEST_TORCH}"'
        )
    multi = isinstance(schedule, PipelineScheduleMulti)
    _check(type(schedule).__name__, schedule, {**SCHEDULE, **(MULTI if multi else SINGLE)})
    for stage in stages_of(schedule):
        if not isinstance(stage, _PipelineStageBase):
            raise ConfigError(
                f"perseus: {type(schedule).__name__} has a {type(stage).__name__} as a stage, expected a PipelineStage "
                "of torch.distributed.pipelining."
            )
        _check(type(stage).__name__, stage, STAGE)


def _check(owner_name: str, owner: Any, needed: Mapping[str, str]) -> None:
    missing = [f"{name} ({use})" for name, use in needed.items() if not hasattr(owner, name)]
    if missing:
        raise VersionError(
            f"torch {importlib.metadata.version('torch')} is not one whose pipeline schedules perseus-ds works with: "
            f"{owner_name} has no {', '.join(missing)}. Run: pip install --upgrade torch perseus-ds"
        )
