"""Computes plans in a separate process.

The process reads a request from stdin and writes its progress to stdout. A job's server starts the process with
:class:`OptimizeWorker` and polls it. The request contains the schedule, so the process imports no class that is named
in a file, and it runs without the current folder on the module search path.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

NICENESS = 10
"""Nice level, so that training on the same cores has priority."""
# More linear-algebra threads would wait for each other in loops without being faster.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_FAILED = 3
"""Exit code for a failure. The last line of the output is the reason in JSON."""
_SECTIONS = ("bounds", "clocks")
_MOST_PROGRESS = 1 << 16


def start(module: str, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs a module's ``main`` on one thread.

    The current folder is not on the module search path. This is equivalent to ``python -P -m`` of Python 3.11, also for
    3.10. Without -P, the path starts with that folder.

    Args:
        module: Name of the module.
        arguments: Its ``sys.argv[1:]``.
        streams: Files of the process, passed to ``subprocess.Popen``.

    Raises:
        OSError: The process cannot be started.
    """
    code = (
        "import sys\n"
        "if not getattr(sys.flags, 'safe_path', False):\n"
        "    del sys.path[0]\n"
        f"from {module} import main\n"
        "sys.exit(main())"
    )
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, **_ONE_THREAD}, **streams)


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest:
    """A request to compute plans, pickled by a process for its own child."""

    profile: Path
    out: Path
    schedule: Schedule
    settings: PlanningSettings


class OptimizeWorker:
    """A process that computes plans on one thread, at a lower priority than its parent's.

    Attributes:
        error: Reason why the process ended without a frontier. Otherwise empty.
    """

    def __init__(self, request: OptimizeRequest, log_path: Path) -> None:
        """Start the process, with its stderr redirected to the log.

        Raises:
            OSError: If the log or a temporary file cannot be written, or the process cannot be started.
        """
        self.error = ""
        self._log_path = log_path
        self._begin_s = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed after the process has ended
        # Files instead of pipes: a pipe would block the server until the process has read a long request.
        with tempfile.TemporaryFile() as order, open_without_links(log_path, append=False) as log:
            pickle.dump(request, order)
            order.seek(0)
            self._process = start(__name__, stdin=order, stdout=self._output, stderr=log)

    def has_ended(self) -> bool:
        """Return whether the process has ended, with a frontier or an error."""
        if not self._output.closed and (code := self._process.poll()) is not None:
            self._output.seek(0)
            output = self._output.read()
            self._output.close()
            if code == _FAILED:
                self.error = json.loads(output.splitlines()[-1])
            elif code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                self.error = f"the optimiser's process ended by {how} without a result, see {self._log_path}"
        return self._output.closed

    def remaining_s(self) -> float | None:
        """Return the estimated time until the process ends [s], or None if it is unknown."""
        if self.has_ended():
            return 0.0
        lines = os.pread(self._output.fileno(), _MOST_PROGRESS, 0).split(b"\n")[:-1]
        try:
            done = float(lines[-1])
        except (IndexError, ValueError):  # not started, or finished
            return None
        return (time.monotonic() - self._begin_s) * (1 - done) / done if done > 0 else None

    def stop(self) -> None:
        """End the process if it is still running."""
        self._process.kill()
        self._process.wait()
        self.has_ended()


def main() -> int:
    """Read a request from stdin, write the frontier, and return the exit code."""
    os.nice(NICENESS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            request: OptimizeRequest = pickle.load(sys.stdin.buffer)
            profile = StageProfile.load(request.profile)
            frontier = optimize(request.schedule, profile, request.settings, progress=_write_progress)
            provenance = frontier.provenance.model_copy(update={"profile": str(request.profile)})
            replace(frontier, provenance=provenance).save(request.out)
    except (PerseusError, OSError) as error:
        print(json.dumps(str(error)))
        return _FAILED
    return 0


def _write_progress(section: str, done: float) -> None:
    print(f"{(_SECTIONS.index(section) + done) / len(_SECTIONS):.3f}", file=sys.__stdout__, flush=True)
