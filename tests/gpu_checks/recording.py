"""A GPU that is really read but never changed, and the agent that records its changes instead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pynvml

from perseus_ds.agent import process, rank_clocks
from perseus_ds.agent.gpu_records import UnrecordedGpu
from perseus_ds.client import lease
from perseus_ds.errors import GpuError
from perseus_ds.gpu import open_gpu
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device, index_of_uuid
from perseus_ds.protocol.latencies import LatencyTable
from perseus_ds.protocol.messages import FindGpu
from perseus_ds.timebase import REAL_TIME, Timebase

DEVICE = "recording"
"""Prefix of the addresses of these GPUs, which only agents of these checks open."""
CHANGES_FILE = "PERSEUS_CHECKS_CHANGES"
"""Variable with the path of the file into which an agent of these checks writes changes."""
LATENCY_S = "PERSEUS_CHECKS_LATENCY_S"
"""Variable with the latency used for all clocks [s]; if it is not set, the agent measures latencies."""

CHANGES = re.compile(
    r"nvml(?!EventSet|SystemEventSet)(?!\w*Get)\w*?(Set|Reset|Clear|Modify|Create|Destroy|Freeze|Activate|Update)[A-Z_]?"
)


class GuardError(Exception):
    """Something tried to change a GPU that must only be read."""


def guard_nvml() -> None:
    """Make every function of pynvml that changes a GPU raise :class:`GuardError` in this process.

    All functions look up their counterpart in the driver's library by name, wherever they were imported.
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


def guard_agents() -> None:
    """Make agents started by this process from now on read GPUs and record changes."""
    path = [str(folder) for folder in (_TESTS.parent, _TESTS, _TESTS / "support")]
    lease._CODE = f"import sys; sys.path[:0] = {path!r}; from gpu_checks.recording import run_agent; run_agent()"


_TESTS = Path(__file__).resolve().parents[1]


@contextmanager
def latency_of_all_clocks(latency_s: float | None) -> Iterator[None]:
    """Request clocks early by this latency, or by the measured ones if it is None."""
    if latency_s is None:
        yield
        return
    known = LatencyTable({(0, rises): (latency_s,) * 3 for rises in (False, True)})
    plan = rank_clocks.plan_transitions

    def plan_by_it(clocks_mhz: Any, spans_s: Any, length_s: float, _: LatencyTable) -> Any:
        return plan(clocks_mhz, spans_s, length_s, known)

    with patch.object(rank_clocks, "plan_transitions", plan_by_it):
        yield


@dataclass(frozen=True)
class Change:
    """A requested change of the clock.

    Attributes:
        at_s: Time of the request [s].
        clock_mhz: Requested clock; None for the default.
    """

    at_s: float
    clock_mhz: int | None


class RecordsChanges:
    """Replaces the methods of a GPU that change its clock.

    Attributes:
        timebase: The time in which changes are recorded.
        address: None, since no other process opens the GPU.
    """

    timebase: Timebase = REAL_TIME
    address: str | None = None

    @cached_property
    def changes(self) -> list[Change]:
        """The requested changes in order."""
        return []

    def lock_clock(self, clock_mhz: int) -> None:
        clocks = self.supported_clocks_mhz()  # type: ignore[attr-defined]
        if clock_mhz not in clocks:
            raise GpuError(f"{self}: it has no {clock_mhz} MHz.")
        self._record(clock_mhz)

    def reset_clock(self) -> None:
        self._record(None)

    def _record(self, clock_mhz: int | None) -> None:
        change = Change(self.timebase.now_s(), clock_mhz)
        self.changes.append(change)
        if (path := os.environ.get(CHANGES_FILE)) is not None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{change.at_s!r} {clock_mhz or 0}\n")

    def check_lock_permission(self) -> None:
        """Accept: nothing is locked, so no permission is needed."""


def changes_in(path: Path) -> list[Change]:
    """Return the changes written into a file by agents."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [Change(float(at_s), int(clock_mhz) or None) for at_s, clock_mhz in rows]


class RecordingGpu(RecordsChanges, NvmlGpu):  # type: ignore[misc]
    """An NVIDIA GPU read through NVML."""

    @property
    def address(self) -> str:  # type: ignore[override]
        """The GPU's address under another prefix, so that only agents of these checks open it."""
        return f"{DEVICE}:{self.uuid}"


def open_to_read(address: str, logs: Sequence[memoryview] = ()) -> Gpu:
    """Open a GPU of a check."""
    device, _, uuid = address.partition(":")
    return RecordingGpu(index_of_uuid(uuid)) if device == DEVICE else open_gpu(address, logs)  # type: ignore[return-value]


def find_to_read(place: FindGpu) -> Gpu:
    """Open a GPU of a job that trains in a check."""
    return RecordingGpu(index_of_cuda_device(place.ordinal, place.uuid, place.variables))  # type: ignore[return-value]


def run_agent() -> None:
    """Run an agent like that of a job, except that it never changes GPUs."""
    guard_nvml()
    process.Agent = partial(process.Agent, open_gpu=open_to_read, find_gpu=find_to_read)  # type: ignore[misc, assignment]
    # No clock is locked, and this agent must not reset clocks left locked by other jobs.
    process.GpuRecord = lambda gpu, agent: UnrecordedGpu(gpu)  # type: ignore[misc, assignment]
    process.left_locked = lambda agent: iter(())  # type: ignore[assignment]
    latency_s = os.environ.get(LATENCY_S)
    with latency_of_all_clocks(None if latency_s is None else float(latency_s)):
        process.main()
