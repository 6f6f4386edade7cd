"""Savings of Perseus and of simple settings, for the profiles that were published with the paper.

    python benchmarks/alternatives.py

GPT-3 175B in eight stages, 1F1B. Savings are against everything at the highest clock, predicted from the published rows
through the DAG. The paper's two baselines are power caps: *ZeusGlobal*, one cap for all stages, and *ZeusPerStage*, a
cap for each stage, such that their forwards take the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from perseus_ds.artifacts.frontier import SLOWDOWNS, Alternative, AlternativePoint  # noqa: E402
from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize, with_alternatives  # noqa: E402
from perseus_ds.optimizer.alternatives import THROTTLED, capped, point_of  # noqa: E402
from perseus_ds.optimizer.problem import Problem, problem_for  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402

PROFILES = ROOT / "tests" / "data" / "sosp24" / "stage_profile"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
MICRO_BATCHES = (12, 24, 48, 96)
NAMES = {"one power cap for all GPUs": "ZeusGlobal (one power cap)"}
CAPS = 60


def zeus_per_stage(problem: Problem) -> Iterator[AlternativePoint]:
    """Yield iterations in which each stage has the lowest cap at which its forward meets a given time."""
    groups = problem.groups
    powers_w = {g.stage: np.unique(g.measured.energy_j / g.measured.time_s) for g in groups if g.kind is Kind.FORWARD}
    forward = {g.stage: g.measured for g in groups if g.kind is Kind.FORWARD}
    slowest_s = max(options.time_s.max() for options in forward.values())
    fastest_s = max(options.time_s.min() for options in forward.values())
    for most_s in np.linspace(fastest_s, slowest_s, CAPS):
        caps_w = {}
        for stage, options in forward.items():
            tried_w = [*((1 + THROTTLED) * powers_w[stage] + 1e-9), np.inf]
            caps_w[stage] = next(w for w in tried_w if capped(options, w)[0] <= most_s * (1 + 1e-9))
        rows = [capped(group.measured, caps_w[group.stage]) for group in groups]
        yield point_of(problem, rows, f"{min(caps_w.values()):.0f} W and more")


def main() -> None:
    """Print a table for each profile and number of micro-batches."""
    heads = "".join(f"{f'+{slowdown:.0%}':>9}" for slowdown in SLOWDOWNS)
    for gpu, power_w in BLOCKING_POWER_W.items():
        profile = StageProfile.load(PROFILES / f"gpt3-175b_{gpu}.csv")
        for micro_batches in MICRO_BATCHES:
            schedule = read_schedule(schedule_class("1f1b"), ranks=8, micro_batches=micro_batches)
            frontier = with_alternatives(optimize(schedule, profile, blocking_power_w=power_w), schedule, profile)
            points = sorted(
                zeus_per_stage(problem_for(schedule, profile, blocking_power_w=power_w)), key=lambda p: -p.energy_j
            )
            per_stage = Alternative("ZeusPerStage (a power cap for each stage)", tuple(points))
            frontier = replace(frontier, alternatives=(*frontier.alternatives, per_stage))
            print(f"GPT-3 175B on {gpu}, {micro_batches} micro-batches; saved at additional time:")
            print(f"  {'':<42}{heads}")
            for name, saved in frontier.savings().items():
                figures = "".join(f"{'-' if value is None else f'{max(0.0, value):.1%}':>9}" for value in saved)
                print(f"  {NAMES.get(name, name):<42}{figures}")
            print(f"  {frontier.best_alternative_in_words()}\n", flush=True)


if __name__ == "__main__":
    main()
