"""Estimates rows for all clocks between the lowest and the highest measured one, with less noise.

An optimiser that is given raw rows selects those that look best because of noise. Rows are therefore replaced by
estimates from all rows of a kind together: time and power by a physical model of the clock, and a Gaussian process for
its residuals. These are smooth in the clock and similar on all stages, since all stages run the same kernels (on A40
the backward of GPT-3 is 8 % slower just above 960 MHz than below). The amplitude and length scale of the process
maximise the likelihood of the rows.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from perseus_ds.artifacts.profile import Measurement, RowQuality, StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.physical_model import Floats, PowerModel, Series, TimeModel

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


def denoise(profile: StageProfile, clocks_mhz: Iterable[int]) -> StageProfile:
    """Return the most likely profile, given measured rows.

    Args:
        profile: The measured rows. Their standard errors in ``info.rows`` are used where known.
        clocks_mhz: Clocks the GPU supports; those within the range measured for a (stage, kind) get a row.

    Returns:
        A profile whose ``info.rows`` gives the error bars of every row, and 0 samples for a clock
        that was not measured; such a clock gets no row if its error is too large. A (stage, kind)
        measured at fewer than three clocks is returned as it was measured.
    """
    everything = estimate_all(profile, clocks_mhz)
    measured = {(m.stage, m.kind, m.clock_mhz) for m in profile.measurements}
    error = {(row.stage, row.kind, row.clock_mhz): row.energy_relative_error or 0.0 for row in everything.info.rows}
    of_measured: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for stage, kind, clock_mhz in measured & error.keys():
        of_measured[stage, kind].append(error[stage, kind, clock_mhz])
    allowed = {key: max(_LARGEST_ERROR, 2 * statistics.median(found)) for key, found in of_measured.items()}
    return everything.where(lambda *row: row in measured or error[row] <= allowed[row[:2]])


def estimate_all(profile: StageProfile, clocks_mhz: Iterable[int]) -> StageProfile:
    """Return the same as :func:`denoise`, but with a row for every clock, however large its error."""
    known = {(row.stage, row.kind, row.clock_mhz): row for row in profile.info.rows}
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
            for row, quality in _estimate_kind(profile, kind, fitted, sorted(set(clocks_mhz)), known):
                measurements.append(row)
                qualities.append(quality)
    return StageProfile(measurements, profile.info.model_copy(update={"rows": qualities}))


def _estimate_kind(
    profile: StageProfile,
    kind: Kind,
    stages: list[int],
    clocks_mhz: list[int],
    known: dict[tuple[int, Kind, int], RowQuality],
) -> list[tuple[Measurement, RowQuality]]:
    asked = np.array(sorted({*clocks_mhz, *(int(c) for s in stages for c in profile.options(s, kind).clock_mhz)}))
    estimates = estimate(*_series(profile, kind, stages, known), asked.astype(float))
    result = []
    for stage, time, power in zip(stages, *estimates, strict=True):
        measured = set(profile.options(stage, kind).clock_mhz.tolist())
        energy_error = np.hypot(time.error, power.error)
        for number, clock_mhz in enumerate(asked.tolist()):
            if not min(measured) <= clock_mhz <= max(measured):
                continue
            before = known.get((stage, kind, clock_mhz))
            quality = RowQuality(
                stage=stage,
                kind=kind,
                clock_mhz=clock_mhz,
                samples=before.samples if before else int(clock_mhz in measured),
                time_relative_error=float(time.error[number]),
                energy_relative_error=float(energy_error[number]),
                temperature_c=before.temperature_c if before else None,
                power_state=before.power_state if before else None,
            )
            time_s = float(time.value[number])
            result.append((Measurement(stage, kind, clock_mhz, time_s, time_s * float(power.value[number])), quality))
    return result


def _series(
    profile: StageProfile, kind: Kind, stages: list[int], known: dict[tuple[int, Kind, int], RowQuality]
) -> tuple[list[Series], list[Series]]:
    """Return the measured times and powers, by stage."""
    times, powers = [], []
    for stage in stages:
        options = profile.options(stage, kind)
        rows = [known.get((stage, kind, int(clock))) for clock in options.clock_mhz]
        # An error that is not known is NaN.
        time_error = np.array([row and row.time_relative_error for row in rows], dtype=float)
        energy_error = np.array([row and row.energy_relative_error for row in rows], dtype=float)
        clocks = options.clock_mhz.astype(float)
        times.append(Series(clocks, options.time_s, time_error))
        powers.append(Series(clocks, options.energy_j / options.time_s, np.hypot(time_error, energy_error)))
    return times, powers


@dataclass(frozen=True)
class Estimate:
    """A quantity at some clocks, with its uncertainty.

    Attributes:
        value: Shape (m,).
        error: Shape (m,): relative standard deviation.
    """

    value: Floats
    error: Floats


def estimate(
    times: Sequence[Series], powers: Sequence[Series], clocks_mhz: Floats
) -> tuple[list[Estimate], list[Estimate]]:
    """Estimate time and power of one kind of instruction on all stages at once, at any clocks.

    Args:
        times: Measured, by stage [s].
        powers: Measured, by stage [W].
        clocks_mhz: Shape (m,).

    Returns:
        Times and powers, by stage.
    """
    time = TimeModel(times)
    power = PowerModel(powers, time.limit)
    return _with_residuals(times, time, clocks_mhz), _with_residuals(powers, power, clocks_mhz)


def _with_residuals(stages: Sequence[Series], physical: TimeModel | PowerModel, clocks_mhz: Floats) -> list[Estimate]:
    residuals = _ResidualModel.fit(stages, physical)
    estimates = []
    for number in range(len(stages)):
        residual, error = residuals.at(number, clocks_mhz)
        value = physical.values(number, clocks_mhz) * np.exp(residual)
        estimates.append(Estimate(value, np.hypot(error, physical.errors(number, clocks_mhz))))
    return estimates


@dataclass(frozen=True)
class _Kernel:
    """Covariance of relative residuals: a Matérn 3/2 in the clock, most of it shared by all stages."""

    amplitude: float
    length_scale: float

    def __call__(self, stage: Stages, clock: Floats, other_stage: Stages, other: Floats) -> Floats:
        distance = np.sqrt(3) * np.abs(np.subtract.outer(clock, other)) / self.length_scale
        shape = (1 + distance) * np.exp(-distance)
        return np.asarray(self.amplitude**2 * shape * (1 + _PER_STAGE**2 * np.equal.outer(stage, other_stage)))


@dataclass(frozen=True)
class _ResidualModel:
    """The relative residuals of the physical model: a Gaussian process over (stage, clock)."""

    stage: Stages
    clock: Floats
    kernel: _Kernel
    factor: tuple[Floats, bool]
    solved: Floats
    calibration: float = 1.0

    @classmethod
    def fit(cls, stages: Sequence[Series], physical: TimeModel | PowerModel) -> _ResidualModel:
        stage = np.concatenate([np.full(len(s.clock_mhz), number) for number, s in enumerate(stages)])
        clock = np.concatenate([s.clock_mhz for s in stages])
        residual = np.concatenate([np.log(s.value / physical.values(n, s.clock_mhz)) for n, s in enumerate(stages)])
        known = np.concatenate([s.error for s in stages])
        noises = _NOISES if np.isnan(known).any() else (1.0,)
        best: tuple[float, _ResidualModel] | None = None
        for noise, length_scale, amplitude in product(noises, _LENGTH_SCALES_MHZ, _AMPLITUDES):
            error = np.where(np.isnan(known), noise, np.maximum(known, _NOISES[0]))
            kernel = _Kernel(amplitude, length_scale)
            factor = cho_factor(kernel(stage, clock, stage, clock) + np.diag(error**2), lower=True)
            solved = cho_solve(factor, residual)
            likelihood = -0.5 * float(residual @ solved) - float(np.log(np.diag(factor[0])).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, cls(stage, clock, kernel, factor, solved)
        assert best is not None
        return replace(best[1], calibration=best[1]._calibrated(residual))

    def _calibrated(self, residual: Floats) -> float:
        """Return the factor by which error bars must grow to be right in leave-one-out predictions of each clock.

        The residuals are averaged over stages first: equal stages have equal residuals, and leaving out the row of one
        stage alone would only test how well another stage predicts it.
        """
        clocks = np.unique(self.clock)
        mean = np.array([residual[self.clock == clock].mean() for clock in clocks])
        same = np.zeros(len(clocks), dtype=np.intp)
        covariance = self.kernel(same, clocks, same, clocks) + _NOISES[0] ** 2 * np.eye(len(clocks))
        inverse = np.linalg.inv(covariance)
        standardised = (inverse @ mean / np.sqrt(np.diag(inverse)))[1:-1]
        return max(1.0, float(np.sqrt(np.mean(standardised**2)))) if len(standardised) else 1.0

    def at(self, stage: int, clock: Floats) -> tuple[Floats, Floats]:
        """Return the relative residual and its standard deviation."""
        stages = np.full(len(clock), stage)
        cross = self.kernel(stages, clock, self.stage, self.clock)
        variance = self.kernel.amplitude**2 * (1 + _PER_STAGE**2) - np.einsum(
            "ij,ji->i", cross, cho_solve(self.factor, cross.T)
        )
        return cross @ self.solved, self.calibration * np.sqrt(np.maximum(variance, 0.0))
