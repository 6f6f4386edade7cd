"""The cheapest assignment of plans to the hours of a signal, exactly, with its bound.

A job runs from now until its steps are done, which must be before a deadline. In every hour it divides its time among
plans, each with a rate [steps/s] and a power [W], and a price is paid for the energy. For a given hour in which the job
ends, that is a linear programme over (hour, plan). An hour's cost is a convex function of its steps: the price times
the lower hull of power over rate (the upper hull where the price is negative). So the programme is solved exactly by
filling the segments of the hulls of all hours in the order of their cost for a step, up to one marginal cost.

The hour in which the job ends is chosen by branch and bound: for any marginal cost, the Lagrangian gives a lower bound
of the cost for all hours at once; only hours whose bound is below the best cost found are solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_ds.policy.signal_values import Numbers

HALT = -1
"""Instead of a plan: the job stands still, with its GPUs idle."""
_DONE = -2
_GRID = 64
# Rates, times and steps are sums of many numbers.
_TOLERANCE = 1e-9


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


@dataclass(frozen=True)
class Entry:
    """A part of a timetable.

    Attributes:
        begin_s: When it begins [Unix seconds].
        end_s: When it ends.
        plan: What runs; ``HALT`` if nothing does.
    """

    begin_s: float
    end_s: float
    plan: int


@dataclass(frozen=True)
class Solution:
    """The cheapest way to do the steps in time.

    Attributes:
        entries: Consecutive, from the first moment to the end of the job.
        cost: Sum over time of price times energy [price x J]; nothing that ends in time costs less.
    """

    entries: tuple[Entry, ...]
    cost: float


def cheapest(options: Sequence[Option], edges_s: Numbers, prices: Numbers, steps: float) -> Solution | None:
    """Return the cheapest assignment of plans to hours; None if there is not enough time.

    Args:
        options: The plans, and ``HALT`` where standing still is allowed.
        edges_s: Edges of the hours, from now to the deadline [Unix seconds], shape (hours + 1,).
        prices: For each hour, the price of energy, in any unit, shape (hours,).
        steps: How many to do, > 0.
    """
    programme = _Programme(options, np.diff(edges_s), prices, steps)
    bounds = programme.lower_bounds()
    best: tuple[float, int, float] | None = None
    for last in np.argsort(bounds, kind="stable"):
        if not np.isfinite(bounds[last]) or (best is not None and bounds[last] >= best[0]):
            break
        solved = programme.solve(int(last))
        if solved is not None and (best is None or solved[0] < best[0]):
            best = (solved[0], int(last), solved[1])
    if best is None:
        return None
    cost, last, marginal = best
    shares = programme.shares(last, marginal)
    return Solution(_entries(shares, edges_s, options), cost)


class _Programme:
    """Hulls of all hours: those before the last one are filled completely, the last one up to the end of the job."""

    def __init__(self, options: Sequence[Option], lengths_s: Numbers, prices: Numbers, steps: float) -> None:
        self._lengths_s = lengths_s
        self._prices = prices
        self._steps = steps
        done = Option(_DONE, 0.0, 0.0)
        self._whole = _Hulls(options, lengths_s, prices)
        self._ending = _Hulls([*options, done], lengths_s, prices)
        self._marginals = np.unique(np.concatenate([h.slopes[h.is_segment] for h in (self._whole, self._ending)]))

    def lower_bounds(self) -> Numbers:
        """Return, for each hour in which the job may end, a cost below which it cannot stay; infinity if it cannot."""
        least = self._before(self._whole.steps[:, 0]) + self._ending.steps[:, 0]
        most = self._before(self._whole.steps[:, -1]) + self._ending.steps[:, -1]
        slack = _TOLERANCE * self._steps
        possible = (least <= self._steps + slack) & (most >= self._steps - slack)
        picks = np.linspace(0, len(self._marginals) - 1, min(_GRID, len(self._marginals))).round().astype(int)
        bounds = np.full(len(self._prices), -np.inf)
        for marginal in self._marginals[picks] if len(self._marginals) else [0.0]:
            steps, costs = self._whole.up_to(marginal)
            last_steps, last_costs = self._ending.up_to(marginal)
            lagrangian = self._before(costs - marginal * steps) + last_costs - marginal * last_steps
            bounds = np.maximum(bounds, lagrangian + marginal * self._steps)
        return np.where(possible, bounds, np.inf)

    def solve(self, last: int) -> tuple[float, float] | None:
        """Return the least cost of a job that ends in an hour, and the marginal cost of a step in it."""
        low, high = 0, len(self._marginals) - 1
        if high < 0 or self._up_to(last, self._marginals[high])[0] < self._steps * (1 - _TOLERANCE):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._up_to(last, self._marginals[middle])[0] < self._steps * (1 - _TOLERANCE):
                low = middle + 1
            else:
                high = middle
        marginal = float(self._marginals[low])
        steps, cost = self._up_to(last, marginal)
        return cost - marginal * max(0.0, steps - self._steps), marginal

    def shares(self, last: int, marginal: float) -> list[list[tuple[int, float]]]:
        """Return, for each hour up to the last one, how long which option is used [s]; the fastest first."""
        hulls = [self._whole] * last + [self._ending]
        surplus = max(0.0, self._up_to(last, marginal)[0] - self._steps)
        shares = []
        for hour in range(last, -1, -1):  # what is too much is left out of the latest hours
            share, surplus = hulls[hour].share(hour, marginal, surplus)
            shares.append(share)
        return shares[::-1]

    def _up_to(self, last: int, marginal: float) -> tuple[float, float]:
        steps, costs = self._whole.up_to(marginal, last)
        last_steps, last_costs = self._ending.up_to(marginal)
        return float(steps.sum() + last_steps[last]), float(costs.sum() + last_costs[last])

    @staticmethod
    def _before(of_hours: Numbers) -> Numbers:
        """Return, for each hour, the sum over the hours before it."""
        total: Numbers = np.cumsum(of_hours)
        return total - of_hours


class _Hulls:
    """For each hour the hull of its options, by ascending rate.

    Attributes:
        slopes: Cost of a step on each segment, ascending, shape (hours, segments); infinity where there is none.
        is_segment: Where there is one.
        steps: Steps of an hour at each corner, shape (hours, segments + 1).
    """

    def __init__(self, options: Sequence[Option], lengths_s: Numbers, prices: Numbers) -> None:
        rates = np.array([option.rate for option in options])
        powers_w = np.array([option.power_w for option in options])
        self._plans = [option.plan for option in options]
        corners = {sign: _hull(rates, sign * powers_w) for sign in (1, -1)}
        width = max(map(len, corners.values()))
        # Hulls of fewer corners are filled up with their last one.
        table = {sign: np.array(c + [c[-1]] * (width - len(c))) for sign, c in corners.items()}
        self._corners = np.where((prices >= 0)[:, None], table[1], table[-1])
        self._lengths_s = lengths_s
        self.steps = lengths_s[:, None] * rates[self._corners]
        self._costs = (prices * lengths_s)[:, None] * powers_w[self._corners]
        gained = np.diff(self.steps)
        self.is_segment = gained > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            self.slopes = np.where(self.is_segment, np.diff(self._costs) / gained, np.inf)
        # Convex but for rounding.
        self.slopes = np.maximum.accumulate(self.slopes, axis=1) if width > 1 else self.slopes

    def up_to(self, marginal: float, hours: int | None = None) -> tuple[Numbers, Numbers]:
        """Return steps and costs of the first hours with all segments that cost at most so much for a step."""
        slopes = self.slopes[:hours]
        filled = (slopes <= marginal).sum(axis=1)
        rows = np.arange(len(slopes))
        return self.steps[rows, filled], self._costs[rows, filled]

    def share(self, hour: int, marginal: float, surplus: float) -> tuple[list[tuple[int, float]], float]:
        """Return how long an hour's options are used [s], so many steps less; and the steps that are still too many."""
        slopes, steps = self.slopes[hour], self.steps[hour]
        corner = int((slopes <= marginal).sum())
        while corner > 0 and slopes[corner - 1] == marginal and surplus >= steps[corner] - steps[corner - 1]:
            surplus -= steps[corner] - steps[corner - 1]
            corner -= 1
        length_s, fast = float(self._lengths_s[hour]), self._plans[self._corners[hour, corner]]
        if corner == 0 or surplus <= 0 or slopes[corner - 1] != marginal:
            return [(fast, length_s)], surplus
        slow_s = length_s * surplus / (steps[corner] - steps[corner - 1])
        return [(fast, length_s - slow_s), (self._plans[self._corners[hour, corner - 1]], slow_s)], 0.0


