"""What a job says: its events, its policy, what its plans promise and what they did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_ds.artifacts.run_records import (
    ClockRefused,
    CostsSoFar,
    Drifted,
    Ended,
    Event,
    Failed,
    Halted,
    OrderGiven,
    PlanChosen,
    PlanJudged,
    PolicyChanged,
    PowerCapChanged,
    ProfileWritten,
    Recovered,
    Started,
    TimetableMade,
)
from perseus_ds.policy.selector import Forecast
from perseus_ds.units import duration, joules, less_or_more, percent, plain, watt_hours, watts


def event_in_words(event: Event) -> str:
    """Return one line about an event."""
    match event:
        case Started(mode=mode, policy=policy):
            return f"start in {mode} mode" + (
                f", {policy_in_words(policy)}" if policy and mode in ("auto", "run") else ""
            )
        case PlanChosen(paused=True):
            return "paused"
        case PlanChosen(plan=plan, plans=plans, straggler=straggler, slowdown=slowdown):
            late = f", pipeline {straggler} is {slowdown:g} times as slow" if straggler is not None else ""
            others = f", pipelines run {', '.join(map(str, plans))}" if len(set(plans)) > 1 else ""
            return f"{'standing still, then ' if event.halts else ''}plan {plan}{late}{others}"
        case PlanJudged(plan=plan, kept=kept, reason=reason, then=then):
            found = ", ".join(
                f"{percent(change)} ± {percent(error).lstrip('+')} {quantity}"
                for change, error, quantity in (
                    (-event.saved, event.saved_error, "energy"),
                    (event.slowdown, event.slowdown_error, "time"),
                )
            )
            decided = f"plan {plan} is {'kept' if kept else 'dropped'}" + (f", since {reason}" if reason else "")
            promised = f"promised {changes(event.promised_slowdown, event.promised_saved)}"
            compared = f"{decided}: {found} ({promised}), against default clocks of this job"
            return f"{compared}; {then}" if then else compared
        case OrderGiven() | PowerCapChanged() | PolicyChanged():
            return _asked_for(event)
        case ProfileWritten():
            return _profile(event)
        case ClockRefused():
            return _refused(event)
        case Drifted(drift=drift, profiles_again=profiles_again):
            then = ": profiling again" if profiles_again else "; the profile stays in use"
            return f"times drifted by {drift:.0%}{then}"
        case TimetableMade() | CostsSoFar() | Halted():
            return _by_the_hour(event)
        case Failed() | Recovered():
            return _fault(event)
        case _:
            return event.event


def _asked_for(event: OrderGiven | PowerCapChanged | PolicyChanged) -> str:
    if isinstance(event, OrderGiven):
        return "ordered: " + (policy_in_words(event.policy) if event.policy else "pause" if event.paused else "resume")
    if isinstance(event, PowerCapChanged):
        return "no power cap" if event.watts is None else f"power cap {watts(event.watts)}, by {event.source}"
    return policy_in_words(event.policy) if event.policy else f"policy: {event.problem}"


def _fault(event: Failed | Recovered) -> str:
    if isinstance(event, Recovered):
        return f"rank {event.rank} runs under plans again"
    if event.event == "failure":
        return f"failure on rank {event.rank}: {event.error}"
    return f"{event.event}: {event.error}"


def _by_the_hour(event: TimetableMade | CostsSoFar | Halted) -> str:
    if isinstance(event, Halted):
        return f"training stood still for {duration(event.time_s)}"
    cost = _against(event.cost, event.fastest_cost)
    if isinstance(event, CostsSoFar):
        return f"{event.iterations} iterations by the hour" + (f", {cost}" if event.done else ", not done yet")
    above = f", {percent(event.cost / event.bound - 1)} above the bound" if event.bound > 0 else ""
    return f"timetable: {cost} for the steps left{above}"


def _against(cost: float, fastest_cost: float) -> str:
    """Return a cost by a signal in words, against the plan of slowdown 0."""
    return (
        f"{percent(cost / fastest_cost - 1)} cost against the plan of slowdown 0" if fastest_cost > 0 else "at no cost"
    )


_LIMITS = {
    "sw_power_cap": "power limit",
    "hw_power_brake_slowdown": "power brake of the machine",
    "sw_thermal_slowdown": "too hot",
    "hw_thermal_slowdown": "too hot",
}
"""What NVML's names of limits mean."""


def _refused(event: ClockRefused) -> str:
    reasons = [f"{_LIMITS[name]}, {name}" if name in _LIMITS else name for name in event.reasons]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    if event.clock_mhz is None:
        unexplained = ", though the driver names no limit: somebody may have locked its clock (nvidia-smi -q -d CLOCK)"
        return f"rank {event.rank}'s GPU at default clocks is kept at {event.reached_mhz} MHz{why or unexplained}"
    return f"rank {event.rank}'s GPU was asked for {event.clock_mhz} MHz and runs at {event.reached_mhz} MHz{why}"


