"""Torch's own schedules: errors of predicted times on real ranks, and gaps of plans.

    python benchmarks/torch_pipelining.py                                 # all schedules, 3 runs each: about 20 minutes
    python benchmarks/torch_pipelining.py --case gap                      # without processes: about 2 minutes
    python benchmarks/torch_pipelining.py --case prediction --schedule ZBVZeroBubble --repeat 5

``prediction``: unequal stages of torch on 2 real gloo ranks with SIMULATED GPUs, under a plan with a random clock for
every instruction. GPUs are simulated in real time. Use an idle machine with two cores or more.

``gap``: gaps of plans to their lower bounds, for 4 ranks and the published A100 profile of GPT-3 175B on 4 stages. For
schedules with two stages per rank, each stage is divided into two with half of its time and energy. For schedules with
split backwards, each part has half of the time and energy of a whole backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "support")]

from frontiers import save_mixed_plan  # type: ignore[import-not-found]  # noqa: E402
from job import run_jobs  # type: ignore[import-not-found]  # noqa: E402
from pipelines import STAGES_PER_RANK, of_torch  # type: ignore[import-not-found]  # noqa: E402
from profiles import stage_profile  # type: ignore[import-not-found]  # noqa: E402
from run_log import iterations, records  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402

SCHEDULE_JOB = TESTS / "integration" / "schedule_job.py"
SIMULATED = {"longest_instruction_s": 0.1, "counter_period_s": 0.02, "lock_latency_s": 0.002}
MEASURED = {"min_clock_mhz": 900, "sampling": "stride", "clock_stride": 8, "warm_up": 5}
MICRO_BATCHES = 6
A100_BLOCKING_POWER_W = 83.64
LATER = 100_000


def prediction(name: str, folder: Path) -> dict[str, float]:
    """Return the deviations of predicted from measured time and energy of an iteration, as fractions."""

    def train(mode: str, **job: Any) -> list[dict[str, Any]]:
        block = {"mode": mode, "device": "simulated", "output_dir": str(folder / mode), "simulated": SIMULATED}
        job["perseus"] = {**block, **job["perseus"]}
        work = [4, 2, 1, 3] if STAGES_PER_RANK[name] == 2 else [4, 2]
        job = {"schedule": name, "micro_batches": MICRO_BATCHES, "work": work, **job}
        run_jobs(folder / f"{mode} job", 2, SCHEDULE_JOB, {mode: job})
        return iterations(records(folder / mode), "run")  # type: ignore[no-any-return]

    train("profile", steps=LATER, until=["observe", 1], perseus={"profile": MEASURED})
    profile = StageProfile.load(folder / "profile")
    plan = save_mixed_plan(folder / "frontier", of_torch(name, 2, MICRO_BATCHES), profile)
    ran = train("run", steps=14, perseus={"frontier": str(folder / "frontier")})
    time_s, energy_j = (statistics.median(r[key] for r in ran) for key in ("time_s", "energy_j"))
    return {"time": plan.time_s / time_s - 1, "energy": plan.energy_j / energy_j - 1}


def gap(name: str, micro_batches: int) -> dict[str, float]:
    """Return the mean and the largest gap of plans to their lower bounds, as fractions."""
    order = of_torch(name, 4, micro_batches)
    profile = cut(StageProfile.load(stage_profile("a100-sxm")), STAGES_PER_RANK[name])
    frontier = optimize(order, profile, blocking_power_w=A100_BLOCKING_POWER_W)
    gaps = np.array([plan.gap for plan in frontier.plans])
    return {"gap, mean": float(gaps.mean()), "gap, worst": float(gaps.max())}


def cut(profile: StageProfile, parts: int) -> StageProfile:
    """Divide each stage into equal ones, and add the parts of a split backward."""
    rows = []
    for row in profile.measurements:
        for part in range(parts):
            stage = row.stage * parts + part
            whole = replace(row, stage=stage, time_s=row.time_s / parts, energy_j=row.energy_j / parts)
            rows.append(whole)
            if row.kind is Kind.BACKWARD:
                half = replace(whole, time_s=whole.time_s / 2, energy_j=whole.energy_j / 2)
                rows.append(replace(half, kind=Kind.BACKWARD_INPUT))
                # On the first stage, torch runs the whole backward in the second part.
                rows.append(replace(half if stage else whole, kind=Kind.BACKWARD_WEIGHT))
    return StageProfile(rows)


def main() -> None:
    """Run the cases and print each figure's median and range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=("prediction", "gap"), default=["gap", "prediction"])
    parser.add_argument("--schedule", nargs="+", choices=STAGES_PER_RANK, default=list(STAGES_PER_RANK))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16], help="of the case gap")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    if "gap" in arguments.case:
        print("Plans against their lower bounds, A100 profile of GPT-3 175B")
        for name in arguments.schedule:
            for micro_batches in arguments.micro_batches:
                figures = ", ".join(f"{what} {value:.3%}" for what, value in gap(name, micro_batches).items())
                print(f"  {name:22} {micro_batches:3} micro-batches: {figures}", flush=True)
    if "prediction" in arguments.case:
        print(f"Predicted against measured, SIMULATED GPUs; median (least to most) of {arguments.repeat} runs")
        for name in arguments.schedule:
            found: dict[str, list[float]] = {}
            for _ in range(arguments.repeat):
                with tempfile.TemporaryDirectory() as folder:
                    for what, value in prediction(name, Path(folder)).items():
                        found.setdefault(what, []).append(value)
            for what, values in found.items():
                median, least, most = (f"{f(values):+.2%}" for f in (statistics.median, min, max))
                print(f"  {name:22} {what:8} {median:>8} ({least} to {most})", flush=True)


if __name__ == "__main__":
    main()
