"""Rhythms: in the middle of an iteration each rank repeats its instructions, each at one clock, in a common period.

Neighbouring ranks wait for each other in every micro-batch, so all of them share the period. For a given one, each
rank chooses alone: the clocks of least energy with which its work on one micro-batch fits. For a deadline between two
rhythms, an iteration runs first in the faster one and then in the slower one. The relaxed problem mixes the clocks of
each rank by itself instead, which real clocks cannot do without making neighbours wait.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.rounding import durations_at, options_at, splice

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MOST_COMBINATIONS = 1500
"""So many combinations of a rank's clocks are kept, evenly over time."""


class Rhythms:
    """The rhythms of a network that lie on the lower hull of energy over period, the fastest first."""

    def __init__(self, network: Network, table: OptionTable) -> None:
        self._network, self._table = network, table
        decision_of = np.full(len(network.problem.dag.nodes), -1, dtype=np.intp)
        decision_of[network.problem.node] = np.arange(network.decisions)
        self._steady = np.zeros(network.decisions, dtype=bool)
        of_ranks = []
        for nodes in network.problem.dag.compute_nodes:
            decisions = decision_of[list(nodes)]
            decisions = decisions[decisions >= 0]
            groups, count = np.unique(network.problem.group[decisions], return_counts=True)
            # What a rank does once, such as the tail, is not part of its rhythm.
            repeated = groups[count > 1]
            if len(repeated):
                of_ranks.append((repeated, _all_combinations(table, repeated)))
                self._steady[decisions[_repeats_all(network.problem.group[decisions], len(repeated))]] = True
        self._options = self._on_hull(of_ranks)

    def _on_hull(self, of_ranks: list[tuple[Indices, _Combinations]]) -> Indices:
        """Return the option of every decision, shape (decisions, rhythms)."""
        group = self._network.problem.group
        if not of_ranks:
            return self._table.begin[group][:, None]
        period_s = np.unique(np.concatenate([combinations.time_s for _, combinations in of_ranks]))
        period_s = period_s[period_s >= max(combinations.time_s[0] for _, combinations in of_ranks)]
        cost_j = np.sum([combinations.cost_j[combinations.within(period_s)] for _, combinations in of_ranks], axis=0)
        period_s = period_s[lower_hull(period_s, cost_j)]
        result = np.repeat(self._table.begin[group][:, None], len(period_s), axis=1)
        for groups, combinations in of_ranks:
            chosen = combinations.options[combinations.within(period_s)]
            for column, one in enumerate(groups):
                result[group == one] = chosen[:, column]
        return result

    def mixed_into(self, event_s: Floats, deadline_s: Floats) -> Floats:
        """Replace the middle of plans by the mixture of two neighbouring rhythms that meets their deadlines.

        Args:
            event_s: Plans, shape (events, plans) [s].
            deadline_s: Shape (plans,), each >= ``T_min`` [s].

        Returns:
            Event times, shape (events, plans) [s]. A plan that is faster than every rhythm is in part at the fastest
            clocks.
        """
        network, table, count = self._network, self._table, self._options.shape[1]
        duration_s = durations_at(network, table, options_at(network, table, event_s))
        # The slowest rhythm that fits, -1 where none does, and the fastest one that does not.
        fits, late = np.full(len(deadline_s), -1), np.full(len(deadline_s), count)
        while np.any(late - fits > 1):
            tried = (fits + late) // 2
            fitting = network.earliest_s(self._in(duration_s, np.maximum(tried, 0)))[-1] <= deadline_s
            fits, late = np.where(fitting & (tried >= 0), tried, fits), np.where(fitting | (tried < 0), late, tried)
        slow_s = self._in(duration_s, np.minimum(late, count - 1))
        fast_s = self._in(duration_s, np.maximum(fits, 0))
        fast_s[:, fits < 0] = network.least_s[:, None]
        return splice(network, slow_s, fast_s, deadline_s, slow_first=False)

    def _in(self, duration_s: Floats, rhythm: Indices) -> Floats:
        """Return the durations of plans whose middles have these rhythms, one for each plan or one for all."""
        result = duration_s.copy()
        result[: self._network.decisions][self._steady] = self._table.time_s[self._options[self._steady][:, rhythm]]
        return result


class _Combinations:
    """Combinations of a rank's options, none as slow as another one of no more energy; rising in time.

    Attributes:
        time_s: Shape (n,): time of all its groups together.
        cost_j: Shape (n,): effective energy of all of them.
        options: Shape (n, groups).
    """

    def __init__(self, time_s: Floats, cost_j: Floats, options: Indices) -> None:
        order = np.lexsort((cost_j, time_s))
        falling = np.minimum.accumulate(cost_j[order])
        kept = order[np.concatenate(([True], falling[1:] < falling[:-1]))]
        if len(kept) > _MOST_COMBINATIONS:
            kept = kept[np.unique(np.linspace(0, len(kept) - 1, _MOST_COMBINATIONS).round().astype(np.intp))]
        self.time_s, self.cost_j, self.options = time_s[kept], cost_j[kept], options[kept]

    def joined(self, other: _Combinations) -> _Combinations:
        """Return the combinations of both."""
        mine, theirs = np.divmod(np.arange(len(self.time_s) * len(other.time_s)), len(other.time_s))
        options = np.concatenate((self.options[mine], other.options[theirs]), axis=1)
        return _Combinations(
            self.time_s[mine] + other.time_s[theirs], self.cost_j[mine] + other.cost_j[theirs], options
        )

    def within(self, period_s: Floats) -> Indices:
        """Return for each period the combination of least energy that fits it; the fastest where none does."""
        found = np.searchsorted(self.time_s, period_s * (1 + 1e-12), side="right") - 1
        result: Indices = np.maximum(found, 0)
        return result


def _all_combinations(table: OptionTable, groups: Indices) -> _Combinations:
    options = [np.arange(table.begin[group], table.last[group] + 1) for group in groups]
    return reduce(
        _Combinations.joined, [_Combinations(table.time_s[own], table.cost_j[own], own[:, None]) for own in options]
    )


def _repeats_all(groups: Indices, kinds: int) -> Indices:
    """Return the places of a rank's program at which it does all of its kinds of work one after the other."""
    places = np.arange(max(0, len(groups) - kinds + 1))[:, None] + np.arange(kinds)
    windows = np.sort(groups[places], axis=1)
    return np.unique(places[(np.diff(windows, axis=1) > 0).all(axis=1)])
