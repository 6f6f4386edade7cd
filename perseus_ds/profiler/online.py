"""Measures time and energy of instructions while ordinary training goes on, one clock an iteration.

Times are those of the instructions as they ran. Energies come from the changes of the energy
counter: between two of them, what was used is the sum over kinds of power times time spent, so
power follows by non-negative least squares over all intervals at one clock.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from perseus_ds.execution import Span
from perseus_ds.instruction import Kind
from perseus_ds.profile_rows import Measurement
from perseus_ds.schedule import Compute

Key = tuple[int, Kind]
Interval = tuple[float, float, float]
"""Begin [s], end [s] and energy [J] between two changes of the counter."""


class OnlineProfiler:
    """Collects iterations of one rank and makes rows of them."""

    def __init__(self) -> None:
        self._times_s: dict[tuple[int, Key], list[float]] = defaultdict(list)
        # By clock: time spent in each kind between two changes of the counter, and the energy used.
        self._equations: dict[int, list[tuple[dict[Key, float], float, float]]] = defaultdict(list)

    def add(self, clock_mhz: int, spans: Sequence[Span], intervals: Sequence[Interval]) -> None:
        """Take in an iteration that ran at one clock.

        Args:
            clock_mhz: The clock.
            spans: What ran, on the same time axis as the intervals.
            intervals: What the counter said during the iteration.
        """
        computed = [(s, _key(s)) for s in spans]
        for span, key in computed:
            if key is not None:
                self._times_s[clock_mhz, key].append(span.time_s)
        for begin_s, end_s, energy_j in intervals:
            spent: dict[Key, float] = defaultdict(float)
            for span, key in computed:
                if key is not None:
                    spent[key] += max(0.0, min(end_s, span.end_s) - max(begin_s, span.start_s))
            self._equations[clock_mhz].append((dict(spent), end_s - begin_s, energy_j))

    def rows(self) -> list[Measurement]:
        """Return one row for every kind and clock of which power can be told."""
        rows = []
        for clock_mhz in sorted(self._equations):
            power_w = self._power_w(clock_mhz)
            for (clock, key), times_s in sorted(self._times_s.items()):
                if clock == clock_mhz and power_w.get(key, 0.0) > 0:
                    time_s = statistics.median(times_s)
                    rows.append(Measurement(*key, clock_mhz, time_s, power_w[key] * time_s))
        return rows

    def blocking_power_w(self) -> float | None:
        """Return the power while not computing, None if there was no such time [W]."""
        found = [p[None] for clock in self._equations if None in (p := self._power_w(clock))]
        return statistics.median(found) if found else None

    def _power_w(self, clock_mhz: int) -> dict[Key | None, float]:
        """Return the power in each kind, and outside of them under None."""
        equations = self._equations[clock_mhz]
        keys: list[Key | None] = sorted({key for spent, _, _ in equations for key in spent})
        times = np.array([[spent.get(key, 0.0) for key in keys] for spent, _, _ in equations]).reshape(
            len(equations), -1
        )
        length = np.array([interval_s for _, interval_s, _ in equations])
        waiting: npt.NDArray[np.float64] = np.maximum(0.0, length - times.sum(axis=1))
        keys.append(None)
        system = np.column_stack([times, waiting])
        seen = system.sum(axis=0) > 0
        if len(equations) < seen.sum():
            return {}
        power, _ = nnls(system[:, seen], np.array([energy_j for _, _, energy_j in equations]))
        return dict(zip([k for k, s in zip(keys, seen, strict=True) if s], power.tolist(), strict=True))


def _key(span: Span) -> Key | None:
    if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL:
        return span.operation.instruction.stage, span.operation.instruction.kind
    return None
