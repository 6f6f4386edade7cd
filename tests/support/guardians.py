"""The guardian processes of a node of stub GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil
from stub_nvml.controller import STATE_VARIABLE, StubNvml

_MODULE = "perseus_ds.device.guardian_daemon"


def guardians_of(node: StubNvml) -> list[psutil.Process]:
    """Return the guardians of a node, the older one first."""
    state_file = node.environment[STATE_VARIABLE]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _MODULE in " ".join(process.cmdline()) and process.environ().get(STATE_VARIABLE) == state_file:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def two_watch(node: StubNvml, ranks: int, besides: Iterable[psutil.Process] = ()) -> bool:
    """Return whether two guardians, others than some, watch so many ranks."""
    found = guardians_of(node)
    starting = {child for guardian in found for child in _children_of(guardian)}  # copies of those that start them
    watching = {guardian for guardian in found if _watched_by(guardian) >= ranks}
    return len(watching - starting - {*besides}) == 2


def _children_of(guardian: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return guardian.children()
    return []


def _watched_by(guardian: psutil.Process) -> int:
    """Return of how many processes a guardian has a descriptor."""
    targets = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{guardian.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(os.readlink(descriptor))
    return sum("pidfd" in target for target in targets)
