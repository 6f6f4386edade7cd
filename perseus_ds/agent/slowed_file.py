"""Files that say which GPUs of the node have lower clocks on purpose, for health checks and monitors.

A file is in Prometheus's text format, so that node_exporter can read it. It exists while
Perseus locks clocks of its GPU.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from perseus_ds.protocol import places

_METRIC = "perseus_gpu_slowed_on_purpose"
_STAYS_S = 10.0
"""Time without a lock after which the file is removed. Clocks are default ones between iterations, too."""


class SlowedFile:
    """The file of a GPU."""

    def __init__(self, gpu: str) -> None:
        """Remove the file of an agent that has died. ``gpu`` is the GPU's address."""
        self._uuid = gpu.partition(":")[2]
        self._locked_s: float | None = None
        self.remove()

    @property
    def path(self) -> Path:
        return path_of(self._uuid)

    def update(self, now_s: float, *, is_locked: bool) -> None:
        """Write the file if the clock is locked, and remove it some time after the last lock."""
        if is_locked:
            is_new, self._locked_s = self._locked_s is None, now_s
            if is_new:
                self._write()
        elif self._locked_s is not None and now_s > self._locked_s + _STAYS_S:
            self.remove()

    def remove(self) -> None:
        self._locked_s = None
        remove(self._uuid)

    @property
    def text(self) -> str:
        """Content of the file."""
        return (
            f"# HELP {_METRIC} 1 while perseus-ds lowers the clock of a GPU to save energy.\n# TYPE {_METRIC} gauge\n"
            f'{_METRIC}{{UUID="{self._uuid}",agent="{os.getpid()}"}} 1\n'
        )

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # no room or no folder: a monitor does not get to know
            part = self.path.with_suffix(".part")
            part.write_text(self.text, encoding="utf-8")
            part.replace(self.path)


def path_of(uuid: str) -> Path:
    """Return the path of the file of a GPU."""
    return places.user_folder() / f"slowed.{uuid}.prom"


def remove(uuid: str) -> None:
    """Remove the file of a GPU, if there is one."""
    with contextlib.suppress(OSError):
        path_of(uuid).unlink(missing_ok=True)
