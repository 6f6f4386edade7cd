"""Savings of auto mode from the first iteration on, including profiling, relative to default clocks.

    python benchmarks/auto.py --steps 200

Trains GPT-3 (tiny, four stages) twice on SIMULATED GPUs, with DeepSpeed's real engine: under
``"mode": "observe"``, and under ``"mode": "auto"`` with an empty cache.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from job import run_script  # type: ignore[import-not-found]  # noqa: E402

BLOCKING_POWER_W = 83.64


def train(folder: Path, overrides: list[str]) -> tuple[float, float, Counter[str]]:
    """Return time [s] and energy of all GPUs [J] from the first to the last iteration, and the phases."""
    script = ROOT / "examples" / "gpt3" / "train.py"
    finished = run_script(folder, 4, script, "model=tiny", "perseus.device=simulated", *overrides, give_up_s=math.inf)
    for line in finished.printed.splitlines():
        if line.startswith("perseus: ") and "step" not in line:
            print(f"  {line}")
    iterations = finished.iterations()
    time_s = iterations[-1]["ended"] - iterations[0]["ended"] + iterations[0]["time_s"]
    # Between iterations GPUs wait, and draw at most blocking power.
    waiting_s = time_s - sum(record["time_s"] for record in iterations)
    energy_j = sum(record["energy_j"] for record in iterations) + 4 * BLOCKING_POWER_W * waiting_s
    return time_s, energy_j, Counter(record["phase"] for record in iterations)


def main() -> None:
    """Run both jobs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("overrides", nargs="*", help="of examples/gpt3/train.py")
    arguments = parser.parse_args()
    jobs = []
    print(f"Iterations 1 to {arguments.steps} on SIMULATED A100s")
    for name, mode in (("default clocks", "observe"), ("auto", "auto")):
        with tempfile.TemporaryDirectory() as folder:
            common = [f"steps={arguments.steps}", "log_every=50", f"perseus.mode={mode}", *arguments.overrides]
            jobs.append(train(Path(folder), common))
        time_s, energy_j, phases = jobs[-1]
        counts = ", ".join(f"{count} {phase}" for phase, count in phases.items())
        print(f"  {name:15} {time_s:8.1f} s {energy_j / 1e3:9.1f} kJ   ({counts})", flush=True)
    (default_s, default_j, _), (auto_s, auto_j, _) = jobs
    print(f"  energy {auto_j / default_j - 1:+.1%}, time {auto_s / default_s - 1:+.2%}")


if __name__ == "__main__":
    main()
