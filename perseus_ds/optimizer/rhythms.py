"""Rhythms: in the middle of 1F1B all ranks repeat their clocks in one period, after one micro-batch or after two.

There, rank r ends a forward when rank r + 1 ends a backward; anything else makes one of them wait. Let y(r, w) be that
time for the w-th backward of a rank and the forward before it. Then nobody waits where

    forward(r, w)  =  y(r, w) - y(r - 1, w - 1),
    backward(r, w)  =  y(r - 1, w) - y(r, w).

So a rank may take longer than the period for one micro-batch and less for the next one, if its neighbours do so when
it suits the rank. Where clocks repeat after two micro-batches, all that neighbours have to agree upon is

    d(r)  =  y(r, 1) - y(r, 0),

as the two differences add up to two periods. Rank r can then have the clocks of which

    forward(r, 0) + backward(r, 0)  <=  2 period - d(r - 1),      backward(r, 0) + forward(r, 1)  <=  d(r),
    forward(r, 1) + backward(r, 1)  <=  d(r - 1),                 backward(r, 1) + forward(r, 0)  <=  2 period - d(r).

The least energy follows rank by rank, for each of some values of d: dynamic programming. Where every d is the period,
ranks choose alone, and their clocks repeat after one micro-batch. What has no clock to choose, such as transfers, is
left out: plans with rhythms are timed by their DAG.

For a deadline between two rhythms, an iteration runs first in the faster one and then in the slower one. The relaxed
problem mixes the clocks of each rank by itself instead, which real clocks cannot do without making neighbours wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices
from perseus_ds.optimizer.search import durations_at, evenly, options_at, splice
from perseus_ds.pipeline.instruction import Instruction, Kind

_PERIODS = 512
"""So many periods are looked at."""
_WORTHWHILE = 0.001
"""Rhythms of two micro-batches are searched where those of one need more energy than a bound by this fraction."""
_VALUES, _FARTHEST = 121, 0.03
"""So many values of d are tried, from 3 % below the period to 3 % above it."""
_MOST_FORWARDS = 12
"""So many options of a forward are tried, evenly over those on the lower hull: each pair of them takes time."""
_MOST_STEPS = 128
"""Rhythms of two micro-batches are searched for so many periods times ranks that differ."""
_FEWEST_PAIRS = 4
"""A rank that seldom runs a forward and a backward in turns has no rhythm."""
_FITS = 1 + 1e-12
"""Times are sums in different orders."""


@dataclass(frozen=True)
class Work:
    """The options of an instruction: times, rising [s], and effective energies, falling [J]."""

    time_s: Floats
    cost_j: Floats

    def within(self, window_s: Floats) -> Indices:
        """Return the slowest options that fit windows, -1 where none does."""
        result: Indices = np.searchsorted(self.time_s, window_s * _FITS, side="right") - 1
        return result

    def least_j(self, window_s: Floats) -> Floats:
        """Return the least energies in windows, infinite where no option fits."""
        option = self.within(window_s)
        return np.where(option < 0, np.inf, self.cost_j[option])


@dataclass(frozen=True)
class Rhythm:
    """Clocks of all ranks.

    Attributes:
        period_s: The least time for one micro-batch in which they fit [s].
        cost_j: Effective energy of all ranks for one micro-batch [J].
        forwards: Shape (ranks, 2): the options of forwards before even and before odd backwards.
        backwards: Shape (ranks, 2): those of even and of odd backwards.
    """

    period_s: float
    cost_j: float
    forwards: Indices
    backwards: Indices


class RhythmSearch:
    """Finds rhythms of least energy, among the periods, forwards and values of d that are tried."""

    def __init__(self, ranks: Sequence[tuple[Work, Work]]) -> None:
        """Take the options of each rank's forward and of its backward, along the pipeline."""
        self._ranks = ranks
        keys = [b"".join(np.concatenate([work.time_s, work.cost_j]).tobytes() for work in rank) for rank in ranks]
        self._like = [keys.index(key) for key in keys]

    def up_to(self, slowdown: float, waiting_w: float) -> list[Rhythm]:
        """Return the rhythms on the lower hull of energy over period, the fastest first.

        Args:
            slowdown: The longest period, in shortest ones.
            waiting_w: What all ranks draw while they wait [W].
        """
        shortest_s = max(float(forward.time_s[0] + backward.time_s[0]) for forward, backward in self._ranks)
        period_s = np.linspace(shortest_s, shortest_s * slowdown, _PERIODS)
        of_rank_j = [_alone_j(*rank, period_s).min(axis=0) for rank in self._ranks]
        cost_j = np.sum(of_rank_j, axis=0)
        hull = lower_hull(period_s, cost_j)
        found = [self.repeating(float(one_s)) for one_s in period_s[hull]]
        # Below this, each rank would have to mix its clocks by itself.
        bound_j = np.sum([_on_hull(period_s, one_j) for one_j in of_rank_j], axis=0)
        above_j = _on_hull(period_s, cost_j) - bound_j
        worthwhile_s = period_s[above_j > _WORTHWHILE * (bound_j + waiting_w * period_s)]
        tried_s = worthwhile_s[evenly(len(worthwhile_s), max(1, _MOST_STEPS // len(set(self._like))))]
        found += filter(None, map(self.alternating, tried_s.tolist()))
        found.sort(key=lambda one: (one.period_s, one.cost_j))
        least_j = np.minimum.accumulate([one.cost_j for one in found])
        falling = [one for number, one in enumerate(found) if number == 0 or one.cost_j < least_j[number - 1]]
        kept = lower_hull(np.array([one.period_s for one in falling]), np.array([one.cost_j for one in falling]))
        return [falling[number] for number in kept]

    def repeating(self, period_s: float) -> Rhythm:
        """Return the rhythm of one micro-batch of least energy with a period in which every rank's work fits."""
        window_s = np.array([period_s])
        forwards = np.array([_alone_j(*rank, window_s).argmin() for rank in self._ranks])
        own_s = [work.time_s[own] for (work, _), own in zip(self._ranks, forwards, strict=True)]
        backwards = np.concatenate(
            [work.within(window_s - time_s) for (_, work), time_s in zip(self._ranks, own_s, strict=True)]
        )
        return self._rhythm(np.stack([forwards, forwards], axis=1), np.stack([backwards, backwards], axis=1))

    def alternating(self, period_s: float) -> Rhythm | None:
        """Return the rhythm of two micro-batches of least energy with a period; None if there is none."""
        value_s = period_s * np.linspace(1 - _FARTHEST, 1 + _FARTHEST, _VALUES)
        passages = {number: _Passage(*self._ranks[number], value_s) for number in set(self._like)}
        least_j, came_from = np.zeros(_VALUES), []
        for like in self._like:
            through_j = least_j[:, None] + passages[like].cost_j
            came_from.append(through_j.argmin(axis=0))
            least_j = through_j.min(axis=0)
        after = int(least_j.argmin())
        if np.isinf(least_j[after]):
            return None
        forwards, backwards = np.zeros((2, len(self._ranks), 2), dtype=np.intp)
        for rank, like in reversed(list(enumerate(self._like))):
            before = int(came_from[rank][after])
            forwards[rank], backwards[rank] = passages[like].options(before, after)
            after = before
        return self._rhythm(forwards, backwards)

    def _rhythm(self, forwards: Indices, backwards: Indices) -> Rhythm:
        chosen = list(zip(self._ranks, forwards, backwards, strict=True))
        cost_j = sum(float(f.cost_j[own].sum() + b.cost_j[theirs].sum()) for (f, b), own, theirs in chosen) / 2
        forward_s = np.array([work.time_s[own] for (work, _), own, _ in chosen])
        backward_s = np.array([work.time_s[own] for (_, work), _, own in chosen])
        return Rhythm(least_period_s(forward_s, backward_s), cost_j, forwards, backwards)


def least_period_s(forward_s: Floats, backward_s: Floats) -> float:
    """Return the least period in which clocks fit, with any d between what the ranks before and after it need.

    Args:
        forward_s: Shape (ranks, 2): times of the forwards before even and before odd backwards.
        backward_s: Likewise: times of even and of odd backwards.
    """
    same_s, next_s = forward_s + backward_s, forward_s[:, ::-1] + backward_s
    nothing_s = np.zeros((1, 2))
    # Of d, and of two periods less d: what the rank after it needs, and what the one before it does.
    needed_s = np.maximum(np.vstack([same_s[:, ::-1], nothing_s]), np.vstack([nothing_s, next_s]))
    return float(needed_s.sum(axis=1).max()) / 2


def _alone_j(forward: Work, backward: Work, period_s: Floats) -> Floats:
    """Return a rank's energy for a micro-batch, infinite where nothing fits: by its forward's option, by period."""
    result: Floats = forward.cost_j[:, None] + backward.least_j(period_s - forward.time_s[:, None])
    return result


def _on_hull(period_s: Floats, cost_j: Floats) -> Floats:
    kept = lower_hull(period_s, cost_j)
    return np.interp(period_s, period_s[kept], cost_j[kept])


class _Passage:
    """From one d to the next one, over a rank.

    Attributes:
        cost_j: Shape (values, values): the rank's least energy for two micro-batches by d before and after it [J].
    """

    def __init__(self, forward: Work, backward: Work, value_s: Floats) -> None:
        self._forward, self._backward, self._value_s = forward, backward, value_s
        hull = np.array(lower_hull(forward.time_s, forward.cost_j), dtype=np.intp)
        self._kept = hull[evenly(len(hull), _MOST_FORWARDS)]
        self._backward_j = np.array([backward.least_j(value_s - time_s) for time_s in forward.time_s[self._kept]])
        self.cost_j = np.full((len(value_s), len(value_s)), np.inf)
        cost_j, second_j = np.empty((2, *self.cost_j.shape))
        own_j = forward.cost_j[self._kept]
        # The values are symmetrical: two periods less the first one are the last one.
        for even, even_j in enumerate(self._backward_j[:, ::-1]):
            for odd, odd_j in enumerate(self._backward_j[: even + 1]):
                # Energies fall with time, so the smaller of two windows is that of more energy.
                forwards_j = own_j[even] + own_j[odd]
                np.maximum((even_j + forwards_j)[:, None], odd_j + forwards_j, out=cost_j)
                cost_j += np.maximum(odd_j[:, None], even_j, out=second_j)
                np.minimum(self.cost_j, cost_j, out=self.cost_j)
        # With even and odd exchanged, each d is two periods less d.
        self.cost_j = np.minimum(self.cost_j, self.cost_j[::-1, ::-1])

    def options(self, before: int, after: int) -> tuple[Indices, Indices]:
        """Return the two forwards and the two backwards of least energy."""
        own_j, backward_j, value_s = self._forward.cost_j[self._kept], self._backward_j, self._value_s
        cost_j = np.maximum(backward_j[:, None, -1 - before], backward_j[:, after])
        cost_j += np.maximum(backward_j[:, before], backward_j[:, None, -1 - after]) + own_j[:, None] + own_j
        forwards = self._kept[list(np.unravel_index(cost_j.argmin(), cost_j.shape))]
        even_s, odd_s = self._forward.time_s[forwards]
        windows_s = [
            min(value_s[-1 - before] - even_s, value_s[after] - odd_s),
            min(value_s[before] - odd_s, value_s[-1 - after] - even_s),
        ]
        return forwards, self._backward.within(np.array(windows_s))


def mixed_into(network: Network, event_s: Floats, deadline_s: Floats) -> Floats:
    """Replace the middle of plans by the mixture of two neighbouring rhythms that meets their deadlines.

    Args:
        network: The events.
        event_s: Plans, shape (events, plans) [s].
        deadline_s: Shape (plans,), rising, each >= ``T_min`` [s].

    Returns:
        Event times, shape (events, plans) [s]. A plan that is faster than every rhythm is in part at the fastest
        clocks. The plans as they are where ranks do not run a forward and a backward in turns.
    """
    pairs = _pairs_by_rank(network)
    if min(map(len, pairs), default=0) < _FEWEST_PAIRS:
        return event_s
    problem = network.problem
    works = [Work(group.options.time_s, group.cost_j) for group in problem.groups]
    ranks = [(works[forward], works[backward]) for forward, backward in (problem.group[own[0, :2]] for own in pairs)]
    slowdown = max(1.0, float(deadline_s[-1]) / problem.t_min_s)
    found = RhythmSearch(ranks).up_to(slowdown, problem.waiting_power_w)
    steady = np.unique(np.concatenate([own[:, :2].ravel() for own in pairs]))
    rhythm_s = np.zeros((network.decisions, len(found)))
    for number, one in enumerate(found):
        for own, (forward, backward), forwards, backwards in zip(
            pairs, ranks, one.forwards, one.backwards, strict=True
        ):
            rhythm_s[own[:, 0], number] = forward.time_s[forwards][own[:, 2]]
            rhythm_s[own[:, 1], number] = backward.time_s[backwards][own[:, 2]]
    duration_s = durations_at(network, options_at(network, event_s))

    def in_rhythm(number: Indices) -> Floats:
        result = duration_s.copy()
        result[steady] = rhythm_s[steady][:, number]
        return result

    # The slowest rhythm that fits, -1 where none does, and the fastest one that does not.
    fits, late = np.full(len(deadline_s), -1), np.full(len(deadline_s), len(found))
    while np.any(late - fits > 1):
        tried = (fits + late) // 2
        fitting = network.earliest_s(in_rhythm(np.maximum(tried, 0)))[-1] <= deadline_s
        fits, late = np.where(fitting & (tried >= 0), tried, fits), np.where(fitting | (tried < 0), late, tried)
    slow_s = in_rhythm(np.minimum(late, len(found) - 1))
    fast_s = in_rhythm(np.maximum(fits, 0))
    fast_s[:, fits < 0] = network.least_s[:, None]
    return splice(network, slow_s, fast_s, deadline_s, slow_first=False)


def _pairs_by_rank(network: Network) -> list[Indices]:
    """Return by rank, along the pipeline, its forwards that a backward follows.

    Returns:
        For each rank that repeats anything, an array of shape (pairs, 3): the forward's and the backward's decision,
        and 1 if they are of an odd backward. No rows where the rank repeats anything else.
    """
    problem = network.problem
    found: list[tuple[int, Indices]] = []
    for decisions in problem.rank_decisions:
        groups, count = np.unique(problem.group[decisions], return_counts=True)
        # What a rank does once, such as the tail, is not part of its rhythm.
        repeated = groups[count > 1]
        if not len(repeated):
            continue
        pairs = []
        if [problem.groups[group].kind for group in repeated] == [Kind.FORWARD, Kind.BACKWARD]:
            for pair in pairwise(decisions):
                work = problem.dag.nodes[problem.node[pair[1]]].work
                if isinstance(work, Instruction) and np.array_equal(problem.group[list(pair)], repeated):
                    pairs.append([*pair, work.micro_batch % 2])
        found.append((problem.groups[repeated[0]].stage, np.array(pairs, dtype=np.intp).reshape(-1, 3)))
    return [pairs for _, pairs in sorted(found, key=lambda rank: rank[0])]
