"""Standing still: all ranks wait between two iterations until rank 0 lets them go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.distributed import Widths
from perseus_ds.errors import GpuError
from perseus_ds.runtime.job import Rank

# Short, since a rank that is told to end must be able to tell the others so within the time that a scheduler gives.
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Waited:
    """How long all ranks have waited.

    Attributes:
        time_s: How long [s]; 0 if they went on at once.
        energy_j: Of all GPUs meanwhile [J]; NaN where it cannot be read.
        closed: Whether a rank has been closed, so that all leave the mode.
    """

    time_s: float
    energy_j: float
    closed: bool


@dataclass(frozen=True)
class Halt:
    """What all ranks wait for before an iteration.

    Attributes:
        is_over: Whether they go on; asked on rank 0.
        waited: Told on all ranks for how long they have waited, unless they went on at once.
    """

    is_over: Callable[[], bool]
    waited: Callable[[Waited], None]


def wait_together(rank: Rank, is_over: Callable[[], bool], is_closed: Callable[[], bool]) -> Waited:
    """Wait until rank 0 says that it is over, or a rank is closed; every rank must do so at the same boundary.

    No collective of the job is under way meanwhile, and none of Perseus for longer than the ranks are apart. The thread
    sleeps, so that handlers of signals run. GPUs are idle, soon at default clocks.

    Args:
        rank: This rank.
        is_over: Asked on rank 0.
        is_closed: Whether this rank has been closed.
    """
    begin_s, begin_j = rank.timebase.now_s(), _energy_j(rank)
    has_waited = False
    while True:
        is_over_here = rank.communicator.is_first and is_over()
        spent_j = _energy_j(rank) - begin_j
        numbers = [float(is_over_here), float(is_closed()), spent_j]
        sent = rank.communicator.start_exchange(numbers, _of_job, Widths(3))
        is_over_now, closed, energy_j = sent.result().tolist()
        if is_over_now or closed:
            break
        has_waited = True
        rank.timebase.sleep(_LOOK_EVERY_S)
    time_s = rank.timebase.now_s() - begin_s if has_waited else 0.0
    return Waited(time_s, energy_j, bool(closed))


def _of_job(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return for all ranks whether it is over, whether one is closed, and the energy of all."""
    return np.array([*numbers[:, :2].max(axis=0), numbers[:, 2].sum()]), np.zeros((len(numbers), 0))


def _energy_j(rank: Rank) -> float:
    try:
        return rank.driver.call(rank.gpu.energy_j)
    except GpuError:
        return math.nan
