"""Savings of plans with a dwell time, compared with a plain search over three clocks per rank.

    python benchmarks/late_clocks.py                             # the published A100 and A40 profiles, about 2 minutes
    python benchmarks/late_clocks.py --picture docs/images/late_clocks.svg
    python benchmarks/late_clocks.py --milp 60                   # small cases and a MILP, 60 s each: 24 minutes

GPT-3 175B, 8 stages, 24 micro-batches, 1F1B. The unit of dwell times is a pair: the first stage's forward and backward
at the highest clock. Savings are relative to the energy of an iteration at the highest clock throughout, with an
iteration time 0, 1 and 5 % above the fastest one. The plain search has one clock for each rank's warm-up, steady state
and cool-down, and begins with the highest clocks. In each step it lowers one of them, or all three of a rank to the
same clock, to the next clock of less energy. It chooses the change that saves the most energy per additional time,
until no change fits.

The small cases have 3 stages, 6 micro-batches and six clocks of the same profiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from milp import solve_held_milp  # type: ignore[import-not-found]  # run as a script, whose folder is on the path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import DeadlineError
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Problem, problem_for
from perseus_ds.optimizer.runs import RunSearch
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule

PROFILES = Path(__file__).resolve().parents[1] / "tests" / "data" / "sosp24" / "stage_profile"
GPUS = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
SLOWDOWNS = (0.0, 0.01, 0.05)


def main() -> None:
    arguments = _arguments()
    if arguments.milp:
        for gpu in arguments.gpus:
            compare_with_milp(gpu, arguments.pairs, arguments.milp)
        return
    curves: dict[str, tuple[list[list[float]], list[list[float]]]] = {}
    for gpu in arguments.gpus:
        file, power_w = GPUS[gpu]
        profile = StageProfile.load(PROFILES / file)
        schedule = read_schedule(schedule_class("1f1b"), ranks=8, micro_batches=arguments.micro_batches)
        pair_s = sum(profile.at_highest_clock(0, kind).time_s for kind in (Kind.FORWARD, Kind.BACKWARD))
        print(f"{gpu}, {arguments.micro_batches} micro-batches; savings at 0, 1 and 5 % slowdown")
        curves[gpu] = ([], [])
        for pairs in arguments.pairs:
            begin_s = time.process_time()
            frontier = optimize(
                schedule, profile, blocking_power_w=power_w, plans=arguments.plans, least_dwell_s=pairs * pair_s
            )
            taken_s = time.process_time() - begin_s
            ours = [_saving(frontier, slowdown) for slowdown in SLOWDOWNS]
            plain = plain_savings(schedule, profile, power_w, pairs * pair_s)
            ratios = [f"{(1 - o) / (1 - p):.3f}" for o, p in zip(ours, plain, strict=True)]
            print(
                f"  {pairs:4g} pairs   ours {_percent(ours)}   plain {_percent(plain)}   energy, ours / plain "
                f"{' / '.join(ratios)}   {len(frontier.plans)} plans, {taken_s:.1f} s of processor time",
                flush=True,
            )
            curves[gpu][0].append(ours)
            curves[gpu][1].append(plain)
    if arguments.picture:
        _draw(arguments.picture, arguments.pairs, curves)


def _saving(frontier: Frontier, slowdown: float) -> float:
    try:
        plan = frontier.lookup(frontier.t_min_s * (1 + slowdown + 1e-9))
    except DeadlineError:
        return 0.0
    return 1 - plan.energy_j / frontier.baseline.energy_j


def plain_savings(schedule: Schedule, profile: StageProfile, power_w: float, dwell_s: float) -> list[float]:
    """Return the saving of the plain search at each slowdown."""
    problem = problem_for(schedule, profile, blocking_power_w=power_w, least_dwell_s=dwell_s)
    search = RunSearch(Network(problem), dwell_s)
    phases = [_phase(problem, rank.decisions) for rank in search.ranks]
    steps = [[len(rank.clock_mhz) - 1] * 3 for rank in search.ranks]

    below = [
        [_next_below(rank.cost_j[phase == number].sum(axis=0)) for number in range(3)]
        for rank, phase in zip(search.ranks, phases, strict=True)
    ]

    throughout = [_next_below(rank.cost_j.sum(axis=0)) for rank in search.ranks]

    def clocks(trial: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return search.clocks_mhz([np.array(own)[phase] for own, phase in zip(trial, phases, strict=True)])

    def is_held(trial: Sequence[Sequence[int]]) -> bool:
        runs = search.beyond_dwell_s([np.array(own)[phase] for own, phase in zip(trial, phases, strict=True)])
        return all(float(rank.min(initial=0.0)) >= -1e-9 for rank in runs)

    result = []
    baseline_j = problem.baseline.energy_j
    now = problem.evaluate(clocks(steps))
    best_j = now.energy_j
    for slowdown in SLOWDOWNS:
        limit_s = problem.t_min_s * (1 + slowdown + 1e-9)
        while True:
            moves = []
            for rank, own in enumerate(steps):
                for phase in (*range(3), None):  # one phase, or all three
                    trial = [list(other) for other in steps]
                    if phase is None:
                        trial[rank] = [throughout[rank][min(own)]] * 3
                    else:
                        trial[rank][phase] = below[rank][phase][own[phase]]
                    plan = problem.evaluate(clocks(trial))
                    saved_j = now.energy_j - problem.waiting_power_w * now.time_s
                    saved_j -= plan.energy_j - problem.waiting_power_w * plan.time_s
                    if plan.time_s <= limit_s and saved_j > 0 and is_held(trial):
                        moves.append((saved_j / max(plan.time_s - now.time_s, 1e-9), trial, plan))
            if not moves:
                break
            _, steps, now = max(moves, key=lambda move: move[0])
            best_j = min(best_j, now.energy_j)
        result.append(1 - best_j / baseline_j)
    return result


def small_case(gpu: str, pairs: float) -> tuple[Problem, float]:
    """Return a problem of 3 stages, 6 micro-batches and six clocks, and its dwell time [s]."""
    file, power_w = GPUS[gpu]
    profile = StageProfile.load(PROFILES / file)
    clocks = profile.options(0, Kind.FORWARD).clock_mhz
    kept = set(clocks[np.linspace(len(clocks) // 3, len(clocks) - 1, 6).astype(np.intp)].tolist())
    profile = profile.where(lambda stage, kind, clock_mhz: clock_mhz in kept)
    pair_s = sum(profile.at_highest_clock(0, kind).time_s for kind in (Kind.FORWARD, Kind.BACKWARD))
    schedule = read_schedule(schedule_class("1f1b"), ranks=3, micro_batches=6)
    return problem_for(schedule, profile, blocking_power_w=power_w, least_dwell_s=pairs * pair_s), pairs * pair_s


def compare_with_milp(gpu: str, pairs: Sequence[float], time_limit_s: float) -> None:
    """Print the gaps of plans of small cases to those of a MILP with the dwell time, and to its bounds."""
    print(f"{gpu}, 3 stages, 6 micro-batches, six clocks; a MILP has {time_limit_s:g} s for each deadline")
    for own_pairs in pairs:
        problem, dwell_s = small_case(gpu, own_pairs)
        network = Network(problem)
        deadline_s = problem.t_min_s * np.array([1.0, 1.02, 1.05, 1.1])
        search = RunSearch(network, dwell_s)
        frontier = optimize(
            problem.dag.schedule, problem.profile, blocking_power_w=problem.blocking_power_w, least_dwell_s=dwell_s
        )
        above_plan, above_bound = [], []
        for time_s in deadline_s.tolist():
            plan = frontier.lookup(time_s * (1 + 1e-9))
            ours_j = plan.energy_j + problem.waiting_power_w * (time_s - plan.time_s)
            found = solve_held_milp(network, search, time_s, time_limit_s)
            above_plan.append(np.nan if found.plan_j is None else ours_j / found.plan_j - 1)
            above_bound.append(ours_j / found.bound_j - 1)
        print(
            f"  {own_pairs:4g} pairs   above its plan {_percent(above_plan)}, mean {np.nanmean(above_plan):.2%}   "
            f"above its bound {_percent(above_bound)}, mean {np.mean(above_bound):.2%}",
            flush=True,
        )


def _phase(problem: Problem, decisions: np.ndarray) -> np.ndarray:
    """Return 0 for instructions of a rank's warm-up, 1 for its steady state and 2 for its cool-down."""
    forward = np.array([problem.groups[group].kind is Kind.FORWARD for group in problem.group[decisions]])
    places = np.arange(len(forward))
    first_backward, last_forward = int(np.argmin(forward)), int(np.flatnonzero(forward)[-1])
    return np.where(places < first_backward, 0, np.where(places <= last_forward + 1, 1, 2))


