"""Compares our frontier with lowtime's and our relaxation with HiGHS's, on the same input. Times are processor times.

python benchmarks/frontier.py
python benchmarks/frontier.py --profile tests/data/sosp24/stage_profile/gpt3-175b_a100-sxm.csv \
        --blocking-power-w 83.64 --micro-batches 12 24 --time-limit-s 300
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
from highs import Method, highs_saving_j, our_saving_j  # type: ignore[import-not-found]
from milp import solve_milp  # type: ignore[import-not-found]  # run as a script, whose folder is on the path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.pipeline.commands import read_schedule, schedule_class, stages_per_rank
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule

Result = TypeVar("Result")
Energies = list[tuple[float, float]]
"""Time [s] and energy [J] of every plan."""


def main() -> None:
    arguments = _arguments()
    profile = (
        StageProfile.load(arguments.profile)
        if arguments.profile
        else synthetic_profile(arguments.stages, arguments.seed)
    )
    stages = min(arguments.stages, profile.num_stages)
    if arguments.last:
        profile = last_stages(profile, stages)
    for micro_batches in arguments.micro_batches:
        chosen = schedule_class(arguments.schedule)
        schedule = read_schedule(chosen, ranks=stages // stages_per_rank(chosen), micro_batches=micro_batches)
        print(f"\n{arguments.schedule}, {stages} stages, {micro_batches} micro-batches")
        _compare(schedule, profile, arguments)


def _compare(schedule: Schedule, profile: StageProfile, arguments: argparse.Namespace) -> None:
    def ours() -> Frontier:
        return optimize(schedule, profile, blocking_power_w=arguments.blocking_power_w, plans=arguments.plans)

    taken_s, frontier = _timed(ours)
    gaps = np.array([plan.gap for plan in frontier.plans])
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  ours     {taken_s:9.2f} s, {len(frontier.plans)} plans, {memory_gib:.1f} GiB at most so far")
    print(f"           gap mean {gaps.mean():.3%}, worst {gaps.max():.3%} (plan {gaps.argmax()}), first {gaps[0]:.3%}")
    print(f"           fastest plan against T_min {frontier.plans[0].time_s / frontier.t_min_s - 1:+.1e}")
    changes = [sum(map(len, frontier.instructions)), *(frontier.plans[i].clock_changes for i in (0, -1))]
    print(
        f"           clock changes, fastest and last plan: {changes[1]} and {changes[2]} of {changes[0]} instructions"
    )
    if arguments.highs_s > 0:
        _compare_highs(schedule, profile, arguments)
    if arguments.time_limit_s > 0:
        _compare_lowtime(schedule, profile, arguments, frontier, taken_s)
    if arguments.milp_s > 0:
        _compare_milp(schedule, profile, arguments, frontier)


def _compare_highs(schedule: Schedule, profile: StageProfile, arguments: argparse.Namespace) -> None:
    """Solve the relaxed problem at one deadline with ours and with HiGHS."""
    problem = problem_for(schedule, profile, blocking_power_w=arguments.blocking_power_w)
    relaxation = Relaxation(Network(problem))
    deadline_s = 1.05 * problem.t_min_s
    ours_s, relaxed = _timed(lambda: relaxation.solve(deadline_s))
    saving_j = our_saving_j(relaxation, relaxed)
    print(f"  relaxed problem at one deadline, 5 % above T_min: ours {ours_s:.3f} s")
    for method in get_args(Method):
        limit_s = arguments.highs_s
        theirs_s, found_j = _timed(partial(highs_saving_j, relaxation, deadline_s, method=method, time_limit_s=limit_s))
        if found_j is None:
            print(f"    {method:9}  not done within {limit_s:.0f} s; time ratio > {limit_s / ours_s:.0f}")
        else:
            apart = f"savings differ by {abs(found_j - saving_j) / saving_j:.1e}"
            print(f"    {method:9}  {theirs_s:.3f} s; time ratio {theirs_s / ours_s:.1f}; {apart}")


def _compare_lowtime(
    schedule: Schedule, profile: StageProfile, arguments: argparse.Namespace, frontier: Frontier, ours_s: float
) -> None:
    found = lowtime_within(arguments.time_limit_s, schedule, profile, arguments.blocking_power_w)
    if found is None:
        limit_s = arguments.time_limit_s
        print(f"  lowtime  not done within {limit_s:.0f} s, stopped; time ratio > {limit_s / ours_s:.0f}")
        return
    lowtime_s, plans = found
    ratios = np.array([frontier.lookup(time_s).energy_j / energy_j for time_s, energy_j in plans])
    print(f"  lowtime  {lowtime_s:9.2f} s, {len(plans)} plans; time ratio {lowtime_s / ours_s:.0f}")
    print(f"           fastest plan against T_min {plans[0][0] / frontier.t_min_s - 1:+.2%}")
    print(
        f"  energy, ours / lowtime's at each of its {len(plans)} times: mean {ratios.mean():.4f}, "
        f"best {ratios.min():.4f}, worst {ratios.max():.4f}"
    )


def _compare_milp(schedule: Schedule, profile: StageProfile, arguments: argparse.Namespace, frontier: Frontier) -> None:
    problem = problem_for(schedule, profile, blocking_power_w=arguments.blocking_power_w)
    for number in sorted({0, len(frontier.plans) // 4, len(frontier.plans) // 2}):
        plan = frontier.plans[number]
        assert plan.lower_bound_j is not None
        found = solve_milp(problem, plan.time_s, arguments.milp_s)
        best = "none found" if found.plan_j is None else f"{found.plan_j / plan.lower_bound_j - 1:+.3%}"
        print(
            f"  MILP at plan {number} ({arguments.milp_s:.0f} s): above our bound: its bound "
            f"{found.bound_j / plan.lower_bound_j - 1:+.3%}, its plan {best}, our plan {plan.gap:+.3%}"
        )


def lowtime_within(
    limit_s: float, schedule: Schedule, profile: StageProfile, blocking_power_w: float
) -> tuple[float, Energies] | None:
    """Run lowtime in a separate process. Return its processor time [s] and plans, or None after the limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_lowtime, args=(theirs, schedule, profile, blocking_power_w))
    process.start()
    theirs.close()
    try:
        # Imports are not counted: the time starts with its first message.
        ours.recv()
        return ours.recv() if ours.poll(limit_s) else None
    finally:
        process.kill()
        process.join()