def _hull(x: Numbers, y: Numbers) -> list[int]:
    """Return the corners of the lower hull of points, by ascending x."""
    corners: list[int] = []
    for point in np.lexsort((y, x)).tolist():
        if corners and x[point] == x[corners[-1]]:
            continue
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], point, x, y):
            corners.pop()
        corners.append(point)
    return corners


def _is_above(first: int, middle: int, last: int, x: Numbers, y: Numbers) -> bool:
    """Whether the middle one of three points lies on or above the line between the others."""
    return bool((y[middle] - y[first]) * (x[last] - x[first]) >= (y[last] - y[first]) * (x[middle] - x[first]))


def _entries(shares: list[list[tuple[int, float]]], edges_s: Numbers, options: Sequence[Option]) -> tuple[Entry, ...]:
    """Return the parts of a timetable, those of the same plan together."""
    entries: list[Entry] = []
    for hour, share in enumerate(shares):
        begin_s = float(edges_s[hour])
        for plan, length_s in share:
            if plan == _DONE or length_s <= 0:
                continue
            end_s = begin_s + length_s
            if entries and entries[-1].plan == plan:
                entries[-1] = Entry(entries[-1].begin_s, end_s, plan)
            else:
                entries.append(Entry(begin_s, end_s, plan))
            begin_s = end_s
    return tuple(entries)
