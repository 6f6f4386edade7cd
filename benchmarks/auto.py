"""What auto mode saves from the first iteration on, with all its profiling counted, against default clocks.

    python benchmarks/auto.py --steps 200

Trains GPT-3 (tiny, four stages) twice on SIMULATED GPUs, with DeepSpeed's real engine: under
``"mode": "observe"``, and under ``"mode": "auto"`` with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A finished job.

    Attributes:
        time_s: From the start of the first iteration to the end of the last one, profiling between them included.
        energy_j: Of all GPUs in that time.
        phases: Iterations by phase.
    """

    time_s: float
    energy_j: float
    phases: Counter[str]


def train(folder: Path, mode: str, steps: int, overrides: list[str]) -> Job:
    """Train and read what each iteration took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    command += [str(ROOT / "examples" / "gpt3" / "train.py"), "model=tiny", f"steps={steps}", "log_every=50"]
    command += ["perseus.device=simulated", f"perseus.mode={mode}", f"perseus.output_dir={folder / mode}", *overrides]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    for line in done.stdout.splitlines():
        if line.startswith("perseus: ") and "step" not in line:
            print(f"  {line}")
    records = [json.loads(line) for line in (folder / mode / "run.jsonl").read_text().splitlines()]
    iterations = [record for record in records if "iteration" in record]
    time_s = iterations[-1]["ended"] - iterations[0]["ended"] + iterations[0]["time_s"]
    # Between iterations GPUs wait: no more than blocking power.
    waiting_s = time_s - sum(record["time_s"] for record in iterations)
    energy_j = sum(record["energy_j"] for record in iterations) + 4 * 83.64 * waiting_s
    return Job(time_s, energy_j, Counter(record["phase"] for record in iterations))


def main() -> None:
    """Run both jobs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("overrides", nargs="*", help="of examples/gpt3/train.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        default = train(Path(folder), "observe", arguments.steps, arguments.overrides)
        auto = train(Path(folder), "auto", arguments.steps, arguments.overrides)
    print(f"Iterations 1 to {arguments.steps} on SIMULATED A100s")
    for name, job in (("default clocks", default), ("auto", auto)):
        phases = ", ".join(f"{count} {phase}" for phase, count in job.phases.items())
        print(f"  {name:15} {job.time_s:8.1f} s {job.energy_j / 1e3:9.1f} kJ   ({phases})")
    print(f"  energy {auto.energy_j / default.energy_j - 1:+.1%}, time {auto.time_s / default.time_s - 1:+.2%}")


if __name__ == "__main__":
    main()