def _lowtime(pipe: Connection, schedule: Schedule, profile: StageProfile, blocking_power_w: float) -> None:
    import lowtime.solver  # noqa: F401

    pipe.send("ready")
    taken_s, frontier = _timed(lambda: optimize(schedule, profile, blocking_power_w=blocking_power_w, solver="lowtime"))
    pipe.send((taken_s, [(plan.time_s, plan.energy_j) for plan in frontier.plans]))


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the processor time that the work takes, which depends little on other work of the machine [s]."""
    begin_s = time.process_time()
    result = work()
    return time.process_time() - begin_s, result


def last_stages(profile: StageProfile, count: int) -> StageProfile:
    """Return the profile of a pipeline made of the last stages only."""
    skipped = profile.num_stages - count
    rows = [replace(row, stage=row.stage - skipped) for row in profile.measurements if row.stage >= skipped]
    return StageProfile(rows)


def synthetic_profile(stages: int, seed: int) -> StageProfile:
    """Return a synthetic profile like measured ones: noisy, with stages that differ by a few percent."""
    rng = np.random.default_rng(seed)
    rows = []
    for stage in range(stages):
        for kind, work_s in ((Kind.FORWARD, 0.05), (Kind.BACKWARD, 0.1)):
            scale = rng.normal(1.0, 0.03)
            for clock_mhz in range(855, 1411, 15):
                time_s = work_s * scale * (0.3 + 0.7 * 1410 / clock_mhz) * rng.normal(1.0, 0.002)
                power_w = (120 + 230 * (clock_mhz / 1410) ** 3) * rng.normal(1.0, 0.005)
                rows.append(Measurement(stage, kind, clock_mhz, time_s, power_w * time_s))
    return StageProfile(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="profile.csv; a synthetic one by default")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic profile")
    parser.add_argument("--blocking-power-w", type=float, default=80.0)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stages", type=int, default=8, help="at most what the profile has")
    parser.add_argument("--last", action="store_true", help="take the last stages of the profile, not the first")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--plans", type=int, default=120)
    parser.add_argument("--time-limit-s", type=float, default=120.0, help="time limit for lowtime (0: do not run it)")
    parser.add_argument("--highs-s", type=float, default=60.0, help="time limit for HiGHS (0: do not run it)")
    parser.add_argument("--milp-s", type=float, default=0.0, help="seconds for a MILP at each of three plans")
    return parser.parse_args()


if __name__ == "__main__":
    main()
