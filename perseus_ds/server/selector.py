"""Selects the plans of every order from the goal, the reports and the user's commands."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perseus_ds.artifacts.frontier import NO_SLOWER
from perseus_ds.artifacts.run_events import GoalChanged, PlanChosen, PowerCapChanged
from perseus_ds.policy.decisions import MARGIN, Decision, PowerCap, Situation, decide, slowdown_of
from perseus_ds.policy.goal import Goal
from perseus_ds.policy.plans import Plans
from perseus_ds.policy.stragglers import StragglerWatch, straggler_of, with_reported
from perseus_ds.savings import Default
from perseus_ds.server.iterations import Seen
from perseus_ds.server.job import Order
from perseus_ds.server.job_control import Effect, cost_in_words
from perseus_ds.server.phases import ModeContext
from perseus_ds.units import plain

_FOLLOWED_AFTER = 2
"""Number of steps until a decision takes effect: ranks have already begun the next one."""
# Deviations from promises of less than this number of standard errors are noise.
_SURE = 2.0
# Time that an iteration took too long is not saved up by later ones, beyond this fraction of an iteration.
_MOST_OWED = 0.5


class PlanSelector:
    """Decides after every iteration which plans the following ones run.

    Attributes:
        is_paused: Whether the job is to run at default clocks.
        is_capped: Whether default clocks would exceed the power limit. Then all iterations run under plans.
        is_refuted: Whether passes deviate from the profile, so that forecasts by the profile are not to be shown.
    """

    def __init__(self, context: ModeContext) -> None:
        """Decide on the first plans, with the state of an earlier start."""
        self._state = context.state
        self._orders = context.orders
        self._control = context.control
        self._timebase = context.timebase
        self._recorder = context.recorder
        self._gpus_per_rank = context.job.gpus_per_rank
        self._stragglers = StragglerWatch(1 + max(place.pipeline for place in context.job.places))
        if len(self._state.stretch_factors) == len(self._stragglers.stretch_factors):
            self._stragglers.stretch_factors = self._state.stretch_factors
        self._goal = self._control.goal
        self._problem = ""
        self._cap: PowerCap | None = None
        self._decisions: dict[int, Decision] = {}
        self._plans: dict[int, Plans] = {}
        self._chosen_for: dict[int, tuple[object, ...]] = {}
        self._recorded: dict[int, Mapping[str, Any]] = {}
        # The last plans of each order that were printed. Two plans that take turns are printed once.
        self._said: dict[int, deque[tuple[int, ...]]] = defaultdict(lambda: deque(maxlen=2))
        self.is_paused = self.is_capped = self.is_refuted = False
        self.decide()
        self._control.effect_of = self.effect_of

    def learn(self, seen: Seen) -> None:
        """Update the statistics with an iteration under plans."""
        plans = seen.plans
        if plans is None:
            return
        statistics, frontier = self._state.statistics, plans.frontier
        promised = frontier.plans[plans.plan]
        statistics.add_stop(seen.messages[0].report.stopped_s)
        statistics.add_iteration(
            time_s=seen.time_s,
            energy_j=seen.job_report.energy_j,
            promised_time_s=promised.time_s,
            promised_energy_j=promised.energy_j * self._gpus_per_rank,
        )
        if self._goal.max_slowdown is not None:
            slowdown = (1 + slowdown_of(frontier, plans.plan)) * (1 + self._late()) - 1
            spare = self._state.spare_slowdown + self._goal.max_slowdown - slowdown
            self._state.spare_slowdown = max(spare, -_MOST_OWED)
        if len(plans.plans) > 1 and seen.ranks.computed_s.min() > 0:
            self._note_stragglers(seen, plans)

    def _note_stragglers(self, seen: Seen, plans: Plans) -> None:
        """Compare the time of each pipeline with that of its plan for inputs of their lengths."""
        # The rank that is last to reduce gradients does not wait, so the shortest tail is the duration of the tail
        # itself.
        tail_s = float(seen.ranks.tail_s.min())
        ratios = []
        for pipeline, computed_s in enumerate(seen.ranks.by_pipeline(seen.ranks.computed_s).tolist()):
            plan_s = plans.frontier.plans[plans.plans[pipeline]].time_s
            # Long inputs in several iterations in a row do not make a pipeline a straggler.
            length = self._state.default.time_factor(seen.tokens[pipeline])
            ratios.append((computed_s / length + tail_s) / plan_s)
        self._state.stretch_factors = self._stragglers.update(ratios)

    def decide(self) -> bool:
        """Decide on the following iterations, and return whether the goal has changed."""
        goal, was_paused = self._control.goal_now(), self.is_paused
        has_changed = goal != self._goal
        if has_changed:
            self._goal, self._problem = goal, ""
            self._state.spare_slowdown = 0.0
        self._control.record_goal()
        decided = {order: self._decide(goal, order) for order in self._orders.planned}
        self.is_paused = self._control.paused or any(decision.failed for decision in decided.values())
        self.is_capped = any(self._exceeds(order, decision.cap) for order, decision in decided.items())
        for order, decision in decided.items():
            self._decisions[order.number] = decision
            self._state.plans[order.number] = decision.plan
            self._choose(order, decision.plan)
            self._record_cap(decision.cap)
        if has_changed:
            self._say_goal()
        self._say_plans(is_known=has_changed)
        for decision in decided.values():
            self._say_problem(decision.problem)
        if self.is_paused != was_paused and not any(decision.failed for decision in decided.values()):
            clocks = "default clocks" if self.is_paused else "under plans again"
            self._recorder.say(f"{'paused' if self.is_paused else 'resumed'} by control: {clocks} {self._from_step()}")
        return has_changed

    def _choose(self, order: Order, plan: int) -> None:
        """Choose the plans of all pipelines for a plan of the goal, and record them if they differ."""
        assert order.frontier is not None, "it is planned"
        factors = with_reported(self._stragglers.stretch_factors, self._control.straggler())
        key = id(order.frontier), plan, factors, self._state.lateness
        if key != self._chosen_for.get(order.number):  # most decisions equal the previous one
            self._chosen_for[order.number] = key
            self._plans[order.number] = Plans.of(order.frontier, order.dag, plan, factors, self._state.lateness)
        status = self.status(order)
        if status != self._recorded.get(order.number):
            self._recorded[order.number] = status
            self._recorder.event(PlanChosen.model_validate(status))

    def plans(self) -> dict[int, Plans]:
        """Return the plans in force with their forecasts, by the number of the order."""
        return {order.number: self._plans_of(order) for order in self._orders.planned}

    def _plans_of(self, order: Order) -> Plans:
        """Return the plans of an order, with their prediction from what default clocks take now."""
        plans = self._plans[order.number]
        forecast = plans.forecast_from(self._default(order), is_refuted=self.is_refuted)
        if forecast != plans.forecast:
            plans = self._plans[order.number] = replace(plans, forecast=forecast)
        return plans

    def _default(self, order: Order) -> Default:
        default = self._state.default.of(order.number)
        assert default is not None, "it is predicted at least"
        return default

    def status(self, order: Order | None = None) -> dict[str, Any]:
        """Return the plans of an order, by default of the latest one, as fields of :class:`PlanChosen`."""
        shown = order or self._shown
        if shown is None:
            return {"plan": None}
        now = self._plans[shown.number]
        straggler = straggler_of(now.stretch_factors)
        return {
            "plan": now.plan,
            "plans": list(now.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": self.is_paused,
        }

    @property
    def _shown(self) -> Order | None:
        """The order that represents the job: the latest one if it has plans."""
        latest = self._orders.latest
        if latest is not None and latest.number in self._plans and latest.frontier is not None:
            return latest
        return next((order for order in self._orders.planned if order.number in self._plans), None)

    def effect_of(self, goal: Goal) -> Effect | None:
        """Return the predicted effect of a goal, or None without plans. Thread-safe."""
        order = self._shown
        if order is None:
            return None
        assert order.frontier is not None, "it is planned"
        decision, default = self._decide(goal, order), self._default(order)
        without = self._decide(goal.without_power_limit(), order)
        now = self._plans[order.number]
        plans = Plans.of(order.frontier, order.dag, decision.plan, now.stretch_factors, self._state.lateness)
        forecast = plans.forecast_from(default)
        power_ratio = self._state.statistics.power_ratio
        return Effect(
            plan=decision.plan,
            slowdown=forecast.slowdown,
            saved=forecast.saved,
            power_w=power_ratio * order.frontier.plans[decision.plan].mean_power_w * self._gpus_per_rank,
            later=order.frontier.plans[decision.plan].time_s / order.frontier.plans[without.plan].time_s - 1,
            begins_in_s=_FOLLOWED_AFTER * default.time_s * (1 + now.promised_slowdown),
            limit_w=goal.power_limit_w(default.power_w),
            problem=decision.problem,
        )

    def _from_step(self) -> str:
        return f"from step {self._control.steps + _FOLLOWED_AFTER}"

    def _say_goal(self) -> None:
        """Print the goal that is in force from now on, and its effect."""
        effect = self.effect_of(self._goal)
        if effect is not None:
            text = f"{self._control.change_in_words}: plan {effect.plan} {self._from_step()}, {effect.in_words}"
            self._recorder.say(plain(text))

    def _say_plans(self, *, is_known: bool) -> None:
        """Print other plans of the order that represents the job, unless they are known already."""
        order = self._shown
        if order is None or self.is_paused:
            return
        plans, said = self._plans_of(order), self._said[order.number]
        if plans.plans in said:
            return
        is_first = not said
        said.append(plans.plans)
        if is_known or is_first or plans.forecast is None:
            return
        words = PlanChosen.model_validate(self.status(order)).in_words()
        cost = cost_in_words(plans.forecast.slowdown, plans.forecast.saved)
        self._recorder.say(plain(f"{words} {self._from_step()}, {cost}"))

    def _say_problem(self, problem: str) -> None:
        """Record and print a part of the goal that no plan keeps, once."""
        # The part before the first colon has no figures that change at every iteration.
        if problem and problem.partition(":")[0] != self._problem.partition(":")[0]:
            self._problem = problem
            self._recorder.event(GoalChanged(problem=problem))
            self._recorder.say(problem)

    def _record_cap(self, cap: PowerCap | None) -> None:
        """Record the power limit in force if it has changed."""
        if (cap and cap.watts) != (self._cap and self._cap.watts):
            self._recorder.event(PowerCapChanged(watts=cap and cap.watts))
        self._cap = cap

    def _exceeds(self, order: Order, cap: PowerCap | None) -> bool:
        """Return True if default clocks would exceed a power limit."""
        if cap is None:
            return False
        default = self._default(order)
        ratio = 1.0 if default.is_measured else self._state.statistics.power_ratio
        return ratio * self._power_at_default_clocks_w(order) > cap.watts * (1 - MARGIN)

    def _power_at_default_clocks_w(self, order: Order) -> float:
        assert order.frontier is not None, "it is planned"
        default = self._default(order)
        return default.power_w if default.is_measured else order.frontier.baseline.mean_power_w * self._gpus_per_rank

    def _decide(self, goal: Goal, order: Order) -> Decision:
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
            late=self._late(),
            spare=self._state.spare_slowdown,
            stopped_s=statistics.stopped_s,
            relative_time=self._state.default.relative_time(order.number),
            gpus_per_rank=self._gpus_per_rank,
            default_power_w=self._power_at_default_clocks_w(order),
            before=before,
        )
        try:
            return decide(goal, order.frontier, situation)
        except Exception as error:  # a goal must not stop training
            return Decision(0, f"the goal cannot be followed ({error!r}). Running at default clocks", failed=True)

    def _late(self) -> float:
        """Return by how much longer plans certainly take than promised, as a fraction. Negative if they are faster.

        What "no slower" tolerates is not counted: plans that are good are not replaced because of it.
        """
        late, _ = self._state.trial.estimates()
        if math.isnan(late.error):
            return 0.0
        certain = max(0.0, abs(late.mean) - _SURE * late.error - NO_SLOWER)
        return math.expm1(math.copysign(certain, late.mean))

    def speed_up(self, late: float) -> bool:
        """Request plans that are faster by a fraction, and return whether there are any."""
        lateness = (1 + self._state.lateness) * (1 + late) - 1
        has_faster = False
        for order in self._orders.planned:
            assert order.frontier is not None, "it is planned"
            now = self._plans[order.number]
            faster = Plans.of(order.frontier, order.dag, now.plan, now.stretch_factors, lateness)
            has_faster |= faster.plans != now.plans
        if has_faster:
            self._state.lateness = lateness
        return has_faster
