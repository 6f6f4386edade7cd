"""The optimisation problem: a clock for every instruction of a DAG, with measured times and energies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import FrequencyPlan, InstructionStreams
from perseus_ds.artifacts.profile import ClockOptions, StageProfile, lower_hull
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import Dag, Seconds
from perseus_ds.pipeline.instruction import Instruction, Kind

OptionIndices = npt.NDArray[np.intp]
"""For every decision, in the order of ``Problem.node``: an index into its group's options, 0 the fastest."""


_AS_FAST = 1.002
"""A clock is as fast as another one if instructions take at most so many times as long."""


@dataclass(frozen=True)
class InstructionGroup:
    """Instructions that share their options: one (stage, kind).

    Options are in one order throughout the optimiser: rising time, falling effective energy, the fastest first.

    Attributes:
        measured: All measured clocks.
        options: The Pareto-optimal ones in time and effective energy.
        cost_j: Effective energy of each option, ``energy - blocking power * time`` [J].
    """

    stage: int
    kind: Kind
    measured: ClockOptions
    options: ClockOptions
    cost_j: npt.NDArray[np.float64]


class Problem:
    """The clocks to choose for one iteration of one pipeline.

    Energy of an iteration is the energy of its instructions plus blocking power times the
    GPU-seconds not spent in them, one GPU per rank (paper, section 3.2), so that

        energy(choice, time) = blocking_power * ranks * time + sum of effective energies.

    Attributes:
        dag: The iteration.
        blocking_power_w: What a waiting GPU draws [W].
        groups: One per (stage, kind) that the profile has.
        node: Shape (n,): DAG node of each decision.
        group: Shape (n,): index into ``groups`` of each decision.
        fixed_s: Shape (nodes of the DAG,): duration of what has no clock to choose, else 0 [s].
    """

    def __init__(
        self,
        dag: Dag,
        profile: StageProfile,
        blocking_power_w: float,
        *,
        switch_cost_s: float = 0.0,
        least_dwell_s: float = 0.0,
    ) -> None:
        """Set up the problem.

        Args:
            dag: The iteration.
            profile: Measured rows.
            blocking_power_w: What a waiting GPU draws [W].
            switch_cost_s: By how much a change of clock delays what follows it, in plans [s].
            least_dwell_s: The longest of the times for which clocks are to be held [s].

        Raises:
            ProfileError: The profile lacks a (stage, kind), has one clock only, or its energies
                are not above blocking power.
        """
        self.dag = dag
        self.profile = profile
        self.blocking_power_w = blocking_power_w
        self.switch_cost_s = switch_cost_s
        self.least_dwell_s = least_dwell_s
        self.fixed_s = dag.fixed_durations_s(profile.info.fixed_durations)
        measured = set(profile.keys)
        fastest_mhz = _shared_fastest_mhz(profile) if switch_cost_s or least_dwell_s else None
        index: dict[tuple[int, Kind], int] = {}
        groups: list[InstructionGroup] = []
        node, group = [], []
        for number, dag_node in enumerate(dag.nodes):
            work = dag_node.work
            if not isinstance(work, Instruction):
                continue
            key = (work.stage, work.kind)
            if work.kind is Kind.TAIL and key not in measured:
                continue
            if key not in index:
                index[key] = len(groups)
                groups.append(_group(profile, *key, blocking_power_w, fastest_mhz))
            node.append(number)
            group.append(index[key])
            self.fixed_s[number] = 0.0
        self.groups = tuple(groups)
        self.node = np.array(node, dtype=np.intp)
        self.group = np.array(group, dtype=np.intp)

    @cached_property
    def _time_s(self) -> npt.NDArray[np.float64]:
        return _padded([g.options.time_s for g in self.groups])

    @cached_property
    def _clock_mhz(self) -> npt.NDArray[np.float64]:
        return _padded([g.options.clock_mhz.astype(np.float64) for g in self.groups])

    @cached_property
    def _cost_j(self) -> npt.NDArray[np.float64]:
        return _padded([g.cost_j for g in self.groups])

    @property
    def fastest(self) -> OptionIndices:
        """Every instruction at its fastest measured clock."""
        return np.zeros(len(self.node), dtype=np.intp)

    @property
    def most_frugal(self) -> OptionIndices:
        """Every instruction at its least effective energy."""
        return np.array([len(g.cost_j) - 1 for g in self.groups], dtype=np.intp)[self.group]

    @cached_property
    def t_min_s(self) -> float:
        """The makespan with every instruction at its fastest measured clock [s]."""
        return self.time_s(self.fastest)

    def durations_s(self, choice: OptionIndices) -> Seconds:
        """Return the duration of every node of the DAG [s]."""
        durations = self.fixed_s.copy()
        durations[self.node] = self._time_s[self.group, choice]
        return durations

    def time_s(self, choice: OptionIndices) -> float:
        """Return the iteration time [s]."""
        return self.dag.makespan_s(self.durations_s(choice))

    def energy_j(self, choice: OptionIndices, time_s: float) -> float:
        """Return the energy of an iteration that ends after ``time_s`` [J]."""
        return self.waiting_energy_j(time_s) + float(self._cost_j[self.group, choice].sum())

    def waiting_energy_j(self, time_s: float) -> float:
        """Return the energy that all ranks would use if they only waited [J]."""
        return self.waiting_power_w * time_s

    @property
    def waiting_power_w(self) -> float:
        """The power of all ranks while they wait [W]."""
        return self.blocking_power_w * len(self.dag.schedule.ranks)

    @cached_property
    def instructions(self) -> InstructionStreams:
        """The instructions to decide on, per rank in program order."""
        return tuple(tuple(self.dag.nodes[i].work for i in nodes) for nodes in self.rank_nodes)  # type: ignore[misc]

    @cached_property
    def rank_nodes(self) -> list[list[int]]:
        """The DAG's nodes of ``instructions``."""
        decided = set(self.node.tolist())
        return [[i for i in nodes if i in decided] for nodes in self.dag.compute_nodes]

    def plan(self, choice: OptionIndices, lower_bound_j: float | None = None) -> FrequencyPlan:
        """Return the plan with these clocks, with its time and energy by the measured rows."""
        clock = np.zeros(len(self.dag.nodes), dtype=np.int64)
        clock[self.node] = self._clock_mhz[self.group, choice]
        clocks_mhz = tuple(tuple(clock[nodes].tolist()) for nodes in self.rank_nodes)
        time_s = self.dag.makespan_s(self.durations_s(choice) + self.delays_s(clocks_mhz))
        return FrequencyPlan(
            instructions=self.instructions,
            clocks_mhz=clocks_mhz,
            time_s=time_s,
            energy_j=self.energy_j(choice, time_s),
            lower_bound_j=lower_bound_j,
        )

    def evaluate(self, clocks_mhz: tuple[tuple[int, ...], ...]) -> FrequencyPlan:
        """Return the plan with any measured clocks, with its time and energy by the measured rows.

        Raises:
            ProfileError: A clock was not measured.
        """
        durations = self.fixed_s.copy()
        cost_j = 0.0
        for nodes, clocks in zip(self.rank_nodes, clocks_mhz, strict=True):
            for number, clock in zip(nodes, clocks, strict=True):
                work = self.dag.nodes[number].work
                assert isinstance(work, Instruction)
                row = self.profile.at(work.stage, work.kind, clock)
                durations[number] = row.time_s
                cost_j += row.energy_j - self.blocking_power_w * row.time_s
        time_s = self.dag.makespan_s(durations + self.delays_s(clocks_mhz))
        return FrequencyPlan(self.instructions, clocks_mhz, time_s, self.waiting_energy_j(time_s) + cost_j)

    def delays_s(self, clocks_mhz: tuple[tuple[int, ...], ...]) -> Seconds:
        """Return by how much changes of clock delay each node of the DAG [s]."""
        """Return by how much changes of clock delay every node of the DAG [s].

        The first clock of an iteration follows the last one of the iteration before, which is the same plan's.
        """
        delays_s = np.zeros(len(self.dag.nodes))
        for nodes, clocks in zip(self.rank_nodes, clocks_mhz, strict=True):
            delays_s[nodes] = self.switch_cost_s * (np.asarray(clocks) != np.roll(clocks, 1))
        return delays_s

    def baseline(self) -> FrequencyPlan:
        """Return the plan with every instruction at the highest measured clock."""
        return self.evaluate(
            tuple(
                tuple(self.profile.at_highest_clock(i.stage, i.kind).clock_mhz for i in stream)
                for stream in self.instructions
            )
        )


