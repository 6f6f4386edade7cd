"""Chooses measured clocks from the relaxed optimum, for many deadlines at once.

A set of plans is held as the times of all events, shape (events, plans): each instruction then runs
at the slowest clock that fits between its events. Times that leave every arc its least duration are
a plan that meets its deadline.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_SNAP = 2e-5
"""An error of the relaxed optimum's times up to this fraction of a typical instruction causes no faster clock."""


def options_at(network: Network, table: OptionTable, event_s: Floats) -> Indices:
    """Return the option of every decision, shape (decisions, plans), indices into the table."""
    n = network.decisions
    window_s = event_s[network.head[:n]] - event_s[network.tail[:n]]
    return table.longest_within(network.problem.group[:, None], window_s)


def durations_at(network: Network, table: OptionTable, options: Indices) -> Floats:
    """Return the duration of every arc, shape (arcs, plans) [s]."""
    duration_s = np.repeat(network.least_s[:, None], options.shape[1], axis=1)
    duration_s[: network.decisions] = table.time_s[options]
    return duration_s


def round_late(network: Network, table: OptionTable, target_s: Floats, deadline_s: Floats) -> Floats:
    """Choose clocks from the end of the iteration to its start, each to start at its target or later.

    The part of its window that an instruction cannot use is added to the window of the one before it, so that
    little is lost along a path however coarse the clocks are.

    Args:
        network: The events.
        table: The options to choose among.
        target_s: Shape (events, plans): when events should happen, from the relaxed optimum [s].
        deadline_s: Shape (plans,), each >= ``T_min`` [s].

    Returns:
        Event times, shape (events, plans) [s].
    """
    n = network.decisions
    group = network.problem.group[:, None]
    earliest_s = network.earliest_s(network.least_s)
    target_s = np.maximum(target_s - _SNAP * float(network.least_s[:n].mean()), earliest_s[:, None])
    result = np.zeros_like(target_s)
    result[-1] = deadline_s
    for level in network.backward:
        arcs = level.arcs
        least_s = network.least_s[arcs][:, None]
        begin_s = result[network.head[arcs]] - least_s
        chosen = arcs < n
        decisions = arcs[chosen]
        if len(decisions):
            window_s = result[network.head[decisions]] - target_s[network.tail[decisions]]
            options = table.longest_within(group[decisions], window_s)
            begin_s[chosen] = result[network.head[decisions]] - table.time_s[options]
        result[level.events] = np.minimum.reduceat(begin_s, level.first, axis=0)
    result[0] = 0.0
    return result


def splice(network: Network, slow_s: Floats, fast_s: Floats, deadline_s: Floats, *, slow_first: bool) -> Floats:
    """Run as a slower plan does up to some moment of the iteration, then as a faster one (or the reverse).

    The middle of an iteration repeats the same sequence of instructions. Where a deadline lies between those of
    two good plans, running a part of the iteration as in each of them is often better than one plan throughout.
    The moment is the latest (or earliest) that meets the deadline.

    Args:
        network: The events.
        slow_s: Shape (arcs, plans): durations in the slower plans [s].
        fast_s: Shape (arcs, plans): durations in the faster plans, which meet the deadlines [s].
        deadline_s: Shape (plans,) [s].
        slow_first: Whether the slower part comes first.

    Returns:
        Event times, shape (events, plans) [s].
    """
    order = network.position if slow_first else 1.0 - network.position
    low, high = np.full(len(deadline_s), -1e-9), np.full(len(deadline_s), 1.0)
    for _ in range(10):
        middle = (low + high) / 2
        duration_s = np.where(order[:, None] <= middle, slow_s, fast_s)
        fits = network.earliest_s(duration_s)[-1] <= deadline_s
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    duration_s = np.where(order[:, None] <= low, slow_s, fast_s)
    result = network.latest_s(duration_s, deadline_s)
    result[0] = 0.0
    return result
