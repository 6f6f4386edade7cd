"""The lines that a job prints of its plans: time and energy against default clocks."""

from __future__ import annotations

from perseus_ds.artifacts.run_records import Ended
from perseus_ds.policy.assignment import Forecast

_MOST_PLANS = 5


def describe(total: Ended) -> str:
    """Return the totals of a job in one line: time and energy, those under plans against default clocks."""
    text = f"{total.iterations} iterations, {total.time_s:.0f} s, {total.energy_j / 3.6e6:.4g} kWh"
    if total.without_energy:
        text += f" (not counting {total.without_energy} iterations whose energy could not be read)"
    text += f", {total.clock_changes} clock changes, {total.clock_skips} skipped"
    if total.saved is not None:
        known = "took in this job" if total.default_measured else "take by the profile"
        compared = against_default(total.planned_s / total.default_s - 1, -total.saved)
        text += f"; {total.planned} under plans, on {compared} than default clocks {known}"
    if len(total.plans) > 1:
        longest = sorted(total.plans, key=lambda plan: -plan.iterations)[:_MOST_PLANS]
        parts = [
            f"plan {plan.plan}: {plan.iterations} iterations, {against_default(plan.slowdown, -plan.saved)}"
            for plan in longest
        ]
        text += f" ({'; '.join(parts)})"
    return text


def begin(plan: int, plans: int, forecast: Forecast | None) -> str:
    """Return which plan a job begins with, of how many, and what it promises; without a forecast, nothing of that."""
    text = f"running under plan {plan} of the frontier's {plans}"
    return text if forecast is None else f"{text}, which promises {promise(forecast)}"


def promise(forecast: Forecast) -> str:
    """Return what plans promise of time and energy, against default clocks."""
    known = "as measured in this job" if forecast.default_measured else "by the profile"
    slowdown = forecast.time_s / forecast.default_time_s - 1
    compared = against_default(slowdown, forecast.energy_j / forecast.default_energy_j - 1)
    return f"{compared} than at default clocks, {known}"


def against_default(time: float, energy: float) -> str:
    """Return changes of time and energy in words, each as a fraction."""
    changes = (f"{abs(change):.1%} {'less' if change < 0 else 'more'}" for change in (energy, time))
    return "{} energy and {} time".format(*changes)
