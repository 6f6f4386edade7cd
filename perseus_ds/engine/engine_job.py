"""The job of an engine as the runtime needs it: the schedule of all ranks, topology, model and versions."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.engine.replay import Replay
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.commands import read_stream
from perseus_ds.pipeline.schedule import Operation, Other, Schedule
from perseus_ds.runtime.build import open_together, profile_info
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime

logger = logging.getLogger("perseus_ds")


def make_runtime(
    engine: Any, config: PerseusConfig, pipe_schedule: Any, replay: Replay, others: Sequence[str]
) -> tuple[PerseusRuntime, Execution]:
    """Make the runtime of an engine that is about to train; every rank must do so at once.

    Args:
        engine: A DeepSpeed ``PipelineEngine``.
        config: The ``perseus`` block.
        pipe_schedule: The schedule of this rank that the engine is about to execute.
        replay: Repeats this rank's passes.
        others: Models of the other engines of this process.

    Returns:
        The runtime, and what times its operations.

    Raises:
        PerseusError: On all ranks, what went wrong on one.
    """
    communicator = Communicator(_topology(engine.grid))
    schedule = _schedule_of_all_ranks(communicator, engine, pipe_schedule)
    gpu, timers = open_together(communicator, config, engine.device, local_rank=engine.local_rank)
    jobs: list[Job] = []

    def describe() -> None:
        model = model_name(engine)
        info = profile_info(
            schedule,
            gpu,
            communicator.topology,
            libraries=["deepspeed"],
            model=model,
            micro_batch_size=engine.micro_batch_size,
        )
        jobs.append(Job(config, schedule, info, _fingerprint(engine), (model, *others)))

    communicator.together(describe)
    runtime = PerseusRuntime(
        jobs[0],
        communicator=communicator,
        gpu=gpu,
        timers=timers,
        device=torch.device(engine.device),
        passes=replay,
        monitor=engine.monitor,
        steps_per_print=engine.steps_per_print(),
    )
    return runtime, timers


def commands_of(pipe_schedule: Any) -> list[Any]:
    """Return the commands of a schedule in order, without using up the schedule."""
    return [command for step in copy.copy(pipe_schedule).steps() for command in step]


def _schedule_of_all_ranks(communicator: Communicator, engine: Any, pipe_schedule: Any) -> Schedule:
    """Return what each rank of this pipeline read of its own schedule.

    Raises:
        PerseusError: On all ranks, what went wrong on one.
    """
    stream: list[tuple[Operation, ...]] = []

    def read() -> None:
        try:
            stream.append(read_stream(commands_of(pipe_schedule), engine.stage_id, engine.num_stages))
        except PerseusError as error:
            raise type(error)(f"{schedule_name(pipe_schedule)}: {error}") from None

    communicator.together(read)
    pipeline = tuple(communicator.pipeline_gather(stream[0]))
    if communicator.is_first:
        _name_unknown_commands(pipeline)
    return Schedule(schedule_name(pipe_schedule), engine.micro_batches, pipeline)


def _name_unknown_commands(streams: Sequence[Sequence[Operation]]) -> None:
    unknown = sorted({operation.command for stream in streams for operation in stream if isinstance(operation, Other)})
    if unknown:
        logger.warning(
            "perseus: the schedule has commands that perseus-ds does not know: %s. They run as they are, at the clock "
            'of their neighbours. perseus_ds.register_command("%s", kind="…") says what one of them does.',
            ", ".join(unknown),
            unknown[0],
        )


def model_name(engine: Any) -> str:
    """Return the class of an engine's model."""
    return type(engine.module).__name__


def schedule_name(pipe_schedule: Any) -> str:
    """Return the class of a schedule as ``package.module:Class``."""
    return f"{type(pipe_schedule).__module__}:{type(pipe_schedule).__qualname__}"


def _topology(grid: Any) -> PipelineTopology:
    return PipelineTopology(
        rank=grid.get_global_rank(),
        pipeline=tuple(grid.pp_group),
        data_parallel_rank=grid.get_data_parallel_id(),
        data_parallel=grid.data_parallel_size,
        stage_peers=tuple(grid.slice_group or ()) if grid.slice_parallel_size > 1 else (),
    )


def _fingerprint(engine: Any) -> str:
    """Return a text that changes with whatever the times of this rank's instructions depend on."""
    module = engine.module
    content = [
        [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()],
        [type(layer).__name__ for layer in module.modules()],
        module.activation_checkpoint_interval,
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()
