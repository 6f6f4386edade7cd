"""Measures time and energy of instructions while training goes on, one clock an iteration.

Times are those of the instructions as they ran. Energies come from the energy counter: at each
refresh, the energy used since the iteration began is blocking power times the time passed, plus the
sum over kinds of their power beyond blocking power times the time spent in them. The powers are
therefore estimated by least squares over all refreshes at one clock.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from perseus_ds.artifacts.profile_csv import Measurement
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.device.gpu.base import GpuState
from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.profiler.fixed_durations import tails_s
from perseus_ds.profiler.rows import MeasuredRow, known

Key = tuple[int, Kind]
Floats = npt.NDArray[np.float64]

# Typical delay until a refresh of the counter is seen [s]; relative variation of power from instruction to instruction,
# at least. A counter that looks at power during a part of the time only varies by more, which the residuals show.
_DELAY_S = 0.001
_POWER_VARIATION = 0.02
# Relative variance of power among kinds, which is not the counter's.
_KIND_VARIATION = 0.1**2
# Dividing the energy among kinds adds an error of about this size.
_LEAST_ERROR = 0.01
# Prior knowledge of power, as relative standard deviations: of waiting from blocking power; of the kinds from each
# other, common to all clocks; and of a kind at one clock from its ratio common to all clocks.
_WAITING_SPREAD = 0.1
_WAITING_SPREAD_AT_LOW_CLOCKS = 0.5
_KIND_SPREAD = {kind: 0.5 if kind is Kind.TAIL else 0.1 for kind in Kind}
_KIND_SPREAD_AT_A_CLOCK = {kind: 0.2 if kind is Kind.TAIL else 0.02 for kind in Kind}


@dataclass(frozen=True)
class _System:
    """Linear equations from the counter's refreshes at one clock, weighted to errors of about 1 times the power.

    Attributes:
        spent_s: Shape (refreshes, kinds + 1): seconds spent in each kind and, last, outside of them.
        beyond_j: Shape (refreshes,): energy beyond blocking power times the time passed.
    """

    spent_s: Floats
    beyond_j: Floats

    def solve(self, expected_w: Floats, spread_w: Floats) -> Floats:
        """Return the power beyond blocking power in each kind and outside, regularised towards the expected one [W]."""
        scale = float(expected_w.max())
        matrix = np.vstack([self.spent_s / scale, np.diag(1 / spread_w)])
        values = np.concatenate([self.beyond_j / scale, expected_w / spread_w])
        return np.asarray(np.linalg.lstsq(matrix, values, rcond=None)[0])

    def common_w(self, ratio: Floats, waiting_spread_w: float) -> float:
        """Return the power beyond blocking power of a kind whose ratio is 1 [W].

        Args:
            ratio: Of the power beyond blocking power of each kind to the others'.
            waiting_spread_w: Standard deviation of the power outside of all kinds from blocking power [W].
        """
        seconds = self.spent_s[:, :-1] @ ratio
        scale = abs(float(seconds @ self.beyond_j / (seconds @ seconds))) + 1e-9
        matrix = np.vstack([np.column_stack([seconds, self.spent_s[:, -1]]) / scale, [[0.0, 1 / waiting_spread_w]]])
        return float(np.linalg.lstsq(matrix, np.append(self.beyond_j / scale, 0.0), rcond=None)[0][0])


class OnlineProfiler:
    """Collects iterations of one rank and computes rows from them.

    Args:
        blocking_power_w: Power of this rank's GPU while it waits [W].
    """

    def __init__(self, blocking_power_w: float) -> None:
        self._blocking_power_w = blocking_power_w
        self._keys: list[Key] = []
        self._state: dict[int, GpuState] = {}
        self._times_s: dict[tuple[int, Key], list[float]] = defaultdict(list)
        # By clock, and for each call of add: spans, and moment and value of the counter's refreshes.
        self._seen: dict[int, list[tuple[list[tuple[Span, Key]], Floats, Floats]]] = defaultdict(list)

    def add(
        self,
        clock_mhz: int,
        iterations: Sequence[Sequence[Span]],
        readings: Sequence[tuple[float, float]],
        state: GpuState = GpuState(),  # noqa: B008  # immutable
    ) -> None:
        """Add iterations that ran at one clock, one right after the other.

        Args:
            clock_mhz: The clock.
            iterations: The operations of each, on the same time axis as the readings.
            readings: Moment [s] and value [J] of the energy counter whenever it was refreshed meanwhile.
            state: Of the GPU at the end.
        """
        self._state[clock_mhz] = state
        computed = [
            (span, (span.operation.instruction.stage, span.operation.instruction.kind))
            for spans in iterations
            for span in spans
            if isinstance(span.operation, Compute)
        ]
        self._keys = sorted({*self._keys, *(key for _, key in computed)})
        for span, key in computed:
            if key[1] is not Kind.TAIL:
                self._times_s[clock_mhz, key].append(span.time_s)
        for spans in iterations:
            for stage, time_s in tails_s(spans).items():
                self._times_s[clock_mhz, (stage, Kind.TAIL)].append(time_s)
        if len(readings) >= 2:
            moments, energy_j = np.array(readings).T
            self._seen[clock_mhz].append((computed, moments, energy_j))

    def power_error(self, clock_mhz: int) -> float:
        """Return the relative error of the mean power beyond blocking power at a clock, by the counter's residuals."""
        passed_s = sum(float(moments[-1] - moments[0]) for _, moments, _ in self._seen[clock_mhz])
        computed_s = sum(
            float(np.clip(span.end_s, moments[0], moments[-1]) - np.clip(span.start_s, moments[0], moments[-1]))
            for computed, moments, _ in self._seen[clock_mhz]
            for span, _ in computed
        )
        return math.sqrt(self._variation(clock_mhz) * passed_s) / computed_s if computed_s else math.inf

    def rows(self) -> list[MeasuredRow]:
        """Return one row for every kind and clock whose power could be estimated, by clock."""
        powers_w = self._powers_w()
        return [
            self._row(clock_mhz, key, float(power_w[number]))
            for clock_mhz, power_w in sorted(powers_w.items())
            for number, key in enumerate(self._keys)
            if self._times_s[clock_mhz, key] and power_w[number] > 0
        ]

    def _row(self, clock_mhz: int, key: Key, power_w: float) -> MeasuredRow:
        times_s = self._times_s[clock_mhz, key]
        time_s = statistics.median(times_s)
        # The standard error of a median is 1.25 times that of a mean.
        error = 1.25 * statistics.stdev(times_s) / math.sqrt(len(times_s)) / time_s if len(times_s) > 1 else None
        beyond = 1 - min(1.0, self._blocking_power_w / power_w)
        quality = RowQuality(
            stage=key[0],
            kind=key[1],
            clock_mhz=clock_mhz,
            samples=len(times_s),
            time_relative_error=error,
            temperature_c=self._state[clock_mhz].temperature_c,
            power_state=self._state[clock_mhz].power_state,
            energy_relative_error=known(math.hypot(error or 0.0, _LEAST_ERROR, beyond * self.power_error(clock_mhz))),
        )
        return MeasuredRow(Measurement(*key, clock_mhz, time_s, power_w * time_s), quality)

    def _powers_w(self) -> dict[int, Floats]:
        """Return, by clock, the power in each kind [W].

        A few refreshes determine the common power of all kinds well; their differences need many. So
        the ratios between kinds are estimated from all clocks at once, and the power of a kind at one
        clock deviates from its ratio only as far as the refreshes at that clock require.
        """
        systems = {clock: system for clock in self._seen if (system := self._system(clock)) is not None}
        ratio = np.ones(len(self._keys))
        common_w: dict[int, float] = {}
        for _ in range(3):
            common_w = {c: w for c, s in systems.items() if (w := s.common_w(ratio, self._waiting_spread_w(c))) > 0}
            if not common_w:
                return {}
            ratio = self._ratio({c: systems[c] for c in common_w}, common_w)
        return {c: self._at_clock(systems[c], ratio, w, self._waiting_spread_w(c)) for c, w in common_w.items()}

    def _waiting_spread_w(self, clock_mhz: int) -> float:
        """Return how far power while waiting may be from blocking power, which was measured at default clocks [W]."""
        below_top = 1 - clock_mhz / max(self._seen)
        return max(1.0, self._blocking_power_w) * (_WAITING_SPREAD + _WAITING_SPREAD_AT_LOW_CLOCKS * below_top)

    def _ratio(self, systems: dict[int, _System], common_w: dict[int, float]) -> Floats:
        """Return the power beyond blocking power of each kind relative to the others, common to all clocks."""
        spread = np.array([_KIND_SPREAD[kind] for _, kind in self._keys])
        matrix = [system.spent_s[:, :-1] for system in systems.values()]
        values = [system.beyond_j / common_w[clock] for clock, system in systems.items()]
        return np.asarray(nnls(np.vstack([*matrix, np.diag(1 / spread)]), np.concatenate([*values, 1 / spread]))[0])

    def _at_clock(self, system: _System, ratio: Floats, common_w: float, waiting_spread_w: float) -> Floats:
        expected_w = ratio * common_w
        spread = np.array([_KIND_SPREAD_AT_A_CLOCK[kind] for _, kind in self._keys])
        power_w = system.solve(
            np.append(expected_w, 0.0),
            np.append(spread * np.maximum(expected_w, 1.0), waiting_spread_w),
        )
        return self._blocking_power_w + np.maximum(power_w[:-1], 0.0)

    def _system(self, clock_mhz: int) -> _System | None:
        """Return the equations of a clock; None where the counter was not refreshed twice within an iteration."""
        spent, beyond = [], []
        for computed, moments, energy_j in self._seen[clock_mhz]:
            seconds = np.zeros((len(moments), len(self._keys) + 1))
            for span, key in computed:
                seconds[:, self._keys.index(key)] += np.clip(moments - span.start_s, 0.0, span.time_s)
            seconds[:, -1] = moments - seconds.sum(axis=1)
            weight = _weights(moments, self._variation(clock_mhz))
            spent.append(weight @ seconds)
            beyond.append(weight @ (energy_j - self._blocking_power_w * moments))
        return _System(np.concatenate(spent), np.concatenate(beyond)) if spent else None

    def _variation(self, clock_mhz: int) -> float:
        """Return the variance that the energy counted gains in a second, relative to the power beyond blocking [s].

        It is that of the residuals from refresh to refresh, if all kinds had the same power, and at least that of
        powers that vary from instruction to instruction.
        """
        computed_s, used_j, passed_s, times_s = [], [], [], []
        for computed, moments, energy_j in self._seen[clock_mhz]:
            done_s = sum(np.clip(moments - span.start_s, 0.0, span.time_s) for span, _ in computed)
            computed_s.append(np.diff(done_s))
            used_j.append(np.diff(energy_j - self._blocking_power_w * moments))
            passed_s.append(np.diff(moments))
            times_s += [span.time_s for span, _ in computed]
        seconds, joules = np.concatenate(computed_s), np.concatenate(used_j)
        least = _POWER_VARIATION**2 * statistics.mean(times_s)
        passed = np.concatenate(passed_s)
        columns = np.column_stack([seconds, passed - seconds])
        power_w = np.linalg.lstsq(columns, joules, rcond=None)[0]
        if power_w[0] <= 0:
            return least
        residual_s = (joules - columns @ power_w) / power_w[0]
        excess = np.mean(residual_s**2) - 2 * _DELAY_S**2 - _KIND_VARIATION * np.mean(seconds**2)
        return max(least, float(excess / np.mean(passed)))


def _weights(moments_s: Floats, variation_s: float) -> Floats:
    """Return the matrix after which errors of readings are independent, of size 1, and free of a common offset.

    A refresh is seen with a random delay. Power varies from instruction to instruction, and the
    resulting deviation of the energy accumulates, so later readings share that of earlier ones.
    """
    accumulated = variation_s * (np.minimum.outer(moments_s, moments_s) - moments_s[0])
    factor = np.linalg.cholesky(accumulated + _DELAY_S**2 * np.eye(len(moments_s)))
    weights = np.linalg.inv(factor)
    begin = weights.sum(axis=1)
    return np.asarray(weights - np.outer(begin, begin @ weights) / (begin @ begin))
