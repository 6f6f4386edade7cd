"""The power that a GPU draws while it waits for another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from perseus_ds.errors import GpuError
from perseus_ds.gpu.counter_log import Refreshes
from perseus_ds.ranks import PipelineTopology
from perseus_ds.timebase import REAL_TIME, Timebase


def measure_blocking_power_w(
    record: Callable[[], AbstractContextManager[Refreshes]],
    topology: PipelineTopology,
    device: torch.device,
    *,
    settle_s: float,
    window_s: float,
    timebase: Timebase = REAL_TIME,
) -> float:
    """Return this rank's power while it waits for another one [W]; all ranks of the job must call this.

    The ranks wait in a collective, first for the first ranks of their pipelines, which come late, and then for all
    others. Each is measured for some refreshes of the energy counter, after a time in which the counter still tells
    what was drawn before.

    Args:
        record: Records the refreshes of this rank's energy counter.
        topology: Of the job.
        device: Where the tensors of the collective live.
        settle_s: How long the counter still tells what was drawn before [s].
        window_s: How long to measure [s].
        timebase: The time in which to wait.

    Raises:
        GpuError: It could not be measured; raised only after all ranks have waited.
    """
    late_s = settle_s + window_s
    if topology.pipeline_ranks == 1:  # it never waits; idling comes closest
        return _power_w(record, lambda: timebase.sleep(late_s), settle_s, timebase)
    power_w: float | None = None
    problem: GpuError | None = None
    for is_first_late in (True, False):
        if is_first_late == (topology.pipeline_rank == 0):
            timebase.sleep(late_s)
            _wait_for_all(device)
        else:
            try:
                power_w = _power_w(record, lambda: _wait_for_all(device), settle_s, timebase)
            except GpuError as error:
                problem = error
    if problem is not None:
        raise problem
    assert power_w is not None
    return power_w


def _power_w(
    record: Callable[[], AbstractContextManager[Refreshes]],
    wait: Callable[[], None],
    settle_s: float,
    timebase: Timebase,
) -> float:
    """Return the average power while this rank waits, but for the first seconds of it [W]."""
    with record() as refreshes:
        begin_s = timebase.now_s() + settle_s
        wait()
        return refreshes.power_w(begin_s, timebase.now_s())


def _wait_for_all(device: torch.device) -> None:
    """Wait for all ranks in a collective of the job's own communicator; sending to one rank would make another."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
