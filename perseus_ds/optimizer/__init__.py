"""Computes the frontier of frequency plans from a schedule and a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.frontier import NO_SLOWER, Frontier, Pairs, Provenance, drop_dominated
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import FrontierError, ProfileError
from perseus_ds.optimizer.alternatives import alternatives
from perseus_ds.optimizer.lowtime import solve_lowtime
from perseus_ds.optimizer.problem import Problem, Progress, power_swing, problem_for
from perseus_ds.optimizer.solver import lower_bounds, solve_exact
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings


def optimize(
    schedule: Schedule,
    profile: StageProfile,
    settings: PlanningSettings | None = None,
    *,
    progress: Progress = lambda what, done: None,
    **changes: Any,
) -> Frontier:
    """Return the frontier of frequency plans from ``T_min`` to ``T*``.

    Args:
        schedule: The schedule of all ranks.
        profile: Times and energies at each clock, and the fixed durations.
        settings: The planning settings. None for the default settings.
        progress: Called with the name of the current step and the completed fraction.
        changes: Settings by name, such as ``plans=40``, that override those of ``settings``.

    Raises:
        ConfigError: If blocking power is unknown or a setting is out of range.
        ProfileError: If the profile does not cover the schedule.
    """
    return solve(problem_for(schedule, profile, settings, **changes), progress)


def solve(problem: Problem, progress: Progress = lambda what, done: None) -> Frontier:
    """Return the frontier of a problem, with the solver of its settings."""
    settings = problem.settings
    if settings.solver == "lowtime":
        return frontier_of(problem, solve_lowtime(problem, progress), settings.solver)
    if settings.reserve:
        bounds = lower_bounds(problem)
        found = _with_reserve(problem, progress)
    else:
        found, bounds = solve_exact(problem, progress)
    return frontier_of(problem, bounds.with_bounds(drop_dominated(found)), settings.solver)


def _with_reserve(problem: Problem, progress: Progress) -> list[FrequencyPlan]:
    """Return plans with the reserve of the settings. Of plans with almost the same time, the one with more reserve."""
    reserved, _ = solve_exact(problem.with_reserve(), progress)
    found: list[FrequencyPlan] = []
    for plan in drop_dominated(reserved):  # the fastest with its reserve first
        evaluated = problem.evaluate(plan.clocks_mhz)
        if not found or evaluated.time_s > (1 + NO_SLOWER) * found[-1].time_s:
            found.append(evaluated)
    return found


def frontier_of(problem: Problem, plans: Iterable[FrequencyPlan], solver: str) -> Frontier:
    """Return the frontier of the plans that are not dominated in time and energy."""
    schedule, info, baseline = problem.dag.schedule, problem.profile.info, problem.baseline
    return Frontier(
        plans=tuple(replace(plan, power=power_swing(problem, plan)) for plan in drop_dominated(plans)),
        t_min_s=problem.t_min_s,
        baseline=replace(baseline, power=power_swing(problem, baseline)),
        provenance=Provenance(
            schedule=schedule.name,
            micro_batches=schedule.micro_batches,
            tokens_per_micro_batch=info.tokens_per_micro_batch,
            stages=schedule.num_stages,
            blocking_power_w=problem.blocking_power_w,
            least_dwell_s=problem.settings.longest_dwell_s if solver == "exact" else 0.0,
            reserve=problem.settings.reserve if solver == "exact" else 0.0,
            solver=solver,
            simulated=info.simulated,
            gpu=info.gpu,
            settings=info.settings,
            model=info.model,
            layout=info.layout,
        ),
        instruction_times_s={(m.stage, m.kind, m.clock_mhz): m.time_s for m in problem.profile.measurements},
        schedule=schedule,
    )


def with_alternatives(frontier: Frontier, schedule: Schedule, profile: StageProfile) -> Frontier:
    """Return the frontier with simple alternatives to its plans, which reports compare with them.

    Raises:
        PerseusError: If the profile does not cover the schedule, or has no clock for one of its instructions.
    """
    if frontier.alternatives:
        return frontier
    found = frontier.provenance
    settings = PlanningSettings(blocking_power_w=found.blocking_power_w, least_dwell_s=found.least_dwell_s)
    problem = Problem(Dag.build(schedule), profile, settings)
    return replace(frontier, alternatives=alternatives(problem))


def frontier_of_imported(plans: Iterable[tuple[Path, Pairs]], problem: Problem) -> Frontier:
    """Return the frontier of imported plans, with time and energy computed from the profile's rows.

    Tails that the profile has rows for but the plans have no clock for run at the highest clock.

    Raises:
        FrontierError: If a plan does not fit the schedule or the profile. The message names the plan's file.
    """
    found = []
    for path, pairs in plans:
        clocks = _clocks_of_ranks(path, pairs, problem)
        try:
            found.append(problem.evaluate(clocks))
        except ProfileError as error:
            raise FrontierError(f"{path}: {error} Give the profile for which the plans were made.") from None
    return frontier_of(problem, found, "imported")


def _clocks_of_ranks(path: Path, pairs: Pairs, problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the clocks of a plan by rank and in program order, if the plan's instructions are the schedule's."""
    if len(pairs) != len(problem.instructions):
        raise FrontierError(f"{path}: {len(pairs)} ranks, the schedule has {len(problem.instructions)}.")
    result = []
    for rank, (entries, instructions) in enumerate(zip(pairs, problem.instructions, strict=True)):
        clocks = [clock for _, clock in entries]
        kinds = [kind for kind, _ in entries]
        if instructions and (last := instructions[-1]).kind is Kind.TAIL and Kind.TAIL.value not in kinds:
            kinds.append(Kind.TAIL.value)
            clocks.append(problem.profile.at_highest_clock(last.stage, last.kind).clock_mhz)
        expected = [instruction.kind.value for instruction in instructions]
        for position, (has, wants) in enumerate(zip_longest(kinds, expected, fillvalue="nothing")):
            if has != wants:
                raise FrontierError(
                    f"{path}: rank {rank}, instruction {position}: the schedule {problem.dag.schedule.name} has "
                    f"{wants}, the plan {has}. Give the schedule for which the plans were made."
                )
        result.append(tuple(clocks))
    return tuple(result)
