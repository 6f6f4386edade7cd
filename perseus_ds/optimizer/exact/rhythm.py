"""Rhythms: in the middle of an iteration each rank repeats its instructions, at the same clocks, in a common period.

Neighbouring ranks wait for each other in every micro-batch, so all of them share the period. For a given one, each
rank chooses alone: the clocks of least energy with which its work on one micro-batch fits. Where clocks repeat after
two micro-batches, neighbours choose together: see ``alternation``. For a deadline between two rhythms, an iteration
runs first in the faster one and then in the slower one. The relaxed problem mixes the clocks of each rank by itself
instead, which real clocks cannot do without making neighbours wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.exact.alternation import Alternation, Alternations, Work, evenly
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.rounding import durations_at, options_at, splice
from perseus_ds.pipeline.instruction import Instruction, Kind

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MOST_COMBINATIONS = 1500
"""So many combinations of a rank's clocks are kept, evenly over time."""
_PERIODS, _WORTHWHILE = 512, 0.001
"""So many periods are looked at; rhythms of two micro-batches are searched where those of one need more energy than a
bound by this fraction."""
_FEWEST_PAIRS = 4
"""A rank that seldom runs a forward and a backward in turns has no rhythm of two micro-batches."""


@dataclass(frozen=True)
class _Found:
    """Rhythms.

    Attributes:
        period_s: Shape (n,): time for one micro-batch [s].
        cost_j: Shape (n,): effective energy of all ranks for one micro-batch [J].
        options: Shape (decisions, n).
    """

    period_s: Floats
    cost_j: Floats
    options: Indices


class Rhythms:
    """The rhythms of a network that lie on the lower hull of energy over period, the fastest first."""

    def __init__(self, network: Network, table: OptionTable) -> None:
        self._network, self._table = network, table
        self._steady = np.zeros(network.decisions, dtype=bool)
        ranks = _ranks(network, table)
        for rank in ranks:
            self._steady[rank.steady] = True
        self._options = table.begin[network.problem.group][:, None]
        if ranks:
            found = self._repeating(ranks)
            others = self._alternating(ranks, self._improvable_s(ranks, found))
            period_s = np.concatenate([found.period_s, others.period_s])
            cost_j = np.concatenate([found.cost_j, others.cost_j])
            falling = _falling(period_s, cost_j)
            kept = falling[lower_hull(period_s[falling], cost_j[falling])]
            self._options = np.concatenate([found.options, others.options], axis=1)[:, kept]

    def _repeating(self, ranks: Sequence[_Rank]) -> _Found:
        """Return the rhythms of one micro-batch, those on the lower hull."""
        group = self._network.problem.group
        period_s = np.unique(np.concatenate([rank.combinations.time_s for rank in ranks]))
        period_s = period_s[period_s >= max(rank.combinations.time_s[0] for rank in ranks)]
        cost_j = np.sum([rank.combinations.cost_j[rank.combinations.within(period_s)] for rank in ranks], axis=0)
        kept = lower_hull(period_s, cost_j)
        period_s, cost_j = period_s[kept], cost_j[kept]
        options = np.repeat(self._options, len(period_s), axis=1)
        for rank in ranks:
            chosen = rank.combinations.options[rank.combinations.within(period_s)]
            for column, one in enumerate(rank.groups):
                options[group == one] = chosen[:, column]
        return _Found(period_s, cost_j, options)

    def _improvable_s(self, ranks: Sequence[_Rank], found: _Found) -> Floats:
        """Return periods for which mixtures of rhythms need more than if each rank mixed its clocks by itself."""
        waiting_w = self._network.problem.waiting_energy_j(1.0)
        # Beyond the period of least energy, waiting included, there is nothing to plan for.
        last = (found.cost_j + waiting_w * found.period_s).argmin()
        period_s = np.unique(np.linspace(found.period_s[0], found.period_s[last], _PERIODS))
        bound_j = np.sum([rank.combinations.hull_j(period_s) for rank in ranks], axis=0)
        above_j = np.interp(period_s, found.period_s, found.cost_j) - bound_j
        result: Floats = period_s[above_j > _WORTHWHILE * (bound_j + waiting_w * period_s)]
        return result

    def _alternating(self, ranks: Sequence[_Rank], period_s: Floats) -> _Found:
        """Return rhythms of two micro-batches, with periods among some."""
        found: list[Alternation] = []
        if len(period_s) and all(len(rank.pairs) >= _FEWEST_PAIRS for rank in ranks):
            works = [(self._work(forward), self._work(backward)) for forward, backward in (r.groups for r in ranks)]
            found = Alternations(works).at(period_s)
        options = np.repeat(self._options, len(found), axis=1)
        for number, one in enumerate(found):
            for rank, forwards, backwards in zip(ranks, one.forwards, one.backwards, strict=True):
                forward, backward, is_odd = rank.pairs.T
                options[forward, number] += forwards[is_odd]
                options[backward, number] += backwards[is_odd]
        return _Found(np.array([one.period_s for one in found]), np.array([one.cost_j for one in found]), options)

    def _work(self, group: int) -> Work:
        own = slice(self._table.begin[group], self._table.last[group] + 1)
        return Work(self._table.time_s[own], self._table.cost_j[own])

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
        kept = evenly(_falling(time_s, cost_j), _MOST_COMBINATIONS)
        self.time_s, self.cost_j, self.options = time_s[kept], cost_j[kept], options[kept]

    def joined(self, other: _Combinations) -> _Combinations:
        """Return the combinations of both."""
        mine, theirs = np.divmod(np.arange(len(self.time_s) * len(other.time_s)), len(other.time_s))
        options = np.concatenate((self.options[mine], other.options[theirs]), axis=1)
        return _Combinations(
            self.time_s[mine] + other.time_s[theirs], self.cost_j[mine] + other.cost_j[theirs], options
        )

    def hull_j(self, period_s: Floats) -> Floats:
        """Return the energy for each period of the cheapest mixture of combinations."""
        kept = lower_hull(self.time_s, self.cost_j)
        result: Floats = np.interp(period_s, self.time_s[kept], self.cost_j[kept])
        return result

    def within(self, period_s: Floats) -> Indices:
        """Return for each period the combination of least energy that fits it; the fastest where none does."""
        found = np.searchsorted(self.time_s, period_s * (1 + 1e-12), side="right") - 1
        result: Indices = np.maximum(found, 0)
        return result


