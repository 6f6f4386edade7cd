"""Settings for computing plans, shared by the command line, ``optimize()`` and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perseus_ds.errors import ConfigError

DwellTimes = Mapping[int, float] | float
"""The shortest time at one clock: one value for all clocks, or a value for each clock in MHz [s]."""


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """Settings for computing plans from a profile."""

    blocking_power_w: float | None = None
    """power of a GPU that waits for another rank [W]; by default the profile's"""
    solver: Literal["exact", "lowtime"] = "exact"
    """exact gives a lower bound for each plan, lowtime is the published solver"""
    plans: int = 120
    """number of deadlines, from T_min to T*, for which the exact solver computes a plan"""
    least_dwell_s: DwellTimes | None = None
    """shortest time at one clock in plans of the exact solver, for all clocks or by clock in MHz [s]; by default the
    profile's"""
    reserve: float = 0.0
    """fraction by which slowed instructions may take longer in plans of the exact solver, because times vary"""

    @property
    def longest_dwell_s(self) -> float:
        """The largest of the shortest times at one clock [s]."""
        dwell_s = self.least_dwell_s or 0.0
        return max(dwell_s.values(), default=0.0) if isinstance(dwell_s, Mapping) else dwell_s

    def check(self) -> None:
        """Raise a ConfigError if a value is beyond its limits."""
        # Imported here because the command line's help imports this module and does not need pydantic.
        from perseus_ds.artifacts.validation import (
            LEAST_GPU_W,
            MOST_GPU_W,
            MOST_PLANS,
            MOST_SECONDS,
            MOST_WATTS,
        )

        power_w = self.blocking_power_w or 0.0
        for name, value, most, unit in (
            ("least_dwell_s", self.longest_dwell_s, MOST_SECONDS, "seconds"),
            ("blocking_power_w", power_w, MOST_WATTS, "watts"),
        ):
            if not 0 <= value <= most:
                raise ConfigError(f"{name}={value}: expected a number of {unit} >= 0, at most {most:g}.")
        if power_w and not LEAST_GPU_W <= power_w <= MOST_GPU_W:
            other, factor = ("milliwatts", 1e-3) if power_w > MOST_GPU_W else ("kilowatts", 1e3)
            likely = LEAST_GPU_W <= power_w * factor <= MOST_GPU_W
            raise ConfigError(
                f"blocking_power_w={power_w:g}: no waiting GPU draws this; expected {LEAST_GPU_W:g} to {MOST_GPU_W:g} W"
                + (f". It is probably in {other}: write {power_w * factor:g}." if likely else ", or 0.")
            )
        if not 0 <= self.reserve <= 1:
            raise ConfigError(f"reserve={self.reserve:g}: expected a fraction from 0 to 1, such as 0.02 for 2 %.")
        if not 2 <= self.plans <= MOST_PLANS:
            raise ConfigError(f"plans={self.plans}: expected 2, one for T_min and one for T*, to {MOST_PLANS}.")
