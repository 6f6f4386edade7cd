"""All checks on a GPU by name, each run in its own process.

Checks that take a minute and give the most information come first.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_checks.results import UNFINISHED, Results, performed

from perseus_ds.artifacts.evidence import CheckResult, Evidence, Machine

ROOT = Path(__file__).resolve().parents[2]
_PATH = [ROOT, ROOT / "tests", ROOT / "tests" / "support"]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        title: What the check shows.
        function: ``module:function`` that performs the check on a machine.
        limit_s: Time after which it is aborted [s].
    """

    title: str
    function: str
    limit_s: float = 240.0

    def load(self) -> Callable[[Any, Results], None]:
        """Return the function."""
        return named(self.function)  # type: ignore[no-any-return]


CHECKS = {
    "marks": Check("0. Marks written by the GPU, as another process sees them", "gpu_checks.mark_checks:marks"),
    "spans": Check("1. Spans of operations by CUDA events", "gpu_checks.clock_checks:spans"),
    "requests": Check("2. From a mark of the GPU to the request of a clock", "gpu_checks.clock_checks:requests"),
    "step": Check("3. The energy counter's answer to the end of a load", "gpu_checks.energy_checks:step"),
    "memory": Check("4. GPU memory that Perseus takes", "gpu_checks.clock_checks:memory"),
    "nvml": Check("5. NVML: selection, clocks, refreshes of the counter, readings", "gpu_checks.nvml_checks:nvml"),
    "graph": Check("6. A CUDA graph with marks in it", "gpu_checks.process_checks:graph"),
    "sigterm": Check("7. SIGTERM while the main thread waits for a long kernel", "gpu_checks.process_checks:sigterm"),
    "kernels": Check("8. Perseus launches no kernel", "gpu_checks.training_checks:kernels"),
    "closure": Check("9. Predicted against measured iterations", "gpu_checks.prediction_checks:closure"),
    "counter": Check("10. The energy counter against steady powers, in waves", "gpu_checks.energy_checks:counter"),
    "duty": Check("11. Times of passes at 100 % and at 60 % duty", "gpu_checks.energy_checks:duty"),
    "overhead": Check("12. Time that Perseus adds to an iteration", "gpu_checks.prediction_checks:overhead"),
    "training": Check("13. DeepSpeed trains the same, bit for bit", "gpu_checks.training_checks:untouched"),
    "stages": Check("14. Two stages on one GPU", "gpu_checks.stage_checks:stages", limit_s=480.0),  # three jobs
    "alarms": Check("15. No false alarm of a slow driver in three minutes", "gpu_checks.training_checks:alarms"),
}

_CHILD = "import sys; from gpu_checks.checks import make; make(*sys.argv[1:])"


def make(name: str, out: str, machine: str) -> None:
    """Perform a check in this process.

    Its result and its machine are written to a file after each of its parts.
    """
    opened: list[Any] = []

    def open_machine() -> Any:
        opened.append(named(machine)())
        return opened[0]

    def write(result: CheckResult) -> None:
        described = opened[0].described().model_dump() if opened else None
        written = Path(out).with_suffix(".part")
        written.write_text(json.dumps({"machine": described, "result": result.model_dump()}))
        written.replace(out)

    write(performed(name, CHECKS[name].title, CHECKS[name].load(), open_machine, write))


def made_in_a_process(name: str, folder: Path, machine: str = "gpu_checks.machine:OneGpu") -> CheckResult:
    """Perform a check in its own process, write its result for :func:`collected`, and return it.

    If the process dies or does not end, the check has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check, out = CHECKS[name], folder / f"{name}.json"
    out.unlink(missing_ok=True)
    reason = _run(check, [sys.executable, "-c", _CHILD, name, str(out), machine])
    if out.exists():
        written = json.loads(out.read_text())
    else:
        failed = CheckResult(name=name, title=check.title, outcome="failed", reason=UNFINISHED, took_s=0.0)
        written = {"machine": None, "result": failed.model_dump()}
    if written["result"]["reason"] == UNFINISHED:
        written["result"]["reason"] = reason
        out.write_text(json.dumps(written))
    return CheckResult.model_validate(written["result"])


def _run(check: Check, command: list[str]) -> str:
    """Run a process and return how it ended, after killing it at the check's time limit."""
    path = os.pathsep.join([*map(str, _PATH), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            how = f"its process ended with {process.wait(check.limit_s)}"
        except subprocess.TimeoutExpired:
            how = f"it did not end within {check.limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return f"{how}: {printed.read()[-1500:].strip()}"


def collected(folder: Path) -> Evidence | None:
    """Return the evidence of all results in a folder from the machine of the latest one.

    Returns:
        None if no result has a machine.
    """
    read = {name: json.loads(p.read_text()) for name in CHECKS if (p := folder / f"{name}.json").exists()}
    machines = [
        raw["machine"] for _, raw in sorted(read.items(), key=lambda i: _written(folder, i[0])) if raw["machine"]
    ]
    if not machines:
        return None
    kept = {name: raw["result"] for name, raw in read.items() if raw["machine"] in (None, machines[-1])}
    made = max(_written(folder, name) for name in kept)
    return Evidence(
        made=datetime.fromtimestamp(made, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=Machine.model_validate(machines[-1]),
        checks=[CheckResult.model_validate(raw) for raw in kept.values()],
        not_made=[check.title for name, check in CHECKS.items() if name not in kept],
    )


def _written(folder: Path, name: str) -> float:
    return (folder / f"{name}.json").stat().st_mtime


def place_of(machine: type) -> str:
    """Return ``module:name`` of a machine's class, for :func:`named` in another process."""
    return f"{machine.__module__}:{machine.__name__}"


def named(place: str) -> Any:
    """Return the object called ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