def _profile(event: ProfileWritten) -> str:
    if event.lost_s is not None and event.lost_j is not None:
        return f"profile written; its iterations took {against_default_clocks(event.lost_s, event.lost_j)}"
    return "profile written"


def policy_in_words(policy: Mapping[str, Any]) -> str:
    """Return a policy and its settings."""
    if policy.get("name") == "schedule":
        windows = ", ".join(
            f"{window.get('begin')} to {window.get('end')} {policy_in_words(window.get('policy') or {})}"
            for window in policy.get("windows") or ()
        )
        return f"policy schedule: {windows}, else {policy_in_words(policy.get('default') or {})}"
    if policy.get("name") == "reduce":
        beside = policy_in_words(policy.get("policy") or {}).removeprefix("policy ")
        share = f"{policy.get('power_fraction')} of the power at default clocks"
        return f"policy reduce: {share} until {policy.get('until')}, beside {beside}"
    settings = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "name")
    return f"policy {policy.get('name')}" + (f": {settings}" if settings else "")


_MOST_PLANS = 5


def describe(total: Ended) -> str:
    """Return the totals of a job in one line: time and energy, those under plans against default clocks."""
    text = f"{total.iterations} iterations, {duration(total.time_s)}, {joules(total.energy_j)}"
    text += f" ({watt_hours(total.energy_j)})"
    if total.without_energy:
        text += f" (not counting {total.without_energy} iterations whose energy could not be read)"
    text += f", {total.clock_changes} clock changes, {total.clock_skips} skipped"
    if total.saved is not None and total.slowdown is not None:
        text += f"; {total.planned} under plans: a typical one takes {against_default(total.slowdown, -total.saved)}"
        text += f" than at {total.baseline}"
    if len(total.plans) > 1:
        longest = sorted(total.plans, key=lambda plan: -plan.iterations)[:_MOST_PLANS]
        parts = [
            f"plan {plan.plan}: {plan.iterations} iterations, {against_default(plan.slowdown, -plan.saved)}"
            for plan in longest
            if plan.saved is not None
        ]
        text += f" ({'; '.join(parts)})"
    return plain(text)


STEPS_TO_A_PLAN: Mapping[str, str] = {
    "warm-up": "warming up",
    "profile": "measuring the profile",
    "optimizing": "computing plans",
    "default": "measuring iterations at default clocks to compare plans with",
}
"""The phases before the first plan in their order, and what a job does in each."""


def unfinished(phase: str, left: int | None, *, profiles: bool) -> str:
    """Return what a job was at when it ended too early, and what was missing.

    Args:
        phase: Of its last iteration.
        left: About how many more iterations that phase takes; None where it is not known.
        profiles: Whether the job only measures a profile.
    """
    steps = [*STEPS_TO_A_PLAN][: 2 if profiles else None]
    following = [STEPS_TO_A_PLAN[step] for step in steps[steps.index(phase) + 1 :]] if phase in steps else []
    text = f"training ended before {'the profile was complete' if profiles else 'a plan ran'}, while "
    text += STEPS_TO_A_PLAN[phase]
    text += f" (about {left} more iteration{'s' if left > 1 else ''})" if left is not None else ""
    text += f"; then comes {', then '.join(following)}" if following else ""
    return f"{text}. Train for more steps"


def begin(plan: int, plans: int, forecast: Forecast | None) -> str:
    """Return which plan a job begins with, of how many, and what it promises; without a forecast, nothing of that."""
    text = f"running under plan {plan} of the frontier's {plans}"
    if forecast is None:
        return text
    promised = changes(forecast.time_s / forecast.default_time_s - 1, 1 - forecast.energy_j / forecast.default_energy_j)
    return plain(f"{text} (promised {promised}), against default clocks of this job")


def changes(slowdown: float | None, saved: float | None) -> str:
    """Return changes against default clocks, promised or measured; None for one that is not known."""
    time = "time not known" if slowdown is None else f"{percent(slowdown)} time"
    energy = "energy not known" if saved is None else f"{percent(-saved)} energy"
    return f"{time}, {energy}"


def against_default(time: float, energy: float) -> str:
    """Return changes of time and energy in words, each as a fraction."""
    return plain(f"{less_or_more(energy)} energy and {less_or_more(time)} time")


def against_default_clocks(extra_s: float, extra_j: float) -> str:
    """Return how much more or less time and energy iterations took than at default clocks, in words."""
    parts = [(duration(abs(extra_s)), extra_s < 0), (joules(abs(extra_j)), extra_j < 0)]
    words = " and ".join(f"{amount} {'less' if less else 'more'}" for amount, less in parts)
    return plain(f"{words} than at default clocks")
