"""How often comparisons with default clocks decide rightly whether a plan keeps its promise, and what they cost.

    python benchmarks/plan_proof.py                # about 1 minute
    python benchmarks/plan_proof.py --jobs 500

SIMULATED jobs, of which only the times and energies of iterations are drawn; estimates, interim analyses and verdicts
are those of ``perseus_ds.policy.plan_proof``. Each iteration takes 1 s; its time varies normally by the noise stated,
3 % of iterations are held up by 10 to 300 %, and the host drifts: not at all, steadily by up to 3 % in 100 iterations,
in waves of 2 %, as a random walk of 0.05 % an iteration, or by a step of 2 % while the comparison goes on. Power varies
by 1 % from iteration to iteration, and the energy counter is refreshed every 100 ms. The plan saves 8 % of the energy;
it promises the time of default clocks, and takes 2 % longer or keeps that promise; or it keeps it and saves nothing.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.policy.plan_proof import (
    ANALYSES,
    BLOCK_ITERATIONS,
    PlanComparison,
    Verdict,
    certainty,
    under_plan_minus_default,
)

NOISES = (0.005, 0.01, 0.02, 0.05)
DRIFTS = ("none", "steady", "waves", "walk", "step")
LATE, SAVING = 0.02, 0.08
STALLS, LONGEST_STALL = 0.03, 3.0
POWER_NOISE, REFRESH_ERROR = 0.01, 0.1 * math.sqrt(2 / 12)
# Of each block, one iteration while clocks settle, and one until the reports are there.
AROUND_A_BLOCK = 2
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What comparisons of many jobs have decided.

    Attributes:
        kept: The share of jobs whose plan was kept.
        iterations: Of a comparison, mean.
        most: The 95th percentile.
        undecided: The share whose slowdown was neither certain nor known to 0.3 % at the last analysis.
    """

    kept: float
    iterations: float
    most: float
    undecided: float


def drift_of_host(drift: str, jobs: int, iterations: int, draw: np.random.Generator) -> Numbers:
    """Return how much longer each iteration takes because of its host, as logarithms, shape (jobs, iterations)."""
    numbers = np.arange(iterations)
    if drift == "steady":
        return draw.uniform(-0.0003, 0.0003, (jobs, 1)) * numbers
    if drift == "waves":
        turns = numbers / draw.uniform(40, 400, (jobs, 1)) + draw.uniform(0, 1, (jobs, 1))
        return 0.02 * np.sin(2 * np.pi * turns)
    if drift == "walk":
        return np.cumsum(0.0005 * draw.standard_normal((jobs, iterations)), axis=1)
    if drift == "step":
        return np.where(numbers > draw.uniform(0, 60, (jobs, 1)), 0.02, 0.0)
    return np.zeros((jobs, iterations))


def simulate(
    noise: float, drift: str, late: float, *, jobs: int, before: int, saving: float = SAVING, seed: int = 1
) -> Outcome:
    """Compare a plan with default clocks in many jobs.

    Args:
        noise: Relative standard deviation of iteration times.
        drift: Of the host.
        late: How much longer than promised iterations under the plan take.
        jobs: How many jobs.
        before: Comparisons that each job has made before.
        saving: Energy that the plan saves, as a fraction.
        seed: Of the random numbers.
    """
    draw = np.random.default_rng(seed)
    blocks = 2 * ANALYSES[-1] + 1
    of_block = BLOCK_ITERATIONS + AROUND_A_BLOCK
    times = noise * draw.standard_normal((jobs, blocks * of_block))
    times += drift_of_host(drift, jobs, blocks * of_block, draw)
    times += np.log1p((draw.random(times.shape) < STALLS) * draw.uniform(0.1, LONGEST_STALL, times.shape))
    times = times.reshape(jobs, blocks, of_block)[..., 1 : 1 + BLOCK_ITERATIONS]
    times[:, 1::2] += math.log1p(late)
    seconds = np.exp(times)
    typical = np.median(seconds, axis=-1)
    deviations = np.median(abs(seconds - typical[..., None]), axis=-1)
    errors = 1.25 * 1.4826 * deviations / math.sqrt(BLOCK_ITERATIONS) / typical
    refresh_errors = REFRESH_ERROR / seconds.sum(axis=-1)
    powers = draw.standard_normal(typical.shape) * np.hypot(POWER_NOISE / math.sqrt(BLOCK_ITERATIONS), refresh_errors)
    powers[:, 1::2] += math.log((1 - saving) / (1 + late))
    return _outcome(np.log(typical), errors, powers, refresh_errors, certainty(before))


def _outcome(times: Numbers, errors: Numbers, powers: Numbers, power_errors: Numbers, sure: float) -> Outcome:
    """Return what is decided by the levels of the blocks of each job, shape (jobs, blocks)."""
    going_on = np.arange(len(times))
    kept, iterations, undecided = np.zeros(len(times)), np.zeros(len(times)), np.zeros(len(times))
    for pairs in ANALYSES:
        so_far = going_on[:, None], np.arange(2 * pairs + 1)
        time, time_error = under_plan_minus_default(times[so_far], errors[so_far])
        power, power_error = under_plan_minus_default(powers[so_far], power_errors[so_far])
        energy_error = np.hypot(time_error, power_error)
        unclear = []
        for job, *figures in zip(going_on, time, time_error, power, energy_error, strict=True):
            ours, ours_error, draws, used_error = map(float, figures)
            comparison = PlanComparison.of_logarithms(ours, ours_error, draws, used_error)
            verdict = Verdict.of(comparison, sure, is_last=pairs == ANALYSES[-1])
            if verdict is None:
                unclear.append(job)
                continue
            kept[job], iterations[job] = verdict.kept, (2 * pairs + 1) * (BLOCK_ITERATIONS + AROUND_A_BLOCK)
            is_certain = comparison.is_late(sure) or comparison.is_in_time(sure)
            undecided[job] = not (is_certain or comparison.is_known)
        going_on = np.array(unclear, dtype=np.int64)
        if not unclear:
            break
    return Outcome(kept.mean(), iterations.mean(), float(np.quantile(iterations, 0.95)), undecided.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4000)
    arguments = parser.parse_args()
    print(f"SIMULATED, {arguments.jobs} jobs for each figure; the worst of five drifts: {', '.join(DRIFTS)}")
    columns = ["comparison", "noise", "2 % late, kept", "in time, dropped", "saves nothing, kept"]
    columns += ["iterations, mean", "95 % of jobs", "undecided"]
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    for before in (0, 2):
        for noise in NOISES:
            late = [simulate(noise, drift, LATE, jobs=arguments.jobs, before=before) for drift in DRIFTS]
            in_time = [simulate(noise, drift, 0.0, jobs=arguments.jobs, before=before) for drift in DRIFTS]
            useless = [simulate(noise, drift, 0.0, jobs=arguments.jobs, before=before, saving=0.0) for drift in DRIFTS]
            mean = np.mean([found.iterations for found in late + in_time])
            most = max(found.most for found in late + in_time)
            wrong = [max(found.kept for found in late), max(1 - found.kept for found in in_time)]
            wrong.append(max(found.kept for found in useless))
            rates = " | ".join(f"{rate:.2%}" for rate in wrong)
            undecided = max(found.undecided for found in late + in_time)
            print(
                f"| {'third' if before else 'first'} | {noise:.1%} | {rates} | {mean:.0f} | "
                f"{most:.0f} | {undecided:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
