"""The cheapest assignment of plans to the hours of a signal, exactly, with its bound; and what a job's energy has cost.

A job runs from now until its steps are done, which must be before a deadline. In every hour it divides its time among
plans, each with a rate [steps/s] and a power [W], and a price is paid for the energy. For a given hour in which the job
ends, that is a linear programme over (hour, plan) with one condition that joins the hours: the steps to be done. If
every step is worth so much, its *marginal cost*, each hour runs the one plan for which cost less worth is lowest. The
higher it is, the more steps are done. At the marginal cost at which as many are done as are needed, the cost is least;
hours in which two plans are equally good there are divided between them (Lagrange). It takes milliseconds for a week of
hours, where a general solver takes nearly a second (``benchmarks/price_signal.py``).

The hour in which the job ends is chosen by branch and bound: any marginal cost gives a lower bound of the cost for all
hours at once. The hour of the lowest bound is solved, and its marginal cost improves the bounds, until none is below
the best cost found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.artifacts.run_records import CostsSoFar
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signals import Numbers, Signal
from perseus_ds.units import J_PER_KWH

Places = npt.NDArray[np.int64]
HALT = -1
"""Instead of a plan: the job stands still, with its GPUs idle."""
_DONE = -2
# Rates, times and steps are sums of many numbers.
_TOLERANCE = 1e-9
_ROUNDING = 1e-12
_MOST_ROUNDS = 200


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
    bounds = programme.least_costs()
    possible = np.flatnonzero(bounds < np.inf)
    if not possible.size:
        return None
    last, marginal = (int(possible[-1]), 0.0) if near is None else (min(near.last, int(possible[-1])), near.marginal)
    best = found = programme.solve(last, marginal)
    while True:
        bounds = np.maximum(bounds, programme.lower_bounds(found.marginal))
        bounds[found.last] = np.inf
        last = int(bounds.argmin())
        if not bounds[last] < best.cost - _ROUNDING * (abs(best.cost) + abs(found.marginal) * steps):
            return best
        found = programme.solve(last, found.marginal)
        best = min(best, found, key=lambda ending: ending.cost)


class _Hull:
    """The options that are worth their cost at some price of a sign, by ascending rate."""

    def __init__(self, options: Sequence[Option], sign: int) -> None:
        by_rate: dict[float, Option] = {}  # of each rate, the one that costs least
        for option in sorted(options, key=lambda option: (option.rate, -sign * option.power_w)):
            by_rate[option.rate] = option
        rates, powers_w, plans = np.array([(o.rate, o.power_w, o.plan) for o in by_rate.values()]).T
        corners = lower_hull(rates, sign * powers_w)
        # Of each corner.
        self._rates, self._powers_w, self._plans = rates[corners], powers_w[corners], plans[corners].astype(np.int64)
        # What a step costs from one corner to the next, at a price of 1 or -1: ascending, but for rounding.
        self._slopes = np.maximum.accumulate(sign * np.diff(self._powers_w) / np.diff(self._rates))

    def at(self, worth: Numbers) -> tuple[Numbers, Numbers, Places]:
        """Return rate, power and plan where a step is worth so much, at a price of 1 or -1."""
        corners = np.searchsorted(self._slopes, worth, "right")
        return self._rates[corners], self._powers_w[corners], self._plans[corners]


@dataclass(frozen=True, eq=False)
class _Filled:
    """What runs in each hour if a step is worth so much: rate, plan, and cost of each hour; steps and cost of all."""

    rates: Numbers
    plans: Places
    costs: Numbers
    steps: float
    cost: float


@dataclass(frozen=True, eq=False)
class Solution:
    """The cheapest way to do the steps, for a job that ends in a given hour.

    Attributes:
        last: The hour.
        cost: Sum over time of price times energy [price x J].
        marginal: What a step costs in the hours that are divided between plans.
        low: Too few steps, at that marginal cost.
        high: Enough steps, at that marginal cost.
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

    def least_costs(self) -> Numbers:
        """Return minus infinity for each hour in which the job can end, infinity for the others."""
        after_s, slack = self._edges_s - self._edges_s[0], _TOLERANCE * self._steps
        is_long_enough = max(self._rates) * after_s[1:] >= self._steps - slack
        is_short_enough = min(self._rates) * after_s[:-1] <= self._steps + slack
        return np.where(is_long_enough & is_short_enough, -np.inf, np.inf)

    def lower_bounds(self, marginal: float) -> Numbers:
        """Return, for each hour, a cost below which a job that ends in it cannot stay."""
        filled = self._filled(marginal)
        reduced: Numbers = filled.costs - marginal * filled.rates * self._lengths_s
        before: Numbers = np.cumsum(reduced) - reduced
        return before + np.minimum(reduced, 0) + marginal * self._steps

    def solve(self, last: int, guess: float) -> Solution:
        """Return the least cost of a job that ends in an hour, which must be possible; ``guess`` is a marginal cost.

        The least cost is convex in the steps, so it is nowhere below its tangents. Two of them, one with too few steps
        and one with too many, meet at the next marginal cost to try.
        """
        low, high = self._filled(-np.inf, last), self._filled(np.inf, last)
        steps = min(max(self._steps, low.steps), high.steps)
        found = self._filled(guess, last)
        for _ in range(_MOST_ROUNDS):
            if low.steps < found.steps < high.steps:
                low, high = (found, high) if found.steps < steps else (low, found)
            marginal = (high.cost - low.cost) / (high.steps - low.steps)
            cost = low.cost + marginal * (steps - low.steps)
            found = self._filled(marginal, last)
            below = cost - (found.cost + marginal * (steps - found.steps))
            if below <= _ROUNDING * (abs(cost) + abs(marginal) * steps) or found.steps in (low.steps, high.steps):
                break
        return Solution(last, cost, marginal, low, high, self._edges_s, self._steps)

    def _filled(self, marginal: float, last: int | None = None) -> _Filled:
        """Fill the hours at a marginal cost: those up to the last one, which the job may leave early, or all."""
        count = len(self._prices) if last is None else last + 1
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            worth = marginal / self._sizes[:count]
        rates, powers_w, plans = self._hulls[0].at(worth)
        negative = self._negative[: np.searchsorted(self._negative, count)]
        rates[negative], powers_w[negative], plans[negative] = self._hulls[1].at(worth[negative])
        if last is not None:
            rates[last], powers_w[last], plans[last] = self._ending[int(self._prices[last] < 0)].at(worth[last])
        costs = self._lengths_s[:count] * self._prices[:count] * powers_w
        return _Filled(rates, plans, costs, float(self._lengths_s[:count] @ rates), float(costs.sum()))


