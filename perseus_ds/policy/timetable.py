"""What a cheapest policy has decided: which plan runs when, until the job ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perseus_ds.policy.hourly_programme import HALT, Entry
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signal_values import Signal


@dataclass(frozen=True)
class Timetable:
    """Plans by time, as decided at one moment; costs are values of the signal times kWh.

    Attributes:
        policy: The policy that it is of.
        signal: The signal that it is of.
        entries: Consecutive; at least one.
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
    entries: tuple[Entry, ...]
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
        return any(entry.plan == HALT for entry in self.entries if entry.begin_s <= time_s < entry.end_s)

    def plan_at(self, time_s: float) -> int:
        """Return the plan that runs at a time [Unix seconds], or next; after the end the last one."""
        plans = [entry for entry in self.entries if entry.plan != HALT]
        return next((entry for entry in plans if time_s < entry.end_s), plans[-1]).plan

    def steps_at(self, time_s: float) -> float:
        """Return how many steps are done at a time [Unix seconds] if all goes as decided."""
        return self.step + sum(
            self.rates[entry.plan] * max(0.0, min(time_s, entry.end_s) - entry.begin_s) for entry in self.entries
        )
