"""The power that a GPU draws while it waits for another one.

It is measured once by itself, while all ranks wait for one. The bubbles of the iterations in which the profile is
measured say it too, pooled over ranks: this is the waiting that plans replace, but it is known less well, the less
ranks wait. If both differ, the bubbles count if that is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist

from perseus_ds.errors import GpuError
from perseus_ds.gpu.counter_log import Refreshes
from perseus_ds.ranks import PipelineTopology
from perseus_ds.timebase import REAL_TIME, Timebase

# Differences below this fraction are none; larger ones are certain from so many standard errors on.
_AGREES, _SURE = 0.03, 3.0


class WaitingPower(NamedTuple):
    """Power while a GPU waits, and its standard error [W]."""

    power_w: float
    error_w: float


def pooled(found: Iterable[WaitingPower | None]) -> WaitingPower | None:
    """Return the mean of several measurements, weighted by their errors; None if there is none."""
    known = [one for one in found if one is not None and 0 < one.error_w < math.inf]
    if not known:
        return None
    weights = [1 / one.error_w**2 for one in known]
    power_w = sum(weight * one.power_w for weight, one in zip(weights, known, strict=True)) / sum(weights)
    return WaitingPower(power_w, 1 / math.sqrt(sum(weights)))


def chosen_power_w(alone_w: float, bubbles: WaitingPower | None) -> tuple[float, str | None]:
    """Return the blocking power to plan with [W], and which and why in words if two measurements differ.

    Args:
        alone_w: As measured while all ranks wait for one [W].
        bubbles: Of iterations, pooled over ranks; None if it is not known.
    """
    if bubbles is None or abs(bubbles.power_w - alone_w) <= _AGREES * alone_w:
        return alone_w, None
    differ = (
        f"a waiting GPU draws {bubbles.power_w:.1f} +/- {2 * bubbles.error_w:.1f} W in the bubbles of iterations, and "
        f"{alone_w:.1f} W where all ranks wait for one"
    )
    if abs(bubbles.power_w - alone_w) > _SURE * bubbles.error_w:
        return bubbles.power_w, f"{differ}: plans are made for the former, the waiting that they replace"
    return alone_w, f"{differ}: plans are made for the latter, as the former is not certain to differ"


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
