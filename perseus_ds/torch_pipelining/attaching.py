"""Attach Perseus to a schedule of ``torch.distributed.pipelining`` that is there, and detach from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from perseus_ds.errors import ConfigError
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.settings import settings_of
from perseus_ds.torch_pipelining.attachment import ScheduleAttachment
from perseus_ds.torch_pipelining.contract import check_schedule
from perseus_ds.torch_pipelining.order import read_order, stages_of
from perseus_ds.torch_pipelining.topology import RankGroups

S = TypeVar("S")


def attach(
    schedule: S, config: Mapping[str, Any] | None = None, *, pipeline: Any = None, data_parallel: Any = None
) -> S:
    """Let a schedule of torch train under Perseus; every rank must do so at once.

    Args:
        schedule: Of a class derived from torch's ``PipelineScheduleSingle`` or ``PipelineScheduleMulti``.
        config: A ``perseus`` block; keys of the variable ``PERSEUS`` replace its own.
        pipeline: Process group or one-dimensional ``DeviceMesh`` of this rank's pipeline; by default its stages' own.
        data_parallel: The same of the ranks that train the same stages on other data; by default, every pipeline
            trains on data of its own.

    Returns:
        The same schedule, now with ``schedule.perseus``; unchanged if the block is disabled.

    Raises:
        ConfigError: The block or a group is wrong, or the stages are not torch's.
        ScheduleError: The schedule's order is not known.
        VersionError: The installed torch is not one that Perseus works with.
    """
    target: Any = schedule
    settings = settings_of(config) or PerseusConfig.model_validate({})
    if not settings.enabled or hasattr(target, "perseus"):
        return schedule
    check_schedule(target)
    read_order(target)
    stage = stages_of(target)[0]
    groups = RankGroups.of(stage.group if pipeline is None else pipeline, data_parallel)
    if len(groups.pipeline) != stage.group_size:
        raise ConfigError(
            f"perseus: the pipeline has ranks {groups.pipeline}, expected the {stage.group_size} ranks of the "
            "process group of its stages."
        )
    target.perseus = ScheduleAttachment(target, settings, groups)
    return schedule


def detach(schedule: S) -> S:
    """End the last iteration and leave a schedule as it was before :func:`attach`; every rank must do so at once."""
    attachment = vars(schedule).pop("perseus", None)
    if attachment is not None:
        attachment.remove()
    return schedule
