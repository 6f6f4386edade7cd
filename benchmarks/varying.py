"""Compares plans for micro-batches of different lengths, as with packed or mixed sequences.

    python benchmarks/varying.py                # the published A100 and A40 profiles, 10 minutes
    python benchmarks/varying.py --jobs         # auto mode on SIMULATED GPUs, 5 minutes
    python benchmarks/varying.py --counts       # the same for varying numbers of micro-batches, 1 minute

GPT-3 175B, 8 stages, 24 micro-batches, 1F1B. The micro-batches of each iteration have random lengths, uniformly
distributed within a given percentage of the mean. Time and energy of a pass are proportional to its tokens, except for
the part of attention, 3 % at the mean length (sequence length / 6 / hidden size), which grows with their square. Time
and energy of every iteration are computed from the published rows at the planned clocks, through the DAG, and compared
with the highest clock throughout *for the same lengths*. Clock changes are immediate, as in all figures from profiles.

- *Plan for the mean*: one plan for iterations in which all micro-batches have the mean length, used for all lengths.
- *One clock a rank* and *one clock for all GPUs*: the setting that saves most, over all iterations, and takes no longer
  than the plan for the mean. It requires no knowledge of lengths.
- *Own plan*: a plan for the lengths of each iteration, which the data loader would have to provide one iteration in
  advance, within the time of the highest clock, and within the time of the plan for the mean. Another plan is computed
  from rows with errors of 2 % in time and energy (standard deviation, a different error for each length), as after a
  fit over lengths.
- *As a job computes it*: the same by the quick method of ``engine.perseus.next_lengths``, with its processor time on
  one thread from lengths to clocks. Plans from rows with errors also use this method.

``--jobs`` trains a job with such lengths in auto mode. The lengths are given one iteration in advance, or not at all.
The job has four unequal stages on SIMULATED A100s in virtual time, eight micro-batches, and the real runtime. The last
100 of 500 iterations are compared with those of the same job in observe mode, which have the same lengths. Energies are
the true ones of the simulated GPUs.

``--counts`` trains the same four stages with 8 and 4 micro-batches alternately, and with 2, 4, 6 and 8, each for a
quarter of the job, as in a warm-up of the batch size. For the latter, all iterations of the job are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, product
from operator import add
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in auto mode

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.measures import Saving
from perseus_ds.optimizer import frontier_of, optimize
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Clocks, Problem
from perseus_ds.optimizer.solver import plan_within, solve_exact
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from virtual.job import VirtualJob  # type: ignore[import-not-found]  # noqa: E402

PROFILES = ROOT / "tests" / "data" / "sosp24" / "stage_profile"
GPUS = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
STAGES = 8
VARIATIONS = (0.0, 0.1, 0.3, 1.0)
SLOWDOWNS = (0.0, 0.05)
ATTENTION = 0.03
WRONG = 0.02
# The published profiles are of a tenth of each stage's layers.
SCALE = 10
ITERATIONS, COMPARED = 500, 100
STAGES_S = (0.036, 0.034, 0.034, 0.05)
_NEVER_S = 1e3
_SAME = 1 + 1e-9


@dataclass(frozen=True)
class Model:
    """A model's profile at the mean length, and its schedule."""

    profile: StageProfile
    schedule: Schedule
    dag: Dag

    @classmethod
    def of(cls, gpu: str, micro_batches: int) -> Model:
        """Return the published model on a kind of GPU."""
        file, power_w = GPUS[gpu]
        schedule = read_schedule(schedule_class("1f1b"), ranks=STAGES, micro_batches=micro_batches)
        profile = StageProfile.load(PROFILES / file)
        info = profile.info.model_copy(update={"blocking_power_w": power_w})
        return cls(StageProfile(profile.measurements, info), schedule, Dag.build(schedule))

    def at_mean_length(self, least_dwell_s: float = 0.0) -> Frontier:
        """Return the frontier for micro-batches that all have the mean length."""
        return optimize(self.schedule, self.profile, least_dwell_s=least_dwell_s, plans=60)

    def problem(self, factors: Sequence[float], plans: int = 2) -> Problem:
        """Return the optimisation problem, given each micro-batch's time relative to one of the mean length."""
        of_pass = {i: factors[i.micro_batch] for i in chain(*self.schedule.instructions) if i.kind is not Kind.TAIL}
        return Problem(self.dag, self.profile, PlanningSettings(plans=plans), of_pass)


def time_factor(length: float) -> float:
    """Return the time of a pass relative to that at the mean length, given its relative length."""
    return (1 - ATTENTION) * length + ATTENTION * length**2


