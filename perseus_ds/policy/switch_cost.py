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
    """Divides the lateness of plans by their clock changes, as default clocks have neither.

    A plan that is late in spite of the delay that it allows for shows that changes delay the job by more, such as two
    ranks at once: the largest of the quotients counts.

    Attributes:
        time_s: By how much plans should take a change of clock to delay what follows it [s].
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self._plans = 0

    def learn(self, plan: FrequencyPlan, comparison: PlanComparison, default_s: float) -> bool:
        """Take in how late a plan was; returns whether plans with another switch cost should be made.

        Args:
            plan: As it ran; its time allows for the switch cost so far.
            comparison: With default clocks.
            default_s: Iteration time at default clocks [s].
        """
        late = comparison.slowdown - comparison.promised_slowdown
        changes = max(map(count_changes, plan.clocks_mhz))
        self._plans += 1
        least = _MATTERS + _SURE * comparison.slowdown_error
        if not least <= late <= _MOST_LATE or self._plans == _MOST_PLANS or not changes:
            return False
        known_s, self.time_s = self.time_s, self.time_s + late * default_s / changes
        return self.time_s > _HIGHER * known_s
