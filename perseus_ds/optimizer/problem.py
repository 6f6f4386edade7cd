"""The optimisation problem: choose a clock for every instruction of a DAG."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.frontier import time_limit_s
from perseus_ds.artifacts.plan import FrequencyPlan, InstructionStreams, PowerSwing
from perseus_ds.artifacts.profile import ClockOptions, StageProfile, lower_hull
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.pipeline.dag import Dag, Seconds
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Clocks = tuple[tuple[int, ...], ...]
"""The clocks of a plan, by rank and in program order [MHz]."""
Progress = Callable[[str, float], None]
"""Called with the name of the current step and the completed fraction, 0 to 1."""

logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class InstructionGroup:
    """The instructions of one (stage, kind), which share their options.

    Throughout the optimiser, options are sorted by rising time and falling effective energy, the fastest first.

    Attributes:
        measured: All measured clocks.
        options: The clocks that are Pareto-optimal in time and effective energy.
        cost_j: Effective energy of each option, ``energy - blocking power * time`` [J].
    """

    stage: int
    kind: Kind
    measured: ClockOptions
    options: ClockOptions
    cost_j: Floats


class Problem:
    """The choice of clocks for one iteration of one pipeline.

    The energy of an iteration is the energy of its instructions plus blocking power times the GPU-seconds not spent in
    them, with one GPU per rank (paper, section 3.2), so that

        energy(choice, time) = blocking_power * ranks * time + sum of effective energies.

    A *decision* is an instruction that has a clock to choose. A *choice* has an index into :class:`OptionTable` for
    every decision, in the order of ``node``.

    Attributes:
        settings: The settings, with the profile's blocking power and dwell times if none were given.
        groups: One group for each (stage, kind) of the schedule.
        node: Shape (n,): DAG node of each decision.
        group: Shape (n,): index into ``groups`` of each decision.
        fixed_s: Shape (nodes of the DAG,): duration of nodes without a clock to choose, otherwise 0 [s].
    """

    def __init__(self, dag: Dag, profile: StageProfile, settings: PlanningSettings) -> None:
        """Set up the problem.

        Raises:
            ConfigError: If blocking power is unknown or a setting is out of range.
            ProfileError: If the profile lacks a (stage, kind), or has only one clock for it.
        """
        power_w = profile.info.blocking_power_w if settings.blocking_power_w is None else settings.blocking_power_w
        if power_w is None:
            raise ConfigError(
                "blocking_power_w is missing: the profile has no profile.json that contains it. Give the power of a "
                "waiting GPU, such as 83.64 W (A100, from the Perseus paper): --blocking-power-w 83.64."
            )
        self.dag = dag
        self.profile = profile
        dwell_s = profile.info.least_dwell_s if settings.least_dwell_s is None else settings.least_dwell_s
        self.settings = replace(settings, blocking_power_w=power_w, least_dwell_s=dwell_s or 0.0)
        self.settings.check()
        self.blocking_power_w = power_w
        self.fixed_s = dag.fixed_durations_s(profile.info.fixed_durations)
        index: dict[tuple[int, Kind], int] = {}
        groups: list[InstructionGroup] = []
        node, group = [], []
        for number, dag_node in enumerate(dag.nodes):
            work = dag_node.work
            if not isinstance(work, Instruction):
                continue
            key = (work.stage, work.kind)
            if work.kind is Kind.TAIL and key not in profile.keys:
                continue
            if key not in index:
                index[key] = len(groups)
                groups.append(_group(profile, *key, power_w))
            node.append(number)
            group.append(index[key])
            self.fixed_s[number] = 0.0
        self.groups = tuple(groups)
        self.node = np.array(node, dtype=np.intp)
        self.group = np.array(group, dtype=np.intp)

    @cached_property
    def table(self) -> OptionTable:
        return OptionTable(self.groups)

    @property
    def has_short_instructions(self) -> bool:
        """True if some instruction is shorter than the dwell time, which has no effect otherwise."""
        return self.settings.longest_dwell_s > min(float(group.measured.time_s.min()) for group in self.groups)

    @property
    def fastest(self) -> Indices:
        """The choice with every instruction at its fastest measured clock."""
        return self.table.begin[self.group]

    @property
    def most_frugal(self) -> Indices:
        """The choice with every instruction at its least effective energy."""
        return self.table.last[self.group]

    @cached_property
    def t_min_s(self) -> float:
        """Makespan with every instruction at its fastest measured clock [s]."""
        return self.time_s(self.fastest)

    @cached_property
    def no_slower_s(self) -> float:
        """The time that counts as no slower than default clocks [s]."""
        return time_limit_s(self.baseline.time_s, self.t_min_s, 0.0)

    def with_reserve(self) -> Problem:
        """Return the problem in which instructions slower than their fastest clock take longer by the reserve.

        They take at most twice as much longer than at their fastest clock, so that those that are hardly slower are
        hardly changed. Effective energies are the same.
        """
        rows = []
        for row in self.profile.measurements:
            fastest_s = float(self.profile.options(row.stage, row.kind).time_s.min())
            reserve_s = min(self.settings.reserve * row.time_s, row.time_s - fastest_s)
            energy_j = row.energy_j + self.blocking_power_w * reserve_s
            rows.append(replace(row, time_s=row.time_s + reserve_s, energy_j=energy_j))
        return Problem(self.dag, StageProfile(rows, self.profile.info), self.settings)

    def durations_s(self, choice: Indices) -> Seconds:
        """Return the duration of every node of the DAG [s]."""
        durations = self.fixed_s.copy()
        durations[self.node] = self.table.time_s[choice]
        return durations

    def time_s(self, choice: Indices) -> float:
        return self.dag.makespan_s(self.durations_s(choice))

    @property
    def waiting_power_w(self) -> float:
        """Power of all ranks while they wait [W]."""
        return self.blocking_power_w * len(self.dag.schedule.ranks)

    @cached_property
    def decision_of(self) -> Indices:
        """For every node of the DAG, its decision, or -1 if it has no clock to choose."""
        result = np.full(len(self.dag.nodes), -1, dtype=np.intp)
        result[self.node] = np.arange(len(self.node))
        return result

    @cached_property
    def rank_decisions(self) -> list[Indices]:
        """The decisions of each rank in program order."""
        of_ranks = [self.decision_of[list(nodes)] for nodes in self.dag.compute_nodes]
        return [decisions[decisions >= 0] for decisions in of_ranks]

    @cached_property
    def instructions(self) -> InstructionStreams:
        """The instructions with a clock to choose, by rank and in program order."""
        streams = []
        for decisions in self.rank_decisions:
            nodes = self.node[decisions].tolist()
            streams.append(tuple(self.dag.nodes[node].work for node in nodes))
        return tuple(streams)

    def plan(self, choice: Indices) -> FrequencyPlan:
        """Return the plan of a choice, with time and energy computed from the measured rows."""
        clocks_mhz = self.clocks_of_ranks(self.table.clock_mhz[choice])
        return self._planned(clocks_mhz, self.table.time_s[choice], self.table.cost_j[choice])

    def clocks_of_ranks(self, clock_mhz: Indices) -> Clocks:
        """Return the clocks by rank and in program order, given those of all decisions, shape (decisions,) [MHz]."""
        return tuple(tuple(clock_mhz[own].tolist()) for own in self.rank_decisions)

    def evaluate(self, clocks_mhz: Clocks) -> FrequencyPlan:
        """Return the plan with the given clocks, evaluated with the measured rows.

        Raises:
            ProfileError: If a clock was not measured.
        """
        time_s, energy_j = self.rows(clocks_mhz)
        return self._planned(clocks_mhz, time_s, energy_j - self.blocking_power_w * time_s)

    def _planned(self, clocks_mhz: Clocks, time_s: Floats, cost_j: Floats) -> FrequencyPlan:
        return FrequencyPlan(self.instructions, clocks_mhz, *self.iteration(time_s, cost_j))

    def rows(self, clocks_mhz: Clocks) -> tuple[Floats, Floats]:
        """Return time [s] and energy [J] of every decision at the given measured clocks.

        Raises:
            ProfileError: If a clock was not measured.
        """
        time_s, energy_j = np.empty((2, len(self.node)))
        for decisions, stream, clocks in zip(self.rank_decisions, self.instructions, clocks_mhz, strict=True):
            rows = [self.profile.at(i.stage, i.kind, clock) for i, clock in zip(stream, clocks, strict=True)]
            time_s[decisions] = [row.time_s for row in rows]
            energy_j[decisions] = [row.energy_j for row in rows]
        return time_s, energy_j

    def iteration(self, time_s: Floats, cost_j: Floats) -> tuple[float, float]:
        """Return time [s] and energy [J] of an iteration, given time and effective energy of every decision."""
        durations = self.fixed_s.copy()
        durations[self.node] = time_s
        end_s = self.dag.makespan_s(durations)
        return end_s, self.waiting_power_w * end_s + float(cost_j.sum())

    @cached_property
    def baseline(self) -> FrequencyPlan:
        """The plan with every instruction at the highest measured clock."""
        highest_mhz = {key: self.profile.at_highest_clock(*key).clock_mhz for key in self.profile.keys}
        clocks_mhz = [tuple(highest_mhz[i.stage, i.kind] for i in stream) for stream in self.instructions]
        return self.evaluate(tuple(clocks_mhz))


def _group(profile: StageProfile, stage: int, kind: Kind, blocking_power_w: float) -> InstructionGroup:
    measured = profile.options(stage, kind)
    if len(measured.clock_mhz) < 2:
        raise ProfileError(
            f"stage {stage}, {kind}: only one clock was measured ({measured.clock_mhz[0]} MHz), so there is no clock "
            "to choose. Profile at least two clocks."
        )
    options = measured.pareto(blocking_power_w)
    return InstructionGroup(stage, kind, measured, options, options.effective_energy_j(blocking_power_w))


@dataclass(frozen=True)
class Corners:
    """The corners of the lower hull of cost over time, a convex, falling, piecewise-linear function."""

    time_s: Floats
    cost_j: Floats

    @classmethod
    def of(cls, time_s: Floats, cost_j: Floats) -> Corners:
        kept = lower_hull(time_s, cost_j)
        return cls(time_s[kept], cost_j[kept])

    @property
    def length_s(self) -> Floats:
        """Length of each piece between two corners, shape (k - 1,) [s]."""
        return np.diff(self.time_s)

    @property
    def saving_w(self) -> Floats:
        """Energy saved per additional second on each piece, strictly falling, shape (k - 1,) [W]."""
        return -np.diff(self.cost_j) / self.length_s

    def least_j(self, price_w: Floats) -> Floats:
        """Return the minimum of ``cost + price * time`` for each price of a second [J]."""
        corner = np.searchsorted(-self.saving_w, -price_w)
        result: Floats = self.cost_j[corner] + price_w * self.time_s[corner]
        return result


class OptionTable:
    """The options of all groups, concatenated, each group in the order of :class:`InstructionGroup`.

    Attributes:
        time_s, cost_j, clock_mhz: Shape (options,): time [s], effective energy [J] and clock [MHz] of each option.
        begin, last: Shape (groups,): index of each group's fastest and slowest option.
    """

    def __init__(self, groups: Sequence[InstructionGroup], *, hull_only: bool = False) -> None:
        """Set up the table with all Pareto-optimal options, or only with those on the lower convex hull."""
        time_s, cost_j, clock_mhz = [], [], []
        for group in groups:
            kept = np.arange(len(group.cost_j))
            if hull_only:
                kept = np.array(lower_hull(group.options.time_s, group.cost_j), dtype=np.intp)
            time_s.append(group.options.time_s[kept])
            cost_j.append(group.cost_j[kept])
            clock_mhz.append(group.options.clock_mhz[kept])
        sizes = np.array([len(of_group) for of_group in cost_j], dtype=np.intp)
        self.last = np.cumsum(sizes) - 1
        self.begin = self.last - sizes + 1
        self.time_s = np.concatenate(time_s)
        self.cost_j = np.concatenate(cost_j)
        self.clock_mhz = np.concatenate(clock_mhz)
        # One sorted array for all groups: each group's times are shifted beyond those of the previous group.
        self.span_s = 2.0 * float(self.time_s.max())
        self.keys = self.time_s + self.span_s * np.repeat(np.arange(len(groups)), sizes)
        self.tolerance_s = 1e-13 * self.span_s * max(len(groups), 10)

    def longest_within(self, group: Indices, window_s: Floats) -> Indices:
        """Return each group's slowest option that fits into the window, or its fastest one if none does."""
        window_s = np.clip(window_s, 0.0, 0.75 * self.span_s)
        found = np.searchsorted(self.keys, window_s + (self.span_s * group + self.tolerance_s), side="right") - 1
        result: Indices = np.maximum(found, self.begin[group])
        return result


