"""What a job has learnt under plans: its modes change it, and a later start continues from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from perseus_ds.artifacts.io import FileModel
from perseus_ds.policy.decisions import RunStatistics
from perseus_ds.policy.trial import Trial, Verdict
from perseus_ds.savings import DefaultClocks

logger = logging.getLogger("perseus_ds")
FIRST_REST = 200
"""Number of iterations for which plans that do not keep their promise rest for the first time."""
_LONGER = 4
MOST_ROBUST = 2
"""How many times late plans are computed again with larger margins before they rest."""
_LONGEST_REST = 10**9


class _Saved(FileModel):
    trial: Trial = Field(default_factory=Trial)
    announced: Verdict = Verdict.UNKNOWN
    resting: Annotated[int, Field(ge=0)] = 0
    next_rest: Annotated[int, Field(ge=1, le=_LONGEST_REST)] = FIRST_REST
    lateness: Annotated[float, Field(ge=0)] = 0.0
    faster_plans: Annotated[int, Field(ge=0)] = 0
    robustness: Annotated[int, Field(ge=0, le=MOST_ROBUST)] = 0
    spare_slowdown: float = 0.0
    default: dict[str, Any] = Field(default_factory=dict)
    statistics: RunStatistics = RunStatistics()
    stretch_factors: tuple[Annotated[float, Field(ge=1)], ...] = ()
    plans: dict[int, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)


@dataclass
class PlanState:
    """State of a job's plans.

    Attributes:
        trial: Evidence on the plans that run.
        announced: The last verdict on them that was recorded and printed.
        resting: Number of iterations at default clocks until plans are tried again; 0 if they run.
        next_rest: Duration of the next rest, in iterations.
        lateness: Fraction by which plans have taken longer than promised, so that faster ones are chosen.
        faster_plans: How many times faster plans were chosen since the last rest.
        robustness: How many times plans were computed again with larger margins, because they were late: clock changes
            may delay the job, and the times of passes vary.
        spare_slowdown: Sum over iterations of the slowdown that the goal allowed and plans have not used.
        default: What default clocks take.
        statistics: Measured relative to predicted figures of the last iterations under plans.
        stretch_factors: For each pipeline, the time that its plan may take relative to that of the goal.
        plans: The plan that the goal selects for an order, by the key of the order.
    """

    trial: Trial = field(default_factory=Trial)
    announced: Verdict = Verdict.UNKNOWN
    resting: int = 0
    next_rest: int = FIRST_REST
    lateness: float = 0.0
    faster_plans: int = 0
    robustness: int = 0
    spare_slowdown: float = 0.0
    default: DefaultClocks = field(default_factory=DefaultClocks)
    statistics: RunStatistics = field(default_factory=RunStatistics)
    stretch_factors: tuple[float, ...] = ()
    plans: dict[int, int] = field(default_factory=dict)

    def begin_rest(self) -> int:
        """Let plans rest, and return the number of iterations. The next rest is longer."""
        self.resting = self.next_rest
        self.next_rest = min(_LONGER * self.next_rest, _LONGEST_REST)
        self._forget_lateness()
        return self.resting

    def use_larger_margins(self) -> None:
        """Plan again with larger margins, and try these plans."""
        self.robustness = min(self.robustness + 1, MOST_ROBUST)
        self._forget_lateness()

    def begin_trial(self) -> None:
        """Try the plans of the goal from the beginning. Late ones still take longer than promised."""
        self.trial.restart()
        self.announced = Verdict.UNKNOWN

    def _forget_lateness(self) -> None:
        self.begin_trial()
        self.lateness, self.faster_plans = 0.0, 0

    def forget_plans(self) -> None:
        """Forget what was learnt under plans of a profile that is no longer used."""
        self._forget_lateness()
        self.robustness = 0
        self.resting = 0
        self.spare_slowdown = 0.0
        self.statistics = RunStatistics(stopped_s=self.statistics.stopped_s, stops=self.statistics.stops)
        self.plans.clear()

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return _Saved(
            trial=self.trial,
            announced=self.announced,
            resting=self.resting,
            next_rest=self.next_rest,
            lateness=self.lateness,
            faster_plans=self.faster_plans,
            robustness=self.robustness,
            spare_slowdown=self.spare_slowdown,
            default=self.default.state(),
            statistics=self.statistics,
            stretch_factors=self.stretch_factors,
            plans=self.plans,
        ).model_dump(mode="json")

    def load(self, state: Mapping[str, Any]) -> bool:
        """Restore the result of :meth:`dump`, and return whether it could be read."""
        try:
            saved = _Saved.model_validate(state)
        except ValidationError as error:  # saved by another version, or damaged
            logger.warning("perseus: the state of an earlier start cannot be read (%r); it is ignored.", error)
            return False
        self.trial, self.announced = saved.trial, saved.announced
        self.resting, self.next_rest = saved.resting, saved.next_rest
        self.lateness, self.faster_plans, self.robustness = saved.lateness, saved.faster_plans, saved.robustness
        self.spare_slowdown = saved.spare_slowdown
        self.default.restore(saved.default)
        self.statistics, self.stretch_factors, self.plans = saved.statistics, saved.stretch_factors, saved.plans
        return True
