"""Time and power of instructions at each clock by physics: what the rows of all stages have in common.

Time has a part that is proportional to ``1/f`` and a constant part. Power is static power plus ``f V(f)^2`` with a
voltage ``V`` that is constant up to a knee and then rises, linearly or quadratically. A board at its power limit keeps
its clock down: from some requested clock on, time and power are constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# On A100, A40, H100 and H200 the knee is near 980 MHz, and 300 MHz beyond it the voltage is 15 to 40 % higher. Rows
# decide where they can; these are the values that are tried, the likely ones, and how far others are from them.
_KNEES_MHZ, _KNEE_MHZ, _KNEE_SPREAD_MHZ = (
    (600, 700, 780, 840, 900, 950, 1000, 1050, 1100, 1160, 1230, 1300),
    980.0,
    120.0,
)
_RISES, _RISE, _RISE_SPREAD = 0.24 * 1.4 ** np.arange(-6, 4), 0.24, 0.5
_POWERS = (1, 2)
# Relative deviations of rows from these formulas that are to be expected, at least.
_MODEL_ERROR = 0.015
_IMPROBABLE = 0.01
# A board at its limit draws up to 8 % more than one that is locked at the clock that it reaches.
_AT_LIMIT_WEIGHT = 0.2
_FLAT = 0.08
# Rows that deviate by more standard deviations than this are outliers; their weight falls with their deviation.
_OUTLIER = 3.0
_FEWEST_BELOW_LIMIT = 2
# By how much a limit must make the rows more likely (twice the logarithm): a fit without one assumes less.
_LIMIT_EVIDENCE = 3.0


@dataclass(frozen=True)
class Series:
    """One quantity of one stage at the clocks where it was measured.

    Attributes:
        clock_mhz: Shape (n,).
        value: Shape (n,), positive.
        error: Shape (n,): relative standard error; NaN where unknown.
    """

    clock_mhz: Floats
    value: Floats
    error: Floats


@dataclass(frozen=True)
class Limit:
    """The power limit as the times of all stages show it.

    Attributes:
        requested_mhz: From this clock on, times are constant; infinite where no limit is seen.
        reached_mhz: The clock at which each stage then runs, by the formula of its time.
    """

    requested_mhz: float
    reached_mhz: list[float]


class TimeModel:
    """Times of one kind of instruction on all stages.

    Attributes:
        limit: The power limit.
    """

    def __init__(self, stages: Sequence[Series]) -> None:
        """Fit each stage's two parts, and the limit."""
        clocks = np.unique(np.concatenate([s.clock_mhz for s in stages]))
        first = max(_FEWEST_BELOW_LIMIT, len(clocks) // 2)
        penalty = math.exp(_LIMIT_EVIDENCE / sum(len(s.clock_mhz) for s in stages))
        best_misfit = np.inf
        for limit_mhz in (np.inf, *clocks[first:-1][::-1]):
            fits = [_time_fit(s, limit_mhz) for s in stages]
            misfit = sum(fit.misfit for fit in fits) * (penalty if limit_mhz < np.inf else 1.0) + 1e-12
            if misfit < best_misfit:
                best_misfit, self._fits, requested_mhz = misfit, fits, limit_mhz
        self.limit = Limit(requested_mhz, [fit.reached_mhz for fit in self._fits])

    def values(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the times at some clocks [s]."""
        fit = self._fits[stage]
        return np.asarray(np.maximum(_time_terms(clock_mhz) @ fit.parts, fit.at_limit))

    def errors(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the relative uncertainty that is due to the choice of a formula: none."""
        return np.zeros_like(clock_mhz)


class _TimeFit(NamedTuple):
    parts: Floats
    at_limit: float
    reached_mhz: float
    misfit: float


def _time_fit(series: Series, limit_mhz: float) -> _TimeFit:
    below = series.clock_mhz < limit_mhz
    above = series.value[~below]
    if not below.any():
        return _TimeFit(np.zeros(2), float(np.median(above)), float(series.clock_mhz.min()), 0.0)
    found, misfits = _fit(_time_terms(series.clock_mhz[below])[None], series.value[below])
    parts, misfit = found[0], float(misfits[0])
    if not len(above):
        return _TimeFit(parts, 0.0, np.inf, misfit)
    at_limit = float(np.median(above))
    constant_s, scaling = parts
    scaling_s = at_limit - constant_s
    reached_mhz = 1e3 * scaling / scaling_s if scaling_s > 0 else np.inf
    misfit += float(np.sum((above / at_limit - 1) ** 2))
    return _TimeFit(parts, at_limit, float(np.clip(reached_mhz, 0.5 * limit_mhz, limit_mhz)), misfit)


def _time_terms(clock_mhz: Floats) -> Floats:
    return np.column_stack([np.ones_like(clock_mhz), 1e3 / clock_mhz])


class PowerModel:
    """Powers of one kind of instruction on all stages.

    A few rows do not tell where the knee is, nor how steeply the voltage rises. So all voltages that agree with the
    rows count, each as much as it is probable.
    """

    def __init__(self, stages: Sequence[Series], limit: Limit) -> None:
        """Fit each stage's static power and dynamic power for each of the voltages."""
        above = [s.value[s.clock_mhz >= limit.requested_mhz] for s in stages]
        # Times may be constant for another reason, such as a memory that is too slow; then power goes on rising.
        is_flat = all(np.ptp(values) < _FLAT * values.mean() for values in above if len(values))
        self._limit_mhz = limit.requested_mhz if is_flat else np.inf
        self._at_limit = [float(np.median(values)) if is_flat and len(values) else np.inf for values in above]
        voltages = list(starmap(_Voltage, product(_KNEES_MHZ, _RISES, _POWERS)))
        fits = [_power_fit(s, voltages, self._limit_mhz, mhz) for s, mhz in zip(stages, limit.reached_mhz, strict=True)]
        misfit = sum(off for _, off in fits)
        rows = sum(len(s.clock_mhz) for s in stages)
        variance = _MODEL_ERROR**2 + np.min(misfit) / rows
        distance = misfit / variance + np.array([voltage.unlikeliness for voltage in voltages])
        probable = np.exp(-0.5 * (distance - distance.min()))
        kept = np.flatnonzero(probable > _IMPROBABLE)
        self._weights = probable[kept] / probable[kept].sum()
        self._voltages = [voltages[number] for number in kept]
        self._parts = [parts[kept] for parts, _ in fits]

    def values(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the powers at some clocks [W]."""
        return np.asarray(np.maximum(self._weights @ self._by_voltage(stage, clock_mhz), 1e-12))

    def errors(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the relative uncertainty that is due to what is not known of the voltage."""
        off = self._by_voltage(stage, clock_mhz) / self.values(stage, clock_mhz) - 1
        return np.asarray(np.sqrt(self._weights @ off**2))

    def _by_voltage(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the powers by each of the voltages, shape (voltages, clocks) [W]."""
        terms = np.array([voltage.terms(clock_mhz) for voltage in self._voltages])
        powers_w = np.einsum("knc,kc->kn", terms, self._parts[stage])
        at_limit = self._at_limit[stage]
        return np.where(clock_mhz < self._limit_mhz, np.minimum(powers_w, at_limit), at_limit)


class _Voltage(NamedTuple):
    """The voltage as a function of the clock.

    Attributes:
        knee_mhz: Up to this clock it is constant.
        rise: By how much it is higher 300 MHz beyond the knee, relative.
        power: 1 where it rises linearly, 2 where quadratically.
    """

    knee_mhz: float
    rise: float
    power: int

    @property
    def unlikeliness(self) -> float:
        knee = (self.knee_mhz - _KNEE_MHZ) / _KNEE_SPREAD_MHZ
        return knee**2 + (math.log(self.rise / _RISE) / _RISE_SPREAD) ** 2

    def terms(self, clock_mhz: Floats) -> Floats:
        voltage = 1 + self.rise * (np.maximum(0.0, clock_mhz - self.knee_mhz) / 300) ** self.power
        return np.column_stack([np.ones_like(clock_mhz), clock_mhz * voltage**2])


def _power_fit(
    series: Series, voltages: Sequence[_Voltage], limit_mhz: float, reached_mhz: float
) -> tuple[Floats, Floats]:
    is_below = series.clock_mhz < limit_mhz
    clock_mhz = np.where(is_below, series.clock_mhz, reached_mhz)
    terms = np.array([voltage.terms(clock_mhz) for voltage in voltages])
    return _fit(terms, series.value, np.where(is_below, 1.0, _AT_LIMIT_WEIGHT))


def _fit(columns: Floats, value: Floats, trust: Floats | float = 1.0) -> tuple[Floats, Floats]:
    """Fit sums of two terms to relative values, with low weight for outliers.

    Returns:
        The coefficients, none negative, shape (formulas, 2), and the misfits, shape (formulas,).
    """
    relative = columns / value[:, None]
    weight = np.broadcast_to(np.asarray(trust, dtype=float), relative.shape[:2])
    for _ in range(3):
        found = _non_negative(relative * weight[..., None], weight)
        off = np.abs(np.einsum("knc,kc->kn", relative, found) - 1)
        largest = _OUTLIER * (1.5 * np.median(off, axis=1, keepdims=True) + 1e-6)
        weight = trust * np.minimum(1.0, largest / np.maximum(off, 1e-12))
    return found, np.asarray(np.sum((trust * np.minimum(off, largest)) ** 2, axis=1))


def _non_negative(columns: Floats, value: Floats) -> Floats:
    """Return the least-squares coefficients of two columns each, or of the better one where one would be negative."""
    square = np.einsum("knc,knd->kcd", columns, columns)
    both = np.einsum("knc,kn->kc", columns, value)
    alone = both / np.maximum(np.einsum("kcc->kc", square), 1e-300)
    better = np.argmax(alone * both, axis=1)
    single = np.where(np.arange(2) == better[:, None], alone, 0.0)
    found = np.einsum("kcd,kd->kc", np.linalg.pinv(square, hermitian=True), both)
    return np.where((found >= 0).all(axis=1, keepdims=True), found, single)
