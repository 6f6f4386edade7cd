"""Measures the energy counter and the blocking power of a rank's GPU before training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import Measured
from perseus_ds.timebase import REAL_TIME, Timebase

# Load before the measured step of power: number of refreshes, length of one part [s], and longest time [s].
_LOADED_REFRESHES, _LOAD_S, _LONGEST_LOAD_S = 5, 0.2, 3.0
_SHORT_WINDOW_S, _WINDOW_S = 0.35, 1.0
# Measurement of blocking power: number of refreshes of the counter, longest time [s], and least number of refreshes.
_WAITED_REFRESHES, _BLOCKING_WINDOW_S, _FEWEST_REFRESHES = 20, 2.0, 4.5


def measure_counter(clocks: AgentClocks) -> Measured:
    """Return the refresh period of the energy counter. Raises a ``GpuError`` if it cannot be read."""
    for window_s in (_SHORT_WINDOW_S, _WINDOW_S):
        (period_s,) = clocks.values("period", window_s)
        if period_s:
            return Measured(period_s)
    return Measured(_WINDOW_S)


def measure_gpu(
    clocks: AgentClocks,
    load: Callable[[float], None],
    device: torch.device,
    *,
    pipeline_rank: int,
    pipeline_ranks: int,
    timebase: Timebase = REAL_TIME,
) -> Measured:
    """Measure the energy counter and the blocking power of this rank's GPU. All ranks must call it.

    The ranks wait in a collective, first for the first ranks of their pipelines, which enter it late, and then for all
    others. Each wait is measured for some refreshes of the energy counter, after a time in which the counter still
    includes earlier power. ``load`` keeps the GPU busy for some time [s].
    """
    period_s, settle_s, problem = _WINDOW_S, 0.0, ""
    try:
        with clocks.counter_log() as log:
            begin_s = timebase.now_s()
            while len(log.readings(begin_s, timebase.now_s())) < _LOADED_REFRESHES:
                if timebase.now_s() > begin_s + _LONGEST_LOAD_S:
                    break
                load(_LOAD_S)
            before_w = log.power_w(begin_s, timebase.now_s())
        found_s, settle_s = clocks.values("step", before_w)
        period_s = found_s or _WINDOW_S
    except GpuError as error:  # the other ranks wait for this one
        problem = str(error)
    # All ranks wait equally long.
    period_s, settle_s = _largest_of_all([period_s, settle_s], device)
    window_s = max(min(_WAITED_REFRESHES * period_s, _BLOCKING_WINDOW_S), _FEWEST_REFRESHES * period_s)
    settles_s = settle_s + period_s
    late_s = settles_s + window_s
    power_w = math.nan
    if pipeline_ranks == 1:  # it never waits, and an idle GPU is closest to that
        power_w = _power_w(clocks, lambda: timebase.sleep(late_s), settles_s, timebase, problem)
    else:
        for is_first_late in (True, False):
            if is_first_late == (pipeline_rank == 0):
                timebase.sleep(late_s)
                _wait_for_all(device)
            else:
                power_w = _power_w(clocks, lambda: _wait_for_all(device), settles_s, timebase, problem)
    return Measured(period_s, settle_s, power_w)


def _power_w(clocks: AgentClocks, wait: Callable[[], None], settle_s: float, timebase: Timebase, problem: str) -> float:
    """Return the average power while this rank waits, without the first ``settle_s`` [W]. NaN if unknown."""
    has_waited = False
    try:
        if problem:
            raise GpuError(problem)
        with clocks.counter_log() as refreshes:
            begin_s = timebase.now_s() + settle_s
            wait()
            has_waited = True
            return refreshes.power_w(begin_s, timebase.now_s())
    except GpuError:
        if not has_waited:
            wait()
        return math.nan


def _largest_of_all(values: list[float], device: torch.device) -> tuple[float, ...]:
    tensor = torch.tensor(values, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tuple(tensor.tolist())


def _wait_for_all(device: torch.device) -> None:
    """Wait for all ranks in a collective, because sending to one rank would create another communicator."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
