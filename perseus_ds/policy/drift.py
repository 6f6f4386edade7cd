"""Detects that instructions take longer or shorter than in the profile, by more than they vary.

Passes of 5 ms vary by much more than passes of 50 ms, where the host delays them. So a rank reports only the part of a
deviation that the spread of the same iteration's instructions does not explain.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.clocks.timers import Span
from perseus_ds.measures import error_of_median
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_TIMES_IN_A_ROW = 2
# A deviation counts where it exceeds so many of its standard errors, and by how much it does.
_SURE = 3.0


def reported_drift(
    spans: Sequence[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> dict[str, float]:
    """Return the fields of a rank's report that say how far it is from the profile; without clocks, that it is not.

    Times of one stage and kind vary about their median; by this, the medians are uncertain.

    Args:
        spans: One iteration.
        clocks_mhz: Clock of each instruction; empty where they were not a plan's.
        expected: The times that the profile says.
    """
    if not clocks_mhz:
        return {"drift": 0.0}
    ratios: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        if isinstance(span.operation, Compute):
            instruction = span.operation.instruction
            key = instruction.stage, instruction.kind
            expected_s = expected.get((*key, clocks_mhz.get(instruction, 0)))
            if expected_s is not None:
                ratios[key].append(span.time_s / expected_s)
    if not ratios:
        return {"drift": 0.0, "pace_low": math.nan, "pace_high": math.nan}
    medians = {key: statistics.median(of_kind) for key, of_kind in ratios.items()}
    deviations = [ratio - medians[key] for key, of_kind in ratios.items() for ratio in of_kind if len(of_kind) > 1]

    def unsure(samples: int) -> float:
        return _SURE * error_of_median(deviations or [0.0], samples)

    every = [*chain.from_iterable(ratios.values())]
    drift = abs(statistics.median(every) - 1) - unsure(len(every))
    paces = [(medians[key], unsure(len(of_kind))) for key, of_kind in ratios.items() if key[1] is not Kind.TAIL]
    low = min((pace + error for pace, error in paces), default=math.nan)
    high = max((pace - error for pace, error in paces), default=math.nan)
    return {"drift": max(0.0, drift), "pace_low": low, "pace_high": high}


class DriftWatch:
    """Counts how often in a row the pipelines were found too far from the profile.

    Args:
        max_drift: How far instructions may be from it, as a fraction.
    """

    def __init__(self, max_drift: float) -> None:
        self._max_drift = max_drift
        self._in_a_row = 0

    def has_drifted(self, drift: float) -> bool:
        """Return whether the profile has turned out to be out of date.

        Args:
            drift: How far the pipelines are from it, by their lower median.
        """
        self._in_a_row = self._in_a_row + 1 if drift > self._max_drift else 0
        return self._in_a_row >= _TIMES_IN_A_ROW
