"""Estimates rows for all clocks between the lowest and the highest measured one, with less noise.

An optimiser that is given raw rows selects those that look best because of noise. Rows are therefore replaced by
estimates from all rows of a kind together: a physical model of time and power as functions of the clock, and a Gaussian
process for its residuals. The residuals are smooth in the clock and similar on all stages, because all stages run the
same kernels (on A40 the backward of GPT-3 is 8 % slower just above 960 MHz than below). The amplitude and length scale
of the process maximise the likelihood of the rows.

In the model, time has a part that is proportional to ``1/f`` and a constant part. Power is static power plus
``f V(f)^2`` with a voltage ``V`` that is constant up to a knee and then rises, linearly or quadratically. A board at
its power limit does not reach higher clocks. Above some requested clock, time and power are constant.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.lapack import dpotrf, dpotrs

from perseus_ds.artifacts.profile import Floats, Measurement, RowQuality, StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind

# On A100, A40, H100 and H200 the knee is near 980 MHz, and 300 MHz above it the voltage is 15 to 40 % higher. These are
# the values to try, and the likely value and its spread, which are prior knowledge.
_KNEES_MHZ, _KNEE_MHZ, _KNEE_SPREAD_MHZ = (
    (600, 700, 780, 840, 900, 950, 1000, 1050, 1100, 1160, 1230, 1300),
    980.0,
    120.0,
)
_RISES, _RISE, _RISE_SPREAD = 0.24 * 1.4 ** np.arange(-6, 4), 0.24, 0.5
# The voltage curves to try, each as three numbers: the knee, the relative rise 300 MHz above it, and the exponent of
# the rise (1 for linear, 2 for quadratic).
_VOLTAGES = np.array(list(product(_KNEES_MHZ, _RISES, (1, 2))))
# Lower bound of the expected relative deviation of rows from these formulas.
_MODEL_ERROR = 0.015
_IMPROBABLE = 0.01
# A board at its limit draws up to 8 % more than one that is locked to the clock that it reaches.
_AT_LIMIT_WEIGHT = 0.2
_FLAT = 0.08
# Rows that deviate by more standard deviations than this are outliers. Their weight falls with their deviation.
_OUTLIER = 3.0
_FEWEST_BELOW_LIMIT = 2
# A limit is assumed only if it increases twice the logarithm of the likelihood of the rows by this.
_LIMIT_EVIDENCE = 3.0
_SINGULAR = 1e-12


@dataclass(frozen=True)
class Samples:
    """One positive quantity of one stage at the clocks where it was measured, with relative errors, NaN if unknown."""

    clock_mhz: Floats
    value: Floats
    error: Floats


class TimeModel:
    """Model of the times of one kind of instruction on all stages, and of the power limit.

    Attributes:
        limit_mhz: Requested clock from which on times are constant. Infinite if no limit is found.
        reached_mhz: Clock at which each stage runs at the limit, by the formula of its time.
    """

    def __init__(self, stages: Sequence[Samples]) -> None:
        clocks = np.unique(np.concatenate([s.clock_mhz for s in stages]))
        first = max(_FEWEST_BELOW_LIMIT, len(clocks) // 2)
        penalty = math.exp(_LIMIT_EVIDENCE / sum(len(s.clock_mhz) for s in stages))
        best_misfit = np.inf
        for limit_mhz in (np.inf, *clocks[first:-1][::-1]):
            fits = [_time_fit(s, limit_mhz) for s in stages]
            misfit = sum(fit.misfit for fit in fits) * (penalty if limit_mhz < np.inf else 1.0) + 1e-12
            if misfit < best_misfit:
                best_misfit, self._fits, self.limit_mhz = misfit, fits, limit_mhz
        self.reached_mhz = [fit.reached_mhz for fit in self._fits]

    def values(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the times at the given clocks [s]."""
        fit = self._fits[stage]
        return np.asarray(np.maximum(_time_terms(clock_mhz) @ fit.parts, fit.at_limit))


