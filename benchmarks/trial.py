"""Error rates and durations of the trial that decides whether plans keep their promise.

    python benchmarks/trial.py                # about 40 minutes of one core
    python benchmarks/trial.py --jobs 20 --iterations 3000 --noise 0.01

Jobs are SIMULATED: times and energies of iterations are drawn at random, but blocks, pairs and verdicts are those of
``perseus_ds.policy.trial``. Each iteration takes 1 s. Its time varies by the stated noise, independently or slowly
(within some 30 iterations), its power by the same noise, at most 1 %. The energy counter is refreshed every 100 ms. The
rest differs between jobs: in a third of them, 3 % of iterations are delayed by up to 3 s; in another one, all times
drift by up to 3 % in 1 000 iterations. The plan promises the time of default clocks. It takes as long as default clocks
and saves 10 %, 3 % or no energy or uses 1 % more, or it takes 2 % longer and saves 10 %.

Columns: share of jobs in which the plan is dropped at any time, and within 12 pairs (24 if the noise is above 1 %);
share in which it is ever found to be good, the number of pairs and of iterations until then; how often the errors that
are stated then contain the true saving and the true slowdown; share of iterations under the plan until it is found to
be good or dropped, and afterwards.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perseus_ds.policy.trial import Block, BlockIteration, Trial, TrialFigures, Verdict, compare
from perseus_ds.savings import DefaultClocks

NOISES = (0.001, 0.003, 0.01, 0.03)
STALLED, LONGEST_STALL_S, DRIFT = 0.03, 3.0, 0.03
POWER_W, WAITING_W, PERIOD_S = 1000.0, 250.0, 0.1
SLOW_OVER = 30


class Plan(NamedTuple):
    """True effect of a plan: the increase of the iteration time and the decrease of energy, as fractions."""

    late: float
    saves: float


PLANS = {
    "saves 10 %": Plan(0.0, 0.1),
    "saves 3 %": Plan(0.0, 0.03),
    "useless": Plan(0.0, 0.0),
    "late": Plan(0.02, 0.1),
    "costs 1 %": Plan(0.0, -0.01),
}


@dataclass
class Outcome:
    """What became of the plan of a job.

    Attributes:
        verdict: The verdict that dropped it, or the last one.
        pairs: Number of pairs until then.
        good: Number of pairs and iterations until it was found to be good, and the figures stated then.
        share_before: Share of iterations under the plan until it was found to be good or dropped.
        share_after: The same from then on; None if it was dropped.
    """

    verdict: Verdict
    pairs: int
    good: tuple[int, int, TrialFigures] | None
    share_before: float
    share_after: float | None


class SimulatedJob:
    """Iterations of a job, one after the other, at default clocks or under its plan."""

    def __init__(self, number: int, plan: Plan, noise: float, iterations: int, *, is_slow: bool) -> None:
        draw = np.random.default_rng(number)
        numbers = np.arange(iterations)
        logarithms = noise * draw.standard_normal(iterations)
        if is_slow:
            logarithms = _smoothed(logarithms)
        if number % 3 == 1:
            logarithms += draw.uniform(-DRIFT, DRIFT) * numbers / 1000
        stalls_s = np.zeros(iterations)
        if number % 3 == 2:
            stalls_s = (draw.random(iterations) < STALLED) * draw.uniform(0.1, LONGEST_STALL_S, iterations)
        powers_w = POWER_W * np.exp(min(noise, 0.01) * draw.standard_normal(iterations))
        # Time from the last refresh of the counter to the end of the iteration.
        ages_s = draw.uniform(0, PERIOD_S, iterations)
        self._drawn = np.column_stack([np.exp(logarithms), stalls_s, powers_w, ages_s]).tolist()
        self._plan = plan
        self._uncounted_j = 0.0
        self.done = self.planned = 0

    @property
    def is_over(self) -> bool:
        return self.done == len(self._drawn)

    def train(self, *, is_planned: bool) -> tuple[float, float]:
        """Return time [s] and energy [J] of the next iteration."""
        computing_s, stall_s, power_w, age_s = self._drawn[self.done]
        self.done += 1
        self.planned += is_planned
        if is_planned:
            computing_s *= 1 + self._plan.late
            power_w *= (1 - self._plan.saves) / (1 + self._plan.late)
        before_j, self._uncounted_j = self._uncounted_j, power_w * age_s
        energy_j = power_w * computing_s + WAITING_W * stall_s
        return computing_s + stall_s, energy_j + before_j - self._uncounted_j

    def block(self, default: DefaultClocks, *, is_planned: bool) -> Block | None:
        """Run a block. None if the job ends before."""
        block = Block(default, is_planned=is_planned, counter_period_s=PERIOD_S)
        begins = True
        while not block.is_complete:
            if self.is_over or block.is_given_up:
                return None
            time_s, energy_j = self.train(is_planned=is_planned)
            if begins:
                block.pass_over(time_s)
            else:
                block.add(BlockIteration(0, time_s, np.array([energy_j])))
            begins = False
        return block

    def outcome(self) -> Outcome:
        """Try the plan until it is dropped or the job ends."""
        default, trial = DefaultClocks(), Trial()
        default.predict(0, 1.0, POWER_W)
        good, before, pairs = None, None, 0
        decided_at: tuple[int, int] | None = None
        verdict = Verdict.UNKNOWN
        while not (self.is_over or verdict.is_dropped):
            first = last = None
            while trial.left and not self.is_over:
                last = self.block(default, is_planned=True)
                first = first or last
                trial.left -= 1
            after = self.block(default, is_planned=False)
            if self.is_over:
                break
            verdict = trial.add(compare([(before, first), (after, last)]))
            before, pairs = after, pairs + 1
            if verdict is Verdict.GOOD and good is None:
                good, decided_at = (pairs, self.done, trial.figures), (self.done, self.planned)
        if decided_at is None:
            return Outcome(verdict, pairs, good, self.planned / self.done, None)
        done, planned = decided_at
        share_after = (self.planned - planned) / max(1, self.done - done)
        return Outcome(verdict, pairs, good, planned / done, share_after)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return values of the same variance that vary slowly."""
    kept, state, found = 1 - 1 / SLOW_OVER, 0.0, []
    for value in values.tolist():
        state = kept * state + math.sqrt(1 - kept**2) * value
        found.append(state)
    return np.array(found)


