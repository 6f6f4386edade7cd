"""The cheapest assignment of plans to the hours of a signal, exactly, with its bound.

A job runs from now until its steps are done, which must be before a deadline. In every hour it divides its time among
plans, each with a rate [steps/s] and a power [W], and a price is paid for the energy. For a given hour in which the job
ends, that is a linear programme over (hour, plan). It is solved exactly by filling the segments of the hulls of all
hours in the order of their cost for a step, up to one marginal cost, at which as many steps are done as are needed.

The hour in which the job ends is chosen by branch and bound: for any marginal cost, the Lagrangian gives a lower bound
of the cost for all hours at once. The hour of the lowest bound is solved, and its marginal cost improves the bounds,
until none is below the best cost found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from perseus_ds.policy.hourly_hulls import Hours, Hull, LastHour, Option, Places
from perseus_ds.policy.signal_values import Numbers

_DONE = -2
# Rates, times and steps are sums of many numbers.
_TOLERANCE = 1e-9
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Solution:
    """The cheapest way to do the steps in time.

    Attributes:
        cost: Sum over time of price times energy [price x J]; nothing that ends in time costs less.
        last: The hour in which the job ends.
        marginal: What a step costs in the hours that are divided between plans.
        parts: Returns when each part begins and the last one ends [Unix seconds], shape (parts + 1,), and what runs in
            each, ``HALT`` if nothing does, shape (parts,).
    """

    cost: float
    last: int
    marginal: float
    parts: Callable[[], tuple[Numbers, Places]]


def cheapest(
    options: Sequence[Option], edges_s: Numbers, prices: Numbers, steps: float, near: Solution | None = None
) -> Solution | None:
    """Return the cheapest assignment of plans to hours; None if there is not enough time.

    Args:
        options: The plans, and ``HALT`` where standing still is allowed.
        edges_s: Edges of the hours, from now to the deadline [Unix seconds], shape (hours + 1,).
        prices: For each hour, the price of energy, in any unit, shape (hours,).
        steps: How many to do, > 0.
        near: Of nearly the same hours and steps, if known: then it takes less time.
    """
    programme = _Programme(options, edges_s, prices, steps)
    possible = programme.possible()
    if not possible.any():
        return None
    bounds = np.where(possible, -np.inf, np.inf)
    latest = int(np.flatnonzero(possible)[-1])
    guess = (latest, 0.0) if near is None else (min(near.last, latest), near.marginal)
    best = found = programme.solve(*guess)
    while True:
        bounds = np.maximum(bounds, programme.lower_bounds(found.marginal))
        bounds[found.last] = np.inf
        last = int(bounds.argmin())
        rounding = _ROUNDING * (abs(best.cost) + abs(found.marginal) * steps)
        if not bounds[last] < best.cost - rounding:  # also where it is no number
            return Solution(best.cost, best.last, best.marginal, partial(programme.parts, best))
        found = programme.solve(last, found.marginal)
        best = min(best, found, key=lambda ending: ending.cost)


@dataclass(frozen=True)
class _Filled:
    """All segments that cost at most so much for a step."""

    marginal: float
    steps: float
    cost: float

    def reduced_cost(self, marginal: float, steps: float) -> float:
        """Return the cost if steps that are missing, or too many, cost so much."""
        return self.cost + marginal * (steps - self.steps)


@dataclass(frozen=True)
class _Ending:
    """The least cost of a job that ends in an hour.

    Attributes:
        last: The hour.
        cost: The least.
        marginal: What a step costs.
        low: Too few segments.
        high: Enough segments; each of those that are not in ``low`` costs as much for a step.
    """

    last: int
    cost: float
    marginal: float
    low: _Filled
    high: _Filled


class _Programme:
    """The hours before the last one are used completely, the last one up to the end of the job."""

    def __init__(self, options: Sequence[Option], edges_s: Numbers, prices: Numbers, steps: float) -> None:
        self._edges_s, self._prices, self._steps = edges_s, prices, steps
        self._lengths_s = np.diff(edges_s)
        self._rates = [option.rate for option in options]
        order = np.argsort(np.abs(prices))
        negative = prices[order] < 0
        places = {1: order[~negative], -1: order[negative]}
        self._hours = [
            Hours(Hull(options, sign), hours, self._lengths_s[hours], prices[hours])
            for sign, hours in places.items()
            if hours.size
        ]
        self._ending = {sign: Hull([*options, Option(_DONE, 0.0, 0.0)], sign) for sign in places}

    def possible(self) -> npt.NDArray[np.bool_]:
        """Return whether the job can end in each hour."""
        after_s, slack = self._edges_s - self._edges_s[0], _TOLERANCE * self._steps
        is_long_enough = max(self._rates) * after_s[1:] >= self._steps - slack
        is_short_enough = min(self._rates) * after_s[:-1] <= self._steps + slack
        possible: npt.NDArray[np.bool_] = is_long_enough & is_short_enough
        return possible

    def lower_bounds(self, marginal: float) -> Numbers:
        """Return, for each hour, a cost below which a job that ends in it cannot stay."""
        reduced = np.empty(len(self._prices))
        for hours in self._hours:
            reduced[hours.places] = hours.reduced_costs(marginal)
        before: Numbers = np.cumsum(reduced) - reduced
        return before + np.minimum(reduced, 0) + marginal * self._steps

    def solve(self, last: int, guess: float) -> _Ending:
        """Return the least cost of a job that ends in an hour, which must be possible; ``guess`` is a marginal cost."""
        hours = self._up_to(last)
        low, high = _filled(hours, -math.inf), _filled(hours, math.inf)
        steps = min(max(self._steps, low.steps), high.steps)
        found = _filled(hours, guess)
        while True:
            if low.steps < found.steps < high.steps:
                low, high = (found, high) if found.steps < steps else (low, found)
            # Steps hardly bend between two marginal costs that are near each other.
            if math.isfinite(high.marginal - low.marginal):
                share = (steps - low.steps) / (high.steps - low.steps)
                found = _filled(hours, low.marginal + share * (high.marginal - low.marginal))
                if low.steps < found.steps < high.steps:
                    low, high = (found, high) if found.steps < steps else (low, found)
            # If nothing costs less than what is on the line between the two, nothing costs less at all.
            marginal = (high.cost - low.cost) / (high.steps - low.steps)
            cost = low.reduced_cost(marginal, steps)
            found = _filled(hours, marginal)
            below = cost - found.reduced_cost(marginal, steps)
            if below <= _ROUNDING * (abs(cost) + abs(marginal) * steps) or found.steps in (low.steps, high.steps):
                return _Ending(last, cost, marginal, low, high)

    def parts(self, ending: _Ending) -> tuple[Numbers, Places]:
        """Return what runs when: the fastest first in an hour; what is too much is left out of the latest hours."""
        count = ending.last + 1
        rates, plans = np.empty((2, count)), np.empty((2, count), dtype=np.int64)
        for hours in self._up_to(ending.last):
            for way, filled in enumerate((ending.high, ending.low)):
                corners = hours.corners(filled.marginal)
                rates[way, hours.places] = hours.hull.rates[corners]
                plans[way, hours.places] = hours.hull.plans[corners]
        lengths_s = self._lengths_s[:count]
        gained = lengths_s * (rates[0] - rates[1])
        after = np.cumsum(gained[::-1])[::-1] - gained
        surplus = max(0.0, float((lengths_s * rates[0]).sum()) - self._steps)
        with np.errstate(invalid="ignore"):
            slow = np.nan_to_num(np.clip(surplus - after, 0, gained) / gained)
        slow = np.where(slow < _TOLERANCE, 0.0, np.where(slow > 1 - _TOLERANCE, 1.0, slow))
        parts_s = np.stack([lengths_s * (1 - slow), lengths_s * slow], axis=1).ravel()
        begins_s = np.stack([self._edges_s[:count], self._edges_s[1 : count + 1] - lengths_s * slow], axis=1).ravel()
        return _together(begins_s, parts_s, plans.T.ravel())

    def _up_to(self, last: int) -> list[Hours | LastHour]:
        """Return the hours up to one in which the job ends."""
        length_s, price = float(self._lengths_s[last]), float(self._prices[last])
        ending = LastHour(self._ending[-1 if price < 0 else 1], last, length_s, price)
        return [*(hours.before(last) for hours in self._hours), ending]


def _filled(hours: Sequence[Hours | LastHour], marginal: float) -> _Filled:
    steps, costs = zip(*(each.totals(marginal) for each in hours), strict=True)
    return _Filled(marginal, sum(steps), sum(costs))


def _together(begins_s: Numbers, lengths_s: Numbers, plans: Places) -> tuple[Numbers, Places]:
    """Return edges and plans of consecutive parts, those of the same plan together."""
    used = (plans != _DONE) & (lengths_s > 0)
    begins_s, lengths_s, plans = begins_s[used], lengths_s[used], plans[used]
    first = np.flatnonzero(np.diff(plans, prepend=_DONE))
    return np.append(begins_s[first], begins_s[-1] + lengths_s[-1]), plans[first]
