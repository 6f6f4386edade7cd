"""Computes plans in separate processes, which a job's server polls.

A request contains the schedule, so the process imports no class that is named in a file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer import optimize, with_alternatives
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

NICENESS = 10
"""Nice level, so that training on the same cores has priority."""
# More linear-algebra threads would wait for each other in loops without being faster.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_SECTIONS = {"exact": ("bounds", "clocks"), "lowtime": ("lowtime",)}
"""Names of the steps that a solver reports, each of which counts as equally long."""
_REPORT_EVERY_S = 0.5
# Equivalent to "python -P -m" of Python 3.11. Without -P, the module search path starts with the current folder.
_CODE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
from {module} import main
main()
"""


class PlanningProcess:
    """A process that runs a module's ``main`` on one thread, at a lower priority than its parent's.

    Attributes:
        error: Reason why it has ended or cannot plan, otherwise empty.
    """

    def __init__(self, module: str, job: object, log_path: Path) -> None:
        """Start the process, which gets the job from :func:`job_and_connection`.

        Raises:
            OSError: If the log or a temporary file cannot be written, or the process cannot be started.
        """
        self.error = ""
        self._log_path = log_path
        self._connection, theirs = Pipe()
        # A file for the job: its schedule would block the server until the process reads from the pipe.
        with tempfile.TemporaryFile() as content, open_without_links(log_path, append=False) as log, theirs:
            pickle.dump(job, content)
            content.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(module=module), str(theirs.fileno())],
                env={**os.environ, **_ONE_THREAD},
                stdin=content,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )

    def receive(self, timeout_s: float = 0.0) -> Any:
        """Return the next message of the process, or None if there is none within the timeout [s]."""
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.error = self.error or f"the optimiser's process ended by {how} without a result, see {self._log_path}"
            return None

    def stop(self) -> None:
        """End the process if it is still running."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def job_and_connection() -> tuple[Any, Connection[Any, Any]]:
    """Return, in a planning process, its job and the connection to its parent."""
    os.nice(NICENESS)
    return pickle.load(sys.stdin.buffer), Connection(int(sys.argv[1]))


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest:
    """A request to compute the frontier of a profile and to write it to the folder ``out``."""

    profile: Path
    out: Path
    schedule: Schedule
    settings: PlanningSettings


class OptimizeWorker(PlanningProcess):
    """A process that computes a frontier."""

    def __init__(self, request: OptimizeRequest, log_path: Path) -> None:
        super().__init__(__name__, request, log_path)
        self._begin_s = time.monotonic()
        self._done = 0.0
        self._has_result = False

    def has_ended(self) -> bool:
        """Return whether the process has ended, with a frontier or an error."""
        while not (self._has_result or self.error) and (message := self.receive()) is not None:
            if isinstance(message, float):
                self._done = message
            else:
                self._has_result, self.error = True, message
        return self._has_result or bool(self.error)

    def remaining_s(self) -> float | None:
        """Return the estimated time until the process ends [s], or None if it is unknown."""
        if self.has_ended():
            return 0.0
        return (time.monotonic() - self._begin_s) * (1 - self._done) / self._done if self._done > 0 else None


def main() -> None:
    """Write the frontier of the request, and send the completed fraction and finally an error or an empty text."""
    request, connection = job_and_connection()

    sections = _SECTIONS[request.settings.solver]
    sent_s = 0.0

    def report(section: str, done: float) -> None:
        nonlocal sent_s
        if time.monotonic() < sent_s + _REPORT_EVERY_S:  # the server reads once an iteration, and a full pipe blocks
            return
        sent_s = time.monotonic()
        connection.send((sections.index(section) + done) / len(sections))

    error = ""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            profile = StageProfile.load(request.profile)
            frontier = optimize(request.schedule, profile, request.settings, progress=report)
            frontier = with_alternatives(frontier, request.schedule, profile)
            provenance = frontier.provenance.model_copy(update={"profile": str(request.profile)})
            replace(frontier, provenance=provenance).save(request.out)
    except (PerseusError, OSError) as problem:
        error = str(problem)
    connection.send(error)
