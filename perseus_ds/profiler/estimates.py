"""Estimates rows for all clocks between the lowest and the highest measured one, with less noise.

An optimiser that is given raw rows selects those that look best because of noise. Rows are therefore replaced by
estimates from all rows of a kind of instruction together: a physical model of time and power as functions of the clock
(:mod:`perseus_ds.profiler.physical_model`), and a Gaussian process for its residuals, which are logarithms of ratios.
The residuals are smooth in the clock and similar on all stages, because all stages run the same kernels (on A40 the
backward of GPT-3 is 8 % slower just above 960 MHz than below). The amplitude and length scale of the process maximise
the likelihood of the rows.

``denoise`` selects from what ``estimate_all`` returns for all clocks. Both call ``estimate_curves``, the mathematics,
for each kind.
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
from perseus_ds.profiler.physical_model import PowerModel, Series, TimeModel

StageIndices = npt.NDArray[np.intp]
"""Index of the stage of each row."""
_AMPLITUDES = (0.0005, 0.002, 0.005, 0.015, 0.04)
_LENGTH_SCALES_MHZ = (30.0, 60.0, 120.0, 300.0)
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.04)
_LEAST_NOISE = _NOISES[0]
# Deviation of one stage from the other stages, relative to the deviation of all stages from the physical model.
_PER_STAGE = 0.2
_FEWEST_CLOCKS = 3
# A clock that was not measured gets no row if the relative error of its energy exceeds both this and twice the median
# error of measured rows.
_LARGEST_ERROR = 0.01
# Standard deviation of a normal distribution relative to its median absolute deviation, and standard error of a median
# relative to that of a mean.
_MAD_TO_SIGMA, _MEDIAN_TO_MEAN = 1.4826, 1.25


def denoise(profile: StageProfile, clocks_mhz: Collection[int]) -> StageProfile:
    """Return a profile of estimates, given measured rows, and the clocks that the GPU supports.

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

    def is_kept(stage: int, kind: Kind, clock_mhz: int) -> bool:
        key = stage, kind, clock_mhz
        return key in measured or error[key] <= allowed[stage, kind]

    return everything.where(is_kept)


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
    wanted_mhz = set(clocks_mhz)
    for stage in stages:
        wanted_mhz.update(profile.options(stage, kind).clock_mhz.tolist())
    clocks = sorted(wanted_mhz)
    times, powers = estimate_curves(*_series(profile, kind, stages), np.array(clocks, dtype=float))
    known, result = profile.info.quality, []
    for stage, time, power in zip(stages, times, powers, strict=True):
        measured = set(profile.options(stage, kind).clock_mhz.tolist())
        energy_error = np.hypot(time.error, power.error)
        energy_j = time.value * power.value
        for number, clock_mhz in enumerate(clocks):
            if not min(measured) <= clock_mhz <= max(measured):
                continue
            measured_quality = known.get((stage, kind, clock_mhz))
            quality = RowQuality(
                stage=stage,
                kind=kind,
                clock_mhz=clock_mhz,
                samples=measured_quality.samples if measured_quality else int(clock_mhz in measured),
                time_relative_error=float(time.error[number]),
                energy_relative_error=float(energy_error[number]),
                temperature_c=measured_quality.temperature_c if measured_quality else None,
                power_state=measured_quality.power_state if measured_quality else None,
            )
            row = Measurement(stage, kind, clock_mhz, float(time.value[number]), float(energy_j[number]))
            result.append((row, quality))
    return result


def _series(profile: StageProfile, kind: Kind, stages: list[int]) -> tuple[list[Series], list[Series]]:
    """Return the times and the powers of each stage."""
    known, times, powers = profile.info.quality, [], []
    for stage in stages:
        options = profile.options(stage, kind)
        rows = [known.get((stage, kind, int(clock))) for clock in options.clock_mhz]
        # An unknown error becomes NaN.
        time_error = np.array([row and row.time_relative_error for row in rows], dtype=float)
        energy_error = np.array([row and row.energy_relative_error for row in rows], dtype=float)
        clocks = options.clock_mhz.astype(float)
        times.append(Series(clocks, options.time_s, time_error))
        # For simplicity, errors of times and energies count as independent, so that of the power is rather too large.
        powers.append(Series(clocks, options.energy_j / options.time_s, np.hypot(time_error, energy_error)))
    return times, powers


class Curve(NamedTuple):
    """Estimates of a quantity of one stage at some clocks.

    Attributes:
        value: Times [s] or powers [W], shape (clocks,).
        error: Their relative standard deviations, shape (clocks,).
    """

    value: Floats
    error: Floats


def estimate_curves(
    times: Sequence[Series], powers: Sequence[Series], clocks_mhz: Floats
) -> tuple[list[Curve], list[Curve]]:
    """Estimate times [s] and powers [W] of one kind of instruction on all stages from measured ones."""
    time = TimeModel(times)
    power = PowerModel(powers, time)
    of_power = []
    for index, curve in enumerate(_with_residuals(powers, power, clocks_mhz)):
        of_power.append(Curve(curve.value, np.hypot(curve.error, power.errors(index, clocks_mhz))))
    return _with_residuals(times, time, clocks_mhz), of_power


