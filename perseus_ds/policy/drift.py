"""Notices that instructions take longer or shorter than the profile says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute

_STRIKES = 2


class DriftWatch:
    """Counts how often in a row the pipelines were found too far from the profile.

    Args:
        expected: What the profile says.
        max_drift: How far instructions may be from it, as a fraction.
    """

    def __init__(self, expected: ClockTimes, max_drift: float) -> None:
        self._expected = expected
        self._max_drift = max_drift
        self._strikes = 0

    def of_rank(self, spans: Iterable[Span], clocks_mhz: Mapping[Instruction, int]) -> float:
        """Return how far a rank's instructions are from the profile, by their median, as a fraction."""
        ratios = []
        for span in spans:
            if isinstance(span.operation, Compute):
                instruction = span.operation.instruction
                expected_s = self._expected.get((instruction.stage, instruction.kind, clocks_mhz.get(instruction, 0)))
                if expected_s is not None:
                    ratios.append(span.time_s / expected_s)
        return abs(statistics.median(ratios) - 1) if ratios else 0.0

    def has_drifted(self, pipelines: Sequence[float]) -> bool:
        """Return whether the profile has turned out to be out of date: once, until it fits again.

        Args:
            pipelines: How far each pipeline is from the profile. One that is alone is a straggler, and
                no reason to measure all over again: at least half of them must be too far.
        """
        self._strikes = self._strikes + 1 if statistics.median_low(pipelines) > self._max_drift else 0
        return self._strikes == _STRIKES
