"""Physical models of time and power as functions of the clock, fitted to the rows of one kind of instruction.

Time has a part that is proportional to ``1/f`` and a constant part. Power is static power plus ``f V(f)^2``, with a
voltage ``V`` that is constant up to a knee and then rises, linearly or quadratically. A board at its power limit does
not reach higher clocks. From some requested clock on, its *limit*, time and power are constant.

The rows of a quantity of one stage are a :class:`Series`. Models are fitted to the series of all stages together,
which are identified by their index. Deviations are relative to the values, and a *misfit* is the sum of their squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.profile import Floats

# On A100, A40, H100 and H200 the knee is near 980 MHz, and 300 MHz above it the voltage is 15 to 40 % higher. Prior
# knowledge is a knee with this mean and standard deviation [MHz], and a rise whose logarithm has this spread.
_KNEE_MHZ, _KNEE_SPREAD_MHZ = 980.0, 120.0
_RISE, _RISE_SPREAD = 0.24, 0.5
_KNEES_MHZ = (600, 700, 780, 840, 900, 950, 1000, 1050, 1100, 1160, 1230, 1300)
_RISES = _RISE * 1.4 ** np.arange(-6, 4)
_VOLTAGES = np.array(list(product(_KNEES_MHZ, _RISES, (1, 2))))
"""The voltage curves to try, shape (voltages, 3): the knee [MHz], the relative rise 300 MHz above it, and the exponent
of the rise (1 for linear, 2 for quadratic)."""
# Relative deviation of rows from these formulas even without noise.
_MODEL_ERROR = 0.015
# Voltage curves that are less probable than this, relative to the most probable one, are left out.
_IMPROBABLE = 0.01
# A board at its limit draws up to 8 % more than one that is locked to the clock that it reaches, so rows at the limit
# have a low weight for the formula. Powers that differ by more than 8 % are not those of a board at its limit.
_AT_LIMIT_WEIGHT, _FLAT = 0.2, 0.08
# Rows that deviate by more standard deviations than this are outliers. Their weight falls with their deviation.
_OUTLIER, _MAD_TO_SIGMA = 3.0, 1.5
_REWEIGHTED = 3
_FEWEST_BELOW_LIMIT = 2
# A limit is assumed only if it increases twice the logarithm of the likelihood of the rows by this.
_LIMIT_EVIDENCE = 3.0
# Added to misfits, so that no limit is assumed because of rounding errors in rows without noise.
_PERFECT = 1e-12
_SINGULAR = 1e-12


@dataclass(frozen=True)
class Series:
    """One positive quantity of one stage at the clocks where it was measured.

    Attributes:
        clock_mhz: Clocks, shape (rows,) [MHz].
        value: Times [s] or powers [W], shape (rows,).
        error: Their relative errors, shape (rows,). NaN if unknown.
    """

    clock_mhz: Floats
    value: Floats
    error: Floats


class TimeModel:
    """Model of the times of one kind of instruction on all stages, and of the power limit.

    Attributes:
        limit_mhz: Requested clock from which on times are constant. Infinite if no limit is found.
        reached_mhz: By index of the stage, the clock at which it runs at the limit, by the formula of its time.
    """

    def __init__(self, series: Sequence[Series]) -> None:
        rows = sum(len(of.clock_mhz) for of in series)
        # Twice the logarithm of the likelihood is -rows * log(misfit).
        penalty_of_limit = math.exp(_LIMIT_EVIDENCE / rows)
        best_misfit = np.inf
        for limit_mhz in (np.inf, *_possible_limits(series)):
            fits = [_time_fit(of, limit_mhz) for of in series]
            misfit = sum(fit.misfit for fit in fits)
            if limit_mhz < np.inf:
                misfit *= penalty_of_limit
            misfit += _PERFECT
            if misfit < best_misfit:
                best_misfit, self._fits, self.limit_mhz = misfit, fits, limit_mhz
        self.reached_mhz = [fit.reached_mhz for fit in self._fits]

    def values(self, index: int, clock_mhz: Floats) -> Floats:
        """Return the times of a stage at the given clocks, shape (clocks,) [s]."""
        fit = self._fits[index]
        return np.asarray(np.maximum(_time_terms(clock_mhz) @ fit.coefficients, fit.plateau_s))


def _possible_limits(series: Sequence[Series]) -> Floats:
    """Return the measured clocks that may be a limit, the highest first.

    A limit has at least two clocks below it, half of all, and one above it.
    """
    clocks = np.unique(np.concatenate([of.clock_mhz for of in series]))
    return clocks[max(_FEWEST_BELOW_LIMIT, len(clocks) // 2) : -1][::-1]


class _TimeFit(NamedTuple):
    """The times of one stage.

    Attributes:
        coefficients: Constant part, and the part at 1000 MHz of what is proportional to 1/f, shape (2,) [s].
        plateau_s: Time at the limit. 0 if there are no rows at it.
        reached_mhz: Clock at which the formula gives that time.
        misfit: Misfit of the rows.
    """

    coefficients: Floats
    plateau_s: float
    reached_mhz: float
    misfit: float


def _time_fit(series: Series, limit_mhz: float) -> _TimeFit:
    below = series.clock_mhz < limit_mhz
    above_s = series.value[~below]
    plateau_s = float(np.median(above_s)) if len(above_s) else 0.0
    misfit_above = float(np.sum((above_s / plateau_s - 1) ** 2)) if len(above_s) else 0.0
    if not below.any():
        return _TimeFit(np.zeros(2), plateau_s, float(series.clock_mhz.min()), misfit_above)
    fitted = _fit(_time_terms(series.clock_mhz[below])[None], series.value[below])
    coefficients, misfit = fitted.coefficients[0], float(fitted.misfits[0])
    if not len(above_s):
        return _TimeFit(coefficients, 0.0, np.inf, misfit)
    constant_s, proportional_s = coefficients
    proportional_at_limit_s = plateau_s - constant_s
    reached_mhz = 1e3 * proportional_s / proportional_at_limit_s if proportional_at_limit_s > 0 else np.inf
    # A clock far from the limit would be due to noise.
    reached_mhz = float(np.clip(reached_mhz, 0.5 * limit_mhz, limit_mhz))
    return _TimeFit(coefficients, plateau_s, reached_mhz, misfit + misfit_above)


def _time_terms(clock_mhz: Floats) -> Floats:
    """Return the terms of the time, shape (clocks, 2)."""
    return np.column_stack([np.ones_like(clock_mhz), 1e3 / clock_mhz])


class PowerModel:
    """Model of the powers of one kind of instruction on all stages.

    A few rows do not determine the knee, nor the rise of the voltage. So the model is the mean of all voltage curves
    that agree with the rows, weighted by their probability.
    """

    def __init__(self, series: Sequence[Series], time: TimeModel) -> None:
        at_limit_w = [of.value[of.clock_mhz >= time.limit_mhz] for of in series]
        # Times may be constant for another reason, such as slow memory. Then power continues to rise.
        is_flat = all(np.ptp(values) < _FLAT * values.mean() for values in at_limit_w if len(values))
        self._limit_mhz = time.limit_mhz if is_flat else np.inf
        # By index. A stage without rows at the limit gets none above it, so its power there is not needed.
        self._limit_power_w = [float(np.median(values)) if is_flat and len(values) else np.inf for values in at_limit_w]
        fits = [_power_fit(of, self._limit_mhz, mhz) for of, mhz in zip(series, time.reached_mhz, strict=True)]
        misfits = np.sum([fit.misfits for fit in fits], axis=0)  # (voltages,)
        variance = _MODEL_ERROR**2 + np.min(misfits) / sum(len(of.clock_mhz) for of in series)  # of a row
        distance = misfits / variance + _unlikeliness()
        probability = np.exp(-0.5 * (distance - distance.min()))
        kept = np.flatnonzero(probability > _IMPROBABLE)
        # Of the kept voltage curves, shapes (kept,), (kept, 3), and by index (kept, 2):
        self._weights = probability[kept] / probability[kept].sum()
        self._voltages = _VOLTAGES[kept]
        self._coefficients = [fit.coefficients[kept] for fit in fits]

    def values(self, index: int, clock_mhz: Floats) -> Floats:
        """Return the powers of a stage at the given clocks, shape (clocks,) [W]."""
        return np.asarray(np.maximum(self._weights @ self._by_voltage_w(index, clock_mhz), 1e-12))

    def errors(self, index: int, clock_mhz: Floats) -> Floats:
        """Return the relative uncertainty due to the unknown voltage curve, shape (clocks,)."""
        deviation = self._by_voltage_w(index, clock_mhz) / self.values(index, clock_mhz) - 1
        return np.asarray(np.sqrt(self._weights @ deviation**2))

    def _by_voltage_w(self, index: int, clock_mhz: Floats) -> Floats:
        """Return the powers by each voltage curve, shape (kept, clocks) [W]."""
        powers_w = _combined(_power_terms(self._voltages, clock_mhz), self._coefficients[index])
        limit_w = self._limit_power_w[index]
        return np.where(clock_mhz < self._limit_mhz, np.minimum(powers_w, limit_w), limit_w)


def _unlikeliness() -> Floats:
    """Return minus twice the logarithm of the prior probability of each voltage curve, shape (voltages,)."""
    knee_mhz, rise, _ = _VOLTAGES.T
    result: Floats = ((knee_mhz - _KNEE_MHZ) / _KNEE_SPREAD_MHZ) ** 2 + (np.log(rise / _RISE) / _RISE_SPREAD) ** 2
    return result


def _power_terms(voltages: Floats, clock_mhz: Floats) -> Floats:
    """Return the terms of static and dynamic power, shape (voltages, clocks, 2)."""
    knee_mhz, rise, exponent = voltages.T[..., None]
    above_knee = np.maximum(0.0, clock_mhz - knee_mhz) / 300
    voltage = 1 + rise * np.where(exponent == 1, above_knee, above_knee**2)
    return np.stack([np.ones_like(voltage), clock_mhz * voltage**2], axis=-1)


def _power_fit(series: Series, limit_mhz: float, reached_mhz: float) -> _Fit:
    """Fit each voltage curve. Rows at the limit count as rows at the clock that is reached there."""
    is_below = series.clock_mhz < limit_mhz
    terms = _power_terms(_VOLTAGES, np.where(is_below, series.clock_mhz, reached_mhz))
    return _fit(terms, series.value, np.where(is_below, 1.0, _AT_LIMIT_WEIGHT))


class _Fit(NamedTuple):
    """Fits of several formulas.

    Attributes:
        coefficients: The non-negative coefficients of their two terms, shape (formulas, 2).
        misfits: Their misfits, shape (formulas,).
    """

    coefficients: Floats
    misfits: Floats


def _fit(terms: Floats, value: Floats, prior_weight: Floats | float = 1.0) -> _Fit:
    """Fit sums of two terms to values, with low weight for outliers.

    Args:
        terms: Terms of each formula, shape (formulas, rows, 2).
        value: Values, shape (rows,).
        prior_weight: Weights of the rows, shape (rows,), or one for all.
    """
    relative = terms / value[:, None]  # to be fitted to 1
    weight = np.broadcast_to(np.asarray(prior_weight, dtype=float), relative.shape[:2])
    for _ in range(_REWEIGHTED):
        # The target is 1 times the weight.
        coefficients = _non_negative(relative * weight[..., None], weight)
        deviation = np.abs(_combined(relative, coefficients) - 1)
        sigma = _MAD_TO_SIGMA * np.median(deviation, axis=1, keepdims=True)
        largest = _OUTLIER * (sigma + 1e-6)
        weight = prior_weight * np.minimum(1.0, largest / np.maximum(deviation, 1e-12))
    return _Fit(coefficients, np.asarray(np.sum((prior_weight * np.minimum(deviation, largest)) ** 2, axis=1)))


def _combined(terms: Floats, coefficients: Floats) -> Floats:
    """Return the values of formulas, shape (formulas, rows), from terms (formulas, rows, 2) and coefficients."""
    return np.asarray(np.einsum("knc,kc->kn", terms, coefficients))


def _non_negative(columns: Floats, value: Floats) -> Floats:
    """Return non-negative least-squares coefficients of two columns, shape (formulas, 2).

    If one of both would be negative, they are those of the column that fits better alone.

    Args:
        columns: Shape (formulas, rows, 2).
        value: Shape (formulas, rows).
    """
    # The normal equations: sums of squares and products of the columns, and of their products with the values.
    squares = np.einsum("knc,knc->kc", columns, columns)
    mixed = np.einsum("kn,kn->k", columns[..., 0], columns[..., 1])
    projections = np.einsum("knc,kn->kc", columns, value)
    one_column = projections / np.maximum(squares, 1e-300)
    better = np.argmax(one_column * projections, axis=1)
    single = np.where(np.arange(2) == better[:, None], one_column, 0.0)
    determinant = (squares.prod(axis=1) - mixed**2)[:, None]
    is_regular = determinant > _SINGULAR * squares.prod(axis=1, keepdims=True)
    numerator = squares[:, ::-1] * projections - mixed[:, None] * projections[:, ::-1]
    # For a single row, or several at one clock, this is the solution with the least norm.
    trace = np.maximum(squares.sum(axis=1, keepdims=True), 1e-300)
    both = np.where(is_regular, numerator, projections) / np.where(is_regular, determinant, trace)
    return np.where((both >= 0).all(axis=1, keepdims=True), both, single)
