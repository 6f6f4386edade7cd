"""``make test-gpu``: runs checks on a GPU, each in its own process, and writes their results as evidence.

Without a GPU, a single line gives the reason why they are skipped. Arguments select checks by name, which run in the
order of :data:`CHECKS`: ``python tests/gpu_checks/run.py spans requests``.
"""

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATH = [str(folder) for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "support")]
if __name__ == "__main__":
    sys.path[:0] = PATH

from gpu_checks.results import UNFINISHED, Results, performed  # noqa: E402

from perseus_ds.artifacts.evidence import CheckResult, Evidence, Machine  # noqa: E402


class Check(NamedTuple):
    """A check, a function of a machine and its results, which is aborted after a time limit."""

    title: str
    function: str
    limit_s: float = 240.0


# Checks that take a minute and give the most information come first.
CHECKS = {
    "marks": Check("0. Marks written by the GPU, as another process sees them", "gpu_checks.mark_checks:marks"),
    "spans": Check("1. Spans of operations by CUDA events", "gpu_checks.clock_checks:spans"),
    "requests": Check("2. From a mark of the GPU to the request of a clock", "gpu_checks.clock_checks:requests"),
    "step": Check("3. The energy counter's answer to the end of a load", "gpu_checks.energy_checks:step"),
    "memory": Check("4. GPU memory that Perseus takes", "gpu_checks.clock_checks:memory"),
    "nvml": Check("5. NVML: selection, clocks, refreshes of the counter, readings", "gpu_checks.energy_checks:nvml"),
    "graph": Check("6. A CUDA graph with marks in it", "gpu_checks.mark_checks:graph"),
    "sigterm": Check("7. SIGTERM while the main thread waits for a long kernel", "gpu_checks.clock_checks:sigterm"),
    "kernels": Check("8. Perseus launches no kernel", "gpu_checks.training_checks:kernels"),
    "closure": Check("9. Predicted against measured iterations", "gpu_checks.training_checks:closure"),
    "counter": Check("10. The energy counter against steady powers, in waves", "gpu_checks.energy_checks:counter"),
    "duty": Check("11. Times of passes at 100 % and at 60 % duty", "gpu_checks.energy_checks:duty"),
    "overhead": Check("12. Time that Perseus adds to an iteration", "gpu_checks.training_checks:overhead"),
    "training": Check("13. DeepSpeed trains the same, bit for bit", "gpu_checks.training_checks:untouched"),
    "stages": Check("14. Two stages on one GPU", "gpu_checks.training_checks:stages", limit_s=480.0),  # three jobs
    "alarms": Check("15. No false alarm of a slow driver in three minutes", "gpu_checks.training_checks:alarms"),
}

_CHILD = "import sys; from gpu_checks.run import make; make(*sys.argv[1:])"


def make(name, path, machine):
    """Perform a check in this process on a machine, given as ``module:name``."""
    check, open_machine = CHECKS[name], pkgutil.resolve_name(machine)
    performed(name, check.title, pkgutil.resolve_name(check.function), open_machine, Path(path))


def made_in_a_process(name, folder, machine="gpu_checks.machine:OneGpu"):
    """Perform a check in its own process, and return its result, also of one that died or hung."""
    folder.mkdir(parents=True, exist_ok=True)
    check, path = CHECKS[name], folder / f"{name}.json"
    path.unlink(missing_ok=True)
    reason = _run([sys.executable, "-c", _CHILD, name, str(path), machine], check.limit_s)
    if not path.exists():
        Results(name, check.title, path).finish(UNFINISHED)
    written = json.loads(path.read_text())
    if written["result"]["reason"] == UNFINISHED:
        written["result"]["reason"] = reason
        path.write_text(json.dumps(written))
    return CheckResult.model_validate(written["result"])


def _run(command, limit_s):
    """Run a process and return how it ended, after killing it at its time limit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            how = f"its process ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            how = f"it did not end within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return f"{how}: {out.read()[-1500:].strip()}"


def collected(folder):
    """Return the evidence of the results in a folder that are from the machine of the latest one, if there is one."""
    times_s = {name: path.stat().st_mtime for name in CHECKS if (path := folder / f"{name}.json").exists()}
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in times_s}
    machines = [read[name]["machine"] for name in sorted(times_s, key=times_s.__getitem__) if read[name]["machine"]]
    if not machines:
        return None
    kept = {name: raw["result"] for name, raw in read.items() if raw["machine"] in (None, machines[-1])}
    made = datetime.fromtimestamp(max(times_s[name] for name in kept), timezone.utc)
    return Evidence(
        made=made.strftime("%Y-%m-%d %H:%M UTC"),
        machine=Machine.model_validate(machines[-1]),
        checks=[CheckResult.model_validate(raw) for raw in kept.values()],
        not_made=[check.title for name, check in CHECKS.items() if name not in kept],
    )


def write_evidence(folder):
    """Write the results of all checks on this machine, and an HTML page with them."""
    from perseus_ds.report.page import evidence_page

    evidence = collected(folder / "checks")
    if evidence is not None:
        evidence.save(folder)
        (folder / "evidence.html").write_text(evidence_page(evidence), encoding="utf-8")


def main(chosen):
    """Run the checks, and write all results, including earlier ones, after each of them."""
    from gpu_checks.machine import why_no_gpu

    if unknown := sorted(set(chosen) - set(CHECKS)):
        print(f"make test-gpu: there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}.")
        return 2
    if reason := why_no_gpu():
        print(f"make test-gpu: skipped, {reason}.")
        return 0
    failed, folder = 0, ROOT / "runs" / "gpu"
    for name, check in CHECKS.items():
        if not chosen or name in chosen:
            print(f"{check.title} ...", flush=True)
            result = made_in_a_process(name, folder / "checks")
            failed += result.outcome != "passed"
            print(f"  {result.outcome} in {result.took_s:.0f} s{f': {result.reason}' if result.reason else ''}")
            write_evidence(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
