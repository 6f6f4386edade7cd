"""Measures time and energy of instructions while ordinary training goes on, one clock an iteration.

Times are those of the instructions as they ran. Energies come from the energy counter: whenever it
is refreshed, what was used since the iteration began is the sum over kinds of power times the time
spent in them, so power follows by least squares over all refreshes at one clock.
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
Floats = npt.NDArray[np.float64]
_LATE_S = 0.001
_ALIKE = 0.1


class OnlineProfiler:
    """Collects iterations of one rank and makes rows of them."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._times_s: dict[tuple[int, Key], list[float]] = defaultdict(list)
        # By clock, and for each iteration: seconds spent in each kind and outside, and energy, at each refresh.
        self._systems: dict[int, list[tuple[Floats, Floats]]] = defaultdict(list)

    def add(self, clock_mhz: int, spans: Sequence[Span], readings: Sequence[tuple[float, float]]) -> None:
        """Take in an iteration that ran at one clock.

        Args:
            clock_mhz: The clock.
            spans: What ran, on the same time axis as the readings.
            readings: Moment [s] and value [J] of the energy counter whenever it was refreshed.
        """
        computed = [(span, key) for span in spans if (key := _key(span)) is not None]
        self._keys = sorted({*self._keys, *(key for _, key in computed)})
        for span, key in computed:
            self._times_s[clock_mhz, key].append(span.time_s)
        if len(readings) < 2:
            return
        moments = np.array([moment for moment, _ in readings])
        spent = np.zeros((len(readings), len(self._keys) + 1))
        for span, key in computed:
            spent[:, self._keys.index(key)] += np.clip(moments - span.start_s, 0.0, span.time_s)
        spent[:, -1] = moments - spent.sum(axis=1)
        energy_j = np.array([energy_j for _, energy_j in readings])
        # Centred, because what the counter and the clock read at the start does not matter.
        self._systems[clock_mhz].append((spent - spent.mean(axis=0), energy_j - energy_j.mean()))

    def rows(self) -> list[Measurement]:
        """Return one row for every kind and clock of which power can be told, by clock."""
        rows = []
        for clock_mhz in sorted(self._systems):
            power_w = self._power_w(clock_mhz)
            for number, key in enumerate(self._keys):
                times_s = self._times_s[clock_mhz, key]
                if power_w is not None and times_s and power_w[number] > 0:
                    time_s = statistics.median(times_s)
                    rows.append(Measurement(*key, clock_mhz, time_s, float(power_w[number]) * time_s))
        return rows

    def blocking_power_w(self) -> float | None:
        """Return the power while not computing, None if it cannot be told [W]."""
        found = [float(power_w[-1]) for clock in self._systems if (power_w := self._power_w(clock)) is not None]
        return statistics.median(found) if found else None

    def _power_w(self, clock_mhz: int) -> Floats | None:
        """Return the power in each kind and, last, outside of them; None where there were too few refreshes."""
        spent = np.concatenate([spent for spent, _ in self._systems[clock_mhz]])
        energy_j = np.concatenate([energy_j for _, energy_j in self._systems[clock_mhz]])
        if len(energy_j) - len(self._systems[clock_mhz]) < spent.shape[1]:
            return None
        # What all kinds draw together is told well by few refreshes, how they differ by many: kinds are taken to
        # draw alike, give or take _ALIKE, until the refreshes, seen up to _LATE_S late, say otherwise.
        together = np.column_stack([spent[:, :-1].sum(axis=1), spent[:, -1]])
        common_w = nnls(together, energy_j)[0][0]
        if common_w == 0:
            return None
        kinds = spent.shape[1] - 1
        prior = np.eye(kinds, kinds + 1) * (_LATE_S / _ALIKE)
        power_w, _ = nnls(np.vstack([spent, prior]), np.concatenate([energy_j, prior[:, :-1].sum(axis=1) * common_w]))
        return np.asarray(power_w)


def _key(span: Span) -> Key | None:
    if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL:
        return span.operation.instruction.stage, span.operation.instruction.kind
    return None
