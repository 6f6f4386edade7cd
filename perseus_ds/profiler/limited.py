"""The profile of GPUs that may do less than when it was measured: the clocks that they still reach.

Rows whose power or clock is above the limit are left out. The row of the highest clock is what default clocks are: its
time is what iterations at default clocks take under the limit, and its energy what the profile says of an instruction
that takes so long. No other row is faster than that: times of rows, which are estimates in part, may be wrong by more
than the clocks next to a limit differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.pipeline.instruction import Kind

# The end of heat is seen by a higher clock only. So what needs about the clock that heat allows asks for the highest.
_SLOWED = 0.97


class StageLimit(NamedTuple):
    """What a stage's GPUs may do; infinite where that is not limited.

    Attributes:
        power_w: The lowest of their power limits [W].
        clock_mhz: The lowest of the highest clocks that they reach [MHz].
    """

    stage: int
    power_w: float
    clock_mhz: float

    def allows(self, row: Measurement) -> bool:
        """Return whether a row keeps within this limit."""
        return row.energy_j <= self.power_w * row.time_s and row.clock_mhz <= _SLOWED * self.clock_mhz


def felt(profile: StageProfile, limits: Sequence[StageLimit]) -> tuple[StageLimit, ...]:
    """Return the limits that some row of a profile exceeds."""
    return tuple(
        limit
        for limit in limits
        if not all(limit.allows(row) for row in profile.measurements if row.stage == limit.stage)
    )


def limited(
    profile: StageProfile, limits: Sequence[StageLimit], default_s: Mapping[tuple[int, Kind], float]
) -> StageProfile:
    """Return the profile under limits.

    Args:
        profile: As it was measured.
        limits: Of stages.
        default_s: What instructions take at default clocks under these limits, as far as it was measured [s].
    """
    limit_of = {limit.stage: limit for limit in limits}
    waiting_w = profile.info.blocking_power_w or 0.0
    kept: list[Measurement] = []
    for (stage, kind), group in groupby(profile.measurements, lambda row: (row.stage, row.kind)):
        rows = list(group)
        limit = limit_of.get(stage)
        if limit is not None and not all(map(limit.allows, rows)):
            within = [row for row in rows[:-1] if limit.allows(row)] or rows[:1]
            fastest_s = max(default_s.get((stage, kind), within[-1].time_s), rows[-1].time_s)
            rows = [*(_no_faster(row, fastest_s, waiting_w) for row in within), _lasting(rows, fastest_s, waiting_w)]
        kept += rows
    known = {(row.stage, row.kind, row.clock_mhz) for row in kept}
    quality = [row for row in profile.info.rows if (row.stage, row.kind, row.clock_mhz) in known]
    return StageProfile(kept, profile.info.model_copy(update={"rows": quality}))


def _no_faster(row: Measurement, time_s: float, waiting_w: float) -> Measurement:
    """Return a row that takes at least so long [s]; what it takes more costs as much as waiting."""
    more_s = max(0.0, time_s - row.time_s)
    return replace(row, time_s=row.time_s + more_s, energy_j=row.energy_j + waiting_w * more_s)


def _lasting(rows: Sequence[Measurement], time_s: float, waiting_w: float) -> Measurement:
    """Return the row of the highest clock if instructions take so long, in spite of that clock [s]."""
    by_time = sorted(rows, key=lambda row: row.time_s)
    energy_j = float(np.interp(time_s, [row.time_s for row in by_time], [row.energy_j for row in by_time]))
    beyond_s = max(0.0, time_s - by_time[-1].time_s)
    return replace(rows[-1], time_s=time_s, energy_j=energy_j + waiting_w * beyond_s)
