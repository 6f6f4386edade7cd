"""What simulated GPUs truly take and use, without noise."""

from collections.abc import Iterable, Mapping
from typing import Any

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile
from perseus_ds.gpu.device_models import COMPUTE_BOUND, DEVICES, MEMORY_BOUND
from perseus_ds.pipeline.instruction import Kind

WORK_S = {(0, Kind.FORWARD): 0.1, (0, Kind.BACKWARD): 0.21, (1, Kind.FORWARD): 0.12, (1, Kind.BACKWARD): 0.23}


def truth(
    name: str, clocks: Iterable[int], work_s: Mapping[tuple[int, Kind], float] = WORK_S, **info: Any
) -> StageProfile:
    """Return the profile of a simulated GPU."""
    model = DEVICES[name]
    rows = []
    for (stage, kind), top_s in work_s.items():
        workload = MEMORY_BOUND if kind is Kind.TAIL else COMPUTE_BOUND
        for clock in clocks:
            time_s = top_s * model.slowdown(clock, workload)
            rows.append(Measurement(stage, kind, clock, time_s, time_s * model.power_w(clock, workload)))
    return StageProfile(rows, ProfileInfo(**info))
