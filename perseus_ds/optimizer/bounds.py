"""Lower bounds on the energy of every plan.

A *flow* has a number of watts >= 0 for each arc of the network: the value of an additional second of that arc. The flow
of an instruction's arc is its *price*. A flow proves a bound as follows. Suppose a plan ends by time T, its events
happen at the times x, from 0 at the start, and arc a takes t_a, so that t_a <= x[head] - x[tail]. Multiplied by the
flow f >= 0 and summed over all arcs, this gives

    sum of f_a * t_a  <=  sum over events of (inflow - outflow) * x  <=  T * sum of max(0, inflow - outflow)

because 0 <= x <= T, with x = 0 at the start. So for any clocks of the plan, the effective energy of its instructions is

    sum of c  >=  sum over instructions of min (c + price * t)  +  sum over the other arcs of f_a * t_a
                  -  T * sum over events except the start of max(0, inflow - outflow),

with the minima over the clocks that an instruction can have in *any* plan that ends by T. This holds for any flow >= 0,
conserved or not. The method by which a flow was found affects the height of the bound but not its validity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Corners, Floats
from perseus_ds.optimizer.relaxation import Relaxed

_ROUNDING = 1e-12
"""Largest rounding error of the sums relative to their terms, by which the bound is lowered."""


def ending_w(network: Network, flow_w: Floats) -> float:
    """Return the sum of max(0, inflow - outflow) over all events except the start [W]."""
    inflow_w = np.bincount(network.head, flow_w, network.events)
    outflow_w = np.bincount(network.tail, flow_w, network.events)
    return float(np.maximum(inflow_w - outflow_w, 0.0)[1:].sum())


@dataclass(frozen=True)
class Tangent:
    """A point on the bound's curve, and the decrease of the bound per additional second, >= 0."""

    time_s: float
    energy_j: float
    slope_w: float

    def at(self, time_s: float) -> float:
        """Return the energy of the tangent at a time [J]."""
        return self.energy_j - self.slope_w * (time_s - self.time_s)


@dataclass(frozen=True)
class _Proof:
    """The flow of a solved deadline, shape (arcs,) [W], and the bound that it proves there."""

    tangent: Tangent
    flow_w: Floats


class Bounds:
    """The flows of the solved deadlines, and the bounds that follow from them at any iteration time."""

    def __init__(self, network: Network) -> None:
        self._network, self._problem = network, network.problem
        groups, group = self._problem.groups, self._problem.group
        decisions = slice(network.decisions)
        earliest_s = network.earliest_s(network.least_s)
        until_end_s = -network.latest_s(network.least_s, 0.0)
        # Shape (decisions,): least time before and after each instruction, and its own [s].
        self._before_s = earliest_s[network.tail[decisions]]
        self._after_s = until_end_s[network.head[decisions]]
        self._fastest_s = network.least_s[decisions]
        self._corners = [Corners.of(own.options.time_s, own.cost_j) for own in groups]
        self._members = [np.flatnonzero(group == number) for number in range(len(groups))]
        self._proofs: list[_Proof] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Add the flow of a relaxed optimum and return the bound that it proves at its deadline."""
        flow_w = np.maximum(relaxed.flow_w, 0.0)
        from_start_w = float(flow_w[self._network.tail == 0].sum())
        tangent = Tangent(
            time_s=relaxed.deadline_s,
            energy_j=self.bound_j(relaxed.deadline_s, flow_w),
            slope_w=from_start_w - self._problem.waiting_power_w,
        )
        self._proofs.append(_Proof(tangent, flow_w))
        self._proofs.sort(key=attrgetter("tangent.time_s"))
        return tangent

    @property
    def energies_j(self) -> Floats:
        """The bounds of the solved deadlines, none above that of an earlier deadline [J]."""
        return np.minimum.accumulate([proof.tangent.energy_j for proof in self._proofs])

    def with_bounds(self, plans: Iterable[FrequencyPlan]) -> list[FrequencyPlan]:
        """Return the plans with the best bound for each."""
        return [replace(plan, lower_bound_j=self._best_j(plan.time_s)) for plan in plans]

    def _best_j(self, time_s: float) -> float:
        """Return the best bound at a time from the flow of a neighbouring deadline or a mixture of two [J]."""
        times_s = [proof.tangent.time_s for proof in self._proofs]
        right = min(int(np.searchsorted(times_s, time_s)), len(times_s) - 1)
        left = max(right - 1, 0)
        before, after = self._proofs[left], self._proofs[right]
        span_s = times_s[right] - times_s[left]
        between = min(max((time_s - times_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
        if left == 0:
            # Just after T_min more and more clocks become usable, and tangents are not informative.
            shares_of_after = {0.0, between, 1.0}
        else:
            # The bound from one flow changes along its tangent, so the lower one need not be tried.
            only_higher = 1.0 if after.tangent.at(time_s) > before.tangent.at(time_s) else 0.0
            shares_of_after = {between, only_higher}
        mixed_w = [(1 - share) * before.flow_w + share * after.flow_w for share in sorted(shares_of_after)]
        return max(self.bound_j(time_s, flow_w) for flow_w in mixed_w)

    def bound_j(self, time_s: float, flow_w: Floats) -> float:
        """Return a lower bound on the energy of every plan that ends by the time, proven by a flow [J].

        Args:
            time_s: The time [s].
            flow_w: Shape (arcs,): any flow >= 0 [W].
        """
        network, decisions = self._network, self._network.decisions
        instructions_j = float(self._least_j(time_s, flow_w[:decisions]).sum())
        others_j = float(flow_w[decisions:] @ network.least_s[decisions:])
        ends_w = ending_w(network, flow_w)
        waiting_w = self._problem.waiting_power_w
        # A plan may end earlier, which lowers the bound if a second is worth less than waiting costs.
        earlier_j = max(0.0, waiting_w - ends_w) * max(0.0, time_s - self._problem.t_min_s)
        rounding_j = _ROUNDING * (abs(instructions_j) + others_j + (ends_w + waiting_w) * time_s)
        return instructions_j + others_j + (waiting_w - ends_w) * time_s - earlier_j - rounding_j

    def _least_j(self, time_s: float, price_w: Floats) -> Floats:
        """Return the minimum of ``c + price * t`` of every decision, over its usable clocks, shape (decisions,) [J]."""
        longest_s = np.maximum(time_s - self._before_s - self._after_s + 1e-9 * time_s, self._fastest_s)
        result = np.empty(len(price_w))
        for group, corners, members in zip(self._problem.groups, self._corners, self._members, strict=True):
            result[members] = corners.least_j(price_w[members])
            # If some clocks are not usable, the hull's minimum may be too low.
            limited = members[longest_s[members] < group.options.time_s[-1]]
            total_j = group.cost_j + price_w[limited, None] * group.options.time_s  # shape (limited, options)
            total_j[group.options.time_s > longest_s[limited, None]] = np.inf
            result[limited] = total_j.min(axis=1)
        return result
