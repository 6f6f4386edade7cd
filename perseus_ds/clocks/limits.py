"""Limits that somebody else sets while a job runs: the power limit of a GPU is lowered, or heat slows it down.

Only changes against what held when the profile was measured count: a board may be at its own limit all the time.
"""

from __future__ import annotations

import math
from contextlib import suppress

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import Timebase

SLOWED_DOWN = frozenset({"hw_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"})
"""Reasons for a lower clock that no power limit tells of, by NVML's names."""
# A limit counts from the first of these parts below what was profiled, and no more from the second one on.
_LOWERED, _RAISED = 0.015, 0.01
# Limits are rounded down to so large a part of what was profiled, so that a power manager that varies a little makes no
# new plans, and clocks to steps of NVIDIA's. One that rises by less than one and a half steps counts as it did.
_STEP, _STEP_MHZ, _STAYS = 0.01, 15.0, 1.5
# No plan below the limit can show that a GPU is no longer slowed down: after so long, and each time that this was wrong
# after twice as long, it counts as over.
_LASTS_S, _LASTS_MOST_S = 30.0, 960.0


class LimitWatch:
    """What a GPU may draw, and how fast it may run, where that is less than profiled; for the clocks' thread.

    Attributes:
        profiled_w: The power limit that a profile records, with which it is compared; until one is known, the first
            one that is read [W].
        power_w: The power limit [W]; infinite where it is no lower than profiled.
        clock_mhz: The highest clock that is reached [MHz]; infinite where only the power limit is in the way.
    """

    def __init__(self, gpu: Gpu, timebase: Timebase) -> None:
        self._gpu = gpu
        self._time = timebase
        self.profiled_w: float | None = None
        self.power_w = self.clock_mhz = math.inf
        self._slowed_at_s = self._over_at_s = -math.inf
        self._lasts_s = _LASTS_S

    def read(self) -> None:
        """Read the power limit, a call of some microseconds; what cannot be read is no limit."""
        if self._time.now_s() > self._slowed_at_s + self._lasts_s and not math.isinf(self.clock_mhz):
            self._end_slowdown()
        limit_w = None
        with suppress(GpuError):
            limit_w = self._gpu.power_limit_w()
        if limit_w is None:
            return
        if self.profiled_w is None:
            self.profiled_w = limit_w
        least_w = (1 - (_LOWERED if math.isinf(self.power_w) else _RAISED)) * self.profiled_w
        step_w = _STEP * self.profiled_w
        if limit_w > least_w:
            self.power_w = math.inf
        elif not 0 <= limit_w - self.power_w < _STAYS * step_w:
            self.power_w = _rounded_down(limit_w, step_w)

    def reached(self, clock_mhz: int, reasons: tuple[str, ...] = ()) -> None:
        """Take in the clock that a busy GPU has reached: the one requested, or a lower one for some reasons [MHz]."""
        if not SLOWED_DOWN.isdisjoint(reasons):
            now_s = self._time.now_s()
            if math.isinf(self.clock_mhz):
                comes_again = now_s < self._over_at_s + self._lasts_s
                self._lasts_s = min(2 * self._lasts_s, _LASTS_MOST_S) if comes_again else _LASTS_S
            self._slowed_at_s = now_s
            if clock_mhz < self.clock_mhz:
                self.clock_mhz = _rounded_down(clock_mhz, _STEP_MHZ)
        elif clock_mhz > self.clock_mhz + _STAYS * _STEP_MHZ:
            self._end_slowdown()

    def _end_slowdown(self) -> None:
        self.clock_mhz, self._over_at_s = math.inf, self._time.now_s()


def _rounded_down(value: float, step: float) -> float:
    return round(math.floor(value / step) * step, 3)
