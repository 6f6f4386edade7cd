"""Among plans of nearly equal energy, the one that changes clocks least often."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.rounding import options_at

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_NEARLY_EQUAL = 3e-5
"""A clock change must save this fraction of a mean instruction's energy even where changes cost nothing."""


def settle(network: Network, table: OptionTable, event_s: Floats, switch_cost_j: float) -> Indices:
    """Choose clocks that fit between the events, at the least energy plus cost of clock changes.

    With the events fixed, every rank is a chain of its own, and dynamic programming over its
    instructions is exact (but for the change from the iteration's end to its start, which it ignores).

    Args:
        network: The events.
        table: All Pareto options.
        event_s: Shape (events, plans) [s].
        switch_cost_j: What one clock change costs [J].

    Returns:
        The option of every decision, shape (decisions, plans), indices into the table.
    """
    slowest = options_at(network, table, event_s)
    decision_of = {node: index for index, node in enumerate(network.problem.node.tolist())}
    clock_mhz = np.concatenate([g.options.clock_mhz for g in network.problem.groups])
    cost_j = max(switch_cost_j, _NEARLY_EQUAL * float(table.cost_j.mean()))
    result = slowest.copy()
    for nodes in network.problem.dag.compute_nodes:
        chain = [decision_of[node] for node in nodes if node in decision_of]
        if chain:
            result[chain] = _chain(network.problem.group[chain], slowest[chain], table, clock_mhz, cost_j)
    return result


def _chain(group: Indices, slowest: Indices, table: OptionTable, clock_mhz: Indices, change_j: float) -> Indices:
    """Return the best options of one rank's instructions, none slower than allowed."""
    clocks, index = np.unique(clock_mhz, return_inverse=True)
    plans = np.arange(slowest.shape[1])
    total_j = np.zeros((len(clocks), len(plans)))
    came_from = []
    option_of = np.full((len(table.begin), len(clocks)), -1, dtype=np.intp)
    for number, (begin, last) in enumerate(zip(table.begin, table.last, strict=True)):
        option_of[number, index[begin : last + 1]] = np.arange(begin, last + 1)
    for row, allowed in zip(group, slowest, strict=True):
        cheapest = total_j.argmin(axis=0)
        changed_j = total_j[cheapest, plans] + change_j
        came_from.append(np.where(total_j <= changed_j, np.arange(len(clocks))[:, None], cheapest))
        options = option_of[row]
        own_j = np.where(options >= 0, table.cost_j[options], np.inf)[:, None]
        usable = options[:, None] <= allowed
        total_j = np.minimum(total_j, changed_j) + np.where(usable, own_j, np.inf)
    clock = total_j.argmin(axis=0)
    result = np.empty_like(slowest)
    for step in range(len(group) - 1, -1, -1):
        result[step] = option_of[group[step], clock]
        clock = came_from[step][clock, plans]
    return result
