"""A GPU that is really read but never changed, and the agent that records its changes instead."""

import os
import re
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pynvml

from perseus_ds.agent import process, timeline
from perseus_ds.agent.gpu_records import UnrecordedGpu
from perseus_ds.client import lease
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device, index_of_uuid
from perseus_ds.protocol.job_messages import LatencyTable
from perseus_ds.simulation import open_gpu
from perseus_ds.timebase import REAL_TIME

DEVICE = "recording"
"""Prefix of the addresses of these GPUs, which only agents of these checks open."""
CHANGES_FILE = "PERSEUS_CHECKS_CHANGES"
"""Variable with the path of the file into which an agent of these checks writes changes."""
LATENCY_S = "PERSEUS_CHECKS_LATENCY_S"
"""Variable with the latency used for all clocks [s]; if it is not set, the agent measures latencies."""

CHANGES = re.compile(
    r"nvml(?!EventSet|SystemEventSet)(?!\w*Get)\w*?(Set|Reset|Clear|Modify|Create|Destroy|Freeze|Activate|Update)[A-Z_]?"
)
_TESTS = Path(__file__).resolve().parents[1]


class GuardError(Exception):
    """Something tried to change a GPU that must only be read."""


def guard_nvml():
    """Make every function of pynvml that changes a GPU raise :class:`GuardError` in this process.

    All functions look up their counterpart in the driver's library by name, wherever they were imported.
    """
    look_up = pynvml._nvmlGetFunctionPointer

    def guarded(name):
        if CHANGES.match(name):
            raise GuardError(f"{name} would change the GPU")
        return look_up(name)

    pynvml._nvmlGetFunctionPointer = guarded


def guard_agents():
    """Make agents started by this process from now on read GPUs and record changes."""
    path = [str(folder) for folder in (_TESTS.parent, _TESTS, _TESTS / "support")]
    lease._CODE = f"import sys; sys.path[:0] = {path!r}; from gpu_checks.recording import run_agent; run_agent()"


@contextmanager
def latency_of_all_clocks(latency_s):
    """Request clocks early by this latency, or by the measured ones if it is None."""
    if latency_s is None:
        yield
        return
    known = LatencyTable({(0, rises): (latency_s,) * 3 for rises in (False, True)})
    plan = timeline.plan_transitions
    with patch.object(timeline, "plan_transitions", lambda *program: plan(*program[:-1], known)):
        yield


class Change(NamedTuple):
    """A requested change of the clock, where None is the default clock."""

    at_s: float
    clock_mhz: int | None


class RecordsChanges:
    """Replaces the methods of a GPU that change its clock. No other process opens it by an address."""

    timebase = REAL_TIME
    address = None

    @cached_property
    def changes(self):
        return []

    def lock_clock(self, clock_mhz):
        if clock_mhz not in self.supported_clocks_mhz():
            raise GpuError(f"{self}: it has no {clock_mhz} MHz.")
        self._record(clock_mhz)

    def reset_clock(self):
        self._record(None)

    def check_lock_permission(self):
        """Accept: nothing is locked, so no permission is needed."""

    def _record(self, clock_mhz):
        change = Change(self.timebase.now_s(), clock_mhz)
        self.changes.append(change)
        if (path := os.environ.get(CHANGES_FILE)) is not None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{change.at_s!r} {clock_mhz or 0}\n")


def changes_in(path):
    """Return the changes written into a file by agents."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [Change(float(at_s), int(clock_mhz) or None) for at_s, clock_mhz in rows]


class RecordingNvmlGpu(RecordsChanges, NvmlGpu):
    """An NVIDIA GPU read through NVML, whose address only agents of these checks know."""

    @property
    def address(self):
        return f"{DEVICE}:{self.uuid}"


def _open_to_read(address, logs=()):
    device, _, uuid = address.partition(":")
    return RecordingNvmlGpu(index_of_uuid(uuid)) if device == DEVICE else open_gpu(address, logs)


def _find_to_read(place):
    return RecordingNvmlGpu(index_of_cuda_device(place.ordinal, place.uuid, place.variables))


def run_agent():
    """Run an agent like that of a job, except that it never changes GPUs."""
    guard_nvml()
    process.Agent = partial(process.Agent, open_gpu=_open_to_read, find_gpu=_find_to_read)
    # No clock is locked, and this agent must not reset clocks left locked by other jobs.
    process.GpuRecord = lambda gpu, agent: UnrecordedGpu(gpu)
    process.left_locked = lambda agent: iter(())
    latency_s = os.environ.get(LATENCY_S)
    with latency_of_all_clocks(None if latency_s is None else float(latency_s)):
        process.main()