class Iteration:
    """An iteration with random lengths, its time and energy at given clocks, and plans for it."""

    def __init__(self, model: Model, lengths: Sequence[float]) -> None:
        self._model = model
        self._factors = [time_factor(length) for length in lengths]
        self.problem = model.problem(self._factors)
        self.default = self.problem.baseline

    def at(self, clocks: Clocks) -> Saving:
        """Return time and energy at given clocks, compared with the highest clock."""
        return self.saving(self.problem.evaluate(clocks))

    def saving(self, plan: FrequencyPlan) -> Saving:
        """Return time and energy of a plan, compared with the highest clock."""
        return Saving(1, plan.time_s, plan.energy_j, self.default.time_s, self.default.energy_j)

    def own_plans(self, plans: int) -> Frontier:
        """Return plans for these lengths."""
        problem = self._model.problem(self._factors, plans)
        found, _ = solve_exact(problem, lambda what, done: None)
        return frontier_of(problem, found, "exact")

    def quick_plan(self) -> Saving:
        """Return time and energy of the plan that a job computes for these lengths."""
        return self.saving(plan_within(Network(self.problem), self.problem.t_min_s))

    def from_wrong_rows(self, errors: Sequence[float]) -> Saving:
        """Return time and energy of the fastest plan from rows with a relative error for each micro-batch."""
        wrong = self._model.problem([f * (1 + error) for f, error in zip(self._factors, errors, strict=True)])
        return self.at(plan_within(Network(wrong), wrong.t_min_s).clocks_mhz)

    def seconds_to_plan(self) -> float:
        """Return the processor time of the plan that a job computes [s]."""
        begin_s = time.process_time()
        problem = self._model.problem(self._factors)
        plan_within(Network(problem), problem.t_min_s)
        return time.process_time() - begin_s


def total(savings: Iterable[Saving]) -> Saving:
    """Return the sum over all iterations."""
    return reduce(add, savings)


def best_within(time_s: float, settings: Iterable[Saving]) -> Saving | None:
    """Return the setting of least energy within a total time [s]. None if there is none."""
    in_time = [saving for saving in settings if saving.time_s <= time_s * _SAME]
    return min(in_time, key=lambda saving: saving.energy_j, default=None)


def compare(model: Model, iterations: Sequence[Iteration]) -> None:
    """Print the savings of plans and settings over several iterations."""
    mean, held = model.at_mean_length(), model.at_mean_length(_NEVER_S)
    clocks_mhz = sorted({m.clock_mhz for m in model.profile.measurements})
    own = [iteration.own_plans(60) for iteration in iterations]
    print(f"    {'own plan in the time of the highest clock':50} {_figures(_own(iterations, own, _default_s))}")
    quick = total(iteration.quick_plan() for iteration in iterations)
    print(f"      {'as a job computes it':48} {_figures(quick)}")
    errors = np.random.default_rng(2).normal(0.0, WRONG, (len(iterations), model.schedule.micro_batches))
    wrong = total(iteration.from_wrong_rows(row.tolist()) for iteration, row in zip(iterations, errors, strict=True))
    print(f"      {f'from rows that are wrong by {WRONG:.0%}':48} {_figures(wrong)}")
    for slowdown in SLOWDOWNS:
        clocks = mean.lookup(mean.t_min_s * (1 + slowdown) * _SAME).clocks_mhz
        ran = [iteration.at(clocks) for iteration in iterations]
        taken = total(ran)
        print(f"    {f'plan for the mean that promises {slowdown:+.0%} of time':50} {_figures(taken)}")
        one_a_rank = (total(iteration.at(plan.clocks_mhz) for iteration in iterations) for plan in held.plans)
        one_for_all = (
            total(iteration.at(tuple((mhz,) * len(rank) for rank in clocks)) for iteration in iterations)
            for mhz in clocks_mhz
        )
        for name, settings in (("one clock a rank", one_a_rank), ("one clock for all GPUs", one_for_all)):
            print(f"      {f'{name}, in no more time':48} {_figures(best_within(taken.time_s, settings))}")
        times_s = iter([saving.time_s for saving in ran])
        as_long = _own(iterations, own, lambda iteration, times_s=times_s: next(times_s))  # type: ignore[misc]
        print(f"      {'own plan, in no more time':48} {_figures(as_long)}", flush=True)
    own_s = [iteration.seconds_to_plan() for iteration in iterations[:5]]
    share = np.median(own_s) / (SCALE * np.mean([iteration.default.time_s for iteration in iterations]))
    print(f"    planning one own plan: {np.median(own_s):.3f} s of processor time, {share:.2%} of an iteration")


def _default_s(iteration: Iteration) -> float:
    return iteration.default.time_s


def _own(iterations: Sequence[Iteration], own: Sequence[Frontier], time_s: Callable[[Iteration], float]) -> Saving:
    """Return time and energy of own plans within the given time of each iteration."""
    pairs = zip(iterations, own, strict=True)
    return total(
        iteration.saving(frontier.lookup(max(time_s(iteration), frontier.t_min_s) * _SAME))
        for iteration, frontier in pairs
    )


def _figures(saving: Saving | None) -> str:
    return "none" if saving is None else f"energy {-saving.saved:+7.1%}   time {saving.slowdown:+6.1%}"