def _shared_fastest_mhz(profile: StageProfile) -> int | None:
    """Return the lowest clock at which every instruction is nearly as fast as it can be; None if there is none.

    Above a power limit many clocks are equally fast, and it is noise which of them is the fastest for an instruction.
    Plans in which a change of clock takes time, or clocks are held, need one that all instructions share.
    """
    slowest: dict[int, list[float]] = defaultdict(list)
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        for clock_mhz, time_s in zip(options.clock_mhz.tolist(), options.time_s.tolist(), strict=True):
            slowest[clock_mhz].append(time_s / float(options.time_s.min()))
    shared = [c for c, ratios in slowest.items() if len(ratios) == len(profile.keys) and max(ratios) <= _AS_FAST]
    return min(shared, default=None)


def _group(
    profile: StageProfile, stage: int, kind: Kind, blocking_power_w: float, fastest_mhz: int | None
) -> InstructionGroup:
    measured = profile.options(stage, kind)
    where = f"stage {stage}, {kind}"
    if len(measured.clock_mhz) < 2:
        raise ProfileError(
            f"{where}: only one clock was measured ({measured.clock_mhz[0]} MHz), so there is nothing to choose. "
            "Profile at least two clocks."
        )
    below = np.flatnonzero(measured.effective_energy_j(blocking_power_w) <= 0)
    if below.size:
        row = int(below[0])
        raise ProfileError(
            f"{where}, {measured.clock_mhz[row]} MHz: {measured.energy_j[row]:.6g} J in {measured.time_s[row]:.6g} s "
            f"is {measured.energy_j[row] / measured.time_s[row]:.1f} W, not above the blocking power of "
            f"{blocking_power_w:.1f} W. Check blocking_power_w, and that energies are in joules per GPU."
        )
    if fastest_mhz is not None:
        is_fastest = measured.clock_mhz == fastest_mhz
        kept = is_fastest | (measured.time_s > measured.time_s[is_fastest])
        measured = ClockOptions(measured.clock_mhz[kept], measured.time_s[kept], measured.energy_j[kept])
    options = measured.pareto(blocking_power_w)
    return InstructionGroup(stage, kind, measured, options, options.effective_energy_j(blocking_power_w))


