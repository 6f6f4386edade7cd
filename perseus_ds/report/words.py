"""Descriptions of a job's events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_ds.artifacts.hour_records import CostsSoFar, Halted, TimetableMade
from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_records import (
    ClockRefused,
    Drifted,
    Failed,
    PlanChosen,
    PlanJudged,
    PolicyChanged,
    ProfileWritten,
    ProfilingBegun,
    Recovered,
    Started,
    against_default_clocks,
)
from perseus_ds.report.units import duration, percent


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
        case PlanJudged(plan=plan, wins=wins):
            changes = ", ".join(
                f"{percent(change)} ± {percent(error)[1:]} {quantity}"
                for change, error, quantity in (
                    (-event.saved, event.saved_error, "energy"),
                    (event.slowdown, event.slowdown_error, "time"),
                )
            )
            return f"plan {plan} against default clocks of this job: {changes}; {'kept' if wins else 'given up'}"
        case PolicyChanged(policy=policy, problem=problem):
            return policy_in_words(policy) if policy else f"policy: {problem}"
        case ProfilingBegun(clocks=clocks):
            return f"measuring a profile at up to {clocks} clocks, while training stops"
        case ProfileWritten():
            return _profile(event)
        case ClockRefused():
            return _refused(event)
        case Drifted(drift=drift, profiles_again=profiles_again):
            # None: version 1 of the records does not record what followed.
            then = {True: ": profiling again", False: "; the profile stays in use", None: ""}[profiles_again]
            return f"times drifted by {drift:.0%}{then}"
        case TimetableMade() | CostsSoFar() | Halted():
            return _by_the_hour(event)
        case Failed() | Recovered():
            return _fault(event)
        case _:
            return event.event


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


def _refused(event: ClockRefused) -> str:
    why = f" ({', '.join(event.reasons)})" if event.reasons else ""
    if event.clock_mhz is None:
        unexplained = ", though the driver names no limit: somebody may have locked its clock (nvidia-smi -q -d CLOCK)"
        return f"rank {event.rank}'s GPU at default clocks is kept at {event.reached_mhz} MHz{why or unexplained}"
    return f"rank {event.rank}'s GPU was asked for {event.clock_mhz} MHz and runs at {event.reached_mhz} MHz{why}"


def _profile(event: ProfileWritten) -> str:
    if event.lost_s is not None and event.lost_j is not None:
        return f"profile written; its iterations took {against_default_clocks(event.lost_s, event.lost_j)}"
    spent = [(event.spent_s, "s"), (event.spent_j, "J")]
    took = " and ".join(f"{value:.4g} {unit}" for value, unit in spent if value is not None)
    return "profile written" + (f"; measuring took {took}" if took else "")


def policy_in_words(policy: Mapping[str, Any]) -> str:
    """Return a policy and its settings."""
    if policy.get("name") == "schedule":
        windows = ", ".join(
            f"{window.get('begin')} to {window.get('end')} {policy_in_words(window.get('policy') or {})}"
            for window in policy.get("windows") or ()
        )
        return f"policy schedule: {windows}, else {policy_in_words(policy.get('default') or {})}"
    settings = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "name")
    return f"policy {policy.get('name')}" + (f": {settings}" if settings else "")
