"""Selects the plans of every order from the policy, the reports and the user's orders."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from perseus_ds.artifacts.run_records import PlanChosen, PolicyChanged, PowerCapChanged
from perseus_ds.measures import STALL
from perseus_ds.policy.decisions import MARGIN, Assignment, Decision, Forecast, PowerCap, Situation, decide
from perseus_ds.policy.policies import PolicyConfig, PowerCapPolicy, ReducePolicy, without_reduction
from perseus_ds.server.iterations import Plans, Seen
from perseus_ds.server.job import Order
from perseus_ds.server.job_control import Effect, Straggler
from perseus_ds.server.phases import ModeContext

_APART = 1.06
_TOGETHER = 1.03
# Number of iterations in a row after which a pipeline counts as a straggler, and after which it no longer does. Lengths
# of inputs that vary let any pipeline be the slowest one several times in a row.
_SURE_AFTER, _OVER_AFTER = 5, 2
# A stretch factor is reduced as soon as a pipeline would delay the others. It is increased only if it is certain and
# the gain is worth a change of plan.
_CUT = 0.99
_RAISE = 1.03


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
        if len(self._seen) == _SURE_AFTER:
            self.stretch_factors = self._next_factors()
        return self.stretch_factors

    def _next_factors(self) -> tuple[float, ...]:
        given, sure = self.stretch_factors, _each(min, self._seen)
        if max(given) == 1:
            # A different straggler in each iteration is noise: no pipeline could be stretched in all of them.
            return sure if max(sure) > _APART else given
        last = [*self._seen][-_OVER_AFTER:]
        least, most = _each(min, last), _each(max, last)
        if max(most) < _TOGETHER:
            return (1.0,) * len(least)
        if any(possible < _CUT * factor for possible, factor in zip(most, given, strict=True)):
            return least
        worth_it = any(possible > _RAISE * factor for possible, factor in zip(sure, given, strict=True))
        return sure if worth_it else given


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


class PlanSelector:
    """Decides after every iteration which plans the following ones run.

    Attributes:
        in_force: Assignment of plans for each order with plans, by the number of the order.
        is_paused: Whether the job is to run at default clocks.
        is_capped: Whether default clocks would exceed the power cap in force. Then all iterations run under plans.
        is_refuted: Whether passes deviate from the profile, so that forecasts by the profile are not to be shown.
    """

    def __init__(self, context: ModeContext) -> None:
        """Decide on the first assignments, with the state of an earlier start."""
        self._state = context.state
        self._orders = context.orders
        self._control = context.control
        self._timebase = context.timebase
        self._recorder = context.recorder
        self._gpus_per_rank = context.job.gpus_per_rank
        self._stragglers = StragglerWatch(1 + max(place.pipeline for place in context.job.places))
        if len(self._state.stretch_factors) == len(self._stragglers.stretch_factors):
            self._stragglers.stretch_factors = self._state.stretch_factors
        self._policy: PolicyConfig = self._control.policy
        self._problem = ""
        self._cap: PowerCap | None = None
        self._decisions: dict[int, Decision] = {}
        self._assigned_for: dict[int, tuple[Any, ...]] = {}
        self._plans: dict[int, Plans] = {}
        self.in_force: dict[int, Assignment] = {}
        self.is_paused = self.is_capped = self.is_refuted = False
        self.decide()
        self._control.effect_of = self.effect_of

    def learn(self, seen: Seen) -> None:
        """Update the statistics with an iteration under plans."""
        plans = seen.plans
        if plans is None:
            return
        statistics, frontier = self._state.statistics, plans.frontier
        promised, ran = frontier.plans[plans.assignment.plan], plans.assignment.plans
        statistics.add_stop(seen.messages[0].report.stopped_s)
        statistics.add_iteration(
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
            promised_s = [frontier.plans[plan].time_s for plan in ran]
            ratios = [(one_s + tail_s) / plan_s for one_s, plan_s in zip(own_s, promised_s, strict=True)]
            self._state.stretch_factors = self._stragglers.update(ratios)

    def decide(self) -> bool:
        """Decide on the following iterations, and return whether the goal has changed."""
        policy = self._control.policy_now()
        has_changed = policy != self._policy
        if has_changed:
            self._policy, self._problem = policy, ""
        self._control.record_policy()
        decided = {order: self._decide(policy, order) for order in self._orders.planned}
        self.is_paused = self._control.paused or any(decision.failed for decision in decided.values())
        self.is_capped = any(self._exceeds(order, decision.cap) for order, decision in decided.items())
        for order, decision in decided.items():
            self._decisions[order.number] = decision
            self._state.plans[order.number] = decision.plan
            self._say_problem(decision.problem)
            self._record_cap(decision.cap)
            self._assign(order, decision.plan)
        return has_changed

    def _assign(self, order: Order, plan: int) -> None:
        """Put the assignment for a plan of the policy in force, and record it if it differs from the previous one."""
        assert order.frontier is not None, "it is planned"
        factors = with_reported(self._stragglers.stretch_factors, self._control.straggler())
        key = id(order.frontier), plan, factors, self._state.lateness, self.is_paused, self.is_capped
        if key == self._assigned_for.get(order.number):  # most decisions equal the previous one
            return
        self._assigned_for[order.number] = key
        before = self.in_force.get(order.number)
        number = 1 if before is None else before.number + 1
        assignment = Assignment.of(order.frontier, plan, factors, lateness=self._state.lateness)
        self.in_force[order.number] = replace(assignment, paused=self.is_paused, capped=self.is_capped, number=number)
        if self.in_force[order.number] != before:
            self._recorder.event(PlanChosen.model_validate(self.status(order)))

    def plans(self) -> dict[int, Plans]:
        """Return the plans in force with their forecasts, by the number of the order."""
        return {order.number: self._plans_of(order) for order in self._orders.planned}

    def _plans_of(self, order: Order) -> Plans:
        assert order.frontier is not None, "it is planned"
        assignment = self.in_force[order.number]
        forecast = self._forecast(order)
        known = self._plans.get(order.number)
        if known is None or known.forecast != forecast or known.assignment is not assignment:
            known = self._plans[order.number] = Plans(order.frontier, assignment, order.dag, forecast)
        return known

    def _forecast(self, order: Order) -> Forecast:
        """Return time and energy at default clocks, and those that the plans promise.

        Default clocks are measured in this job or predicted from the profile. The slowdown and power that plans promise
        relative to them do not depend on this.
        """
        assignment = self.in_force[order.number]
        default = self._state.default.of(order.number)
        assert default is not None, "it is predicted at least"
        time_s = default.time_s * (1 + assignment.promised_slowdown)
        return Forecast(
            time_s=time_s,
            energy_j=time_s * assignment.promised_power * default.power_w,
            default_time_s=default.time_s,
            default_energy_j=default.energy_j,
            stall_s=STALL * time_s,
            default_measured=default.is_measured,
            is_refuted=self.is_refuted and not default.is_measured,
        )

    def status(self, order: Order | None = None) -> dict[str, Any]:
        """Return the assignment of an order, by default of the latest one, as fields of :class:`PlanChosen`."""
        shown = order or self._shown
        if shown is None:
            return {"plan": None}
        now = self.in_force[shown.number]
        straggler = straggler_of(now.stretch_factors)
        return {
            "plan": now.plan,
            "plans": list(now.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": now.paused,
        }

    @property
    def _shown(self) -> Order | None:
        """The order that represents the job: the latest one if it has plans."""
        latest = self._orders.latest
        if latest is not None and latest.number in self.in_force and latest.frontier is not None:
            return latest
        return next((order for order in self._orders.planned if order.number in self.in_force), None)

    def effect_of(self, policy: PolicyConfig) -> Effect | None:
        """Return the predicted effect of a policy, or None without plans. Thread-safe."""
        order = self._shown
        if order is None:
            return None
        decision = self._decide(policy, order)
        time_s, energy_j = self._expected(order, decision.plan)
        time_now_s, _ = self._expected(order, self.in_force[order.number].plan)
        without_s, _ = self._expected(order, self._decide(without_reduction(policy), order).plan)
        default_w = self._power_at_default_clocks_w(order)
        return Effect(time_s, time_now_s, without_s, energy_j / time_s, default_w, decision.problem)

    def _say_problem(self, problem: str) -> None:
        """Record and print a condition that no plan meets, once."""
        # The part before the first colon has no figures that change at every iteration.
        if problem and problem.partition(":")[0] != self._problem.partition(":")[0]:
            self._problem = problem
            self._recorder.event(PolicyChanged(problem=problem))
            self._recorder.say(problem)

    def _record_cap(self, cap: PowerCap | None) -> None:
        """Record the power cap if it has changed."""
        if (cap and cap.watts) != (self._cap and self._cap.watts):
            self._recorder.event(PowerCapChanged(watts=cap and cap.watts))
        self._cap = cap

    def _exceeds(self, order: Order, cap: PowerCap | None) -> bool:
        """Return True if default clocks would exceed a power cap."""
        if cap is None:
            return False
        default = self._state.default.of(order.number)
        is_measured = default is not None and default.is_measured
        ratio = 1.0 if is_measured else self._state.statistics.power_ratio
        return bool(ratio * self._power_at_default_clocks_w(order) > cap.watts * (1 - MARGIN))

    def _power_at_default_clocks_w(self, order: Order) -> float:
        assert order.frontier is not None, "it is planned"
        default = self._state.default.of(order.number)
        if default is not None and default.is_measured:
            return default.power_w
        return order.frontier.baseline.mean_power_w * self._gpus_per_rank

    def default_clocks_exceed_cap(self) -> bool:
        """Return whether default clocks would exceed the power cap of the current policy."""
        policy = self._control.policy_now()
        if not isinstance(policy, PowerCapPolicy | ReducePolicy):
            return False
        return any(self._exceeds(order, self._decide(policy, order).cap) for order in self._orders.planned)

    def _decide(self, policy: PolicyConfig, order: Order) -> Decision:
        assert order.frontier is not None, "it is planned"
        statistics, before = self._state.statistics, self._decisions.get(order.number)
        if before is None and order.number in self._state.plans:  # of an earlier start
            before = Decision(min(self._state.plans[order.number], len(order.frontier.plans) - 1))
        situation = Situation(
            step=self._control.steps,
            iterations_per_step=self._control.iterations_per_step,
            now=self._timebase.date(),
            time_ratio=statistics.time_ratio,
            power_ratio=statistics.power_ratio,
            stopped_s=statistics.stopped_s,
            relative_time=self._state.default.relative_time(order.number),
            gpus_per_rank=self._gpus_per_rank,
            default_power_w=self._power_at_default_clocks_w(order),
            before=before,
        )
        try:
            return decide(policy, order.frontier, situation)
        except Exception as error:  # an order must not stop training
            return Decision(0, f"the policy {policy.name} fails ({error!r}). Running at default clocks", failed=True)

    def speed_up(self, late: float) -> bool:
        """Request plans that are faster by a fraction, and return whether there are any."""
        has_faster = False
        for order in self._orders.planned:
            assert order.frontier is not None, "it is planned"
            now = self.in_force[order.number]
            faster = Assignment.of(order.frontier, now.plan, now.stretch_factors, lateness=late)
            has_faster |= faster.plans != now.plans
        if has_faster:
            self._state.lateness = (1 + self._state.lateness) * (1 + late) - 1
        return has_faster

    def _expected(self, order: Order, plan: int) -> tuple[float, float]:
        """Return time [s] and energy of all GPUs [J] of an iteration, from the profile and measurements."""
        assert order.frontier is not None, "it is planned"
        known, by_profile = self._state.statistics, order.frontier.plans[plan]
        time_s = by_profile.time_s * known.time_ratio
        return time_s, by_profile.energy_j / by_profile.time_s * time_s * known.power_ratio * self._gpus_per_rank
