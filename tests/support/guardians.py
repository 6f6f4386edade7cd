"""The guardian processes of a node of stub GPUs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
from stub_nvml.controller import STATE_VARIABLE, StubNvml

_MODULE = "perseus_ds.clocks.guardian_daemon"


def guardians_of(node: StubNvml) -> list[psutil.Process]:
    """Return the guardians of a node; while one starts, or takes the place of another, there may be several."""
    state_file = node.environment[STATE_VARIABLE]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _MODULE in " ".join(process.cmdline()) and process.environ().get(STATE_VARIABLE) == state_file:
                found.append(process)
    return found


def watched_by(guardian: psutil.Process) -> int:
    """Return how many ranks are connected with a guardian."""
    with contextlib.suppress(OSError):
        targets = [os.readlink(descriptor) for descriptor in Path(f"/proc/{guardian.pid}/fd").iterdir()]
        return sum(target.startswith("socket:") for target in targets) - 1  # the one that listens
    return 0