def _with_residuals(series: Sequence[Series], physical: TimeModel | PowerModel, clocks_mhz: Floats) -> list[Curve]:
    residuals = _ResidualModel(series, physical)
    curves = []
    for index in range(len(series)):
        residual = residuals.at(index, clocks_mhz)
        curves.append(Curve(physical.values(index, clocks_mhz) * np.exp(residual.value), residual.error))
    return curves


@dataclass(frozen=True)
class _Kernel:
    """Covariance of relative residuals: a Matérn 3/2 kernel of the clock, mostly shared by all stages."""

    amplitude: float
    length_scale: float

    def __call__(self, stage: StageIndices, clock: Floats, other_stage: StageIndices, other: Floats) -> Floats:
        distance = np.sqrt(3) * np.abs(np.subtract.outer(clock, other)) / self.length_scale
        shape = (1 + distance) * np.exp(-distance)
        return np.asarray(self.amplitude**2 * shape * (1 + _PER_STAGE**2 * np.equal.outer(stage, other_stage)))


class _ResidualModel:
    """The residuals of a physical model, logarithms of ratios: a Gaussian process over stage and clock."""

    def __init__(self, series: Sequence[Series], physical: TimeModel | PowerModel) -> None:
        # Of all rows, shape (rows,):
        self._index: StageIndices = np.concatenate([np.full(len(of.clock_mhz), n) for n, of in enumerate(series)])
        self._clock_mhz = np.concatenate([of.clock_mhz for of in series])
        ratios = [of.value / physical.values(n, of.clock_mhz) for n, of in enumerate(series)]
        residual = np.log(np.concatenate(ratios))
        known = np.concatenate([of.error for of in series])
        # Without unknown errors, there is nothing to choose.
        noises = _NOISES if np.isnan(known).any() else (math.nan,)
        errors = [np.where(np.isnan(known), noise, np.maximum(known, _LEAST_NOISE)) for noise in noises]
        best_likelihood = -math.inf
        for length_scale in _LENGTH_SCALES_MHZ:
            unit = _Kernel(1.0, length_scale)(self._index, self._clock_mhz, self._index, self._clock_mhz)
            for error, amplitude in product(errors, _AMPLITUDES):
                likelihood = _log_likelihood(amplitude**2 * unit + np.diag(error**2), residual)
                if likelihood > best_likelihood:
                    best_likelihood = likelihood
                    self._kernel, best_error = _Kernel(amplitude, length_scale), error
        if best_likelihood == -math.inf:
            raise ProfileError(
                "The rows of the profile determine no estimates: their values or errors are not finite, or are too "
                "far from each other. Measure the profile again."
            )
        covariance = self._kernel(self._index, self._clock_mhz, self._index, self._clock_mhz) + np.diag(best_error**2)
        self._factor = cho_factor(covariance, lower=True)
        self._solved = cho_solve(self._factor, residual)
        self._calibration = self._calibrated(residual)

    def _calibrated(self, residual: Floats) -> float:
        """Return the factor by which error bars must grow to agree with leave-one-out predictions.

        The residuals are first averaged over stages, because equal stages have equal residuals. Without the row of only
        one stage, its prediction would come from the rows of other stages. Averages have hardly any noise. The first
        and the last clock are left out, because their predictions are extrapolations.
        """
        clocks = np.unique(self._clock_mhz)
        mean = np.array([residual[self._clock_mhz == clock].mean() for clock in clocks])
        one_stage = np.zeros(len(clocks), dtype=np.intp)
        covariance = self._kernel(one_stage, clocks, one_stage, clocks) + _LEAST_NOISE**2 * np.eye(len(clocks))
        inverse = cho_solve(cho_factor(covariance, lower=True), np.eye(len(clocks)))
        # The deviation of a value from its leave-one-out prediction, in standard deviations of the latter.
        standardised = (inverse @ mean / np.sqrt(np.diag(inverse)))[1:-1]
        return float(np.maximum(1.0, np.sqrt(np.mean(standardised**2)))) if len(standardised) else 1.0

    def at(self, index: int, clock_mhz: Floats) -> Curve:
        """Return the mean and the standard deviation of the residual of a stage at the given clocks."""
        indices = np.full(len(clock_mhz), index)
        cross = self._kernel(indices, clock_mhz, self._index, self._clock_mhz)  # (clocks, rows)
        explained = np.sum(cross.T * cho_solve(self._factor, cross.T), axis=0)
        variance = self._kernel.amplitude**2 * (1 + _PER_STAGE**2) - explained
        return Curve(cross @ self._solved, self._calibration * np.sqrt(np.maximum(variance, 0.0)))


def _log_likelihood(covariance: Floats, residual: Floats) -> float:
    """Return the logarithm of a likelihood up to a constant. May overwrite the covariance.

    It is minus infinity if the covariance is singular to working precision, or a value is not finite. LAPACK is called
    directly for speed.
    """
    factor, failed = dpotrf(covariance, lower=1, overwrite_a=1)
    if failed:
        return -math.inf
    solved, failed = dpotrs(factor, residual, lower=1)
    likelihood = -0.5 * float(residual @ solved) - float(np.log(np.diag(factor)).sum())
    return likelihood if not failed and math.isfinite(likelihood) else -math.inf


def error_of_median(deviations: Iterable[float], samples: int) -> float:
    """Return a robust estimate of the standard error of the median of that number of samples."""
    standard_deviation = _MAD_TO_SIGMA * statistics.median(map(abs, deviations))
    return _MEDIAN_TO_MEAN * standard_deviation / math.sqrt(samples)
