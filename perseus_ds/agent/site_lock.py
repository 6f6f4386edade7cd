"""A clock that somebody has locked before the job, such as a site's script with ``nvidia-smi -lgc``.

Drivers do not report a locked clock. It shows only while the GPU is busy, when its clock stays below the highest one
without a reason, and rises when it is reset.
"""

from __future__ import annotations

from contextlib import suppress

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_TOLERANCE = 0.02
_HELD_S, _RISES_WITHIN_S, _LOOK_S = 0.2, 0.3, 0.02
# Reasons with which a busy GPU may run below its highest clock although no limit is reached.
_NO_LIMITS = frozenset({"applications_clocks_setting", "display_clock_setting", "sync_boost"})


def check_lock_permission(gpu: Gpu, timebase: Timebase = REAL_TIME) -> str:
    """Check that clocks may be locked, which resets the clock, and return a notice if that has removed a lock.

    The notice is empty if no lock was removed, or if the GPU is idle or at a limit, where a lock does not show.

    Raises:
        GpuPermissionError: Clocks may not be locked.
        GpuError: The driver refused.
    """
    held_mhz = _held_mhz(gpu, timebase)
    gpu.check_lock_permission()
    if held_mhz is None or not _rises_above(held_mhz, gpu, timebase):
        return ""
    return (
        f"its clock was locked at {held_mhz} MHz before the job, and this lock is removed: Perseus sets clocks itself, "
        "and its default clocks are those without a lock. Lock it again after the job, or use a power limit, which "
        "stays."
    )


def _held_mhz(gpu: Gpu, timebase: Timebase) -> int | None:
    """Return the clock at which a busy GPU stays below its highest one without a reported limit. None otherwise."""
    end_s = timebase.now_s() + _HELD_S
    held_mhz: int | None = None
    with suppress(GpuError):
        highest_mhz = gpu.supported_clocks_mhz()[-1]
        while timebase.now_s() < end_s:
            clock_mhz, reasons = gpu.clock_mhz(), gpu.throttle_reasons()
            held_mhz = clock_mhz if held_mhz is None else held_mhz
            is_at_limit = not _NO_LIMITS.issuperset(reasons) or clock_mhz >= (1 - _TOLERANCE) * highest_mhz
            if is_at_limit or abs(clock_mhz - held_mhz) > _TOLERANCE * held_mhz:
                return None
            timebase.sleep(_LOOK_S)
        return held_mhz
    return None


def _rises_above(clock_mhz: int, gpu: Gpu, timebase: Timebase) -> bool:
    end_s = timebase.now_s() + _RISES_WITHIN_S
    with suppress(GpuError):
        while timebase.now_s() < end_s:
            if gpu.clock_mhz() > (1 + _TOLERANCE) * clock_mhz:
                return True
            timebase.sleep(_LOOK_S)
    return False