def _next_below(cost_j: np.ndarray) -> list[int]:
    """Return for each clock the next lower one with less energy, or itself if there is none."""
    return [max([c for c in range(clock) if cost_j[c] < cost_j[clock]], default=clock) for clock in range(len(cost_j))]


def _percent(savings: Sequence[float]) -> str:
    return " / ".join(f"{100 * saving:4.1f}" for saving in savings) + " %"


def _draw(path: Path, pairs: Sequence[float], curves: dict[str, tuple[list[list[float]], list[list[float]]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(curves), 3.4), layout="constrained")
    for number, (gpu, (ours, plain)) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), number + 1)
        for column, slowdown in enumerate(SLOWDOWNS):
            colour = f"C{column}"
            axes.plot(pairs, 100 * np.array(ours)[:, column], "o-", color=colour, label=f"{slowdown:.0%} slower")
            axes.plot(pairs, 100 * np.array(plain)[:, column], "x:", color=colour)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(list(pairs), [f"{value:g}" for value in pairs])
        axes.set_title(f"GPT-3 175B, {gpu}")
        axes.set_xlabel("dwell time in pairs of forward and backward")
        axes.set_ylabel("energy saved [%]")
        axes.set_ylim(bottom=0)
        axes.legend(title="dotted: plain search", fontsize="small", loc="lower left")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--plans", type=int, default=120)
    parser.add_argument("--pairs", type=float, nargs="+", default=[0, 1, 2, 4, 10, 40])
    parser.add_argument("--milp", type=float, help="compare small cases with a MILP, with this time limit for each [s]")
    parser.add_argument("--picture", type=Path, help="file for a picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
