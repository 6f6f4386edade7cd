"""Jobs with stages of known parts: layouts, and profiles computed from costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from pipelines import one_f_one_b

from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.layouts.balance import MeasuredJob
from perseus_ds.pipeline.instruction import Kind

COSTS_S = {"embedding": (0.001, 0.002), "dense": (0.01, 0.02), "moe": (0.015, 0.03), "mtp": (0.02, 0.04)}
COSTS_S["head"] = (0.03, 0.06)
CLOCKS = {1000: (1.3, 200.0), 1400: (1.0, 350.0)}
"""Factor on the times of passes, and their power [W], by clock."""


def layout_of(*stages: str, parameters: dict[str, int] | None = None) -> Layout:
    """Return a layout of stages such as ``"Edd"``.

    Letters are the first ones of kinds, except ``M`` for MTP.
    """
    kinds = {"E": "embedding", "d": "dense", "m": "moe", "M": "mtp", "h": "head"}
    sizes = parameters or {}
    return Layout(
        engine="megatron",
        stages=[[Part(kind=kinds[k], parameters=sizes.get(kinds[k], 0)) for k in stage] for stage in stages],
    )


def profile_of(layout: Layout, *, noise: float = 0.0, seed: int = 0, clocks: Any = CLOCKS, **info: Any) -> StageProfile:
    """Return the profile of stages of parts with the costs ``COSTS_S``, with known errors."""
    draw = np.random.default_rng(seed)
    rows, quality = [], []
    for stage, parts in enumerate(layout.stages):
        for which, kind in enumerate((Kind.FORWARD, Kind.BACKWARD)):
            for clock_mhz, (slower, power_w) in clocks.items():
                time_s = sum(COSTS_S[part.kind][which] for part in parts) * slower * (1 + noise * draw.normal())
                rows.append(Measurement(stage, kind, clock_mhz, time_s, time_s * power_w))
                errors = {"time_relative_error": noise, "energy_relative_error": noise}
                quality.append(RowQuality(stage=stage, kind=kind, clock_mhz=clock_mhz, samples=4, **errors))
    facts = {"blocking_power_w": 80.0, "gpu": "A100", "rows": quality, "pipeline_ranks": len(layout.stages), **info}
    return StageProfile(rows, ProfileInfo(**facts))


def job_of(*stages: str, micro_batches: int = 8, **options: Any) -> MeasuredJob:
    layout = layout_of(*stages)
    schedule = one_f_one_b(len(stages), micro_batches)
    return MeasuredJob(layout, profile_of(layout, **options), schedule)
