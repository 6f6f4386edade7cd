"""Compares plans from selected clocks or noisy rows with plans from all rows without noise.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --seeds 8

Measured profiles (published with the Perseus paper): the sampler receives only the rows that it requests, and the
resulting plans are evaluated with the full table. The alternative is the same number of evenly spaced clocks with
monotone interpolation. Simulated truth: rows with 1 % noise on time and 2 % on energy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import PchipInterpolator

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from profiles import truth  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.profile import Measurement, StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize  # noqa: E402
from perseus_ds.optimizer.problem import problem_for  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402
from perseus_ds.pipeline.schedule import Schedule  # noqa: E402
from perseus_ds.profiler.clock_search import AdaptiveSampler  # noqa: E402
from perseus_ds.profiler.estimates import denoise  # noqa: E402
from perseus_ds.simulation.device_models import DEVICES  # noqa: E402

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "sosp24" / "stage_profile"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
BUDGET = 8
STAGES_S = (0.100, 0.085, 0.110, 0.120)
SLOWDOWNS = (0.0, 0.02, 0.05, 0.10, 0.15)
PLANS = 60


@dataclass(frozen=True)
class Judgement:
    """Plans of one profile, evaluated with another one.

    Attributes:
        excess: Relative excess of energy over plans from the true rows with the same time, mean over deadlines.
        late: Relative lateness of the latest plan.
        time_error: Largest relative error of the predicted time over all plans.
        energy_error: The same for the predicted energy.
    """

    excess: float
    late: float
    time_error: float = 0.0
    energy_error: float = 0.0


class Judge:
    """Evaluates profiles by their plans, with the true rows."""

    def __init__(self, true: StageProfile, schedule: Schedule, blocking_power_w: float) -> None:
        self._schedule = schedule
        self._power_w = blocking_power_w
        self._problem = problem_for(schedule, true, blocking_power_w=blocking_power_w)
        self._best = optimize(schedule, true, blocking_power_w=blocking_power_w, plans=PLANS)

    def of(self, profile: StageProfile) -> Judgement:
        """Compute the plans of a profile and evaluate them."""
        frontier = optimize(self._schedule, profile, blocking_power_w=self._power_w, plans=PLANS)
        excess, late, time_errors, energy_errors = [], [], [], []
        for slowdown in SLOWDOWNS:
            deadline_s = self._best.t_min_s * (1 + slowdown)
            plan = frontier.lookup(max(deadline_s, frontier.plans[0].time_s))
            real = self._problem.evaluate(plan.clocks_mhz)
            # Energy that a plan saves because it is late does not count.
            best = self._best.lookup(max(deadline_s, real.time_s, self._best.plans[0].time_s))
            excess.append(real.energy_j / best.energy_j - 1)
            late.append(real.time_s / deadline_s - 1)
            time_errors.append(plan.time_s / real.time_s - 1)
            energy_errors.append(plan.energy_j / real.energy_j - 1)
        return Judgement(statistics.mean(excess), max(late), max(time_errors, key=abs), max(energy_errors, key=abs))


def only(profile: StageProfile, clocks_mhz: Sequence[int]) -> StageProfile:
    """Return the rows of some clocks."""
    return StageProfile([m for m in profile.measurements if m.clock_mhz in clocks_mhz], profile.info)


def clocks_of(profile: StageProfile) -> list[int]:
    """Return all clocks of a profile, ascending."""
    return sorted({m.clock_mhz for m in profile.measurements})


def interpolated(profile: StageProfile, clocks_mhz: Sequence[int]) -> StageProfile:
    """Return a profile for the given clocks, by monotone interpolation of time and energy."""
    rows = []
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        time_s, energy_j = (
            PchipInterpolator(options.clock_mhz, v)(clocks_mhz) for v in (options.time_s, options.energy_j)
        )
        rows += [
            Measurement(stage, kind, c, float(t), float(e))
            for c, t, e in zip(clocks_mhz, time_s, energy_j, strict=True)
        ]
    return StageProfile(rows, profile.info)


def sample(profile: StageProfile, blocking_power_w: float, budget: int) -> list[int]:
    """Return the clocks that the sampler requests until it is finished."""
    sampler = AdaptiveSampler(clocks_of(profile), blocking_power_w=blocking_power_w, budget=budget)
    asked: list[int] = []
    rows: list[Measurement] = []
    while clocks := sampler.next_clocks(rows):
        asked += clocks
        rows += [m for m in profile.measurements if m.clock_mhz in clocks]
    return asked


def measured_profiles(micro_batches: int) -> None:
    """Compare on the profiles published with the paper."""
    schedule = read_schedule(schedule_class("1f1b"), ranks=8, micro_batches=micro_batches)
    print(
        f"GPT-3 175B, 8 stages, {micro_batches} micro-batches; energy above plans from all rows, at 0, 2, 5, 10, 15 %"
    )
    for name, blocking_power_w in BLOCKING_POWER_W.items():
        profile = StageProfile.load(DATA / f"gpt3-175b_{name}.csv")
        clocks = clocks_of(profile)
        judge = Judge(profile, schedule, blocking_power_w)
        asked = sample(profile, blocking_power_w, BUDGET)
        adaptive = judge.of(denoise(only(profile, asked), clocks))
        evenly = [clocks[round(i)] for i in np.linspace(0, len(clocks) - 1, len(asked))]
        even = judge.of(interpolated(only(profile, evenly), clocks))
        print(f"  {name}: {len(asked)} of {len(clocks)} clocks: {sorted(asked)}")
        show("adaptive", adaptive)
        show("evenly spaced, interpolated", even)
        print(f"    ratio of excess energy: {adaptive.excess / even.excess:.2f}")


def simulated_truth(seeds: int, micro_batches: int) -> None:
    """Compare raw and denoised rows with a known truth."""
    schedule = read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=micro_batches)
    print(f"Simulated truth, 4 unequal stages, {micro_batches} micro-batches, noise 1 % on time and 2 % on energy")
    for name, model in DEVICES.items():
        true = truth(name, model.clocks_mhz[len(model.clocks_mhz) // 2 :], work_of(STAGES_S))
        judge = Judge(true, schedule, model.blocking_power_w)
        found: dict[str, list[Judgement]] = {"raw rows": [], "denoised": [], "adaptive, denoised": []}
        for seed in range(seeds):
            noisy = with_noise(true, seed)
            asked = sample(noisy, model.blocking_power_w, len(clocks_of(true)) // 3)
            found["raw rows"].append(judge.of(noisy))
            found["denoised"].append(judge.of(denoise(noisy, clocks_of(true))))
            found["adaptive, denoised"].append(judge.of(denoise(only(noisy, asked), clocks_of(true))))
        print(f"  {name}, {seeds} draws (mean excess, mean of the worst lateness)")
        for what, results in found.items():
            show(what, Judgement(statistics.mean(r.excess for r in results), statistics.mean(r.late for r in results)))
        excess = {what: statistics.mean(abs(r.excess) for r in results) for what, results in found.items()}
        print(f"    ratio of excess energy, denoised to raw: {excess['denoised'] / excess['raw rows']:.2f}")


def work_of(stages_s: Sequence[float]) -> dict[tuple[int, Kind], float]:
    """Return the time of each stage and kind at the top clock [s].

    A backward takes twice as long as a forward.
    """
    return {
        (stage, kind): factor * forward_s
        for stage, forward_s in enumerate(stages_s)
        for kind, factor in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
    }


def with_noise(true: StageProfile, seed: int) -> StageProfile:
    """Return the rows with 1 % noise on time and 2 % on energy."""
    rng = np.random.default_rng(seed)
    return StageProfile(
        Measurement(
            m.stage,
            m.kind,
            m.clock_mhz,
            m.time_s * float(1 + 0.01 * rng.standard_normal()),
            m.energy_j * float(1 + 0.02 * rng.standard_normal()),
        )
        for m in true.measurements
    )


def show(what: str, judgement: Judgement) -> None:
    """Print one line."""
    print(f"    {what:28} energy {judgement.excess:+7.2%}   late {judgement.late:+7.2%}", flush=True)


def main() -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    measured_profiles(arguments.micro_batches)
    simulated_truth(arguments.seeds, arguments.micro_batches)


if __name__ == "__main__":
    main()
