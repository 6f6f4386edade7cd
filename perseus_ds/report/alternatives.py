"""What other plans of the frontier would have given instead of the one in use."""

from __future__ import annotations

from dataclasses import dataclass

from perseus_ds.artifacts.frontier import Frontier

_SLOWDOWNS = (0.0, 0.01, 0.02, 0.05, 0.10)


@dataclass(frozen=True)
class Alternative:
    """A plan, compared with the one in use; by the profile.

    Attributes:
        plan: Its place on the frontier.
        time: Iteration time against the plan in use, as a fraction: 0.01 is 1 % longer.
        energy: Energy against the plan in use, likewise.
        saved: Energy saved against everything at the highest clock, as a fraction.
    """

    plan: int
    time: float
    energy: float
    saved: float


def alternatives(frontier: Frontier, in_use: int) -> list[Alternative]:
    """Return the plan in use among those of some slowdowns, the fastest first, up to the most frugal one."""
    plans = frontier.plans
    chosen = {plans.index(frontier.within(slowdown)) for slowdown in _SLOWDOWNS} | {0, in_use, len(plans) - 1}
    return [_compared(frontier, plan, in_use) for plan in sorted(chosen)]


def one_percent_slower(frontier: Frontier, in_use: int) -> Alternative | None:
    """Return what 1 % more time than the plan in use takes would buy; None where the frontier ends before."""
    plan = frontier.plans.index(frontier.lookup(frontier.plans[in_use].time_s * 1.01))
    return _compared(frontier, plan, in_use) if plan > in_use else None


def _compared(frontier: Frontier, plan: int, in_use: int) -> Alternative:
    ours, theirs = frontier.plans[plan], frontier.plans[in_use]
    return Alternative(
        plan=plan,
        time=ours.time_s / theirs.time_s - 1,
        energy=ours.energy_j / theirs.energy_j - 1,
        saved=1 - ours.energy_j / frontier.baseline.energy_j,
    )