def power_swing(problem: Problem, plan: FrequencyPlan) -> PowerSwing:
    """Return the extremes of power over a second of a repeated iteration.

    An instruction is assumed to draw constant power, and a waiting rank draws blocking power. The cumulative energy is
    then linear between the begins and ends of instructions, so extremes occur when a second begins or ends at one.
    """
    decisions = np.concatenate(problem.rank_decisions)
    nodes = problem.node[decisions]
    time_s, energy_j = (values[decisions] for values in problem.rows(plan.clocks_mhz))
    beyond_w = energy_j / time_s - problem.blocking_power_w
    durations = problem.fixed_s.copy()
    durations[nodes] = time_s
    end_s = problem.dag.finish_s(durations)[nodes]
    # The power rises at the begin of an instruction by its power beyond waiting, and falls by it at the end.
    at_s = np.concatenate([[0.0], end_s - time_s, end_s, [plan.time_s]])
    step_w = np.concatenate([[problem.waiting_power_w], beyond_w, -beyond_w, [0.0]])
    by_time = np.argsort(at_s, kind="stable")
    at_s, power_w = at_s[by_time], np.cumsum(step_w[by_time])
    used_j = np.concatenate([[0.0], np.cumsum(power_w[:-1] * np.diff(at_s))])

    def until_j(moment_s: Floats) -> Floats:
        iterations, rest_s = np.divmod(moment_s, plan.time_s)
        energy_j: Floats = iterations * used_j[-1] + np.interp(rest_s, at_s, used_j)
        return energy_j

    first_s = np.concatenate([at_s, at_s - 1, at_s - 2])
    begin_j, middle_j, end_j = (until_j(first_s + seconds) for seconds in range(3))
    mean_w, next_w = middle_j - begin_j, end_j - middle_j
    return PowerSwing(float(mean_w.max()), float(mean_w.min()), float(np.abs(next_w - mean_w).max()))