COLUMNS = f"{'noise':18} {'plan':11} dropped  early    good  pairs  iterations  saving, time in error  before, after"


def row(noise: float, name: str, outcomes: list[Outcome], *, is_slow: bool) -> str:
    """Return the line of the table for a noise and a plan."""
    plan, jobs = PLANS[name], len(outcomes)
    few = 12 if noise <= 0.01 else 24
    dropped = sum(one.verdict.is_dropped for one in outcomes) / jobs
    early = sum(one.verdict.is_dropped and one.pairs <= few for one in outcomes) / jobs
    good = [one.good for one in outcomes if one.good is not None]
    text = f"{noise:6.1%} {'slow' if is_slow else 'independent':11} {name:11}{dropped:8.1%} {early:6.1%}"
    text += f" {len(good) / jobs:7.1%}"
    if good:
        saving = np.mean([abs(figures.saved - plan.saves) <= figures.saved_error for _, _, figures in good])
        time = np.mean([abs(figures.slowdown - plan.late) <= figures.slowdown_error for _, _, figures in good])
        pairs, iterations = (np.mean([each[column] for each in good]) for column in (0, 1))
        text += f" {pairs:6.1f} {iterations:11.0f} {saving:12.1%} {time:10.1%}"
    else:
        text += " " * 43
    after = [one.share_after for one in outcomes if one.share_after is not None]
    text += f" {np.mean([one.share_before for one in outcomes]):14.1%}"
    return text + (f" {np.mean(after):9.1%}" if after else "")


def main() -> None:
    """Print a line for each noise and plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISES)
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=list(PLANS))
    arguments = parser.parse_args()
    print(f"SIMULATED jobs: {arguments.jobs} of {arguments.iterations} iterations for each line")
    print(COLUMNS)
    for is_slow in (False, True):
        for noise in arguments.noise:
            for name in arguments.plan:
                numbers = range(arguments.jobs)
                jobs = [SimulatedJob(n, PLANS[name], noise, arguments.iterations, is_slow=is_slow) for n in numbers]
                print(row(noise, name, [job.outcome() for job in jobs], is_slow=is_slow), flush=True)


if __name__ == "__main__":
    main()
