"""Decides by the hours of a price or a carbon intensity: makes a timetable and follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.policy.hourly_programme import HALT, Option, Timetable, cheapest
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signals import Signal
from perseus_ds.policy.situation import MARGIN, Decision, Situation
from perseus_ds.units import J_PER_KWH

_NO_SIGNAL = Signal((-math.inf,), (1.0,), math.inf)
# A timetable holds until the job is this many steps before or behind it.
_LEAST_STEPS_OFF = 2.0


def by_hours(policy: CheapestPolicy, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that a policy asks for by the hour, or that training stands still."""
    left = policy.total_steps - situation.step
    if left <= 0:
        return Decision(len(frontier.plans) - 1)
    now_s = situation.now.timestamp()
    signal = situation.signals.get(policy.signal, _NO_SIGNAL)
    timetable = situation.timetable
    if timetable is None or not _still_holds(timetable, policy, signal, situation):
        options = options_of(policy, frontier, situation)
        timetable = make_timetable(policy, signal, options, situation)
    if timetable is None:
        needed_s, left_s = left / options[0].rate, max(0.0, policy.finish_by.timestamp() - now_s)
        return Decision(
            options[0].plan,
            f"the deadline {policy.finish_by.isoformat()} cannot be met: {left} steps take {needed_s:.0f} s at the "
            f"fastest, {left_s:.0f} s are left. Running the fastest plan",
        )
    # The iteration that is decided on lasts from half an iteration before this moment to half of one after it.
    decides_for_s = now_s + (situation.iterations_ahead + 0.5) / timetable.rates[situation.running or 0]
    return Decision(
        timetable.plan_at(decides_for_s),
        _assumption(policy, signal, timetable),
        halts=timetable.halts_at(decides_for_s),
        timetable=timetable,
    )


def options_of(policy: CheapestPolicy, frontier: Frontier, situation: Situation) -> list[Option]:
    """Return rate and power of each plan as measured in this run, the fastest first, and of standing still."""
    options = []
    for number, plan in enumerate(frontier.plans):
        time_s = plan.time_s * situation.time_ratio
        power_w = plan.energy_j / plan.time_s * situation.power_ratio * situation.gpus_per_rank
        period_s = time_s + situation.stopped_s
        energy_j = power_w * time_s + situation.idle_power_w * situation.stopped_s
        options.append(Option(number, 1 / period_s, energy_j / period_s))
    if policy.may_pause:
        options.append(Option(HALT, 0.0, situation.idle_power_w))
    return options


def make_timetable(
    policy: CheapestPolicy, signal: Signal, options: Sequence[Option], situation: Situation
) -> Timetable | None:
    """Return the cheapest timetable that ends in time; None if there is none.

    It keeps one step and half a percent of the time in reserve, as long as that is possible.
    """
    begin_s, end_s = situation.now.timestamp(), policy.finish_by.timestamp()
    left = policy.total_steps - situation.step
    if end_s <= begin_s:
        return None
    edges_s, values = signal.between(begin_s, end_s)
    bound = cheapest(options, edges_s, values, left)
    if bound is None:
        return None
    in_reserve = cheapest(options, *signal.between(begin_s, end_s - MARGIN * (end_s - begin_s)), left + 1, near=bound)
    solution = in_reserve or bound
    edges_s, plans = solution.parts()
    return Timetable(
        policy=policy,
        signal=signal,
        edges_s=edges_s,
        plans=plans,
        rates={option.plan: option.rate for option in options},
        made_s=begin_s,
        step=situation.step,
        valid_until_s=min(signal.next_change_s(begin_s), float(edges_s[-1])),
        cost=solution.cost / J_PER_KWH,
        bound=bound.cost / J_PER_KWH,
        fastest_cost=cost_of_one(options[0], signal, begin_s, left) / J_PER_KWH,
        mean_from_s=signal.end_s if signal.end_s < end_s else None,
    )


def cost_of_one(option: Option, signal: Signal, begin_s: float, steps: float) -> float:
    """Return the cost of steps under one plan throughout [value x J]."""
    edges_s, values = signal.between(begin_s, begin_s + steps / option.rate)
    return float((np.diff(edges_s) * values).sum() * option.power_w)


def _still_holds(timetable: Timetable, policy: CheapestPolicy, signal: Signal, situation: Situation) -> bool:
    now_s = situation.now.timestamp()
    allowed = max(_LEAST_STEPS_OFF, MARGIN / 2 * (policy.total_steps - timetable.step))
    return (
        timetable.policy == policy
        and timetable.signal is signal
        and now_s < timetable.valid_until_s
        and abs(timetable.steps_at(now_s) - situation.step) <= allowed
    )


def _assumption(policy: CheapestPolicy, signal: Signal, timetable: Timetable) -> str:
    if signal is _NO_SIGNAL:
        return f"the signal cannot be read from {policy.signal}: every hour is taken to cost the same"
    if timetable.mean_from_s is None:
        return ""
    end = datetime.fromtimestamp(timetable.mean_from_s, timezone.utc)
    return (
        f"the signal {policy.signal} ends at {end:%FT%TZ}, before the deadline: of the time after it, its mean "
        f"{signal.mean:.4g} is assumed"
    )
