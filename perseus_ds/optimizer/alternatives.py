"""Evaluates simple alternatives to frequency plans with the same profile and DAG.

- *One clock*: the same clock for all GPUs.
- *One clock for each stage*: for each of many times that a micro-batch may take on a stage, every stage has the clock
  of least energy at which its instructions take no longer. With few stages, a search is added that starts at the least
  energy and raises the clock of one stage after the other, each time the one that shortens the iteration most for the
  energy. One clock for all is included.
- *One power cap*: the same cap for all GPUs. An instruction runs at the highest clock at which the board's power does
  not exceed it. A throttled board draws more power than one that is locked at the clock of equal throughput (A100 at
  caps of 200 to 400 W: 5 to 9 %; H100 and H200 at their limits: 8 %; FIRESTARTER runs of NHR@FAU, 2026); here
  :data:`THROTTLED`.
- *EnvPipe's rule* (Choi et al., ATC '23): the fastest clock on the critical path and the most efficient one elsewhere.
  Then the clocks on new critical paths are raised step by step until the iteration is as short as before.

The alternatives change no clock during an instruction, or so rarely that the changes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.frontier import Alternative, AlternativePoint, drop_dominated
from perseus_ds.artifacts.profile import ClockOptions
from perseus_ds.optimizer.problem import Clocks, Floats, Indices, InstructionGroup, Problem
from perseus_ds.optimizer.runs import respects_dwell_time
from perseus_ds.pipeline.instruction import Kind

THROTTLED = 0.07
"""Relative excess of a board's power at a power cap over its power at a locked clock of equal throughput."""
_MOST_POINTS, _MOST_SEARCHED = 60, 16
_SAME = 1e-9

Rows = list[tuple[float, float]]
"""Time [s] and energy [J] of an instruction, for each of a problem's groups."""


class SimplePlan(NamedTuple):
    """A setting whose clocks are those of a plan.

    Attributes:
        clock_mhz: Shape (decisions,): the clock of every decision [MHz].
    """

    point: AlternativePoint
    clock_mhz: Indices


def simple_plans(problem: Problem) -> list[Clocks]:
    """Return the clocks of the settings that are plans, without dominated ones.

    The optimiser compares its own plans with them, so that it is never worse than a simple setting.
    """
    found = [*_one_clock(problem), *_one_clock_a_stage(problem), _envpipe(problem)]
    clocks_of = {plan.point: plan.clock_mhz for plan in found}
    return [_by_rank(problem, clocks_of[point]) for point in drop_dominated(clocks_of)]


def _by_rank(problem: Problem, clock_mhz: Indices) -> Clocks:
    return tuple(tuple(clock_mhz[own].tolist()) for own in problem.rank_decisions)


def alternatives(problem: Problem) -> tuple[Alternative, ...]:
    """Return the alternatives to a problem's plans, with points of rising time.

    An alternative for which the profile lacks rows is omitted, such as one clock if the stages share none. So is
    EnvPipe's rule if it does not hold its clocks for the dwell time, because a job could not follow it.
    """
    one_clock = [plan.point for plan in _one_clock(problem)]
    envpipe = _envpipe(problem)
    can_follow = respects_dwell_time(problem, _by_rank(problem, envpipe.clock_mhz))
    points = {
        "one clock for all GPUs": one_clock,
        "one clock for each stage": [*one_clock, *(plan.point for plan in _one_clock_a_stage(problem))],
        "one power cap for all GPUs": list(_one_power_cap(problem)),
        "EnvPipe's rule": [envpipe.point] if can_follow else [],
    }
    return tuple(Alternative(name, tuple(drop_dominated(found))) for name, found in points.items() if found)


def point_of(problem: Problem, rows: Rows, setting: str) -> AlternativePoint:
    """Return the iteration in which all instructions of a group have the same time and energy."""
    time_s, energy_j = (np.array(values)[problem.group] for values in zip(*rows, strict=True))
    return AlternativePoint(*problem.iteration(time_s, energy_j - problem.blocking_power_w * time_s), setting)


def _simple_plan(problem: Problem, of_stage_mhz: Mapping[int, float], setting: str) -> SimplePlan:
    """Return the plan in which each instruction has the measured clock that is nearest to its stage's."""
    places = [_nearest(group.measured, of_stage_mhz[group.stage]) for group in problem.groups]
    rows = [_row(group.measured, place) for group, place in zip(problem.groups, places, strict=True)]
    clocks = [int(group.measured.clock_mhz[place]) for group, place in zip(problem.groups, places, strict=True)]
    return SimplePlan(point_of(problem, rows, setting), np.array(clocks)[problem.group])


def _row(options: ClockOptions, place: int) -> tuple[float, float]:
    return float(options.time_s[place]), float(options.energy_j[place])


def _nearest(options: ClockOptions, clock_mhz: float) -> int:
    """Return the place of the measured clock that is nearest to the given one."""
    return int(np.abs(options.clock_mhz - clock_mhz).argmin())


def _shared_mhz(groups: Iterable[InstructionGroup]) -> list[int]:
    """Return the clocks at which all groups except tails were measured."""
    clocks = [set(group.measured.clock_mhz.tolist()) for group in groups if group.kind is not Kind.TAIL]
    return sorted(set.intersection(*clocks)) if clocks else []


def _evenly(values: Iterable[float]) -> list[float]:
    distinct = np.unique(np.fromiter(values, np.float64))
    return [float(v) for v in distinct[np.linspace(0, len(distinct) - 1, min(len(distinct), _MOST_POINTS)).astype(int)]]


