"""Improves plans with rhythms, which repeat one clock for each (stage, kind).

If the instructions of one micro-batch take the same period on every rank, each rank can choose its clocks
independently: those of least energy that fit into the period. Rounding the relaxed optimum seldom finds them, because
it considers one instruction at a time.

For a deadline between those of two rhythms, an iteration runs first in the faster one and then in the slower one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices, InstructionGroup
from perseus_ds.optimizer.search import durations_at, options_at, splice

_PERIODS = 512
"""Number of periods evaluated."""
_FEWEST = 4
"""Minimum number of instructions in the steady state of a rank."""
_FITS = 1 + 1e-12
"""Tolerance for times that are summed in different orders."""


def mixed_into(network: Network, event_s: Floats, deadline_s: Floats) -> Floats:
    """Replace the middle of plans by a mixture of two rhythms that meets the deadlines.

    A plan that is faster than every rhythm runs partly at the fastest clocks. If no rank has a steady state, the plans
    are returned unchanged.

    Args:
        network: The events.
        event_s: Plans, shape (events, plans) [s].
        deadline_s: Shape (plans,), rising, each >= ``T_min`` [s].

    Returns:
        Event times, shape (events, plans) [s].
    """
    problem = network.problem
    ranks = []
    for decisions in problem.rank_decisions:
        own = decisions[_middle(problem.group[decisions])]
        if len(own):
            groups = np.unique(problem.group[own])
            ranks.append((own, groups, *joint_options([problem.groups[group] for group in groups])))
    if not ranks:
        return event_s
    shortest_s = max(float(time_s[0]) for _, _, time_s, _, _ in ranks)
    period_s = np.linspace(shortest_s, shortest_s * max(1.0, float(deadline_s[-1]) / problem.t_min_s), _PERIODS)
    steady, by_period_s, total_j = [], [], np.zeros(_PERIODS)
    for own, groups, time_s, cost_j, chosen in ranks:
        row = np.searchsorted(time_s, period_s * _FITS, side="right") - 1
        total_j += cost_j[row]
        group_s = problem.table.time_s[problem.table.begin[groups][:, None] + chosen[row].T]
        steady.append(own)
        by_period_s.append(group_s[np.searchsorted(groups, problem.group[own])])
    kept = lower_hull(period_s, total_j)
    middle, rhythm_s = np.concatenate(steady), np.concatenate(by_period_s)[:, kept]
    duration_s = durations_at(network, options_at(network, event_s))

    def in_rhythm(number: Indices) -> Floats:
        result = duration_s.copy()
        result[middle] = rhythm_s[:, number]
        return result

    # The index of the slowest rhythm that fits, -1 if none does, and of the fastest one that does not.
    fits, late = np.full(len(deadline_s), -1), np.full(len(deadline_s), len(kept))
    while np.any(late - fits > 1):
        tried = (fits + late) // 2
        fitting = network.earliest_s(in_rhythm(np.maximum(tried, 0)))[-1] <= deadline_s
        fits, late = np.where(fitting & (tried >= 0), tried, fits), np.where(fitting | (tried < 0), late, tried)
    slow_s = in_rhythm(np.minimum(late, len(kept) - 1))
    fast_s = in_rhythm(np.maximum(fits, 0))
    fast_s[:, fits < 0] = network.least_s[:, None]
    return splice(network, slow_s, fast_s, deadline_s, slow_first=False)


def _middle(group: Indices) -> Indices:
    """Return the places of a rank's steady state, given the group at each place."""
    groups, first, count = np.unique(group, return_index=True, return_counts=True)
    last = len(group) - 1 - np.unique(group[::-1], return_index=True)[1]
    # An instruction that a rank executes once, such as the tail, is not part of its steady state.
    repeated = count > 1
    if repeated.sum() < 2:
        return np.arange(0)
    begin, end = max(int(first[repeated].max()) - 1, 0), int(last[repeated].min()) + 2
    places = np.arange(begin, min(end, len(group)) if end - begin >= _FEWEST else begin)
    return places[np.isin(group[places], groups[repeated])]


def joint_options(groups: Sequence[InstructionGroup]) -> tuple[Floats, Floats, Indices]:
    """Return the Pareto-optimal combinations of one option for each group, the fastest first.

    Returns:
        Their total times, rising [s], total effective energies, falling [J], and options, shape (combinations, groups).
    """
    time_s, cost_j, chosen = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.intp)
    for group in groups:
        both_s = (time_s[:, None] + group.options.time_s).ravel()
        both_j = (cost_j[:, None] + group.cost_j).ravel()
        order = np.lexsort((both_j, both_s))
        least_j = np.minimum.accumulate(both_j[order])
        order = order[np.append(True, both_j[order][1:] < least_j[:-1])]
        before, own = np.divmod(order, len(group.cost_j))
        time_s, cost_j, chosen = both_s[order], both_j[order], np.column_stack([chosen[before], own])
    return time_s, cost_j, chosen
