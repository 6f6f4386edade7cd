"""Selects the plan of every pipeline from the policy, the reports and the user's orders."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.run_records import PlanChosen, PolicyChanged, PowerCapChanged
from perseus_ds.policy.decisions import (
    MARGIN,
    Assignment,
    Decision,
    PowerCap,
    RunStatistics,
    Situation,
    decide,
)
from perseus_ds.policy.policies import PolicyConfig, PowerCapPolicy, ReducePolicy, without_reduction
from perseus_ds.server.iterations import Seen
from perseus_ds.server.job_control import Effect, Straggler
from perseus_ds.server.phases import ModeContext

logger = logging.getLogger("perseus_ds")
_APART = 1.06
_TOGETHER = 1.03
_IN_A_ROW = 2
# A stretch factor is reduced as soon as a pipeline would delay the others. It is increased only if it is certain and
# the gain is worth a change of plan.
_CUT = 0.99
_RAISE = 1.03
_SURE_AFTER = 5


class StragglerWatch:
    """Compares the time of each pipeline, without waits for others, with the time of its plan.

    ``docs/stragglers.md`` describes when stretch factors start, change and end.

    Attributes:
        stretch_factors: For each pipeline, the time that its plan may take relative to the policy's plan so that it
            finishes with the slowest pipeline (T' of the paper, section 3.2), >= 1. All are 1 if no pipeline straggles.
    """

    def __init__(self, pipelines: int) -> None:
        self.stretch_factors = (1.0,) * pipelines
        self._seen: deque[tuple[float, ...]] = deque(maxlen=_SURE_AFTER)

    def update(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Add an iteration, by each pipeline's own time divided by that of its plan, and return the stretch factors."""
        slowest = max(ratios)
        self._seen.append(tuple(slowest / ratio for ratio in ratios))
        if len(self._seen) >= _IN_A_ROW:
            self.stretch_factors = self._next_factors([*self._seen][-_IN_A_ROW:])
        return self.stretch_factors

    def _next_factors(self, last: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        given = self.stretch_factors
        least, most = _each(min, last), _each(max, last)
        if max(given) == 1:
            # A different straggler in each of two iterations is noise: no pipeline could be stretched in both.
            return least if max(least) > _APART else given
        if max(most) < _TOGETHER:
            return (1.0,) * len(least)
        if any(possible < _CUT * factor for possible, factor in zip(most, given, strict=True)):
            return least
        sure = _each(min, self._seen)
        worth_it = any(possible > _RAISE * factor for possible, factor in zip(sure, given, strict=True))
        return sure if worth_it and len(self._seen) == _SURE_AFTER else given


def _each(choose: Callable[..., float], seen: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(choose(factors) for factors in zip(*seen, strict=True))


def with_reported(stretch_factors: Sequence[float], reported: Straggler | None) -> tuple[float, ...]:
    """Return the stretch factors, combined with a pipeline that a user has reported as a straggler."""
    if reported is None:
        return tuple(stretch_factors)
    slowness = [max(stretch_factors) / factor for factor in stretch_factors]
    others = [slow for pipeline, slow in enumerate(slowness) if pipeline != reported.pipeline]
    slowness[reported.pipeline] = reported.slowdown * (statistics.median_low(others) if others else 1.0)
    return tuple(max(slowness) / slow for slow in slowness)


def straggler_of(stretch_factors: Sequence[float]) -> Straggler | None:
    """Return the pipeline for which all others wait, if any."""
    largest = max(stretch_factors)
    return None if largest == min(stretch_factors) else Straggler(stretch_factors.index(min(stretch_factors)), largest)


class _Progress(FileModel):
    """Progress kept for a later start of the job. The plan is None if it is for another profile."""

    plan: Annotated[int, Field(ge=0)] | None
    stretch_factors: tuple[Annotated[float, Field(ge=1)], ...]
    statistics: RunStatistics


class PlanSelector:
    """Decides after every iteration which plans the following ones run.

    Attributes:
        in_force: Assignment of the following iterations.
        statistics: Ratios of measured to predicted time and power of the last iterations.
        default_power_w: Power of all GPUs at default clocks, as measured in this job [W]; None if unknown.
    """

    def __init__(self, context: ModeContext, frontier: Frontier) -> None:
        """Decide on the first assignment, with the progress of an earlier start."""
        self._kind = context.job.order
        self._frontier = frontier
        self._assigned_for: tuple[Any, ...] = ()
        self._assigned = Assignment()
        self._control = context.control
        self._timebase = context.timebase
        self._recorder = context.recorder
        self._gpus_per_rank = context.job.gpus_per_rank
        self._stragglers = StragglerWatch(1 + max(place.pipeline for place in context.job.places))
        self.statistics = RunStatistics()
        self.default_power_w: float | None = None
        self._lateness = 0.0
        self._ordered: PolicyConfig = self._control.policy
        self._problem = ""
        self._decision: Decision | None = None
        self.in_force = Assignment()
        self._control.effect_of = self.effect_of
        plan = self._restore()
        if plan is None:
            self.decide()
        else:
            self._adopt(self._assign(plan, paused=self._control.paused, capped=self.default_clocks_exceed_cap()))

    def learn(self, seen: Seen) -> None:
        """Update the statistics with an iteration under plans."""
        plans = seen.run.plans if seen.run is not None else None
        if plans is None or plans.frontier is not self._frontier:
            return
        promised, ran = self._frontier.plans[plans.assignment.plan], plans.assignment.plans
        self.statistics.add_stop(seen.messages[0].report.stopped_s)
        self.statistics.add_iteration(
            time_s=seen.time_s,
            energy_j=seen.reports.energy_j,
            promised_time_s=promised.time_s,
            promised_energy_j=promised.energy_j * self._gpus_per_rank,
        )
        computed_s = seen.ranks.computed_s
        if len(ran) > 1 and computed_s.min() > 0:
            # The rank that is last to reduce gradients does not wait, so the shortest tail is the duration of the tail
            # itself.
            tail_s = float(seen.ranks.tail_s.min())
            own_s = seen.ranks.by_pipeline(computed_s).tolist()
            promised_s = [self._frontier.plans[plan].time_s for plan in ran]
            self._stragglers.update(
                [(one_s + tail_s) / plan_s for one_s, plan_s in zip(own_s, promised_s, strict=True)]
            )

    def decide(self) -> None:
        """Decide on the following iterations."""
        self._adopt(self._choose())

    def _adopt(self, chosen: Assignment) -> None:
        """Put an assignment in force, and record it if it differs from the previous one."""
        if chosen != self.in_force:
            self.in_force = replace(chosen, number=self.in_force.number + 1)
            self._recorder.event(PlanChosen.model_validate(self.status()))

    def status(self) -> dict[str, Any]:
        """Return the assignment in force as fields of :class:`PlanChosen`."""
        now = self.in_force
        straggler = straggler_of(now.stretch_factors)
        return {
            "plan": now.plan,
            "plans": list(now.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": now.paused,
        }

    def effect_of(self, policy: PolicyConfig) -> Effect:
        """Return the predicted effect of a policy. Thread-safe."""
        decision = self._decide(policy)
        time_s, energy_j = self._expected(decision.plan)
        time_now_s, _ = self._expected(self.in_force.plan)
        without_s, _ = self._expected(self._decide(without_reduction(policy)).plan)
        default_w = self._power_at_default_clocks_w
        return Effect(time_s, time_now_s, without_s, energy_j / time_s, default_w, decision.problem)

    def _choose(self) -> Assignment:
        control = self._control
        policy = control.policy_now()
        if policy != self._ordered:
            self._ordered, self._problem, self._lateness = policy, "", 0.0
        control.record_policy()
        before, self._decision = self._decision, self._decide(policy)
        decision = self._decision
        self._record_cap(decision.cap, before.cap if before is not None else None)
        # The part before the first colon has no figures that change at every iteration.
        if decision.problem and decision.problem.partition(":")[0] != self._problem.partition(":")[0]:
            self._problem = decision.problem
            self._recorder.event(PolicyChanged(problem=decision.problem))
            self._recorder.say(decision.problem)
        return self._assign(
            decision.plan,
            paused=control.paused or decision.failed,
            capped=self._is_capped(decision),
        )

    def _record_cap(self, cap: PowerCap | None, before: PowerCap | None) -> None:
        """Record the power cap if it has changed."""
        if (cap and cap.watts) != (before and before.watts):
            self._recorder.event(PowerCapChanged(watts=cap and cap.watts))

    def _is_capped(self, decision: Decision) -> bool:
        """Return True if default clocks would exceed the power cap in force."""
        if decision.cap is None:
            return False
        ratio = 1.0 if self.default_power_w else self.statistics.power_ratio
        return bool(ratio * self._power_at_default_clocks_w > decision.cap.watts * (1 - MARGIN))

    @property
    def _power_at_default_clocks_w(self) -> float:
        return self.default_power_w or self._frontier.baseline.mean_power_w * self._gpus_per_rank

    def default_clocks_exceed_cap(self) -> bool:
        """Return whether default clocks would exceed the power cap of the current policy."""
        policy = self._control.policy_now()
        return isinstance(policy, PowerCapPolicy | ReducePolicy) and self._is_capped(self._decide(policy))

    def _decide(self, policy: PolicyConfig) -> Decision:
        situation = Situation(
            step=self._control.steps,
            now=self._timebase.date(),
            time_ratio=self.statistics.time_ratio,
            power_ratio=self.statistics.power_ratio,
            stopped_s=self.statistics.stopped_s,
            relative_time=self._control.kind_times.relative(self._kind),
            gpus_per_rank=self._gpus_per_rank,
            default_power_w=self._power_at_default_clocks_w,
            before=self._decision,
        )
        try:
            return decide(policy, self._frontier, situation)
        except Exception as error:  # an order must not stop training
            return Decision(0, f"the policy {policy.name} fails ({error!r}). Running at default clocks", failed=True)

    def _assign(self, plan: int, **decided: bool) -> Assignment:
        factors = with_reported(self._stragglers.stretch_factors, self._control.straggler())
        key = plan, factors, self._lateness, decided
        if key != self._assigned_for:  # most decisions equal the previous one
            self._assigned_for = key
            self._assigned = Assignment.of(self._frontier, plan, factors, lateness=self._lateness, **decided)
        return self._assigned

    def speed_up(self, late: float) -> bool:
        """Request plans that are faster by a fraction, and return whether there are any."""
        now = self.in_force
        faster = Assignment.of(self._frontier, now.plan, now.stretch_factors, lateness=late)
        if faster.plans == now.plans:
            return False
        self._lateness = (1 + self._lateness) * (1 + late) - 1
        return True

    def return_to_policy(self) -> None:
        """Return to the policy's own plans, which may be slower."""
        self._lateness = 0.0

    def _expected(self, plan: int) -> tuple[float, float]:
        """Return time [s] and energy of all GPUs [J] of an iteration, from the profile and measurements."""
        known, by_profile = self.statistics, self._frontier.plans[plan]
        time_s = by_profile.time_s * known.time_ratio
        return time_s, by_profile.energy_j / by_profile.time_s * time_s * known.power_ratio * self._gpus_per_rank

    def state(self) -> dict[str, Any]:
        """Return the progress to keep for a later start of the job, as plain values."""
        return _Progress(
            plan=self.in_force.plan, stretch_factors=self._stragglers.stretch_factors, statistics=self.statistics
        ).model_dump(mode="json")

    def state_for_other_plans(self) -> dict[str, Any]:
        """Return the part of :meth:`state` that is valid for plans of another profile."""
        stops = RunStatistics(stopped_s=self.statistics.stopped_s, stops=self.statistics.stops)
        return {**self.state(), "plan": None, "statistics": stops.model_dump(mode="json")}

    def _restore(self) -> int | None:
        """Restore the result of :meth:`state`. Return the policy's plan at that time, if known."""
        state = {key: value for key, value in self._control.progress.items() if key != "kept"}
        self._control.progress = {}
        if not state:
            return None
        try:
            progress = _Progress.model_validate(state)
        except ValueError as error:  # saved by another version, or damaged
            logger.warning("perseus: the progress under plans that was kept cannot be read (%r); it is ignored.", error)
            return None
        self.statistics = progress.statistics
        if len(progress.stretch_factors) == len(self._stragglers.stretch_factors):
            self._stragglers.stretch_factors = progress.stretch_factors
        if progress.plan is None:
            self._decision = None
            return None
        plan = min(progress.plan, len(self._frontier.plans) - 1)
        self._decision = replace(self._decision or Decision(plan), plan=plan)
        return plan
