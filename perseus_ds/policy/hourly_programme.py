"""The cheapest assignment of plans to the hours of a signal, exactly, with its bound.

A job runs from now until its steps are done, which must be before a deadline. In every hour it divides its time among
plans, each with a rate [steps/s] and a power [W], and a price is paid for the energy. For a given hour in which the job
ends, that is a linear programme over (hour, plan). An hour's cost is a convex function of its steps: the price times
the lower hull of power over rate (the upper hull where the price is negative). So the programme is solved exactly by
filling the segments of the hulls of all hours in the order of their cost for a step, up to one marginal cost, at which
as many steps are done as are needed. That takes milliseconds for a week of hours, where a general solver takes nearly a
second (``benchmarks/price_signal.py``).

The hour in which the job ends is chosen by branch and bound: for any marginal cost, the Lagrangian gives a lower bound
of the cost for all hours at once. The hour of the lowest bound is solved, and its marginal cost improves the bounds,
until none is below the best cost found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signals import Numbers, Signal

Places = npt.NDArray[np.int64]
HALT = -1
"""Instead of a plan: the job stands still, with its GPUs idle."""
_DONE = -2
# Rates, times and steps are sums of many numbers.
_TOLERANCE = 1e-9
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Option:
    """One way to spend time.

    Attributes:
        plan: Place on the frontier, or ``HALT``.
        rate: Steps per second.
        power_w: Of all GPUs [W].
    """

    plan: int
    rate: float
    power_w: float


@dataclass(frozen=True, eq=False)
class Timetable:
    """Plans by time, as decided at one moment; costs are values of the signal times kWh.

    Attributes:
        edges_s: When each part begins, and when the last one ends [Unix seconds], shape (parts + 1,).
        plans: What runs in each part; ``HALT`` if nothing does, shape (parts,).
        rates: Steps per second of each plan, standing still included.
        valid_until_s: When the next value of the signal begins [Unix seconds].
        cost: Of all steps left, as the timetable has it.
        bound: No assignment of plans to hours that ends in time costs less.
        fastest_cost: Of all steps left under the plan of ``slowdown: 0``.
        mean_from_s: From when on the signal's mean is assumed, as it ends before the deadline [Unix seconds].
    """

    policy: CheapestPolicy
    signal: Signal
    edges_s: Numbers
    plans: Places
    rates: Mapping[int, float]
    step: int
    valid_until_s: float
    cost: float
    bound: float
    fastest_cost: float
    mean_from_s: float | None = None

    def at(self, time_s: float) -> tuple[int, bool]:
        """Return the plan that runs at a time [Unix seconds], or next, or as the last one; and whether nothing runs."""
        part = int(np.searchsorted(self.edges_s, time_s, "right")) - 1
        runs = np.flatnonzero(self.plans != HALT)
        following = runs[min(int(np.searchsorted(runs, part)), len(runs) - 1)]
        halts = 0 <= part < len(self.plans) and self.plans[part] == HALT
        return int(self.plans[following]), bool(halts)

    def steps_at(self, time_s: float) -> float:
        """Return how many steps are done at a time [Unix seconds] if all goes as decided."""
        return self.step + float(np.interp(time_s, self.edges_s, self._steps_done))

    @cached_property
    def _steps_done(self) -> Numbers:
        """Steps that are done at each edge, of those that are left."""
        rates = np.array([self.rates[plan] for plan in self.plans.tolist()])
        return np.concatenate([[0.0], np.cumsum(rates * np.diff(self.edges_s))])


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
            return best
        found = programme.solve(last, found.marginal)
        best = min(best, found, key=lambda ending: ending.cost)


class _Hull:
    """The options that are worth their cost at some price of a sign, by ascending rate.

    Attributes:
        plans: Of each corner.
        rates: Of each corner.
        powers_w: Of each corner.
        slopes: What a step costs in each segment, at a price of plus or minus one; ascending.
    """

    def __init__(self, options: Sequence[Option], sign: int) -> None:
        ordered = sorted(options, key=lambda option: (option.rate, sign * option.power_w))
        cheapest_of_rate = [next(same) for _, same in groupby(ordered, key=lambda option: option.rate)]
        rates = np.array([option.rate for option in cheapest_of_rate])
        costs = sign * np.array([option.power_w for option in cheapest_of_rate])
        corners = lower_hull(rates, costs)
        self.plans: Places = np.array([cheapest_of_rate[corner].plan for corner in corners])
        self.rates, self.powers_w = rates[corners], sign * costs[corners]
        # Convex but for rounding.
        self.slopes = np.maximum.accumulate(np.diff(costs[corners]) / np.diff(self.rates))


@dataclass(frozen=True, eq=False)
class _Filled:
    """All segments that cost at most so much for a step.

    Attributes:
        marginal: So much.
        rates: Of each hour.
        plans: Of each hour.
        costs: Of each hour.
        steps: Of all.
        cost: Of all.
    """

    marginal: float
    rates: Numbers
    plans: Places
    costs: Numbers
    steps: float
    cost: float

    def reduced_cost(self, marginal: float, steps: float) -> float:
        """Return the cost if steps that are missing, or too many, cost so much."""
        return self.cost + marginal * (steps - self.steps)


@dataclass(frozen=True, eq=False)
class Solution:
    """The cheapest way to do the steps, for a job that ends in a given hour.

    Attributes:
        last: The hour.
        cost: Sum over time of price times energy [price x J].
        marginal: What a step costs in the hours that are divided between plans.
        low: Too few segments.
        high: Enough segments; each of those that are not in ``low`` costs as much for a step.
        edges_s: Edges of the hours [Unix seconds].
        steps: How many are to be done.
    """

    last: int
    cost: float
    marginal: float
    low: _Filled
    high: _Filled
    edges_s: Numbers
    steps: float

    def parts(self) -> tuple[Numbers, Places]:
        """Return what runs when: the fastest first in an hour; what is too much is left out of the latest hours.

        Returns:
            When each part begins and the last one ends [Unix seconds], shape (parts + 1,), and what runs in each,
            ``HALT`` if nothing does, shape (parts,).
        """
        edges_s = self.edges_s[: self.last + 2]
        lengths_s = np.diff(edges_s)
        gained = lengths_s * (self.high.rates - self.low.rates)
        after = np.cumsum(gained[::-1])[::-1] - gained
        surplus = max(0.0, self.high.steps - self.steps)
        with np.errstate(invalid="ignore"):
            slow = np.nan_to_num(np.clip(surplus - after, 0, gained) / gained)
        slow = np.where(slow < _TOLERANCE, 0.0, np.where(slow > 1 - _TOLERANCE, 1.0, slow))
        parts_s = np.stack([lengths_s * (1 - slow), lengths_s * slow], axis=1).ravel()
        begins_s = np.stack([edges_s[:-1], edges_s[1:] - lengths_s * slow], axis=1).ravel()
        plans = np.stack([self.high.plans, self.low.plans], axis=1).ravel()
        used = (plans != _DONE) & (parts_s > 0)
        begins_s, parts_s, plans = begins_s[used], parts_s[used], plans[used]
        first = np.flatnonzero(np.diff(plans, prepend=_DONE))  # consecutive parts of one plan are one
        return np.append(begins_s[first], begins_s[-1] + parts_s[-1]), plans[first]


class _Programme:
    """The hours before the last one are used completely, the last one up to the end of the job."""

    def __init__(self, options: Sequence[Option], edges_s: Numbers, prices: Numbers, steps: float) -> None:
        self._edges_s, self._prices, self._steps = edges_s, prices, steps
        self._lengths_s, self._sizes, self._negative = np.diff(edges_s), np.abs(prices), np.flatnonzero(prices < 0)
        self._rates = [option.rate for option in options]
        self._hulls = _Hull(options, 1), _Hull(options, -1)
        ending = [*options, Option(_DONE, 0.0, 0.0)]
        self._ending = _Hull(ending, 1), _Hull(ending, -1)

    def possible(self) -> npt.NDArray[np.bool_]:
        """Return whether the job can end in each hour."""
        after_s, slack = self._edges_s - self._edges_s[0], _TOLERANCE * self._steps
        is_long_enough = max(self._rates) * after_s[1:] >= self._steps - slack
        is_short_enough = min(self._rates) * after_s[:-1] <= self._steps + slack
        possible: npt.NDArray[np.bool_] = is_long_enough & is_short_enough
        return possible

    def lower_bounds(self, marginal: float) -> Numbers:
        """Return, for each hour, a cost below which a job that ends in it cannot stay."""
        filled = self._filled(marginal)
        reduced: Numbers = filled.costs - marginal * filled.rates * self._lengths_s
        before: Numbers = np.cumsum(reduced) - reduced
        return before + np.minimum(reduced, 0) + marginal * self._steps

    def solve(self, last: int, guess: float) -> Solution:
        """Return the least cost of a job that ends in an hour, which must be possible; ``guess`` is a marginal cost."""
        low, high = self._filled(-math.inf, last), self._filled(math.inf, last)
        steps = min(max(self._steps, low.steps), high.steps)
        found = self._filled(guess, last)
        while True:
            if low.steps < found.steps < high.steps:
                low, high = (found, high) if found.steps < steps else (low, found)
            # Steps hardly bend between two marginal costs that are near each other.
            if math.isfinite(high.marginal - low.marginal):
                share = (steps - low.steps) / (high.steps - low.steps)
                found = self._filled(low.marginal + share * (high.marginal - low.marginal), last)
                if low.steps < found.steps < high.steps:
                    low, high = (found, high) if found.steps < steps else (low, found)
            # If nothing costs less than what is on the line between the two, nothing costs less at all.
            marginal = (high.cost - low.cost) / (high.steps - low.steps)
            cost = low.reduced_cost(marginal, steps)
            found = self._filled(marginal, last)
            below = cost - found.reduced_cost(marginal, steps)
            if below <= _ROUNDING * (abs(cost) + abs(marginal) * steps) or found.steps in (low.steps, high.steps):
                return Solution(last, cost, marginal, low, high, self._edges_s, self._steps)

    def _filled(self, marginal: float, last: int | None = None) -> _Filled:
        """Fill the hours at a marginal cost: those up to the last one, which the job may leave early, or all."""
        count = len(self._prices) if last is None else last + 1
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            worth = marginal / self._sizes[:count]
        rates, powers_w, plans = _corners(self._hulls[0], worth)
        negative = self._negative[: np.searchsorted(self._negative, count)]
        if negative.size:
            rates[negative], powers_w[negative], plans[negative] = _corners(self._hulls[1], worth[negative])
        if last is not None:
            rates[last], powers_w[last], plans[last] = _corners(self._ending[int(self._prices[last] < 0)], worth[last])
        costs = self._lengths_s[:count] * self._prices[:count] * powers_w
        steps = float(self._lengths_s[:count] @ rates)
        return _Filled(marginal, rates, plans, costs, steps, float(costs.sum()))


def _corners(hull: _Hull, worth: Numbers) -> tuple[Numbers, Numbers, Places]:
    """Return rate, power and plan of the corners up to which a step costs at most so much, at a price of one."""
    corners = np.searchsorted(hull.slopes, worth, "right")
    return hull.rates[corners], hull.powers_w[corners], hull.plans[corners]
