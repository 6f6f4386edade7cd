"""Chooses the plan of the next iteration, by the user's policy, the frontier and the progress of the run."""

from __future__ import annotations

from dataclasses import replace

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.policy.cheapest import by_hours
from perseus_ds.policy.policies import (
    CheapestPolicy,
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PolicyConfig,
    PowerCapPolicy,
    SlowdownPolicy,
    in_force,
)
from perseus_ds.policy.situation import MARGIN, Decision, PowerCap, Situation


def decide(policy: PolicyConfig, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan that a policy asks for now."""
    policy = in_force(policy, situation.now)
    if isinstance(policy, SlowdownPolicy):
        return Decision(frontier.plans.index(frontier.within(policy.max_slowdown)))
    if isinstance(policy, EnergyOptimalPolicy):
        return Decision(len(frontier.plans) - 1)
    if isinstance(policy, DeadlinePolicy):
        return _by_deadline(policy, frontier, situation)
    if isinstance(policy, CheapestPolicy):
        return by_hours(policy, frontier, situation)
    return _under_cap(policy, frontier, situation)


def stretched_plan(frontier: Frontier, plan: int, factor: float) -> int:
    """Return the plan of a pipeline that may take so many times as long as a plan: that of min(T', T*).

    Args:
        frontier: The plans.
        plan: The policy's.
        factor: Below 1, the plan is a faster one, or the fastest.
    """
    deadline_s = frontier.plans[plan].time_s * factor * (1 - MARGIN)
    if factor >= 1 and deadline_s <= frontier.plans[plan].time_s:
        return plan
    return _slowest(frontier, deadline_s)


def _by_deadline(policy: DeadlinePolicy, frontier: Frontier, situation: Situation) -> Decision:
    left = policy.total_steps - situation.step
    if left <= 0:
        return Decision(len(frontier.plans) - 1)
    seconds = (policy.finish_by - situation.now).total_seconds()
    # One step in reserve: what an iteration takes more than the one before is only known afterwards.
    allowed_s = (seconds / (left + 1) - situation.stopped_s) / situation.time_ratio
    fastest_s = frontier.plans[0].time_s
    if allowed_s >= fastest_s:
        most = _slowest(frontier, allowed_s)
        running = most if situation.running is None else situation.running
        return Decision(_clamp(running, _slowest(frontier, allowed_s * (1 - MARGIN)), most))
    needed_s = left * (fastest_s * situation.time_ratio + situation.stopped_s)
    if needed_s <= seconds:
        return Decision(0)
    return Decision(
        0,
        f"the deadline {policy.finish_by.isoformat()} cannot be met: {left} steps take {needed_s:.0f} s at the "
        f"fastest, {max(0.0, seconds):.0f} s are left. Running the fastest plan",
    )


def _under_cap(policy: PowerCapPolicy, frontier: Frontier, situation: Situation) -> Decision:
    """Return the fastest plan under the cap.

    What is measured is noisy, and plans differ from the profile in different ways, so a plan must not follow each
    change of the power measured: a slower one is taken once the power exceeds the cap, and a faster one only where it
    would stay below it by the headroom, which doubles each time that this was wrong.
    """
    last = len(frontier.plans) - 1
    watts = policy.watts
    if policy.signal is not None:
        signal = situation.signals.get(policy.signal)
        watts = None if signal is None else signal.held_at(situation.now.timestamp())
    if watts is None:
        return Decision(last, f"the power cap cannot be read from {policy.signal}. Running the plan that draws least")
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]

    def fastest_below(cap_w: float) -> int:
        return next((n for n, power_w in enumerate(powers_w) if power_w <= cap_w), last)

    cap, running = situation.cap, situation.running
    if cap is None or cap.watts != watts or running is None:
        cap, plan = PowerCap(watts), fastest_below(watts * (1 - MARGIN))
    elif powers_w[running] > watts:
        headroom = 2 * cap.headroom if cap.raised else cap.headroom
        cap, plan = PowerCap(watts, headroom), max(running, fastest_below(watts * (1 - MARGIN)))
    elif (faster := fastest_below(watts * (1 - cap.headroom))) < running:
        cap, plan = replace(cap, raised=True), faster
    else:
        plan = running
    problem = (
        f"a power cap of {watts:.0f} W cannot be kept: the plan that draws least takes {powers_w[last]:.0f} W. "
        "Running it"
        if powers_w[last] > watts
        else ""
    )
    return Decision(plan, problem, cap=cap)


def _clamp(running: int, low: int, high: int) -> int:
    """Return the plan of a range that changes least: small fluctuations do not change plans."""
    return min(max(running, low), high)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
