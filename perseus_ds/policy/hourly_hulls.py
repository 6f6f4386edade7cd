"""What the hours of a signal cost by the steps that are done in them: hulls of the options, scaled by price and length.

An hour's cost is a convex function of its steps: the price times the lower hull of power over rate (the upper hull
where the price is negative). A segment of a hull costs the price times its slope for a step. So with the hours in the
order of their prices, those in which a segment is worth its cost are consecutive, and a sum over them is a difference
of two cumulative sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.policy.signal_values import Numbers

Places = npt.NDArray[np.int64]
HALT = -1
"""Instead of a plan: the job stands still, with its GPUs idle."""


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


class Hull:
    """The options that are worth their cost at some price of a sign, by ascending rate.

    Attributes:
        plans: Of each corner.
        rates: Of each corner.
        powers_w: Of each corner.
        rate_gains: Of each segment.
        power_gains_w: Of each segment.
        slopes: Of each segment, at a price of plus or minus one; ascending.
        falling: How many of them are negative.
    """

    def __init__(self, options: Sequence[Option], sign: int) -> None:
        corners: list[Option] = []
        for option in sorted(options, key=lambda o: (o.rate, sign * o.power_w)):
            if corners and option.rate == corners[-1].rate:
                continue
            while len(corners) > 1 and _is_above(corners[-2], corners[-1], option, sign):
                corners.pop()
            corners.append(option)
        self.plans: Places = np.array([option.plan for option in corners])
        self.rates = np.array([option.rate for option in corners])
        self.powers_w = np.array([option.power_w for option in corners])
        self.rate_gains, self.power_gains_w = np.diff(self.rates), np.diff(self.powers_w)
        # Convex but for rounding; no negative zero.
        self.slopes = np.maximum.accumulate(sign * self.power_gains_w / self.rate_gains) + 0.0
        self.falling = int(np.searchsorted(self.slopes, 0.0))


def _is_above(first: Option, middle: Option, last: Option, sign: int) -> bool:
    """Whether the middle one of three options lies on or above the line between the others."""
    gained, rises = middle.rate - first.rate, sign * (middle.power_w - first.power_w)
    return rises * (last.rate - first.rate) >= sign * (last.power_w - first.power_w) * gained


class Hours:
    """Hours whose prices have one sign, in the order of their sizes.

    Attributes:
        hull: Of their options.
        places: Which hours they are, shape (hours,).
    """

    def __init__(self, hull: Hull, places: Places, lengths_s: Numbers, prices: Numbers) -> None:
        """Take hours.

        Args:
            hull: Of their options.
            places: Which hours they are; by ascending absolute price.
            lengths_s: Of each.
            prices: Of each.
        """
        self.hull = hull
        self.places = places
        self._lengths_s, self._prices = lengths_s, prices
        self._sizes = np.abs(prices)
        self._length_sums = _sums(lengths_s)
        self._price_sums = _sums(lengths_s * prices)

    def before(self, place: int) -> Hours:
        """Return those of the hours that are before one."""
        is_before = self.places < place
        return Hours(self.hull, self.places[is_before], self._lengths_s[is_before], self._prices[is_before])

    def totals(self, marginal: float) -> tuple[float, float]:
        """Return steps and cost of all hours with each segment that costs at most so much for a step."""
        hull, lengths_s, prices = self.hull, self._length_sums, self._price_sums
        begins, ends = self._filled(marginal)
        steps = hull.rates[0] * lengths_s[-1] + (hull.rate_gains * (lengths_s[ends] - lengths_s[begins])).sum()
        cost = hull.powers_w[0] * prices[-1] + (hull.power_gains_w * (prices[ends] - prices[begins])).sum()
        return float(steps), float(cost)

    def corners(self, marginal: float) -> Places:
        """Return how far the hull of each hour is filled then."""
        begins, ends = self._filled(marginal)
        count = len(self.places) + 1
        changes = np.bincount(begins, minlength=count) - np.bincount(ends, minlength=count)
        return np.cumsum(changes)[:-1]

    def reduced_costs(self, marginal: float) -> Numbers:
        """Return the cost of each hour, less its steps at so much for a step."""
        corners = self.corners(marginal)
        costs: Numbers = self._prices * self.hull.powers_w[corners] - marginal * self.hull.rates[corners]
        return self._lengths_s * costs

    def _filled(self, marginal: float) -> tuple[Places, Places]:
        """Return for each segment the first hour in which a step costs at most so much, and the one after the last."""
        hull, falling = self.hull, self.hull.falling
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            sizes = marginal / hull.slopes  # of a level segment at no marginal cost not a number: beyond all hours
        begins = np.zeros(len(sizes), dtype=np.int64)
        ends = np.searchsorted(self._sizes, sizes, "right")
        if falling:  # they are worth more at high prices
            begins[:falling] = np.searchsorted(self._sizes, sizes[:falling], "left")
            ends[:falling] = len(self.places)
        return begins, ends


class LastHour:
    """The hour in which a job ends.

    Attributes:
        hull: Of its options.
        places: Which hour it is, shape (1,).
    """

    def __init__(self, hull: Hull, place: int, length_s: float, price: float) -> None:
        self.hull = hull
        self.places: Places = np.array([place])
        self._length_s, self._price = length_s, price
        self._costs = hull.slopes * abs(price)

    def totals(self, marginal: float) -> tuple[float, float]:
        """Return its steps and cost, as of :class:`Hours`."""
        corner = self._costs.searchsorted(marginal, "right")
        rate, power_w = float(self.hull.rates[corner]), float(self.hull.powers_w[corner])
        return self._length_s * rate, self._length_s * power_w * self._price

    def corners(self, marginal: float) -> Places:
        """Return how far its hull is filled, as of :class:`Hours`."""
        return np.array([self._costs.searchsorted(marginal, "right")])


def _sums(values: Numbers) -> Numbers:
    """Return the sum of the values before each place, and of all."""
    return np.concatenate([[0.0], np.cumsum(values)])
