"""What a cheapest policy has decided: which plan runs when, until the job ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perseus_ds.policy.hourly_hulls import HALT, Places
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signal_values import Numbers, Signal


@dataclass(frozen=True, eq=False)
class Timetable:
    """Plans by time, as decided at one moment; costs are values of the signal times kWh.

    Attributes:
        policy: The policy that it is of.
        signal: The signal that it is of.
        edges_s: When each part begins, and when the last one ends [Unix seconds], shape (parts + 1,).
        plans: What runs in each part; ``HALT`` if nothing does, shape (parts,).
        rates: Steps per second of each plan, standing still included.
        made_s: When it was made [Unix seconds].
        step: Steps done then.
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
    made_s: float
    step: int
    valid_until_s: float
    cost: float
    bound: float
    fastest_cost: float
    mean_from_s: float | None = None

    def halts_at(self, time_s: float) -> bool:
        """Whether nothing runs at a time [Unix seconds]."""
        part = self._part_at(time_s)
        return 0 <= part < len(self.plans) and bool(self.plans[part] == HALT)

    def plan_at(self, time_s: float) -> int:
        """Return the plan that runs at a time [Unix seconds], or next; after the end the last one."""
        runs = self._runs
        following = int(np.searchsorted(runs, self._part_at(time_s)))
        return int(self.plans[runs[min(following, len(runs) - 1)]])

    def steps_at(self, time_s: float) -> float:
        """Return how many steps are done at a time [Unix seconds] if all goes as decided."""
        return self.step + float(np.interp(time_s, self.edges_s, self._steps_done))

    def _part_at(self, time_s: float) -> int:
        return int(np.searchsorted(self.edges_s, time_s, "right")) - 1

    @cached_property
    def _runs(self) -> Places:
        """Places of the parts in which a plan runs."""
        return np.flatnonzero(self.plans != HALT)

    @cached_property
    def _steps_done(self) -> Numbers:
        """Steps that are done at each edge, of those that are left."""
        rates = np.array([self.rates[plan] for plan in self.plans.tolist()])
        return np.concatenate([[0.0], np.cumsum(rates * np.diff(self.edges_s))])
