"""Among plans of nearly equal energy, the one that changes clocks least often."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.rounding import options_at

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_NEARLY_EQUAL = 3e-5
"""A clock change must save this fraction of a mean instruction's energy even where changes cost nothing."""
_LATE = 1e3
"""Price of an instruction that ends late, in energies of a mean instruction: more than changes of the clock save."""


@dataclass(frozen=True)
class SwitchCosts:
    """The price of a change of clock.

    Attributes:
        energy_j: Energy that it costs [J].
        time_s: By how much it delays the instruction that follows [s].
        least_dwell_s: Shortest time at one clock [s].
    """

    energy_j: float = 0.0
    time_s: float = 0.0
    least_dwell_s: float = 0.0


def settle(network: Network, table: OptionTable, event_s: Floats, costs: SwitchCosts) -> Indices:
    """Choose clocks that fit between the events, at the least energy plus cost of clock changes.

    With the events fixed, every rank is a chain of its own, and dynamic programming over its
    instructions is exact (but for the change from the iteration's end to its start, which it ignores, and for runs at
    one clock that are too short: these are raised or lengthened afterwards).

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
    change_j = max(costs.energy_j, _NEARLY_EQUAL * mean_j)
    result = slowest.copy()
    for nodes in network.problem.dag.compute_nodes:
        chain = [decision_of[node] for node in nodes if node in decision_of]
        if chain:
            options = _Options(network.problem.group[chain], table, clock_mhz)
            changing_j = np.where(is_late[chain], change_j + _LATE * mean_j, change_j)
            result[chain] = options.best(slowest[chain], after_change[chain], changing_j)
            if costs.least_dwell_s:
                options.hold(result, chain, costs.least_dwell_s)
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
        self._clock_of = index
        self._of = option_of[group]

    def best(self, slowest: Indices, after_change: Indices, change_j: Floats) -> Indices:
        """Return the best options, none slower than allowed; arguments and result have shape (instructions, plans)."""
        clocks = np.arange(self._of.shape[1])[:, None]
        plans = np.arange(slowest.shape[1])
        total_j = np.zeros((len(clocks), len(plans)))
        came_from = []
        for row, (options, allowed, allowed_changed, changing_j) in enumerate(
            zip(self._of, slowest, after_change, change_j, strict=True)
        ):
            cheapest = total_j.argmin(axis=0)
            exists = options[:, None] >= 0
            kept_j = np.where(exists & (options[:, None] <= allowed), total_j, np.inf)
            changed_j = total_j[cheapest, plans] + (changing_j if row else 0.0)
            changed_j = np.where(
                exists & (options[:, None] <= (allowed_changed if row else allowed)), changed_j, np.inf
            )
            came_from.append(np.where(kept_j <= changed_j, clocks, cheapest))
            total_j = np.minimum(kept_j, changed_j) + self._table.cost_j[options][:, None]
        clock = total_j.argmin(axis=0)
        result = np.empty_like(slowest)
        for step in range(len(slowest) - 1, -1, -1):
            result[step] = self._of[step, clock]
            clock = came_from[step][clock, plans]
        return result

    def hold(self, result: Indices, chain: list[int], least_s: float) -> None:
        """Leave no run at one clock, but the first and the last, that is too short; no instruction gets slower.

        Args:
            result: Options, shape (decisions, plans); those of the chain are changed.
            chain: Its decisions.
            least_s: Shortest time at one clock [s].
        """
        if self._table.time_s[self._of[self._of >= 0]].min() >= least_s:
            return  # no instruction alone is too short
        for plan in range(result.shape[1]):
            options = result[chain, plan]
            while self._lengthen_one(options, least_s):
                pass
            result[chain, plan] = options

    def _lengthen_one(self, options: Indices, least_s: float) -> bool:
        """Raise clocks in or beside the first run that is too short; returns whether one was raised."""
        clocks = self._clock_of[options].tolist()
        runs = [list(run) for _, run in groupby(range(len(clocks)), key=clocks.__getitem__)]
        for before, run, after in zip(runs, runs[1:], runs[2:], strict=False):
            if self._table.time_s[options[run]].sum() >= least_s:
                continue
            own, beside = clocks[run[0]], [clocks[before[0]], clocks[after[0]]]
            higher = [clock for clock in beside if clock > own]
            raised, clock = (run, min(higher)) if higher else ([after[0]], own)
            if (self._of[raised, clock] >= 0).all():
                options[raised] = self._of[raised, clock]
                return True
        return False