def _padded(rows: list[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    result = np.full((len(rows), max((len(r) for r in rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


class OptionTable:
    """Options of every group, group after group, each in the order of :class:`InstructionGroup`.

    Attributes:
        time_s: Shape (options,).
        cost_j: Shape (options,): effective energy, falling within a group.
        begin: Shape (groups,): where each group's options begin.
        last: Shape (groups,): its slowest option.
    """

    def __init__(self, groups: Sequence[InstructionGroup], *, hull_only: bool = False) -> None:
        """Set up the table, of all Pareto options or of those on the lower convex hull alone."""
        kept = [_kept(group, hull_only) for group in groups]
        sizes = np.array([len(k) for k in kept], dtype=np.intp)
        self.last = np.cumsum(sizes) - 1
        self.begin = self.last - sizes + 1
        self.time_s = np.concatenate([g.options.time_s[k] for g, k in zip(groups, kept, strict=True)])
        self.cost_j = np.concatenate([g.cost_j[k] for g, k in zip(groups, kept, strict=True)])
        # One sorted array for all groups: each group's times are shifted beyond the one before.
        self.span_s = 2.0 * float(self.time_s.max())
        self.keys = self.time_s + self.span_s * np.repeat(np.arange(len(groups)), sizes)
        self.tolerance_s = 1e-13 * self.span_s * max(len(groups), 10)

    def longest_within(self, group: OptionIndices, window_s: npt.NDArray[np.float64]) -> OptionIndices:
        """Return each group's slowest option that fits the window, or its fastest where none does."""
        window_s = np.clip(window_s, 0.0, 0.75 * self.span_s)
        found = np.searchsorted(self.keys, window_s + (self.span_s * group + self.tolerance_s), side="right") - 1
        result: OptionIndices = np.maximum(found, self.begin[group])
        return result


def _kept(group: InstructionGroup, hull_only: bool) -> OptionIndices:
    """Return the indices of the group's options to keep."""
    kept = lower_hull(group.options.time_s, group.cost_j) if hull_only else range(len(group.cost_j))
    return np.array(kept, dtype=np.intp)
