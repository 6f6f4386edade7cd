"""The whole workflow on simulated GPUs: profile, optimise, train at default clocks and with the plan.

    python examples/gpt3/demo.py

Four pipeline stages, each a process with DeepSpeed's real engine. The GPUs are simulated A100s.
All files are written to ``runs/demo``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.progress.sums import JobSums
from perseus_ds.report.inputs import read
from perseus_ds.units import percent, plain

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs" / "demo"
BIN = Path(sys.executable).parent
TRAIN = [
    str(BIN / "deepspeed"), "--num_gpus", "4", str(Path(__file__).parent / "train.py"),
    "model=tiny", "perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.2", "log_every=5",
]  # fmt: skip
PROMISED_SAVING, ALLOWED_SLOWDOWN, ALLOWED_ERROR = 0.08, 0.01, 0.05


def _short(word: str) -> str:
    """Return a path relative to the repository's root."""
    return word.replace(f"{BIN}/", "").replace(f"{ROOT}/", "")


def run(title: str, command: list[str], log: Path) -> None:
    """Run a command, print Perseus's messages, and write the rest to a log."""
    print(f"\n{title}\n  $ {' '.join(_short(word) for word in command)}", flush=True)
    began_s = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            shown = re.search(r"(?:steps: \d+ loss: \S+|perseus: step|perseus: wrote).*", line)
            if shown:
                print(f"  {shown.group()}", flush=True)
    if process.wait() != 0:
        print(log.read_text(encoding="utf-8")[-3000:])
        raise SystemExit(f"This step failed with exit code {process.returncode}. Its output is in {log}.")
    print(f"  ({time.monotonic() - began_s:.0f} s)", flush=True)


def table(frontier: Frontier, job: JobSums) -> tuple[str, bool]:
    """Return predicted and measured figures side by side, and whether the plan saves the expected energy."""
    plan, saving = frontier.within(0.0), job.under_plans
    assert saving is not None, "iterations ran under plans"
    mean = job.planned.mean()
    name = f"plan {frontier.plans.index(plan)} of {len(frontier.plans)}"
    rows = [(name, plan, mean.time_s, mean.energy_j)]
    lines = [
        "                      iteration time [s]               energy per iteration [J]",
        "                   predicted  measured   error        predicted  measured   error",
    ]
    if saving.by_profile:  # too few iterations at default clocks: what they take is a prediction, not a measurement
        baseline = frontier.baseline
        lines.append(
            f"  default clocks   {baseline.time_s:9.3f}  not measured          {baseline.energy_j:12.1f}  not measured"
        )
    else:
        rows.insert(0, ("default clocks", frontier.baseline, mean.default_s, mean.default_j))
    errors = []
    for name, predicted, time_s, energy_j in rows:
        error_t, error_e = predicted.time_s / time_s - 1, predicted.energy_j / energy_j - 1
        errors += [abs(error_t), abs(error_e)]
        lines.append(
            f"  {name:16} {predicted.time_s:9.3f} {time_s:9.3f} {plain(percent(error_t)):>7}"
            f"     {predicted.energy_j:12.1f} {energy_j:9.1f} {plain(percent(error_e)):>7}"
        )
    saves_enough = 1 - mean.energy_j / mean.default_j >= PROMISED_SAVING
    is_as_fast = mean.time_s / mean.default_s - 1 <= ALLOWED_SLOWDOWN
    lines += [
        "",
        f"  {saving.in_words()}.",
        f"  Means of {job.planned.compared} iterations. Energies are of all four GPUs, which are SIMULATED A100s.",
    ]
    checks = {
        f"saves at least {PROMISED_SAVING:.0%}": saves_enough,
        f"iterations at most {ALLOWED_SLOWDOWN:.0%} longer": is_as_fast,
        f"predictions within {ALLOWED_ERROR:.0%}": max(errors) <= ALLOWED_ERROR,
    }
    lines += ["", *(f"  [{'ok' if good else 'NOT MET'}] {what}" for what, good in checks.items())]
    if not all(checks.values()):
        lines.append("  Passes are computed for real, so other work on this machine changes their times. Run it again.")
    return "\n".join(lines), saves_enough  # times depend on other work on the machine, so they are only shown


def main() -> int:
    """Run all steps, print the results, and return 1 if the plan does not save the expected energy, else 0."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    profile, frontier_dir = OUT / "profile" / "profile.csv", OUT / "frontier"
    perseus_ds = str(BIN / "perseus-ds")
    print("At its first start on a machine, DeepSpeed compiles an operator, which takes about a minute without output.")
    run(
        "1. Profile: train at a few selected clocks, one after the other",
        [*TRAIN, "steps=10000", "--profile", f"perseus.output_dir={OUT}/profile"],
        OUT / "profile.log",
    )
    run(
        "2. Optimise: compute the frontier of frequency plans",
        [perseus_ds, "optimize", str(profile), "--out", str(frontier_dir)],
        OUT / "optimize.log",
    )
    run(
        "3. Train at default clocks",
        [*TRAIN, "steps=14", "perseus.mode=observe", f"perseus.output_dir={OUT}/default"],
        OUT / "default.log",
    )
    run(
        "4. Train under the plan that is as fast as default clocks",
        [*TRAIN, "steps=32", "perseus.mode=run", f"perseus.frontier={frontier_dir}", f"perseus.output_dir={OUT}/plan"],
        OUT / "plan.log",
    )
    run("5. Draw", [perseus_ds, "plot", str(OUT)], OUT / "plot.log")
    run("6. Report", [perseus_ds, "report", str(OUT)], OUT / "report.log")
    (job,) = [run.job for run in read(OUT).runs if run.job.under_plans is not None]
    text, saves_enough = table(Frontier.load(frontier_dir), job)
    print(f"\n{text}\n")
    print(f"  Report:    {OUT}/report.html (open it in a browser)")
    print(f"  Pictures:  {OUT}/frontier.png, {OUT}/timeline.png")
    print(f"  Profile:   {profile}\n  Frontier:  {frontier_dir}/frontier.csv\n  Iterations: {OUT}/plan/run.jsonl")
    return 0 if saves_enough else 1


if __name__ == "__main__":
    sys.exit(main())
