"""Plans iterations with given lengths in a separate process, which handles one request after another.

The process is started in the same way as that of :mod:`~perseus_ds.optimizer.worker`, and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer.lengths import IterationPlan, Lengths, LengthsPlanner
from perseus_ds.optimizer.worker import NICENESS, start
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

_PARENT_ENDED_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """Profile, schedule and settings of the job to plan."""

    profile: Path
    schedule: Schedule
    settings: PlanningSettings


class LengthsWorker:
    """A process that plans iterations on one thread, at a lower priority than its parent's.

    Attributes:
        error: Reason why it no longer plans. Empty while it does.
    """

    def __init__(self, job: PlannedJob, log_path: Path) -> None:
        """Start the process.

        Raises:
            OSError: If it cannot be started.
        """
        self.error = ""
        self._connection, theirs = Pipe()
        with open_without_links(log_path, append=False) as log, theirs:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [theirs.fileno()]}
            self._process = start(__name__, str(theirs.fileno()), **files)
        self._send(job)

    @property
    def file(self) -> int:
        """File descriptor that is readable when a plan is available."""
        return self._connection.fileno()

    def request(self, lengths: Sequence[Lengths], slowdown: float) -> None:
        """Request a plan, as :meth:`LengthsPlanner.plan` computes it, if none is being computed."""
        self._send((tuple(lengths), slowdown))

    def received(self, timeout_s: float) -> IterationPlan | None:
        """Return the requested plan, or None if it is not available within the timeout [s]."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            answer = self._connection.recv()
        except (EOFError, OSError):
            self.error = self.error or "the planning process has ended"
            return None
        if isinstance(answer, IterationPlan):
            return answer
        self.error = str(answer)
        return None

    def stop(self) -> None:
        """End the process if it is still running."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self.error = self.error or "the planning process has ended"


def main() -> int:
    """Plan until the parent ends, and return the exit code."""
    parent = os.getppid()
    os.nice(NICENESS)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        try:
            job: PlannedJob = connection.recv()
            planner = LengthsPlanner(job.schedule, StageProfile.load(job.profile), job.settings)
            while os.getppid() == parent:
                # Processes that the parent has forked keep the connection open after its end.
                if connection.poll(_PARENT_ENDED_S):
                    connection.send(planner.plan(*connection.recv()))
        except (PerseusError, ValueError) as error:
            connection.send(str(error))
    return 0
