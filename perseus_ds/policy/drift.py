"""Detects that instructions take longer or shorter than in the profile."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.clocks.timers import Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_TIMES_IN_A_ROW = 2


def reported_drift(
    spans: Sequence[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> dict[str, float]:
    """Return the fields of a rank's report that say how far it is from the profile; without clocks, that it is not.

    Args:
        spans: One iteration.
        clocks_mhz: Clock of each instruction; empty where they were not a plan's.
        expected: The times that the profile says.
    """
    if not clocks_mhz:
        return {"drift": 0.0}
    low, high = paces_of_rank(spans, clocks_mhz, expected)
    return {"drift": drift_of_rank(spans, clocks_mhz, expected), "pace_low": low, "pace_high": high}


def drift_of_rank(spans: Iterable[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes) -> float:
    """Return how far a rank's instructions are from the profile, by their median, as a fraction.

    Args:
        spans: One iteration.
        clocks_mhz: Clock of each instruction; without one an instruction is left out.
        expected: The times that the profile says.
    """
    ratios = []
    for span in spans:
        if isinstance(span.operation, Compute):
            instruction = span.operation.instruction
            expected_s = expected.get((instruction.stage, instruction.kind, clocks_mhz.get(instruction, 0)))
            if expected_s is not None:
                ratios.append(span.time_s / expected_s)
    return abs(statistics.median(ratios) - 1) if ratios else 0.0


def paces_of_rank(
    spans: Iterable[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> tuple[float, float]:
    """Return how long forwards and backwards take, divided by what the profile says: of the fastest and slowest kind.

    Args:
        spans: One iteration.
        clocks_mhz: Clock of each instruction; without one an instruction is left out.
        expected: The times that the profile says.

    Returns:
        The lowest and the highest of the kinds' medians; NaN where no instruction has a clock.
    """
    ratios: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL:
            instruction = span.operation.instruction
            key = instruction.stage, instruction.kind
            expected_s = expected.get((*key, clocks_mhz.get(instruction, 0)))
            if expected_s is not None:
                ratios[key].append(span.time_s / expected_s)
    medians = [statistics.median(values) for values in ratios.values()]
    return (min(medians), max(medians)) if medians else (math.nan, math.nan)


class DriftWatch:
    """Counts how often in a row the pipelines were found too far from the profile.

    Args:
        max_drift: How far instructions may be from it, as a fraction.
    """

    def __init__(self, max_drift: float) -> None:
        self._max_drift = max_drift
        self._in_a_row = 0

    def has_drifted(self, drift: float) -> bool:
        """Return whether the profile has turned out to be out of date: once, until it fits again.

        Args:
            drift: How far the pipelines are from it, by their lower median.
        """
        self._in_a_row = self._in_a_row + 1 if drift > self._max_drift else 0
        return self._in_a_row == _TIMES_IN_A_ROW
