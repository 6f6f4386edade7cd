"""Clocks that repeat after two micro-batches: where ranks alternate between clocks and no neighbour waits for it.

In the middle of 1F1B, rank r ends a forward when rank r + 1 ends a backward; anything else makes one of them wait. Let
y(r, w) be that moment for the w-th backward of a rank and the forward before it. Then nobody waits where

    forward(r, w)  =  y(r, w) - y(r - 1, w - 1),
    backward(r, w)  =  y(r - 1, w) - y(r, w).

So a rank may take longer than the period for one micro-batch and less for the next one, if its neighbours do so at the
moments that suit it. Where clocks repeat after two micro-batches, all that neighbours have to agree upon is

    d(r)  =  y(r, 1) - y(r, 0),

as the two differences add up to two periods. Rank r can then have the clocks of which

    forward(r, 0) + backward(r, 0)  <=  2 period - d(r - 1),      backward(r, 0) + forward(r, 1)  <=  d(r),
    forward(r, 1) + backward(r, 1)  <=  d(r - 1),                 backward(r, 1) + forward(r, 0)  <=  2 period - d(r).

The least energy follows rank by rank, for each of some values of d: dynamic programming. What has no clock to choose,
such as transfers, is left out: plans made of alternations are timed by their DAG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Array = TypeVar("Array", Floats, Indices)

_VALUES, _FARTHEST = 121, 0.03
"""So many values of d are tried, from 3 % below the period to 3 % above it."""
_MOST_FORWARDS = 12
"""So many options of a forward are tried, evenly over those on the lower hull: each pair of them takes time."""
_MOST_STEPS = 512
"""Periods are tried until periods times ranks that differ are so many."""


@dataclass(frozen=True)
class Work:
    """The options of an instruction: times, rising [s], and effective energies, falling [J]."""

    time_s: Floats
    cost_j: Floats

    def within(self, window_s: Floats) -> Indices:
        """Return the slowest options that fit windows, -1 where none does."""
        result: Indices = np.searchsorted(self.time_s, window_s * (1 + 1e-12), side="right") - 1
        return result

    def least_j(self, window_s: Floats) -> Floats:
        """Return the least energies in windows, infinite where no option fits."""
        option = self.within(window_s)
        return np.where(option < 0, np.inf, self.cost_j[option])


@dataclass(frozen=True)
class Alternation:
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


def evenly(values: Array, most: int) -> Array:
    """Return all values, or so many of them at even distances."""
    return values[np.linspace(0, len(values) - 1, min(len(values), most)).round().astype(np.intp)]


class Alternations:
    """Finds alternations of least energy, among the forwards and the values of d that are tried."""

    def __init__(self, ranks: Sequence[tuple[Work, Work]]) -> None:
        """Set up the search.

        Args:
            ranks: The options of each rank's forward and of its backward, along the pipeline.
        """
        self._ranks = ranks
        keys = [b"".join(np.concatenate([work.time_s, work.cost_j]).tobytes() for work in rank) for rank in ranks]
        self._like = [keys.index(key) for key in keys]

    def at(self, period_s: Floats) -> list[Alternation]:
        """Return the best alternation of each period that is tried; none for a period in which nothing fits.

        Args:
            period_s: Periods, rising [s]. Of many, some are tried, evenly.
        """
        tried_s = evenly(period_s, max(1, _MOST_STEPS // len(set(self._like))))
        found = [self._best(float(one_s)) for one_s in tried_s]
        return [one for one in found if one is not None]

    def _best(self, period_s: float) -> Alternation | None:
        """Return the alternation of least energy with a period; None if there is none."""
        value_s = period_s * np.linspace(1 - _FARTHEST, 1 + _FARTHEST, _VALUES)
        steps = {number: _Step(*self._ranks[number], value_s) for number in set(self._like)}
        least_j, came_from = np.zeros(_VALUES), []
        for like in self._like:
            through_j = least_j[:, None] + steps[like].cost_j
            came_from.append(through_j.argmin(axis=0))
            least_j = through_j.min(axis=0)
        after = int(least_j.argmin())
        cost_j = float(least_j[after])
        if np.isinf(cost_j):
            return None
        forwards, backwards = np.zeros((2, len(self._ranks), 2), dtype=np.intp)
        for rank, like in reversed(list(enumerate(self._like))):
            before = int(came_from[rank][after])
            forwards[rank], backwards[rank] = steps[like].options(before, after)
            after = before
        forward_s = np.array([work.time_s[own] for (work, _), own in zip(self._ranks, forwards, strict=True)])
        backward_s = np.array([work.time_s[own] for (_, work), own in zip(self._ranks, backwards, strict=True)])
        return Alternation(least_period_s(forward_s, backward_s), cost_j / 2, forwards, backwards)


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


class _Step:
    """From one d to the next one, over a rank.

    Attributes:
        cost_j: Shape (values, values): the rank's least energy for two micro-batches by d before and after it [J].
    """

    def __init__(self, forward: Work, backward: Work, value_s: Floats) -> None:
        self._forward, self._backward, self._value_s = forward, backward, value_s
        hull: Indices = np.array(lower_hull(forward.time_s, forward.cost_j), dtype=np.intp)
        self._kept = evenly(hull, _MOST_FORWARDS)
        self._backward_j = np.array([backward.least_j(value_s - time_s) for time_s in forward.time_s[self._kept]])
        self.cost_j = np.full((len(value_s), len(value_s)), np.inf)
        own_j = forward.cost_j[self._kept]
        # The values are symmetrical: two periods less the first one are the last one.
        for even, even_j in enumerate(self._backward_j[:, ::-1]):
            for odd, odd_j in enumerate(self._backward_j[: even + 1]):
                # Energies fall with time, so the smaller of two windows is that of more energy.
                cost_j = np.maximum(even_j[:, None], odd_j) + np.maximum(odd_j[:, None], even_j)
                np.minimum(self.cost_j, cost_j + (own_j[even] + own_j[odd]), out=self.cost_j)
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