def problem_for(
    schedule: Schedule, profile: StageProfile, settings: PlanningSettings | None = None, **changes: Any
) -> Problem:
    """Return the optimisation problem of a schedule, with the arguments of :func:`~perseus_ds.optimizer.optimize`.

    Raises:
        ConfigError: If blocking power is unknown or a setting is out of range.
        ProfileError: If the profile does not cover the schedule, or most of its rows are below blocking power.
    """
    if schedule.num_stages > profile.num_stages:
        raise ProfileError(
            f"The schedule has {schedule.num_stages} stages, the profile {profile.num_stages}. "
            f"Profile the model with {schedule.num_stages} stages, or give fewer."
        )
    problem = Problem(Dag.build(schedule), profile, replace(settings or PlanningSettings(), **changes))
    check_powers(profile, problem.blocking_power_w)
    return problem


def check_powers(profile: StageProfile, blocking_power_w: float) -> None:
    """Warn if a few rows of a measured profile do not exceed blocking power.

    At low clocks, noise can do this to a row, and the optimiser needs no positive effective energy.

    Raises:
        ProfileError: If most rows do not exceed it, so that blocking power or the unit of energies is wrong.
    """
    below = [row for row in profile.measurements if row.energy_j <= blocking_power_w * row.time_s]
    if not below:
        return
    row = below[0]
    found = (
        f"{len(below)} of {len(profile.measurements)} rows do not exceed the blocking power of "
        f"{blocking_power_w:.1f} W, such as stage {row.stage}, {row.kind}, {row.clock_mhz} MHz: {row.energy_j:.6g} J "
        f"in {row.time_s:.6g} s is {row.energy_j / row.time_s:.1f} W."
    )
    if 2 * len(below) > len(profile.measurements):
        raise ProfileError(f"{found} Check blocking_power_w, and that energies are in joules per GPU.")
    logger.warning("%s", found)
