"""Frontiers for jobs, and for tests of decisions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from profiles import truth

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.simulation.device_models import DEVICES

MODEL = DEVICES["a100-sxm"]


def save_random_plan(
    folder: Path,
    schedule: str | Schedule = "1f1b",
    *,
    ranks: int = 2,
    clocks_mhz: Sequence[int] = MODEL.clocks_mhz[40:],
    simulated: bool = True,
) -> FrequencyPlan:
    """Save a frontier of one plan with a random clock for each instruction, and return the plan."""
    if isinstance(schedule, str):
        schedule = read_schedule(schedule_class(schedule), ranks=ranks, micro_batches=4)
    instructions = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in schedule.instructions)
    draw = random.Random(0)
    plan = FrequencyPlan(
        instructions, tuple(tuple(draw.choice(clocks_mhz) for _ in s) for s in instructions), 1.0, 100.0
    )
    _save_only(plan, schedule, folder, blocking_power_w=80.0, simulated=simulated)
    return plan


def thirty_plans() -> Frontier:
    """Return a frontier of one pass, of which each plan takes 10 ms longer and saves 1 J."""
    pass_ = ((Instruction(0, Kind.FORWARD, 0),),)
    plans = tuple(FrequencyPlan(pass_, ((1400 - 10 * i,),), 1.0 + 0.01 * i, 100.0 - i) for i in range(30))
    provenance = Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=1, solver="none")
    return Frontier(plans, 1.0, plans[0], provenance)


def save_mixed_plan(folder: Path, schedule: Schedule, profile: StageProfile) -> FrequencyPlan:
    """Save a frontier of one plan with random clocks of the profile, and return the plan."""
    blocking_power_w = profile.info.blocking_power_w or 0.0
    problem = problem_for(schedule, profile, blocking_power_w=blocking_power_w)
    draw = random.Random(3)
    plan = problem.evaluate(
        tuple(
            tuple(int(draw.choice(profile.options(i.stage, i.kind).clock_mhz)) for i in stream)
            for stream in problem.instructions
        )
    )
    times_s = {(m.stage, m.kind, m.clock_mhz): m.time_s for m in profile.measurements}
    _save_only(plan, schedule, folder, blocking_power_w=blocking_power_w, instruction_times_s=times_s)
    return plan


def _save_only(
    plan: FrequencyPlan,
    schedule: Schedule,
    folder: Path,
    *,
    blocking_power_w: float,
    simulated: bool = True,
    instruction_times_s: ClockTimes = MappingProxyType({}),
) -> None:
    """Save a frontier of this plan only."""
    provenance = Provenance(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        stages=schedule.num_stages,
        blocking_power_w=blocking_power_w,
        solver="none",
        simulated=simulated,
    )
    Frontier((plan,), plan.time_s, plan, provenance, instruction_times_s).save(folder)


def save_true_frontier(
    folder: Path,
    *,
    stages: int = 2,
    micro_batches: int = 4,
    forward_s: float = 0.01,
    linears: int = 6,
    least_dwell_s: float = 0.0,
) -> Frontier:
    """Save the frontier of a job's true profile on simulated A100s.

    A backward takes twice as long as a forward, except for the first layer, whose input needs no gradient.
    """
    work_s = {(stage, Kind.FORWARD): forward_s for stage in range(stages)}
    work_s |= {(stage, Kind.BACKWARD): forward_s * (2 if stage else 2 - 1 / linears) for stage in range(stages)}
    blocking_power_w = MODEL.blocking_power_w
    profile = truth("a100-sxm", MODEL.clocks_mhz[40:], work_s, simulated=True, blocking_power_w=blocking_power_w)
    schedule = read_schedule(schedule_class("1f1b"), ranks=stages, micro_batches=micro_batches)
    found = optimize(schedule, profile, plans=40, least_dwell_s=least_dwell_s)
    found.save(folder)
    return found