class CostAccount(FileModel):
    """Costs since a cheapest policy began, in values of its signal times kWh; checkpoints keep it.

    The fastest plan throughout is charged with its own hours: it would have been at the same step earlier.

    Attributes:
        iterations: How many are counted.
        cost: Of their energy, and of the energy while training stood still.
        fastest_cost: Of as many iterations under the plan of ``slowdown: 0``.
        halted_s: How long training stood still [s].
        bound: What no assignment of plans to hours would have stayed below, as computed at the beginning; None before.
        fastest_at_s: When the fastest plan would have been here [Unix seconds]; None before.
    """

    iterations: int = 0
    cost: float = 0.0
    fastest_cost: float = 0.0
    halted_s: float = 0.0
    bound: float | None = None
    fastest_at_s: float | None = None

    @property
    def saved(self) -> float | None:
        """How much less it cost than under the fastest plan, as a fraction; None where that cannot be told."""
        return 1 - self.cost / self.fastest_cost if self.fastest_cost > 0 else None

    def add_iteration(
        self,
        signal: Signal,
        *,
        ended_s: float,
        time_s: float,
        energy_j: float,
        fastest_time_s: float,
        fastest_energy_j: float,
    ) -> None:
        """Add an iteration that ended at a time [Unix seconds], with the energy of all GPUs [s, J].

        ``fastest_time_s`` and ``fastest_energy_j`` are those of the fastest plan, with the time until the next one.
        """
        begin_s = ended_s - time_s if self.fastest_at_s is None else self.fastest_at_s
        self.iterations += 1
        self.cost += _cost(signal, ended_s - time_s, ended_s, energy_j)
        self.fastest_at_s = begin_s + fastest_time_s
        self.fastest_cost += _cost(signal, begin_s, self.fastest_at_s, fastest_energy_j)

    def add_halt(self, signal: Signal, *, begin_s: float, end_s: float, energy_j: float) -> None:
        """Add a time in which training stood still [Unix seconds, J]."""
        self.halted_s += end_s - begin_s
        self.cost += _cost(signal, begin_s, end_s, energy_j)

    def so_far(self, *, done: bool = False) -> CostsSoFar:
        """Return the record of what is counted; ``done`` if these are all."""
        counted = self.model_dump(exclude={"fastest_at_s"})
        return CostsSoFar(**{**counted, "halted_s": round(self.halted_s, 3)}, done=done)


def _cost(signal: Signal, begin_s: float, end_s: float, energy_j: float) -> float:
    """Return the cost of energy that was used evenly over a span of time."""
    return signal.mean_between(begin_s, end_s) * energy_j / J_PER_KWH
