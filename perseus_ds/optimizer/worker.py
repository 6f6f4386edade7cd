"""Optimising in a process of its own: a request on its stdin, how far it is on its stdout.

A job that trains starts the process with :class:`OptimizeWorker` and asks from time to time whether it has ended.
The request holds the schedule, so the process imports no class that a file names, and it runs without the current
folder on the module search path.
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

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

_NICENESS = 10
"""Training on the same cores goes first."""
# More threads of the linear algebra wait for each other in loops, and are no faster.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# ``python -P -m`` of Python 3.11, for 3.10 too. Without -P, the first entry of the path is the current folder.
_START = (
    "import sys\n"
    "if not getattr(sys.flags, 'safe_path', False):\n"
    "    del sys.path[0]\n"
    "from perseus_ds.optimizer.worker import main\n"
    "sys.exit(main())"
)
_FAILED = 3
"""Exit code where there is no frontier; the reason is the last line, in JSON."""
_SECTIONS = ("bounds", "clocks")
_MOST_PROGRESS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest:
    """An order to plan, in pickled form from a process to its own child."""

    profile: Path
    out: Path
    schedule: Schedule
    settings: PlanningSettings


@dataclass(frozen=True)
class OptimizeResult:
    """That the process has ended; ``error`` says why there is no frontier, None if there is one."""

    error: str | None = None


class OptimizeWorker:
    """A running process that optimises on one thread, at a lower priority than its parent's."""

    def __init__(self, request: OptimizeRequest, log_path: Path) -> None:
        """Start the process; what it writes on stderr, such as a traceback, goes to the log.

        Raises:
            OSError: The log or a temporary file cannot be written, or no process be started.
        """
        self._log_path = log_path
        self._result: OptimizeResult | None = None
        self._begin_s = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
        # Files, not pipes: a pipe would block the training thread until the process has read a long request.
        with tempfile.TemporaryFile() as order, open_without_links(log_path, append=False) as log:
            pickle.dump(request, order)
            order.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=order,
                stdout=self._output,
                stderr=log,
                env={**os.environ, **_ONE_THREAD},
            )

    def poll(self) -> OptimizeResult | None:
        """Return the result, or None while the process runs."""
        if self._result is None and (code := self._process.poll()) is not None:
            self._output.seek(0)
            self._result = self._read(self._output.read(), code)
            self._output.close()
        return self._result

    def remaining_s(self) -> float | None:
        """Return about how long it takes until there is a result [s]; None while that is not known."""
        if self._result is not None:
            return 0.0
        lines = os.pread(self._output.fileno(), _MOST_PROGRESS, 0).split(b"\n")[:-1]
        try:
            done = float(lines[-1])
        except (IndexError, ValueError):  # not begun, or finished
            return None
        return (time.monotonic() - self._begin_s) * (1 - done) / done if done > 0 else None

    def stop(self) -> None:
        """End the process; nothing happens where it has ended."""
        self._process.kill()
        self._process.wait()
        self.poll()

    def _read(self, output: bytes, code: int) -> OptimizeResult:
        if code == _FAILED:
            return OptimizeResult(json.loads(output.splitlines()[-1]))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = f"the optimiser's process ended by {how} without a result, see {self._log_path}"
        return OptimizeResult(error if code else None)


def main() -> int:
    """Read a request from stdin and write the frontier; return the exit code."""
    os.nice(_NICENESS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _optimize(pickle.load(sys.stdin.buffer))
    except (PerseusError, OSError) as error:
        print(json.dumps(str(error)))
        return _FAILED
    return 0


def _write_progress(section: str, done: float) -> None:
    """Write how much is done, 0 to 1, as a line."""
    print(f"{(_SECTIONS.index(section) + done) / len(_SECTIONS):.3f}", file=sys.__stdout__, flush=True)


def _optimize(request: OptimizeRequest) -> None:
    profile = StageProfile.load(request.profile)
    frontier = optimize(request.schedule, profile, request.settings, progress=_write_progress)
    provenance = frontier.provenance.model_copy(update={"profile": str(request.profile)})
    replace(frontier, provenance=provenance).save(request.out)
