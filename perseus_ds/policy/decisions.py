"""Chooses the plan of the next iteration, by the user's policy, the frontier and the progress of the run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

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
from perseus_ds.policy.signals import Signal
from perseus_ds.policy.situation import MARGIN, Decision, Situation


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
    last = len(frontier.plans) - 1
    cap_w = cap_in_force_w(policy, situation.signals, situation.now)
    if cap_w is None:
        return Decision(last, f"the power cap cannot be read from {policy.signal}. Running the plan that draws least")
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]
    if powers_w[last] <= cap_w:
        fastest = next(n for n, power_w in enumerate(powers_w) if power_w <= cap_w)
        safe = next((n for n, power_w in enumerate(powers_w) if power_w <= cap_w * (1 - MARGIN)), last)
        return Decision(_clamp(fastest if situation.running is None else situation.running, fastest, safe))
    return Decision(
        last,
        f"a power cap of {cap_w:.0f} W cannot be kept: the plan that draws least takes {powers_w[-1]:.0f} W. "
        "Running it",
    )


def cap_in_force_w(policy: PowerCapPolicy, signals: Mapping[str, Signal], now: datetime) -> float | None:
    """Return the power cap of a policy at some time [W]; None where it cannot be read from its file."""
    if policy.signal is None:
        return policy.watts
    signal = signals.get(policy.signal)
    return None if signal is None else signal.held_at(now.timestamp())


def _clamp(running: int, low: int, high: int) -> int:
    """Return the plan of a range that changes least: small fluctuations do not change plans."""
    return min(max(running, low), high)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
