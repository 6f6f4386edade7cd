"""Savings of frontiers in an emulated job of many pipelines, one of which is a straggler.

    python benchmarks/emulation.py

GPT-3 175B in eight stages of eight GPUs, 1F1B, as in the paper's strong scaling: for each number of micro-batches, the
savings of the frontier published with the paper and of ours, both from the same published profile. The accounting is
that of the paper's large-scale emulation, so its published frontiers reproduce its published figures. All data-parallel
pipelines synchronise at the end of an iteration, so all wait for the slowest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.pipeline.instruction import Instruction, Kind  # noqa: E402

DATA = ROOT / "tests" / "data" / "sosp24"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
PIPELINES = {12: 128, 24: 64, 48: 32, 96: 16}
SLOWDOWNS = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
# The published profiles are of a tenth of each stage's layers.
SCALE = 10

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Emulation:
    """The saving of a frontier relative to the highest clock throughout.

    Attributes:
        shortest_s: Iteration time of the fastest plan, scaled [s].
        t_star_s: Iteration time of the plan of least energy, scaled [s].
        baseline_j: Energy of one pipeline's iteration at the highest clock, scaled [J].
        intrinsic: Saving without a straggler, at the shortest time, as a fraction.
        with_straggler: Intrinsic and extrinsic saving by the straggler's slowdown, as a fraction of the job's energy at
            the highest clock.
    """

    shortest_s: float
    t_star_s: float
    baseline_j: float
    intrinsic: float
    with_straggler: dict[float, float]


def emulate(
    plans: Floats,
    profile: StageProfile,
    streams: Sequence[Iterable[Instruction]],
    *,
    blocking_power_w: float,
    pipelines: int,
    gpus_per_stage: int = 1,
    slowdowns: Iterable[float] = (),
    time_scale: float = 1.0,
    energy_scale: float = 1.0,
) -> Emulation:
    """Return the saving of a frontier in a job.

    At the highest clock, iterations are assumed to take the frontier's shortest time, and GPUs to draw blocking power
    whenever they do not compute. A straggler that takes ``s`` times as long uses ``s`` times the energy of its plan
    (the baseline or the fastest plan). The other pipelines run the plan of least energy that finishes before it, and
    wait for it at blocking power.

    Args:
        plans: Time [s] and energy [J] of one pipeline's plans, one GPU per rank, in any order, shape (n, 2).
        profile: Time and energy of the instructions at the highest clock.
        streams: The instructions of every rank.
        blocking_power_w: Power of a waiting GPU [W].
        pipelines: Number of data-parallel pipelines, including the straggler.
        gpus_per_stage: Number of GPUs that share a stage (tensor parallelism).
        slowdowns: Iteration times of the straggler relative to the shortest time, each >= 1.
        time_scale: Factor on all times, for a profile of a part of each stage.
        energy_scale: Factor on all energies per GPU, including blocking energy of waiting within a pipeline.
    """

    def cheapest(deadline_s: float) -> tuple[float, float]:
        """Return time and energy of the plan of least energy that meets a deadline."""
        # A plan that is late only due to rounding is in time.
        in_time = plans[plans[:, 0] <= deadline_s * (1 + 1e-9)]
        time_s, energy_j = in_time[in_time[:, 1].argmin()].tolist()
        return time_s, energy_j

    rows = [profile.at_highest_clock(i.stage, i.kind) for stream in streams for i in stream]
    shortest_s, t_star_s = float(plans[:, 0].min()), float(plans[plans[:, 1].argmin(), 0])
    waiting_s = len(streams) * shortest_s - sum(row.time_s for row in rows)
    scale = energy_scale * gpus_per_stage
    baseline_j = scale * (sum(row.energy_j for row in rows) + blocking_power_w * waiting_s)
    fastest_j = scale * cheapest(shortest_s)[1]

    def job_j(straggler_j: float, plan_s: float, plan_j: float, end_s: float) -> float:
        waiting_w = blocking_power_w * gpus_per_stage * len(streams)
        return straggler_j + (pipelines - 1) * (plan_j + waiting_w * time_scale * (end_s - plan_s))

    def saving(slowdown: float) -> float:
        end_s = slowdown * shortest_s
        plan_s, plan_j = cheapest(end_s)
        ours_j = job_j(slowdown * fastest_j, plan_s, scale * plan_j, end_s)
        return 1 - ours_j / job_j(slowdown * baseline_j, shortest_s, baseline_j, end_s)

    return Emulation(
        shortest_s=shortest_s * time_scale,
        t_star_s=t_star_s * time_scale,
        baseline_j=baseline_j,
        intrinsic=1 - fastest_j / baseline_j,
        with_straggler={slowdown: saving(slowdown) for slowdown in slowdowns},
    )


def main() -> None:
    for gpu, power_w in BLOCKING_POWER_W.items():
        profile = StageProfile.load(DATA / "stage_profile" / f"gpt3-175b_{gpu}.csv")
        print(
            f"{gpu}: saved without a straggler, and with one that takes {', '.join(map(str, SLOWDOWNS))} times as long"
        )
        for micro_batches, pipelines in PIPELINES.items():
            schedule = read_schedule(schedule_class("1f1b"), ranks=8, micro_batches=micro_batches)
            streams = [[i for i in stream if i.kind is not Kind.TAIL] for stream in schedule.instructions]
            ours = optimize(schedule, profile, blocking_power_w=power_w)
            published = np.loadtxt(
                DATA / "lowtime_frontier" / f"gpt3-175b_{gpu}_mb{micro_batches}.csv", delimiter=",", skiprows=1
            )
            plans = {"published": published, "ours": np.array([(plan.time_s, plan.energy_j) for plan in ours.plans])}
            for whose, of_frontier in plans.items():
                found = emulate(
                    of_frontier,
                    profile,
                    streams,
                    blocking_power_w=power_w,
                    pipelines=pipelines,
                    gpus_per_stage=8,
                    slowdowns=SLOWDOWNS,
                    time_scale=SCALE,
                    energy_scale=SCALE,
                )
                savings = " ".join(f"{saved:7.1%}" for saved in (found.intrinsic, *found.with_straggler.values()))
                print(f"  {micro_batches:3d} micro-batches, {pipelines:3d} pipelines, {whose:9} {savings}", flush=True)


if __name__ == "__main__":
    main()
