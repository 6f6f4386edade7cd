"""Accuracy of profiles that are measured during training, and of plans made from them.

    python benchmarks/profiling.py                                   # four GPUs, two jobs, 3 seeds: about 10 minutes
    python benchmarks/profiling.py --gpu a100-sxm --seeds 1 --condition sampled-counter

The real runtime of four ranks runs on SIMULATED GPUs in virtual time, in profile mode, with 1 % noise on the time of
every instruction and 2 % on its power. Rows and plans are compared with times and energies of the device model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from pipelines import one_f_one_b  # type: ignore[import-not-found]  # noqa: E402
from profiles import truth  # type: ignore[import-not-found]  # noqa: E402
from sampling import Judge, work_of  # type: ignore[import-not-found]  # noqa: E402
from virtual.job import VirtualJob  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402
from perseus_ds.simulation.device_models import DEVICES  # noqa: E402
from perseus_ds.simulation.gpu import CONDITIONS, SimulatedGpu  # noqa: E402

JOBS: dict[str, dict[str, Any]] = {
    "long": {"stages_s": (0.100, 0.085, 0.110, 0.120), "micro_batches": 8, "tail_s": 0.02},
    "short": {"stages_s": (0.03, 0.02, 0.024, 0.036), "micro_batches": 12, "tail_s": 0.05, "transfer_s": 0.002},
}
MOST_ITERATIONS = 600


@dataclass(frozen=True)
class Figures:
    """Figures of a profile.

    Attributes:
        clocks: Number of measured clocks.
        iterations: Number of iterations until it was written.
        time_error: Mean and maximum relative error of the times of its rows.
        energy_error: The same for energies.
        plan_time_error: Largest relative error of the predicted time over five plans.
        plan_energy_error: The same for the predicted energy.
        excess: Mean relative excess of the energy of these plans over plans from true rows.
    """

    clocks: int
    iterations: int
    time_error: tuple[float, float]
    energy_error: tuple[float, float]
    plan_time_error: float
    plan_energy_error: float
    excess: float


class NoisyGpu(SimulatedGpu):
    """A simulated GPU with different noise for each rank and draw."""

    draw = 0

    @classmethod
    def named(cls, gpu: str, *, seed: int = 0, **settings: Any) -> NoisyGpu:
        return cls(DEVICES[gpu], seed=seed + 100 * cls.draw, **settings)


def measure(name: str, job: dict[str, Any], seed: int, conditions: Sequence[str], judge: Judge) -> Figures:
    """Train a job until its profile is written, and evaluate the profile."""
    noise = {"time_noise": 0.01, "power_noise": 0.02, "conditions": conditions}
    NoisyGpu.draw = seed
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        training = VirtualJob(Path(folder), device=name, gpu_class=NoisyGpu, gpu=noise, mode="profile", **job)
        iterations = 0
        while training.phase != "observe":
            iterations += len(training.train(1))
            assert iterations < MOST_ITERATIONS, "no profile"
        training.close()
        raw, profile = (StageProfile.load(Path(folder) / file) for file in ("measured.csv", "profile.csv"))
    # Forwards and backwards alone: transfers and tails of the truth have no rows.
    passes = StageProfile([row for row in profile.measurements if row.kind is not Kind.TAIL])
    true = truth(name, DEVICES[name].clocks_mhz, work_of(job["stages_s"]))
    pairs = [(row, true.at(row.stage, row.kind, row.clock_mhz)) for row in passes.measurements]
    judgement = judge.of(passes)
    return Figures(
        clocks=len({row.clock_mhz for row in raw.measurements}),
        iterations=iterations,
        time_error=mean_and_worst([row.time_s / exact.time_s - 1 for row, exact in pairs]),
        energy_error=mean_and_worst([row.energy_j / exact.energy_j - 1 for row, exact in pairs]),
        plan_time_error=judgement.time_error,
        plan_energy_error=judgement.energy_error,
        excess=judgement.excess,
    )


def mean_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the maximum of the absolute values of errors."""
    return statistics.fmean(map(abs, errors)), max(map(abs, errors))


def judge_of(name: str, job: dict[str, Any]) -> Judge:
    """Return the evaluator of profiles of a job, with its schedule and true rows."""
    model = DEVICES[name]
    schedule = one_f_one_b(len(job["stages_s"]), job["micro_batches"])
    return Judge(truth(name, model.clocks_mhz, work_of(job["stages_s"])), schedule, model.blocking_power_w)


def main() -> None:
    """Print a line for each GPU and job, with means and maxima over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=sorted(DEVICES), default=sorted(DEVICES))
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--condition", nargs="*", choices=list(CONDITIONS), default=[])
    arguments = parser.parse_args()
    print("SIMULATED GPUs; errors of rows: mean / worst")
    for name in arguments.gpu:
        for what in arguments.job:
            judge = judge_of(name, JOBS[what])
            found = [measure(name, JOBS[what], seed, arguments.condition, judge) for seed in range(arguments.seeds)]
            print(line(f"{name}, {what}", found), flush=True)


def line(what: str, found: Sequence[Figures]) -> str:
    """Return a line of the table."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    worst = partial(max, key=abs)
    return (
        f"  {what:16} {mean([f.clocks for f in found]):3.0f} clocks"
        f" {mean([f.iterations for f in found]):3.0f} iterations"
        f"   time {mean([f.time_error[0] for f in found]):.2%} / {max(f.time_error[1] for f in found):.2%}"
        f"   energy {mean([f.energy_error[0] for f in found]):.2%} / {max(f.energy_error[1] for f in found):.2%}"
        f"   plans: time {worst([f.plan_time_error for f in found]):+.2%}"
        f" energy {worst([f.plan_energy_error for f in found]):+.2%} excess {mean([f.excess for f in found]):+.2%}"
    )


if __name__ == "__main__":
    main()
