"""By how much the power of a pipeline changes within its iterations, and what could be done about it by clocks.

    python benchmarks/power_swing.py             # a minute
    python benchmarks/power_swing.py --search    # some minutes more

GPT-3 175B in eight stages, 1F1B, by the published profiles, and by the same with each instruction ten times as long:
they are of a tenth of each stage. One pipeline, one GPU per rank; of pipelines in step all figures are the sum. Printed
for the plans of some slowdowns: mean power, the highest and the lowest power over a second, and the largest change from
one second to the next; then by how much that change is smaller, and how much more energy is used, in the plan that the
policy takes with ``least_swing``, of plans that are made for it. With ``--search`` also by how much change and range
are smaller after a longer search: clocks of single instructions are changed, in the same time, with up to 0.1 % more
energy.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from perseus_ds.artifacts.plan import NEARLY, FrequencyPlan, PowerSwing  # noqa: E402
from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize  # noqa: E402
from perseus_ds.optimizer.problem import Problem, power_swing, problem_for  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.policy.decisions import steadiest  # noqa: E402

PROFILES = ROOT / "tests" / "data" / "sosp24" / "stage_profile"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
SLOWDOWNS = (0.0, 0.02, 0.05, 1.0)
STEPS = (-3, -2, -1, 1, 2, 3)


def search(problem: Problem, plan: FrequencyPlan, limit_s: float) -> FrequencyPlan:
    """Return a plan as fast, with nearly as little energy, whose power changes less; for so much processor time [s]."""
    draw = np.random.default_rng(0)
    most_s, most_j, end_s = plan.time_s * (1 + 1e-9), plan.energy_j * (1 + NEARLY), time.process_time() + limit_s
    clocks = {(g.stage, g.kind): np.unique(g.measured.clock_mhz).tolist() for g in problem.groups}
    best, swing = plan, power_swing(problem, plan)
    while time.process_time() < end_s:
        changed = [list(of_rank) for of_rank in best.clocks_mhz]
        for _ in range(draw.integers(1, 4)):
            rank = draw.integers(len(changed))
            place = draw.integers(len(changed[rank]))
            instruction = problem.instructions[rank][place]
            options = clocks[instruction.stage, instruction.kind]
            other = options.index(changed[rank][place]) + draw.choice(STEPS)
            changed[rank][place] = options[min(max(other, 0), len(options) - 1)]
        found = problem.evaluate(tuple(map(tuple, changed)))
        if found.time_s > most_s or found.energy_j > most_j:
            continue
        theirs = power_swing(problem, found)
        if _size(theirs) <= _size(swing):
            best, swing = found, theirs
    return replace(best, power=swing)


def _size(swing: PowerSwing) -> float:
    return swing.change_w + swing.highest_w - swing.lowest_w


def main() -> None:
    """Print a table for each profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--search-s", type=float, default=20.0)
    parser.add_argument("--micro-batches", type=int, default=12)
    arguments = parser.parse_args()
    for gpu, power_w in BLOCKING_POWER_W.items():
        published = StageProfile.load(PROFILES / f"gpt3-175b_{gpu}.csv")
        for scale in (1, 10):
            rows = [replace(m, time_s=scale * m.time_s, energy_j=scale * m.energy_j) for m in published.measurements]
            schedule = read_schedule(schedule_class("1f1b"), ranks=8, micro_batches=arguments.micro_batches)
            profile = StageProfile(rows)
            frontier = optimize(schedule, profile, blocking_power_w=power_w)
            begin_s = time.process_time()
            steady = optimize(schedule, profile, blocking_power_w=power_w, least_swing=True)
            took_s = time.process_time() - begin_s
            problem = problem_for(schedule, profile, power_w)
            print(f"{gpu}, {scale} times as long, {arguments.micro_batches} micro-batches, {frontier.t_min_s:.1f} s")
            print(f"plans for least_swing: {len(steady.plans)} of {len(frontier.plans)}, in {took_s:.0f} s")
            heads = ("slower by", "mean", "lowest", "highest", "change", "least_swing", "its energy", "search", "range")
            print("".join(f"{head:>14}" for head in heads[: 9 if arguments.search else 7]))
            for slowdown in SLOWDOWNS:
                number = frontier.plans.index(frontier.within(slowdown))
                plan = frontier.plans[number]
                ours = steady.plans[steadiest(steady, steady.plans.index(steady.within(slowdown)))]
                assert plan.power is not None
                assert ours.power is not None
                power = plan.power
                cells = [f"{plan.time_s / frontier.t_min_s - 1:.1%}"]
                cells += [f"{w:.0f} W" for w in (plan.mean_power_w, power.lowest_w, power.highest_w, power.change_w)]
                cells.append(f"{ours.power.change_w / power.change_w - 1:+.1%}")
                cells.append(f"{ours.energy_j / plan.energy_j - 1:+.2%}")
                if arguments.search:
                    found = search(problem, plan, arguments.search_s).power
                    assert found is not None
                    ranges_w = [one.highest_w - one.lowest_w for one in (found, power)]
                    cells += [f"{found.change_w / power.change_w - 1:+.1%}", f"{ranges_w[0] / ranges_w[1] - 1:+.1%}"]
                print("".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