class _TimeFit(NamedTuple):
    parts: Floats
    at_limit: float
    reached_mhz: float
    misfit: float


def _time_fit(series: Samples, limit_mhz: float) -> _TimeFit:
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
    """Model of the powers of one kind of instruction on all stages.

    A few rows do not determine the knee, nor the rise of the voltage. So the model is the mean of all voltage curves
    that agree with the rows, weighted by their probability.
    """

    def __init__(self, stages: Sequence[Samples], time: TimeModel) -> None:
        above = [s.value[s.clock_mhz >= time.limit_mhz] for s in stages]
        # Times may be constant for another reason, such as slow memory. Then power continues to rise.
        is_flat = all(np.ptp(values) < _FLAT * values.mean() for values in above if len(values))
        self._limit_mhz = time.limit_mhz if is_flat else np.inf
        self._at_limit = [float(np.median(values)) if is_flat and len(values) else np.inf for values in above]
        fits = [_power_fit(s, self._limit_mhz, mhz) for s, mhz in zip(stages, time.reached_mhz, strict=True)]
        misfit = sum(off for _, off in fits)
        rows = sum(len(s.clock_mhz) for s in stages)
        variance = _MODEL_ERROR**2 + np.min(misfit) / rows
        distance = misfit / variance + _unlikeliness(_VOLTAGES)
        probable = np.exp(-0.5 * (distance - distance.min()))
        kept = np.flatnonzero(probable > _IMPROBABLE)
        self._weights = probable[kept] / probable[kept].sum()
        self._voltages = _VOLTAGES[kept]
        self._parts = [parts[kept] for parts, _ in fits]

    def values(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the powers at the given clocks [W]."""
        return np.asarray(np.maximum(self._weights @ self._by_voltage(stage, clock_mhz), 1e-12))

    def errors(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the relative uncertainty due to the unknown voltage curve."""
        off = self._by_voltage(stage, clock_mhz) / self.values(stage, clock_mhz) - 1
        return np.asarray(np.sqrt(self._weights @ off**2))

    def _by_voltage(self, stage: int, clock_mhz: Floats) -> Floats:
        """Return the powers by each voltage curve, shape (voltages, clocks) [W]."""
        powers_w = np.einsum("knc,kc->kn", _power_terms(self._voltages, clock_mhz), self._parts[stage])
        at_limit = self._at_limit[stage]
        return np.where(clock_mhz < self._limit_mhz, np.minimum(powers_w, at_limit), at_limit)


def _unlikeliness(voltages: Floats) -> Floats:
    knee_mhz, rise, _ = voltages.T
    result: Floats = ((knee_mhz - _KNEE_MHZ) / _KNEE_SPREAD_MHZ) ** 2 + (np.log(rise / _RISE) / _RISE_SPREAD) ** 2
    return result


def _power_terms(voltages: Floats, clock_mhz: Floats) -> Floats:
    """Return the terms of static and dynamic power, shape (voltages, clocks, 2)."""
    knee_mhz, rise, power = voltages.T[..., None]
    beyond = np.maximum(0.0, clock_mhz - knee_mhz) / 300
    voltage = 1 + rise * np.where(power == 1, beyond, beyond**2)
    return np.stack([np.ones_like(voltage), clock_mhz * voltage**2], axis=-1)


def _power_fit(series: Samples, limit_mhz: float, reached_mhz: float) -> tuple[Floats, Floats]:
    is_below = series.clock_mhz < limit_mhz
    terms = _power_terms(_VOLTAGES, np.where(is_below, series.clock_mhz, reached_mhz))
    return _fit(terms, series.value, np.where(is_below, 1.0, _AT_LIMIT_WEIGHT))


def _fit(columns: Floats, value: Floats, trust: Floats | float = 1.0) -> tuple[Floats, Floats]:
    """Fit sums of two terms to relative values, with low weight for outliers.

    Returns:
        The non-negative coefficients, shape (formulas, 2), and the misfits, shape (formulas,).
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
    """Return the least-squares coefficients of two columns, or of the better one if one would be negative."""
    square = np.einsum("knc,knc->kc", columns, columns)
    mixed = np.einsum("kn,kn->k", columns[..., 0], columns[..., 1])
    both = np.einsum("knc,kn->kc", columns, value)
    alone = both / np.maximum(square, 1e-300)
    better = np.argmax(alone * both, axis=1)
    single = np.where(np.arange(2) == better[:, None], alone, 0.0)
    determinant = (square.prod(axis=1) - mixed**2)[:, None]
    is_regular = determinant > _SINGULAR * square.prod(axis=1, keepdims=True)
    numerator = square[:, ::-1] * both - mixed[:, None] * both[:, ::-1]
    # For a single row, or several at one clock, this is the solution with the least norm.
    trace = np.maximum(square.sum(axis=1, keepdims=True), 1e-300)
    found = np.where(is_regular, numerator, both) / np.where(is_regular, determinant, trace)
    return np.where((found >= 0).all(axis=1, keepdims=True), found, single)


Stages = npt.NDArray[np.intp]

_AMPLITUDES = (0.0005, 0.002, 0.005, 0.015, 0.04)
_LENGTH_SCALES_MHZ = (30.0, 60.0, 120.0, 300.0)
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.04)
# Deviation of one stage from the other stages, relative to the deviation of all stages from the physical model.
_PER_STAGE = 0.2
_FEWEST_CLOCKS = 3
# A clock that was not measured gets no row if the relative error of its energy exceeds both this and twice the median
# error of measured rows.
_LARGEST_ERROR = 0.01


def denoise(profile: StageProfile, clocks_mhz: Collection[int]) -> StageProfile:
    """Return the most likely profile, given measured rows, and the clocks that the GPU supports.

    Those within the measured range of a (stage, kind) get a row with error bars in ``info.rows``, and 0 samples if they
    were not measured. Such a clock gets no row if its error is too large. A (stage, kind) that was measured at fewer
    than three clocks is returned as measured.
    """
    everything = estimate_all(profile, clocks_mhz)
    measured = {(m.stage, m.kind, m.clock_mhz) for m in profile.measurements}
    error = {key: row.energy_relative_error or 0.0 for key, row in everything.info.quality.items()}
    of_measured: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for stage, kind, clock_mhz in measured & error.keys():
        of_measured[stage, kind].append(error[stage, kind, clock_mhz])
    allowed = {key: max(_LARGEST_ERROR, 2 * statistics.median(found)) for key, found in of_measured.items()}
    return everything.where(lambda *row: row in measured or error[row] <= allowed[row[:2]])


def estimate_all(profile: StageProfile, clocks_mhz: Collection[int]) -> StageProfile:
    """Return the same as :func:`denoise`, but with a row for every clock, regardless of its error."""
    known = profile.info.quality
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for stage, kind in profile.keys:
        by_kind[kind].append(stage)
    measurements: list[Measurement] = []
    qualities: list[RowQuality] = []
    for kind, stages in by_kind.items():
        fitted = [s for s in stages if len(profile.options(s, kind).clock_mhz) >= _FEWEST_CLOCKS]
        for stage in sorted(set(stages) - set(fitted)):
            kept = [m for m in profile.measurements if (m.stage, m.kind) == (stage, kind)]
            measurements += kept
            qualities += [known[m.stage, kind, m.clock_mhz] for m in kept if (m.stage, kind, m.clock_mhz) in known]
        if fitted:
            for row, quality in _estimate_kind(profile, kind, fitted, clocks_mhz):
                measurements.append(row)
                qualities.append(quality)
    return StageProfile(measurements, profile.info.model_copy(update={"rows": qualities}))


def _estimate_kind(
    profile: StageProfile, kind: Kind, stages: list[int], clocks_mhz: Collection[int]
) -> list[tuple[Measurement, RowQuality]]:
    asked = np.array(sorted({*clocks_mhz, *(int(c) for s in stages for c in profile.options(s, kind).clock_mhz)}))
    estimates = estimate(*_series(profile, kind, stages), asked.astype(float))
    known, result = profile.info.quality, []
    for stage, (time_s, time_error), (power_w, power_error) in zip(stages, *estimates, strict=True):
        measured = set(profile.options(stage, kind).clock_mhz.tolist())
        energy_error = np.hypot(time_error, power_error)
        energy_j = time_s * power_w
        for number, clock_mhz in enumerate(asked.tolist()):
            if not min(measured) <= clock_mhz <= max(measured):
                continue
            before = known.get((stage, kind, clock_mhz))
            quality = RowQuality(
                stage=stage,
                kind=kind,
                clock_mhz=clock_mhz,
                samples=before.samples if before else int(clock_mhz in measured),
                time_relative_error=float(time_error[number]),
                energy_relative_error=float(energy_error[number]),
                temperature_c=before.temperature_c if before else None,
                power_state=before.power_state if before else None,
            )
            row = Measurement(stage, kind, clock_mhz, float(time_s[number]), float(energy_j[number]))
            result.append((row, quality))
    return result


def _series(profile: StageProfile, kind: Kind, stages: list[int]) -> tuple[list[Samples], list[Samples]]:
    known, times, powers = profile.info.quality, [], []
    for stage in stages:
        options = profile.options(stage, kind)
        rows = [known.get((stage, kind, int(clock))) for clock in options.clock_mhz]
        # An unknown error becomes NaN.
        time_error = np.array([row and row.time_relative_error for row in rows], dtype=float)
        energy_error = np.array([row and row.energy_relative_error for row in rows], dtype=float)
        clocks = options.clock_mhz.astype(float)
        times.append(Samples(clocks, options.time_s, time_error))
        powers.append(Samples(clocks, options.energy_j / options.time_s, np.hypot(time_error, energy_error)))
    return times, powers


Estimates = list[tuple[Floats, Floats]]
"""By stage, values of a quantity and their relative standard deviations, each of shape (clocks,)."""


def estimate(times: Sequence[Samples], powers: Sequence[Samples], clocks_mhz: Floats) -> tuple[Estimates, Estimates]:
    """Estimate times [s] and powers [W] of one kind of instruction on all stages from measured ones."""
    time = TimeModel(times)
    power = PowerModel(powers, time)
    of_power = [
        (power_w, np.hypot(error, power.errors(stage, clocks_mhz)))
        for stage, (power_w, error) in enumerate(_with_residuals(powers, power, clocks_mhz))
    ]
    return _with_residuals(times, time, clocks_mhz), of_power


def _with_residuals(stages: Sequence[Samples], physical: TimeModel | PowerModel, clocks_mhz: Floats) -> Estimates:
    residuals = _ResidualModel(stages, physical)
    found = [residuals.at(stage, clocks_mhz) for stage in range(len(stages))]
    return [(physical.values(n, clocks_mhz) * np.exp(residual), error) for n, (residual, error) in enumerate(found)]


@dataclass(frozen=True)
class _Kernel:
    """Covariance of relative residuals: a Matérn 3/2 kernel of the clock, mostly shared by all stages."""

    amplitude: float
    length_scale: float

    def __call__(self, stage: Stages, clock: Floats, other_stage: Stages, other: Floats) -> Floats:
        distance = np.sqrt(3) * np.abs(np.subtract.outer(clock, other)) / self.length_scale
        shape = (1 + distance) * np.exp(-distance)
        return np.asarray(self.amplitude**2 * shape * (1 + _PER_STAGE**2 * np.equal.outer(stage, other_stage)))


class _ResidualModel:
    """The relative residuals of the physical model: a Gaussian process over (stage, clock)."""

    def __init__(self, stages: Sequence[Samples], physical: TimeModel | PowerModel) -> None:
        self.stage: Stages = np.concatenate([np.full(len(s.clock_mhz), number) for number, s in enumerate(stages)])
        self.clock = np.concatenate([s.clock_mhz for s in stages])
        residual = np.concatenate([np.log(s.value / physical.values(n, s.clock_mhz)) for n, s in enumerate(stages)])
        known = np.concatenate([s.error for s in stages])
        noises = _NOISES if np.isnan(known).any() else (1.0,)
        errors = [np.where(np.isnan(known), noise, np.maximum(known, _NOISES[0])) for noise in noises]
        best: tuple[float, _Kernel, Floats] | None = None
        for length_scale in _LENGTH_SCALES_MHZ:
            unit = _Kernel(1.0, length_scale)(self.stage, self.clock, self.stage, self.clock)
            for error, amplitude in product(errors, _AMPLITUDES):
                likelihood = _likelihood(amplitude**2 * unit + np.diag(error**2), residual)
                if likelihood > (-math.inf if best is None else best[0]):
                    best = likelihood, _Kernel(amplitude, length_scale), error
        if best is None:
            raise ProfileError(
                "The rows of the profile determine no estimates: their values or errors are not finite, or are too "
                "far from each other. Measure the profile again."
            )
        _, self.kernel, error = best
        covariance = self.kernel(self.stage, self.clock, self.stage, self.clock) + np.diag(error**2)
        self.factor = cho_factor(covariance, lower=True)
        self.solved = cho_solve(self.factor, residual)
        self.calibration = self._calibrated(residual)

    def _calibrated(self, residual: Floats) -> float:
        """Return the factor by which error bars must grow to agree with leave-one-out predictions.

        The residuals are first averaged over stages, because equal stages have equal residuals. Without the row of only
        one stage, its prediction would come from the rows of other stages.
        """
        clocks = np.unique(self.clock)
        mean = np.array([residual[self.clock == clock].mean() for clock in clocks])
        same = np.zeros(len(clocks), dtype=np.intp)
        covariance = self.kernel(same, clocks, same, clocks) + _NOISES[0] ** 2 * np.eye(len(clocks))
        inverse = cho_solve(cho_factor(covariance, lower=True), np.eye(len(clocks)))
        standardised = (inverse @ mean / np.sqrt(np.diag(inverse)))[1:-1]
        return float(np.maximum(1.0, np.sqrt(np.mean(standardised**2)))) if len(standardised) else 1.0

    def at(self, stage: int, clock: Floats) -> tuple[Floats, Floats]:
        """Return the relative residual and its standard deviation."""
        stages = np.full(len(clock), stage)
        cross = self.kernel(stages, clock, self.stage, self.clock)
        variance = self.kernel.amplitude**2 * (1 + _PER_STAGE**2) - np.einsum(
            "ij,ji->i", cross, cho_solve(self.factor, cross.T)
        )
        return cross @ self.solved, self.calibration * np.sqrt(np.maximum(variance, 0.0))


def _likelihood(covariance: Floats, residual: Floats) -> float:
    """Return the logarithm of a likelihood up to a constant. LAPACK is called directly for speed.

    It is minus infinity if the covariance is singular to working precision, or a value is not finite.
    """
    factor, failed = dpotrf(covariance, lower=1, overwrite_a=1)
    if failed:
        return -math.inf
    solved, failed = dpotrs(factor, residual, lower=1)
    likelihood = -0.5 * float(residual @ solved) - float(np.log(np.diag(factor)).sum())
    return likelihood if not failed and math.isfinite(likelihood) else -math.inf


def error_of_median(deviations: Iterable[float], samples: int) -> float:
    """Return a robust estimate of the standard error of the median of that number of samples."""
    return 1.25 * 1.4826 * statistics.median(map(abs, deviations)) / math.sqrt(samples)