def _falling(time_s: Floats, cost_j: Floats) -> Indices:
    """Return the places of those that need less than all that are as fast or faster, by rising time."""
    order = np.lexsort((cost_j, time_s))
    least_j = np.minimum.accumulate(cost_j[order])
    result: Indices = order[np.concatenate(([True], least_j[1:] < least_j[:-1]))]
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


@dataclass(frozen=True)
class _Rank:
    """What a rank repeats.

    Attributes:
        groups: Of its instructions, each of which it runs several times.
        combinations: Of their options.
        steady: Decisions that are part of a rhythm.
        pairs: Shape (pairs, 3): a forward, the backward that follows, and 1 if that is one of an odd micro-batch. No
            rows where the rank repeats anything else.
    """

    groups: Indices
    combinations: _Combinations
    steady: Indices
    pairs: Indices


def _ranks(network: Network, table: OptionTable) -> list[_Rank]:
    """Return what each rank repeats, of those that repeat anything, along the pipeline."""
    problem = network.problem
    decision_of = np.full(len(problem.dag.nodes), -1, dtype=np.intp)
    decision_of[problem.node] = np.arange(network.decisions)
    found = []
    for nodes in problem.dag.compute_nodes:
        decisions = decision_of[list(nodes)]
        decisions = decisions[decisions >= 0]
        groups, count = np.unique(problem.group[decisions], return_counts=True)
        # What a rank does once, such as the tail, is not part of its rhythm.
        repeated = groups[count > 1]
        if not len(repeated):
            continue
        steady = decisions[_repeats_all(problem.group[decisions], len(repeated))]
        pairs = []
        if [problem.groups[group].kind for group in repeated] == [Kind.FORWARD, Kind.BACKWARD]:
            for pair in pairwise(decisions):
                work = problem.dag.nodes[problem.node[pair[1]]].work
                if isinstance(work, Instruction) and np.array_equal(problem.group[list(pair)], repeated):
                    pairs.append([*pair, work.micro_batch % 2])
        shape = np.array(pairs, dtype=np.intp).reshape(-1, 3)
        found.append(_Rank(repeated, _all_combinations(table, repeated), steady, shape))
    return sorted(found, key=lambda rank: problem.groups[rank.groups[0]].stage)