def _one_clock(problem: Problem) -> Iterator[SimplePlan]:
    stages = {group.stage for group in problem.groups}
    for clock_mhz in _evenly(_shared_mhz(problem.groups)):
        yield _simple_plan(problem, dict.fromkeys(stages, clock_mhz), f"{clock_mhz:.0f} MHz")


def _one_clock_a_stage(problem: Problem) -> Iterator[SimplePlan]:
    by_stage: dict[int, list[int]] = {}
    for number, group in enumerate(problem.groups):
        by_stage.setdefault(group.stage, []).append(number)
    tables = [_stage_table(problem, numbers) for numbers in by_stage.values()]
    if not all(len(clocks) for clocks, _, _ in tables):
        return

    def plan(places: list[int]) -> SimplePlan:
        clocks = [int(table[0][place]) for table, place in zip(tables, places, strict=True)]
        return _simple_plan(problem, dict(zip(by_stage, clocks, strict=True)), f"{min(clocks)} to {max(clocks)} MHz")

    shortest_s = max(float(pass_s.min()) for _, pass_s, _ in tables)
    for most_s in _evenly(time for _, pass_s, _ in tables for time in pass_s.tolist() if time >= shortest_s):
        yield plan([int(np.where(time_s <= most_s * (1 + _SAME), j, np.inf).argmin()) for _, time_s, j in tables])
    if len(tables) <= _MOST_SEARCHED:
        highest = [len(clocks) - 1 for clocks, _, _ in tables]
        yield from _raised_in_turns(plan, [int(cost_j.argmin()) for _, _, cost_j in tables], highest)


def _raised_in_turns(
    plan: Callable[[list[int]], SimplePlan], places: list[int], highest: list[int]
) -> Iterator[SimplePlan]:
    """Raise one stage's clock at a time, the one that shortens the iteration most for the energy."""
    now = plan(places)
    while True:
        yield now
        found: list[tuple[float, SimplePlan, list[int]]] = []
        for stage in (number for number, place in enumerate(places) if place < highest[number]):
            raised = [place + (number == stage) for number, place in enumerate(places)]
            after = plan(raised)
            more_j = max(after.point.energy_j - now.point.energy_j, _SAME * now.point.energy_j)
            found.append(((now.point.time_s - after.point.time_s) / more_j, after, raised))
        worth, now, places = max(found, key=itemgetter(0), default=(0.0, now, places))
        if worth <= 0:
            return


def _stage_table(problem: Problem, numbers: list[int]) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return a stage's clocks and, by clock, the time [s] and effective energy [J] of a micro-batch."""
    clocks = np.array(_shared_mhz(problem.groups[number] for number in numbers), dtype=np.int64)
    # A tail runs once per iteration, the other instructions once per micro-batch.
    counts = np.bincount(problem.group)[numbers]
    shares = counts / counts.max()
    time_s, cost_j = [], []  # of each group at the shared clocks
    for number in numbers:
        options = problem.groups[number].measured
        places = [_nearest(options, clock) for clock in clocks]
        time_s.append(options.time_s[places])
        cost_j.append(options.effective_energy_j(problem.blocking_power_w)[places])
    return clocks, shares @ np.array(time_s), shares @ np.array(cost_j)


def _one_power_cap(problem: Problem) -> Iterator[AlternativePoint]:
    # Below this cap, some instruction would exceed it at all its clocks.
    least_w = max(float(_power_w(group.measured).min()) for group in problem.groups) * (1 + THROTTLED)
    powers_w = (power_w for group in problem.groups for power_w in _power_w(group.measured).tolist())
    for cap_w in _evenly([least_w, *(power_w for power_w in powers_w if power_w > least_w)]):
        yield point_of(problem, [capped(group.measured, cap_w) for group in problem.groups], f"{cap_w:.0f} W")


def capped(options: ClockOptions, cap_w: float) -> tuple[float, float]:
    """Return time [s] and energy [J] of an instruction on a board with a power cap [W]."""
    power_w, last = _power_w(options), len(options.clock_mhz) - 1
    if power_w[last] <= cap_w:
        return _row(options, last)
    within = np.flatnonzero(power_w * (1 + THROTTLED) <= cap_w)
    time_s, energy_j = _row(options, int(within[-1]) if len(within) else 0)
    return time_s, energy_j * (1 + THROTTLED)


def _power_w(options: ClockOptions) -> Floats:
    return options.energy_j / options.time_s


def _envpipe(problem: Problem) -> SimplePlan:
    fastest = problem.fastest
    efficient = fastest + np.array([g.options.energy_j.argmin() for g in problem.groups])[problem.group]
    choice: Indices = np.where(_is_critical(problem, fastest), fastest, efficient)
    while problem.time_s(choice) > problem.t_min_s * (1 + _SAME):
        choice = choice - (_is_critical(problem, choice) & (choice > fastest))
    plan = problem.plan(choice)
    point = AlternativePoint(plan.time_s, plan.energy_j, "efficient clocks off the critical path")
    return SimplePlan(point, problem.table.clock_mhz[choice])


def _is_critical(problem: Problem, choice: Indices) -> npt.NDArray[np.bool_]:
    """Return which decisions have no slack."""
    durations = problem.durations_s(choice)
    finish_s = problem.dag.finish_s(durations)
    end_s = float(finish_s.max())
    slack_s = problem.dag.latest_finish_s(durations, end_s) - finish_s
    critical: npt.NDArray[np.bool_] = slack_s[problem.node] <= _SAME * end_s
    return critical
