"""User control of a running job: policy, reported stragglers and pause."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.run_records import Event, OrderGiven, PolicyChanged
from perseus_ds.policy.policies import (
    AnyOrder,
    Pause,
    PolicyConfig,
    Reduce,
    ReducePolicy,
    Resume,
    SetPolicy,
    SetStraggler,
    Status,
    check_deadline,
    reduced,
)
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import duration, percent, watts

logger = logging.getLogger("perseus_ds")
# Number of iterations that end under the old plan after an order: the current and the next one.
_FOLLOWED_AFTER = 2


class Straggler(NamedTuple):
    """A pipeline for which all others wait, and its slowdown as a factor."""

    pipeline: int
    slowdown: float


@dataclass(frozen=True)
class Effect:
    """Predicted effect of a policy, using measurements of the job."""

    time_s: float  # of an iteration
    time_now_s: float  # of an iteration under the plan in force
    without_s: float  # of an iteration without a reduction, under the base policy
    power_w: float  # of all GPUs of the job
    default_power_w: float  # of all GPUs at default clocks
    problem: str = ""  # a condition that no plan meets


def cost_in_words(
    effect: Effect | None, power_fraction: float, duration_s: float, until: datetime, within_s: float | None = None
) -> str:
    """Describe the cost of a reduction of power to a fraction of that at default clocks.

    Args:
        effect: Effect of the reduced policy. None if unknown.
        power_fraction: The fraction.
        duration_s: Duration of the reduction [s].
        until: End of the reduction.
        within_s: Time within which the reduction must take effect [s].
    """
    share = f"at most {power_fraction:.0%} of the power at default clocks until {until.astimezone(timezone.utc):%FT%TZ}"
    if effect is None:
        return f"{share}, once the job runs under plans. Its cost is not known yet"
    waits_s = _FOLLOWED_AFTER * effect.time_now_s
    is_too_late = within_s is not None and waits_s > within_s
    too_late = f", later than the {duration(within_s)} asked for" if is_too_late else ""
    late_s = duration_s * max(0.0, 1 - effect.without_s / effect.time_s)
    late = late_s / effect.without_s
    longer = percent(max(0.0, effect.time_s / effect.without_s - 1)).lstrip("+")
    problem = f". However, {effect.problem}" if effect.problem else ""
    return (
        f"{share} ({watts(power_fraction * effect.default_power_w)}): {watts(effect.power_w)}, after at most "
        f"{duration(waits_s)}{too_late}. Iterations take {longer} longer, which makes the job {duration(late_s)} or "
        f"{late:.{0 if late >= 10 else 1}f} iterations later, if it trains as long{problem}"
    )


class JobControl:
    """The settings that users may change while the job trains.

    Attributes:
        steps: Completed steps, including those of earlier starts of the job.
        own_steps: Iterations since the server started.
        record: Records an event of the job.
        effect_of: Returns the predicted effect of a policy, or None until plans run.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        pipelines: int,
        job_status: Callable[[], Mapping[str, Any]] = dict,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Start with the configured policy. ``job_status`` returns the job's phase, and the run that comes ``next``."""
        self.policy = policy
        self._configured = self._recorded = policy
        self.paused = False
        self.steps = self.own_steps = 0
        self._shared = 0  # iterations that belong to the step of the next one
        self.record: Callable[[Event], None] = lambda event: None
        self.effect_of: Callable[[PolicyConfig], Effect | None] = _not_known
        self._pipelines = pipelines
        self._job_status = job_status
        self._timebase = timebase
        self._reported: dict[int, tuple[int, float]] = {}  # step and slowdown by pipeline

    def policy_now(self) -> PolicyConfig:
        """Return the policy in force. A reduction that has ended is replaced by its base policy."""
        if isinstance(self.policy, ReducePolicy) and self.policy.is_over(self._timebase.date()):
            self.policy = self.policy.policy
        return self.policy

    def record_policy(self) -> None:
        """Record the policy if it differs from the last recorded one."""
        if self.policy != self._recorded:
            self._recorded = self.policy
            self.record(PolicyChanged(policy=self.policy.model_dump(mode="json")))

    def count_step(self, step: int) -> None:
        """Count a completed step."""
        self.steps = step
        self.own_steps += 1

    def add_steps(self, steps: int) -> None:
        """Count steps without an iteration, or, if negative, iterations that belong to the step of the next one."""
        self.steps += steps
        self._shared += max(0, -steps)

    @property
    def iterations_per_step(self) -> float:
        """Number of iterations of a training step, which is above 1 if gradients are accumulated over several."""
        return self.own_steps / max(1, self.own_steps - self._shared) if self.own_steps else 1.0

    def straggler(self) -> Straggler | None:
        """Return the slowest reported straggler that is in effect, if any."""
        due = [Straggler(p, slowdown) for p, (step, slowdown) in self._reported.items() if self.steps >= step]
        return max(due, key=lambda straggler: straggler.slowdown, default=None)

    def carry_out(self, order: AnyOrder) -> dict[str, Any]:
        """Carry out an order and return the answer.

        Raises:
            ValueError: The order cannot be carried out. Nothing has changed.
        """
        job = self._job_status()
        if isinstance(order, Status):
            asked = {"paused": self.paused, "policy": self.policy.model_dump(mode="json")}
            return {"status": {**asked, **job}}
        done = self._done(order, job)
        if isinstance(order, SetPolicy | Reduce):
            self.record(OrderGiven(policy=self.policy.model_dump(mode="json")))
        elif isinstance(order, Pause | Resume):
            self.record(OrderGiven(paused=self.paused))
        return {"done": done + (". However, this job runs no plans now" if _runs_no_plans(job) else "")}

    def _done(self, order: SetPolicy | SetStraggler | Reduce | Pause | Resume, job: Mapping[str, Any]) -> str:
        if isinstance(order, Reduce):
            return self._reduced(order)
        if isinstance(order, SetPolicy):
            check_deadline(order.policy, self._timebase.date())
            self.policy = order.policy
            effect = self.effect_of(order.policy)
            but = f". However, {effect.problem}" if effect is not None and effect.problem else ""
            return f"policy {order.policy.name} from the next iterations on{but}"
        if isinstance(order, SetStraggler):
            pipeline, slowdown = order.pipeline, order.slowdown
            if pipeline >= self._pipelines:
                raise ValueError(f"pipeline: there is no pipeline {pipeline}, expected 0 to {self._pipelines - 1}.")
            if slowdown == 1:
                self._reported.pop(pipeline, None)
                return f"pipeline {pipeline} is treated as recovered"
            self._reported[pipeline] = (self.steps + order.after_iterations, slowdown)
            return f"pipeline {pipeline} is expected to take {slowdown:g} times as long"
        self.paused = isinstance(order, Pause)
        if not self.paused:
            return "under plans again"
        at_once = bool(job.get("next")) or _runs_no_plans(job)
        return "at default clocks" if at_once else "at default clocks, once the job has profiled itself"

    def _reduced(self, order: Reduce) -> str:
        until = self._timebase.date() + timedelta(seconds=order.duration_s)
        policy = reduced(self.policy, order.power_fraction, until)
        effect = self.effect_of(policy)
        self.policy = policy
        cost = cost_in_words(effect, order.power_fraction, order.duration_s, until, order.within_s)
        return cost + (
            ". However, the job is paused, and runs at default clocks until it is resumed" if self.paused else ""
        )

    def state(self) -> dict[str, Any]:
        """Return the state to keep for later starts of the job, as plain values."""
        return _Kept(
            policy=self.policy,
            configured=self._configured,
            paused=self.paused,
            steps=self.steps,
            stragglers=self._reported,
        ).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the state kept by an earlier start, and return whether the policy is the one of that start.

        If the policy has changed in the config since then, it is taken from the config.
        """
        try:
            kept = _Kept.model_validate(state)
        except ValueError as error:  # saved by another version, or damaged
            logger.warning("perseus: what an earlier start kept cannot be read (%r); it is ignored.", error)
            return False
        self._reported = {p: entry for p, entry in kept.stragglers.items() if p < self._pipelines}
        self.paused, self.steps = kept.paused, kept.steps
        if kept.configured != self._configured:
            return False
        self.policy = kept.policy
        return True


class _Kept(FileModel):
    """State kept for later starts of the job. A straggler is in effect from a given step."""

    model_config = ConfigDict(extra="ignore")
    policy: PolicyConfig
    configured: PolicyConfig
    paused: bool
    steps: int = Field(ge=0, le=10**12)
    stragglers: dict[int, tuple[int, Annotated[float, Field(ge=1)]]]


def _not_known(policy: PolicyConfig) -> Effect | None:
    return None


def _runs_no_plans(job: Mapping[str, Any]) -> bool:
    return job.get("phase") == "observe" and not job.get("next")
