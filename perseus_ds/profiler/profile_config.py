"""The block ``perseus.profile``: which clocks to measure; apart, so that reading a config imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perseus_ds.artifacts.validation import StrictModel
from perseus_ds.errors import ConfigError
from perseus_ds.gpu.base import Gpu

# Every measured clock costs slower iterations, so adaptive sampling measures at most so many, and a third of all.
MOST_CLOCKS = 8


class ProfileConfig(StrictModel):
    """How a profile is measured."""

    min_clock_mhz: int | None = Field(
        None, gt=0, description="Lowest clock to measure [MHz]; the GPU's lowest by default."
    )
    max_clock_mhz: int | None = Field(
        None, gt=0, description="Highest clock to measure [MHz]; the GPU's highest by default."
    )
    sampling: Literal["full", "stride", "adaptive"] = Field(
        "adaptive",
        description="Clocks to measure. full: each one; stride: every n-th; adaptive: a few, chosen from what was "
        "measured so far, and a fitted model in between.",
    )
    clock_stride: int = Field(1, ge=1, description="The n of stride.")
    warm_up: int = Field(
        3,
        ge=2,
        description="Least number of ordinary training iterations before the measurement; more while times drift.",
    )

    def clocks_of(self, gpu: Gpu) -> list[int]:
        """Return the clocks that may be measured, ascending [MHz].

        Raises:
            ConfigError: The GPU supports fewer than two clocks in the configured range.
        """
        supported = gpu.supported_clocks_mhz()
        low, high = self.min_clock_mhz or supported[0], self.max_clock_mhz or supported[-1]
        chosen = [clock for clock in supported if low <= clock <= high]
        if len(chosen) < 2:
            raise ConfigError(
                f"perseus.profile: {gpu.name} supports {len(chosen)} clocks from {low} to {high} MHz; a profile needs "
                f"at least 2. It supports {supported[0]} to {supported[-1]} MHz."
            )
        return chosen

    def most_clocks(self, clocks: int) -> int:
        """Return the largest number of clocks that are measured, given how many there are."""
        if self.sampling == "adaptive":
            return min(MOST_CLOCKS, max(4, clocks // 3))
        return clocks if self.sampling == "full" else -(-clocks // self.clock_stride)
