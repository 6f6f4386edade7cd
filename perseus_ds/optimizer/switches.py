"""Among plans of nearly equal energy, the one that changes clocks least often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import OptionTable
from perseus_ds.optimizer.search import options_at

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_NEARLY_EQUAL = 3e-5
"""A clock change must save this fraction of a mean instruction's energy even where changes cost nothing."""
_LATE = 1e3
"""Price of an instruction that ends late, in energies of a mean instruction: more than changes of the clock save."""


_SHORTER, _MOST_STEPS = 1.5, 3
"""Dwell times that are shorter by this factor are planned for apart; so many at most."""


DwellTimes = Mapping[int, float] | float


@dataclass(frozen=True)
class SwitchCosts:
    """The price of a change of clock.

    Attributes:
        energy_j: Energy that it costs [J].
        time_s: By how much it delays the instruction that follows [s].
        least_dwell_s: Shortest time at one clock, for all clocks or by clock in MHz [s].
    """

    energy_j: float = 0.0
    time_s: float = 0.0
    least_dwell_s: DwellTimes = 0.0

    @property
    def longest_dwell_s(self) -> float:
        """The largest of the dwell times [s]."""
        by_clock = self.least_dwell_s
        return max(by_clock.values(), default=0.0) if isinstance(by_clock, Mapping) else by_clock


def dwell_ladder(least_dwell_s: DwellTimes) -> list[DwellTimes]:
    """Return the dwell times to plan for one after the other, the longest first.

    A run can only be as short as the clock after it needs to come. So either all clocks of a rank are held as long as
    that which comes latest needs, or those that come late are not used, but for whole iterations.

    Args:
        least_dwell_s: By what each clock itself needs [s].
    """
    if not isinstance(least_dwell_s, Mapping):
        return [least_dwell_s]
    steps_s: list[float] = []
    for dwell_s in sorted(least_dwell_s.values(), reverse=True):
        if not steps_s or (_SHORTER * dwell_s < steps_s[-1] and len(steps_s) < _MOST_STEPS):
            steps_s.append(dwell_s)
    return [
        {clock_mhz: step_s if own_s <= step_s else np.inf for clock_mhz, own_s in least_dwell_s.items()}
        for step_s in steps_s
    ]


def change_energy_j(table: OptionTable, costs: SwitchCosts) -> float:
    """Return what a change of clock must save [J]."""
    return max(costs.energy_j, _NEARLY_EQUAL * float(table.cost_j.mean()))


def choose_clocks(network: Network, table: OptionTable, event_s: Floats, costs: SwitchCosts) -> Indices:
    """Choose clocks that fit between the events, at the least energy plus cost of clock changes.

    With the events fixed, every rank is a chain of its own, and dynamic programming over its instructions is exact,
    but for the change from the iteration's end to its start. That one is ignored where changes delay nothing. Otherwise
    the last clock is that of the best chain without it, and the best chain that ends so is found.

    Args:
        network: The events.
        table: All Pareto options.
        event_s: Shape (events, plans) [s].
        costs: Of a clock change.

    Returns:
        The option of every decision, shape (decisions, plans), indices into the table.
    """
    slowest = options_at(network, table, event_s)
    after_change, is_late = _after_change(network, table, event_s, costs.time_s)
    decision_of = {node: index for index, node in enumerate(network.problem.node.tolist())}
    clock_mhz = np.concatenate([g.options.clock_mhz for g in network.problem.groups])
    mean_j = float(table.cost_j.mean())
    change_j = change_energy_j(table, costs)
    result = slowest.copy()
    for nodes in network.problem.dag.compute_nodes:
        chain = [decision_of[node] for node in nodes if node in decision_of]
        if chain:
            options = _Options(network.problem.group[chain], table, clock_mhz)
            changing_j = np.where(is_late[chain], change_j + _LATE * mean_j, change_j)
            arguments = slowest[chain], after_change[chain], changing_j
            clocks = options.best(*arguments)
            if costs.time_s:
                clocks = options.best(*arguments, last=clocks[-1])
            result[chain] = options.at(clocks)
    return result


def _after_change(
    network: Network, table: OptionTable, event_s: Floats, change_s: float
) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Return the slowest option of every decision that fits after a change of clock, and where none does."""
    n = network.decisions
    window_s = event_s[network.head[:n]] - event_s[network.tail[:n]] - change_s
    slowest = table.longest_within(network.problem.group[:, None], window_s)
    return slowest, (table.time_s[slowest] > window_s + table.tolerance_s) & (change_s > 0)


class _Options:
    """The options of one rank's instructions, by clock.

    Args:
        group: Shape (instructions,).
        table: All options.
        clock_mhz: Of each option of the table.
    """

    def __init__(self, group: Indices, table: OptionTable, clock_mhz: Indices) -> None:
        clocks, index = np.unique(clock_mhz, return_inverse=True)
        option_of = np.full((len(table.begin), len(clocks)), -1, dtype=np.intp)
        for number, (begin, last) in enumerate(zip(table.begin, table.last, strict=True)):
            option_of[number, index[begin : last + 1]] = np.arange(begin, last + 1)
        self._table = table
        self._of = option_of[group]

    def at(self, clocks: Indices) -> Indices:
        """Return the options of clocks, both of shape (instructions, plans)."""
        return self._of[np.arange(len(clocks))[:, None], clocks]

    def best(self, slowest: Indices, after_change: Indices, change_j: Floats, last: Indices | None = None) -> Indices:
        """Return the best clocks, none slower than allowed.

        Args:
            slowest: The slowest options allowed, shape (instructions, plans).
            after_change: Those allowed after a change of clock.
            change_j: What such a change costs [J].
            last: Shape (plans,): the last clock, which that of the first instruction follows; None for any, and no
                change before the first instruction.
        """
        clocks = np.arange(self._of.shape[1])[:, None]
        plans = np.arange(slowest.shape[1])
        if last is None:
            total_j = np.zeros((len(clocks), len(plans)))
            change_j = np.concatenate([np.zeros_like(change_j[:1]), change_j[1:]])
            after_change = np.concatenate([slowest[:1], after_change[1:]])
        else:
            total_j = np.where(clocks == last, 0.0, np.inf)
        came_from = []
        for options, allowed, allowed_changed, changing_j in zip(
            self._of, slowest, after_change, change_j, strict=True
        ):
            cheapest = total_j.argmin(axis=0)
            exists = options[:, None] >= 0
            kept_j = np.where(exists & (options[:, None] <= allowed), total_j, np.inf)
            changed_j = total_j[cheapest, plans] + changing_j
            changed_j = np.where(exists & (options[:, None] <= allowed_changed), changed_j, np.inf)
            came_from.append(np.where(kept_j <= changed_j, clocks, cheapest))
            total_j = np.minimum(kept_j, changed_j) + self._table.cost_j[options][:, None]
        clock = total_j.argmin(axis=0) if last is None else last
        result = np.empty_like(slowest)
        for step in range(len(slowest) - 1, -1, -1):
            result[step] = clock
            clock = came_from[step][clock, plans]
        return result