class MixedJob(VirtualJob):  # type: ignore[misc]
    """A job with micro-batches of random lengths, given one iteration in advance or not at all."""

    def __init__(self, folder: Path, variation: float, *, ahead: bool, **block: object) -> None:
        drawn = 1 + variation * np.random.default_rng(3).uniform(-1, 1, (ITERATIONS + 2, 8))
        self._lengths = np.maximum(drawn, 0.01)
        self._ahead = ahead
        super().__init__(folder, stages_s=STAGES_S, micro_batches=8, **block)
        self._give(0)

    def _give(self, iteration: int) -> None:
        if self._ahead:
            self.runtime.next_lengths((1000 * self._lengths[iteration]).tolist())

    def _iterate(self, rank: int) -> None:
        if rank == 0:
            self._give(self._iterations[rank] + 1)
        super()._iterate(rank)

    def work(self, rank: int, instruction: Instruction) -> None:
        """Run an instruction for the time that its micro-batch takes."""
        factor = 1.0
        if instruction.kind is not Kind.TAIL:
            factor = time_factor(float(self._lengths[self._iterations[rank] - 1, instruction.micro_batch]))
        self.slowdowns[rank] = factor
        super().work(rank, instruction)


def train(variation: float, *, ahead: bool = False, **block: object) -> tuple[MixedJob, list[str]]:
    """Train a job, and return it with its messages about plans."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        job = MixedJob(Path(folder), variation, ahead=ahead, **block)
        job.train(ITERATIONS)
        job.close()
    return job, [line for line in printed.getvalue().splitlines() if "is kept" in line or "is dropped" in line]


def compare_jobs(variations: Sequence[float]) -> None:
    """Print the savings of auto mode with and without lengths given one iteration in advance."""
    for variation in variations:
        default, _ = train(variation, mode="observe")
        for slowdown, ahead in product(SLOWDOWNS, (False, True)):
            auto, said = train(
                variation, ahead=ahead, mode="auto", policy={"name": "slowdown", "max_slowdown": slowdown}
            )
            (time_s, energy_j), (default_s, default_j) = (
                np.sum([taken[1:] for taken in job.taken[-COMPARED:]], axis=0) for job in (auto, default)
            )
            phases = sorted({taken[0] for taken in auto.taken[-COMPARED:]})
            saving = Saving(COMPARED, time_s, energy_j, default_s, default_j)
            of = f"lengths within {variation:.0%}{', given ahead' if ahead else ''}, {slowdown:+.0%} of time"
            print(f"{of}: {_figures(saving)}   {', '.join(phases)}")
            for line in said[-1:]:
                print(f"    {line}", flush=True)


def compare_counts() -> None:
    """Print the savings of auto mode with varying numbers of micro-batches."""
    for name, counts, compared in (
        ("8 and 4 in turns, the last 100", [8, 4] * (ITERATIONS // 2), COMPARED),
        ("2, 4, 6 and 8, all 500", np.repeat([2, 4, 6, 8], ITERATIONS // 4).tolist(), ITERATIONS),
    ):
        jobs = {}
        for mode in ("observe", "auto"):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                jobs[mode] = job = VirtualJob(Path(folder), stages_s=STAGES_S, micro_batches=counts[0], mode=mode)
                for count in counts:
                    job.schedule = read_schedule(schedule_class("1f1b"), ranks=len(STAGES_S), micro_batches=count)
                    job.train()
                job.close()
        (time_s, energy_j), (default_s, default_j) = (
            np.sum([taken[1:] for taken in jobs[mode].taken[-compared:]], axis=0) for mode in ("auto", "observe")
        )
        phases = Counter(phase for phase, _, _ in jobs["auto"].taken)
        saving = Saving(compared, time_s, energy_j, default_s, default_j)
        print(f"{name}: {_figures(saving)}   of all, {', '.join(f'{n} {phase}' for phase, n in phases.items())}")


def main() -> None:
    """Print the table of each GPU and variation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="*", choices=[*GPUS], default=[*GPUS])
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--variations", nargs="*", type=float, default=VARIATIONS)
    parser.add_argument("--jobs", action="store_true", help="auto mode on SIMULATED GPUs")
    parser.add_argument("--counts", action="store_true", help="numbers of micro-batches, on SIMULATED GPUs")
    arguments = parser.parse_args()
    if arguments.counts:
        compare_counts()
        return
    if arguments.jobs:
        compare_jobs(arguments.variations)
        return
    for gpu in arguments.gpus:
        model = Model.of(gpu, arguments.micro_batches)
        for variation in arguments.variations:
            draw = np.random.default_rng(1)
            lengths = 1 + variation * draw.uniform(-1, 1, (arguments.iterations, arguments.micro_batches))
            print(f"{gpu}, {arguments.micro_batches} micro-batches, lengths within {variation:.0%} of the mean")
            compare(model, [Iteration(model, of_iteration.tolist()) for of_iteration in np.maximum(lengths, 0.01)])


if __name__ == "__main__":
    main()
