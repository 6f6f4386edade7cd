"""The ``profile`` block: how a profile is measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perseus_ds.artifacts.validation import StrictModel


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
    relative_error: float = Field(
        0.01, gt=0, lt=1, description="Instructions are repeated until their time and energy are known this well."
    )
    max_window_s: float = Field(
        4.0,
        gt=0,
        description="Longest time an instruction is repeated at one clock [s]; up to ten times that where its energy "
        "is not known to be above that of waiting.",
    )
