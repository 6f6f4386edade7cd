"""A GPU that is read for real and never changed: what would have changed it is recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pynvml

from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.timebase import REAL_TIME, Timebase

CHANGES = re.compile(
    r"nvml(?!EventSet|SystemEventSet)(?!\w*Get)\w*?(Set|Reset|Clear|Modify|Create|Destroy|Freeze|Activate|Update)[A-Z_]?"
)


class GuardError(Exception):
    """Something tried to change a GPU that is only to be read."""


def guard_nvml() -> None:
    """Make every function of pynvml that changes a GPU raise :class:`GuardError`, for the rest of this process.

    All of them, wherever they were imported, look their function of the driver's library up by name.
    """
    look_up = pynvml._nvmlGetFunctionPointer
    if getattr(look_up, "is_guarded", False):
        return

    def guarded(name: str) -> Any:
        if CHANGES.match(name):
            raise GuardError(f"{name} would change the GPU")
        return look_up(name)

    guarded.is_guarded = True  # type: ignore[attr-defined]
    pynvml._nvmlGetFunctionPointer = guarded


@dataclass(frozen=True)
class Change:
    """A change of the clock that was asked for.

    Attributes:
        at_s: When [s].
        clock_mhz: Which; None for the default.
    """

    at_s: float
    clock_mhz: int | None


class RecordsChanges:
    """Takes the place of the methods of a GPU that change its clock.

    Attributes:
        timebase: The time in which changes are recorded.
        address: None, so that no other process resets the clock.
    """

    timebase: Timebase = REAL_TIME
    address = None

    @cached_property
    def changes(self) -> list[Change]:
        """The changes that were asked for, in order."""
        return []

    def lock_clock(self, clock_mhz: int) -> None:
        clocks = self.supported_clocks_mhz()  # type: ignore[attr-defined]
        if clock_mhz not in clocks:
            raise GpuError(f"{self}: it has no {clock_mhz} MHz.")
        self.changes.append(Change(self.timebase.now_s(), clock_mhz))

    def reset_clock(self) -> None:
        self.changes.append(Change(self.timebase.now_s(), None))

    def check_lock_permission(self) -> None:
        """Nothing is locked, so no permission is needed."""


class RecordingGpu(RecordsChanges, NvmlGpu):  # type: ignore[misc]
    """An NVIDIA GPU that is read through NVML."""
