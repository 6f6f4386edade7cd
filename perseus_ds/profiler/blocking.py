"""Measures blocking power: what a GPU draws while it waits for its neighbour in a receive."""

from __future__ import annotations

import torch
import torch.distributed as dist

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.ranks import PipelineTopology
from perseus_ds.timebase import REAL_TIME, Timebase


def measure_blocking_power_w(
    gpu: Gpu,
    topology: PipelineTopology,
    device: torch.device,
    *,
    settle_s: float,
    window_s: float,
    timebase: Timebase = REAL_TIME,
) -> float:
    """Let the ranks of a pipeline wait for each other in turns; every rank must call this.

    Args:
        gpu: This rank's GPU.
        topology: Position of this rank in its pipeline.
        device: Where the engine's tensors live.
        settle_s: How long each rank waits before it is measured: the counter still tells what was drawn before [s].
        window_s: How long it is measured then [s]; several refreshes of the energy counter.
        timebase: The GPU's timebase.

    Returns:
        This rank's average power while it waited [W].

    Raises:
        GpuError: It could not be measured; raised only after all ranks have waited for each other.
    """
    power_w: float | None = None
    problem: GpuError | None = None
    rank = topology.pipeline_rank
    for waiting, sending in _turns(topology.pipeline_ranks):
        if rank == waiting:
            try:
                power_w = _waiting_power_w(gpu, topology.pipeline[sending], device, settle_s, timebase)
            except GpuError as error:
                problem = error
        elif rank == sending:
            timebase.sleep(settle_s + window_s)
            dist.send(torch.zeros(1, device=device), topology.pipeline[waiting])
    if problem is not None:
        raise problem
    if power_w is None:  # a pipeline of one rank never waits; idling comes closest
        with CounterLog(gpu, timebase) as log:
            timebase.sleep(settle_s)
            begin_s = timebase.now_s()
            timebase.sleep(window_s)
            power_w = log.power_w(begin_s, timebase.now_s())
    return power_w


def _turns(ranks: int) -> list[tuple[int, int]]:
    """Return who waits for whom, neighbours only, so that every rank waits at least once; pairs do so side by side."""
    pairs = [(rank, rank + 1) for rank in range(0, ranks - 1, 2)]
    turns = [*pairs, *((after, before) for before, after in pairs)]
    return [*turns, (ranks - 1, ranks - 2)] if ranks > 1 and ranks % 2 else turns


def _waiting_power_w(gpu: Gpu, source: int, device: torch.device, settle_s: float, timebase: Timebase) -> float:
    with CounterLog(gpu, timebase) as log:
        begin_s = timebase.now_s() + settle_s
        dist.recv(torch.zeros(1, device=device), source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return log.power_w(begin_s, timebase.now_s())
