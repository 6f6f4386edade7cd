"""By how much a change of clock delays this job, learnt from plans that ran and were late."""

from __future__ import annotations

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.clocks.transitions import count_changes
from perseus_ds.policy.plan_proof import PlanComparison

# Lateness below this fraction of an iteration, or below so many standard errors, is not worth other plans.
_MATTERS = 0.008
# Lateness above this fraction has another cause than changes of the clock.
_MOST_LATE = 0.1
_SURE = 3.0
_MOST_PLANS = 3
# A switch cost that is this much higher makes other plans.
_HIGHER = 1.2


class SwitchCost:
    """Fits lateness against the number of clock changes: a line through default clocks, which have no changes.

    Attributes:
        time_s: By how much plans should take a change of clock to delay the next instruction [s].
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self._changes: list[int] = []
        self._late_s: list[float] = []

    def learn(self, plan: FrequencyPlan, comparison: PlanComparison, default_s: float) -> bool:
        """Take in how late a plan was; returns whether plans with another switch cost should be made.

        Args:
            plan: As it ran; its time allows for the switch cost so far.
            comparison: With default clocks.
            default_s: Iteration time at default clocks [s].
        """
        late = comparison.slowdown - comparison.promised_slowdown
        changes = max(map(count_changes, plan.clocks_mhz))
        self._changes.append(changes)
        self._late_s.append(self.time_s * changes + late * default_s)
        least = _MATTERS + _SURE * comparison.slowdown_error
        if not least <= late <= _MOST_LATE or len(self._changes) == _MOST_PLANS:
            return False
        square = sum(changes**2 for changes in self._changes)
        fitted_s = sum(c * s for c, s in zip(self._changes, self._late_s, strict=True)) / square if square else 0.0
        rises = fitted_s > _HIGHER * self.time_s
        self.time_s = max(self.time_s, fitted_s)
        return rises
