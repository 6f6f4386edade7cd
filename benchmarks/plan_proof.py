"""Error rates and durations of the comparisons that decide whether a plan keeps its promise.

    python benchmarks/plan_proof.py                # about 5 minutes
    python benchmarks/plan_proof.py --jobs 100 --noise 0.01

Jobs are SIMULATED: times and energies of iterations are drawn at random, but blocks, estimates, interim analyses and
verdicts are those of ``perseus_ds.policy.plan_proof``. Each iteration takes 1 s. Its time varies normally by the stated
noise, its power by 1 %, and 3 % of iterations are delayed by 10 to 300 %. Waiting draws a quarter of the power. The
energy counter is refreshed every 100 ms. The host drifts differently in each fifth of the jobs: not at all, steadily by
up to 3 % in 100 iterations, in waves of 2 %, as a random walk of 0.05 % per iteration, or by a step of 2 % during the
comparison.

The disturbance is one of these: nothing; a stall of 30 s in one of the first 41 iterations, the least duration of a
comparison in an earlier version; such a stall in the third block, which is part of the most differences; or a
checkpoint of 60 s in every 50th iteration. The plan promises the time of default clocks. It takes as long as default
clocks and saves 10 %, 3 % or no energy, or it takes 2 % longer and saves 10 %.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perseus_ds.policy.plan_proof import IterationSample, PlanProof, Verdict, error_probability
from perseus_ds.server.phases import SETTLED

NOISES = (0.005, 0.01, 0.02, 0.05)
DRIFTS = ("none", "steady", "waves", "walk", "step")
DISTURBANCES = ("nothing", "stall", "stall in block 3", "checkpoints")
HELD_UP, LONGEST_S = 0.03, 3.0
STALL_S, CHECKPOINT_S, CHECKPOINT_EVERY = 30.0, 60.0, 50
FIRST, THIRD_BLOCK = 41, (20, 28)
POWER_W, POWER_NOISE, WAITING_W, PERIOD_S = 1000.0, 0.01, 250.0, 0.1
MOST_ITERATIONS = 2000


class Plan(NamedTuple):
    """True effect of a plan: the increase of the iteration time and the decrease of energy, as fractions."""

    late: float
    saves: float


PLANS = {"saves 10 %": Plan(0.0, 0.1), "saves 3 %": Plan(0.0, 0.03), "useless": Plan(0.0, 0.0), "late": Plan(0.02, 0.1)}


class SimulatedJob:
    """Iterations of a job, one after the other, at default clocks or under its plan."""

    def __init__(self, number: int, plan: Plan, noise: float, disturbance: str) -> None:
        draw = np.random.default_rng(number)
        numbers = np.arange(MOST_ITERATIONS)
        logarithms = noise * draw.standard_normal(MOST_ITERATIONS)
        drift = DRIFTS[number % len(DRIFTS)]
        if drift == "steady":
            logarithms += draw.uniform(-0.0003, 0.0003) * numbers
        elif drift == "waves":
            logarithms += 0.02 * np.sin(2 * np.pi * (numbers / draw.uniform(40, 400) + draw.uniform()))
        elif drift == "walk":
            logarithms += np.cumsum(0.0005 * draw.standard_normal(MOST_ITERATIONS))
        elif drift == "step":
            logarithms += np.where(numbers > draw.uniform(0, 60), 0.02, 0.0)
        waits_s = (draw.random(MOST_ITERATIONS) < HELD_UP) * draw.uniform(0.1, LONGEST_S, MOST_ITERATIONS)
        if disturbance == "stall":
            waits_s[draw.integers(FIRST)] += STALL_S
        elif disturbance == "stall in block 3":
            waits_s[draw.integers(*THIRD_BLOCK)] += STALL_S
        elif disturbance == "checkpoints":
            waits_s[draw.integers(CHECKPOINT_EVERY) :: CHECKPOINT_EVERY] += CHECKPOINT_S
        powers_w = POWER_W * np.exp(POWER_NOISE * draw.standard_normal(MOST_ITERATIONS))
        # Time from the last refresh of the counter to the end of the iteration.
        ages_s = draw.uniform(0, PERIOD_S, MOST_ITERATIONS)
        self._drawn = iter(np.column_stack([np.exp(logarithms), waits_s, powers_w, ages_s]).tolist())
        self._plan = plan
        self._uncounted_j = 0.0
        self.iterations = 0

    def train(self, *, is_planned: bool) -> tuple[float, float]:
        """Return time [s] and energy [J] of the next iteration."""
        computing_s, waiting_s, power_w, age_s = next(self._drawn)
        self.iterations += 1
        if is_planned:
            computing_s *= 1 + self._plan.late
            power_w *= (1 - self._plan.saves) / (1 + self._plan.late)
        before_j, self._uncounted_j = self._uncounted_j, power_w * age_s
        energy_j = power_w * computing_s + WAITING_W * waiting_s
        return computing_s + waiting_s, energy_j + before_j - self._uncounted_j

    def verdict(self, comparisons: int) -> Verdict:
        """Compare the plan until there is a verdict, as in a job with the given number of earlier comparisons."""
        proof = PlanProof(error_probability(comparisons))
        block, uncounted = IterationSample(PERIOD_S), SETTLED
        while proof.verdict is None:
            for _ in range(uncounted):  # clocks change, or the report has not arrived
                self.train(is_planned=proof.next_is_planned)
            while not (block.is_as_long_as(1) if proof.blocks else block.is_enough):
                block.add(*self.train(is_planned=proof.next_is_planned))
            proof.add(block)
            block, uncounted = IterationSample(PERIOD_S), 1
        return proof.verdict


@dataclass(frozen=True)
class Outcome:
    """Results of the comparisons of many jobs.

    Attributes:
        kept: Share of jobs that keep the plan.
        within: Share of jobs in which the error of the reported saving is within the stated error.
        error: Median of the stated errors.
        iterations: Mean and 95th percentile of the iterations per comparison.
    """

    kept: float
    within: float
    error: float
    iterations: tuple[float, float]


def simulate(plan: Plan, noise: float, disturbance: str, *, jobs: int, before: int = 0) -> Outcome:
    """Compare a plan with default clocks in many jobs, each with the given number of earlier comparisons."""
    kept, off, errors, iterations = np.zeros((4, jobs))
    for number in range(jobs):
        job = SimulatedJob(number, plan, noise, disturbance)
        verdict = job.verdict(before)
        kept[number], iterations[number] = verdict.kept, job.iterations
        off[number] = abs(verdict.comparison.saved - plan.saves)
        errors[number] = verdict.comparison.stated_errors[1]
    spent = float(iterations.mean()), float(np.quantile(iterations, 0.95))
    return Outcome(kept.mean(), (off <= errors).mean(), float(np.median(errors)), spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISES)
    arguments = parser.parse_args()
    print(f"SIMULATED, {arguments.jobs} jobs for each figure\n")
    columns = [
        "comparison",
        "noise",
        "disturbed by",
        "saves 10 %, dropped",
        "saves 3 %, dropped",
        "saves nothing, kept",
    ]
    columns += ["2 % late, kept", "saving within its error", "error (median)", "iterations, mean", "95 % of jobs"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    cases = [(0, noise, disturbance) for noise in arguments.noise for disturbance in DISTURBANCES]
    for before, noise, disturbance in [*cases, (2, 0.01, "nothing")]:
        found = {
            name: simulate(plan, noise, disturbance, jobs=arguments.jobs, before=before) for name, plan in PLANS.items()
        }
        saves, saves_less, useless, late = found.values()
        rates = [1 - saves.kept, 1 - saves_less.kept, useless.kept, late.kept]
        cells = ["third" if before else "first", f"{noise:.1%}", disturbance, *(f"{rate:.1%}" for rate in rates)]
        cells += [f"{min(one.within for one in found.values()):.1%}", f"{saves.error:.1%}"]
        cells += [f"{max(one.iterations[i] for one in (saves, late)):.0f}" for i in (0, 1)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
