"""Conditions under which simulated GPUs are as unpleasant as real ones may be; all of them off by default.

Their sizes are assumptions, except where a source is given.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal, Protocol

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.errors import GpuError
from perseus_ds.timebase import Timebase

Condition = Literal[
    "lock-contention", "slow-transfers", "sampled-counter", "warming", "duty-limit", "low-clock-waiting"
]

CONDITIONS: dict[Condition, str] = {
    "lock-contention": "the node's driver serves the clock-setting calls of its GPUs one after the other",
    "slow-transfers": "a transfer takes 10 ms longer for each change of the GPU's clock in the last 50 ms",
    "sampled-counter": "the energy counter looks at power during a quarter of the time",
    "warming": "power rises by 0.1 % per kelvin while the GPU warms up, for minutes",
    "duty-limit": "the board holds its mean power over a second at 85 % of its limit",
    "low-clock-waiting": "blocking power falls by up to half towards the lowest clock",
}

# NVIDIA/nccl#1551 reports that collectives were delayed when clocks were locked about every 50 ms, not by how much.
_DISTURBED_S, _DELAY_S = 0.05, 0.01
# The A100's and H100's power readings cover 25 ms of 100 ms (arXiv 2312.02741).
_SAMPLED = 0.25
_COLD_C, _C_PER_W, _WARMS_IN_S = 30.0, 0.1, 60.0
_RISE_PER_C = 0.001
_AVERAGED_S = 1.0
_SUSTAINED = 0.85
_GAIN = 4.0


def counted_s(moment_s: float, period_s: float, *, sampled: bool) -> float:
    """Return until when the energy up to a moment has been counted; a sampled one is taken for the whole period [s]."""
    if not sampled:
        return moment_s
    periods, phase = divmod(moment_s / period_s, 1.0)
    return (periods + max(0.0, phase - (1 - _SAMPLED)) / _SAMPLED) * period_s


def transfer_delay_s(now_s: float, changed_s: Iterable[float]) -> float:
    """Return how much longer a transfer takes that begins now, given the clock changes before [s]."""
    return _DELAY_S * sum(now_s - each_s < _DISTURBED_S for each_s in changed_s)


class Board:
    """Temperature and mean power of a board, which follow its power.

    Attributes:
        temperature_c: Of the GPU.
    """

    def __init__(self, power_w: float) -> None:
        self.temperature_c = _COLD_C + _C_PER_W * power_w
        self._mean_w = power_w

    def spend(self, power_w: float, time_s: float) -> None:
        """Draw some power for some time."""
        warm_c = _COLD_C + _C_PER_W * power_w
        self.temperature_c += (warm_c - self.temperature_c) * -math.expm1(-time_s / _WARMS_IN_S)
        self._mean_w += (power_w - self._mean_w) * -math.expm1(-time_s / _AVERAGED_S)

    @property
    def power_factor(self) -> float:
        """How much more a warm GPU draws than a cold one."""
        return 1 + _RISE_PER_C * (self.temperature_c - _COLD_C)

    def allowed_w(self, limit_w: float) -> float:
        """Return the power that a board may draw now which holds its mean power near a part of its limit [W]."""
        sustained_w = _SUSTAINED * limit_w
        return min(limit_w, max(0.5 * sustained_w, sustained_w + _GAIN * (sustained_w - self._mean_w)))


class DriverQueue(Protocol):
    """The clock-setting calls of a node's GPUs."""

    def turn(self) -> AbstractContextManager[None]:
        """Wait until no other GPU's call is under way; surrounds this one's."""


class UnlimitedDriver:
    """A driver that serves all calls at once."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield


class OneAtATime:
    """A driver that serves one call after the other, of GPUs in one process.

    Args:
        timebase: Their timebase.
    """

    def __init__(self, timebase: Timebase) -> None:
        self._changed = timebase.condition()
        self._is_busy = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            while self._is_busy:
                self._changed.wait()
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify()


class OneAtATimeOnNode:
    """The same for GPUs of several processes of a node which have the same parent, as the ranks of a job do."""

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"perseus-ds-simulated-driver-{os.getuid()}-{os.getppid()}"

    @contextmanager
    def turn(self) -> Iterator[None]:
        # Others can guess the name.
        with open_without_links(self._path, append=True) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise GpuError(f"{self._path}: it belongs to another user. Remove it, or set TMPDIR to another folder.")
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
