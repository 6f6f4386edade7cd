"""From a schedule and a profile to the frontier of frequency plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from perseus_ds.artifacts.frontier import Frontier, Provenance, drop_dominated
from perseus_ds.artifacts.limits import MOST_JOULES, MOST_PLANS, MOST_SECONDS, MOST_WATTS
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.optimizer.alternatives import alternatives
from perseus_ds.optimizer.lowtime import solve_lowtime
from perseus_ds.optimizer.power import power_swing
from perseus_ds.optimizer.problem import Problem
from perseus_ds.optimizer.solver import solve_exact
from perseus_ds.optimizer.switches import DwellTimes, SwitchCosts
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.schedule import Schedule

Solver = Literal["exact", "lowtime"]
Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""


def optimize(
    schedule: Schedule,
    profile: StageProfile,
    *,
    blocking_power_w: float | None = None,
    solver: Solver = "exact",
    plans: int = 120,
    switch_cost_j: float = 0.0,
    switch_cost_s: float = 0.0,
    least_dwell_s: DwellTimes = 0.0,
    progress: Progress | None = None,
) -> Frontier:
    """Return the frontier of frequency plans from ``T_min`` to ``T*``.

    Args:
        schedule: What every rank does in one iteration.
        profile: Time and energy at each clock, and the durations of what has no clock.
        blocking_power_w: What a waiting GPU draws [W]; the profile's own value by default.
        solver: ``exact`` plans against a proven bound; ``lowtime`` is the published solver.
        plans: For how many deadlines ``exact`` plans; about so many plans come back.
        switch_cost_j: What a change of clock is taken to cost when ``exact`` chooses between clocks [J].
        switch_cost_s: By how much it is then taken to delay what follows [s].
        least_dwell_s: The shortest time at one clock in plans of ``exact``, for all clocks or by clock in MHz [s].
        progress: Told how far the solver is.

    Returns:
        The frontier; from ``exact`` with the certificates of its lower bounds.

    Raises:
        ConfigError: Blocking power is unknown, or an argument is out of range.
        ProfileError: The profile does not cover the schedule.
    """
    if plans < 2:
        raise ConfigError(f"plans={plans}: a frontier needs at least 2, one for T_min and one for T*.")
    if plans > MOST_PLANS:
        raise ConfigError(f"plans={plans}: at most {MOST_PLANS} are computed.")
    switches = SwitchCosts(switch_cost_j, switch_cost_s, least_dwell_s)
    for name, value, most, unit in (
        ("switch_cost_j", switch_cost_j, MOST_JOULES, "joules"),
        ("switch_cost_s", switch_cost_s, MOST_SECONDS, "seconds"),
        ("least_dwell_s", switches.longest_dwell_s, MOST_SECONDS, "seconds"),
    ):
        if not 0 <= value <= most:
            raise ConfigError(f"{name}={value}: expected a number of {unit} >= 0, at most {most:g}.")
    problem = problem_for(schedule, profile, blocking_power_w, switch_cost_s, switches.longest_dwell_s)
    report = progress or (lambda what, done: None)
    if solver == "lowtime":
        return frontier_of(problem, solve_lowtime(problem, report), solver)
    found = solve_exact(problem, plans=plans, switches=switches, progress=report)
    return replace(frontier_of(problem, found.plans, solver), certificates=found.certificates)


def problem_for(
    schedule: Schedule,
    profile: StageProfile,
    blocking_power_w: float | None,
    switch_cost_s: float = 0.0,
    least_dwell_s: float = 0.0,
) -> Problem:
    """Return the optimisation problem of a schedule.

    Raises:
        ConfigError: Blocking power is unknown.
        ProfileError: The profile does not cover the schedule.
    """
    power_w = profile.info.blocking_power_w if blocking_power_w is None else blocking_power_w
    if power_w is None:
        raise ConfigError(
            "blocking_power_w is missing: the profile has no profile.json that holds it. Give what a GPU draws "
            "while it waits, such as blocking_power_w=83.64 (A100, from the Perseus paper)."
        )
    if not 0 <= power_w <= MOST_WATTS:
        raise ConfigError(f"blocking_power_w={power_w}: expected a number of watts >= 0, at most {MOST_WATTS:g}.")
    if schedule.num_stages > profile.num_stages:
        raise ProfileError(
            f"The schedule has {schedule.num_stages} stages, the profile {profile.num_stages}. "
            f"Profile the model with {schedule.num_stages} stages, or give fewer."
        )
    return Problem(Dag.build(schedule), profile, power_w, switch_cost_s=switch_cost_s, least_dwell_s=least_dwell_s)


def frontier_of(problem: Problem, plans: Iterable[FrequencyPlan], solver: str) -> Frontier:
    """Return the frontier of the plans for which no other is as fast with as little energy."""
    schedule, info = problem.dag.schedule, problem.profile.info
    return Frontier(
        plans=tuple(_with_power(problem, plan) for plan in drop_dominated(plans)),
        t_min_s=problem.t_min_s,
        baseline=_with_power(problem, problem.baseline()),
        provenance=Provenance(
            schedule=schedule.name,
            micro_batches=schedule.micro_batches,
            stages=schedule.num_stages,
            blocking_power_w=problem.blocking_power_w,
            switch_cost_s=problem.switch_cost_s,
            least_dwell_s=problem.least_dwell_s,
            solver=solver,
            simulated=info.simulated,
            gpu=info.gpu,
            settings=info.settings,
        ),
        instruction_times_s={(m.stage, m.kind, m.clock_mhz): m.time_s for m in problem.profile.measurements},
        schedule=schedule,
        alternatives=alternatives(problem),
    )


def _with_power(problem: Problem, plan: FrequencyPlan) -> FrequencyPlan:
    return replace(plan, power=power_swing(problem, plan))
