"""What a job says: its events, its policy, what its plans promise and what they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perseus_ds.artifacts.run_records import (
    ClockRefused,
    CostsSoFar,
    Drifted,
    Ended,
    Event,
    Failed,
    Halted,
    LimitsChanged,
    OrderGiven,
    PlanChosen,
    PlanJudged,
    PolicyChanged,
    PowerCapChanged,
    Predicted,
    ProfileWritten,
    Recovered,
    ShapePlanned,
    Started,
    TimetableMade,
)
from perseus_ds.units import duration, joules, less_or_more, percent, plain, watt_hours, watts

if TYPE_CHECKING:  # the selector imports torch, which commands that show a job do not need
    from perseus_ds.policy.selector import Forecast


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
        case ProfileWritten() | Predicted() | ShapePlanned():
            return _profile(event)
        case ClockRefused():
            return _refused(event)
        case LimitsChanged(limits=limits, more=more):
            text = limits_in_words(limits, more)
            return f"limited below what was profiled: {text}" if text else "no GPU is limited any more"
        case Drifted(drift=drift, then=then):
            return f"instructions take {drift:.0%} longer or shorter than profiled; {then}"
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
    cost = "at no cost"
    if event.fastest_cost > 0:
        cost = f"{percent(event.cost / event.fastest_cost - 1)} cost against the plan of slowdown 0"
    if isinstance(event, CostsSoFar):
        return f"{event.iterations} iterations by the hour" + (f", {cost}" if event.done else ", not done yet")
    above = f", {percent(event.cost / event.bound - 1)} above the bound" if event.bound > 0 else ""
    return f"timetable: {cost} for the steps left{above}"


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


_MOST_LIMITS = 4


def limits_in_words(limits: Sequence[tuple[int, float | None, float | None]], more: int) -> str:
    """Return which GPUs may do less than when the profile was measured; empty for none."""
    each = []
    for rank, power_w, clock_mhz in limits[:_MOST_LIMITS]:
        parts = [f"to {watts(power_w)}"] if power_w is not None else []
        parts += [f"to {clock_mhz:.0f} MHz by heat or the machine"] if clock_mhz is not None else []
        each.append(f"rank {rank}'s GPU {' and '.join(parts)}")
    rest = max(0, len(limits) - _MOST_LIMITS) + more
    return ", ".join(each) + (f" and {rest} more" if rest else "")


def _profile(event: ProfileWritten | Predicted | ShapePlanned) -> str:
    if isinstance(event, Predicted):
        measured = ((event.time_s, event.predicted_time_s), (event.energy_j, event.predicted_energy_j))
        longer, more = (percent(value / predicted - 1) if predicted > 0 else "unknown" for value, predicted in measured)
        parts = ", ".join(f"{name} {percent(factor - 1)}" for name, factor in event.parts.items())
        kept = "the profile stays as it is; whether a plan is kept is decided by measured iterations alone"
        return (
            f"iterations at default clocks differ from the profile by {longer} time and {more} energy "
            f"({parts or 'no instruction, transfer or tail differs in time'}): "
            f"{'the profile is corrected, and plans are made again' if event.corrected else kept}"
        )
    if isinstance(event, ShapePlanned):
        if event.given_up:
            return f"shape {event.shape} is no longer planned ({event.given_up}): it runs at default clocks"
        return f"many iterations have inputs of one shape: it has plans of its own, as shape {event.shape}"
    cost = against_default_clocks(event.lost_s or 0.0, event.lost_j or 0.0)
    earlier = f" ({event.resumed_clocks} clocks were already measured)" if event.resumed_clocks else ""
    return f"wrote {event.path} after {event.iterations} profiled iterations{earlier}, which took {cost}"


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
        fraction, signal = policy.get("power_fraction"), policy.get("signal")
        share = f"{fraction} of the power at default clocks until {policy.get('until')}" if fraction else ""
        by_file = f"less power by {signal}" if signal else ""
        return f"policy reduce: {', '.join(filter(None, (share, by_file)))}, beside {beside}"
    given = {key: value for key, value in policy.items() if value is not None and value is not False}
    settings = ", ".join(f"{key} {value}" for key, value in given.items() if key != "name")
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


PHASES: Mapping[str, str] = {
    "calibrate": "calibrating the simulated GPU",
    "warm-up": "warming up",
    "profile": "measuring the profile",
    "optimizing": "computing plans",
    "default": "measuring iterations at default clocks to compare plans with",
    "verdict": "comparing plan and default clocks",
    "run": "running under plans",
    "pause": "paused: default clocks",
    "halt": "standing still until a cheaper hour",
    "observe": "default clocks",
}
"""What a job does in each phase; a verdict is none of its own, but what comes next while plans run."""
STEPS_TO_A_PLAN = ("warm-up", "profile", "optimizing", "default")
"""The phases before the first plan, in their order."""


def unfinished(phase: str, left: int | None, *, profiles: bool) -> str:
    """Return what a job was at when it ended too early, and what was missing.

    Args:
        phase: Of its last iteration.
        left: About how many more iterations that phase takes; None where it is not known.
        profiles: Whether the job only measures a profile.
    """
    steps = STEPS_TO_A_PLAN[: 2 if profiles else None]
    following = [PHASES[step] for step in steps[steps.index(phase) + 1 :]] if phase in steps else []
    text = f"training ended before {'the profile was complete' if profiles else 'a plan ran'}, while "
    text += PHASES[phase]
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
