"""Time and power of instructions as functions of the clock: a physical model, and a Gaussian process for its residuals.

The physical model: time has a part that is proportional to ``1/f`` and a constant part; power is static
power plus ``f V(f)^2`` with a voltage that is constant up to a knee and then rises; at a power limit the
board keeps its clock, so time and power stay constant. Knee and limit are properties of the device, so
all stages share them.

The residuals are smooth in the clock and similar on all stages, since all stages run the same kernels
(on A40 the backward of GPT-3 is 8 % slower just above 960 MHz than below). They are modelled by a
Gaussian process whose amplitude and length scale maximise the likelihood of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
Stages = npt.NDArray[np.intp]

_AMPLITUDES = (0.0005, 0.002, 0.005, 0.015, 0.04)
_LENGTH_SCALES = (0.02, 0.04, 0.08, 0.2)
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.04)
# Deviation of one stage from the other stages, relative to the deviation of all stages from the physical model.
_PER_STAGE = 0.2
# Rows that deviate by more standard deviations than this are outliers; their weight falls with their deviation.
_OUTLIER = 3.0

Terms = Callable[[Floats, float], Floats]
"""From clocks and a knee, both relative to the top clock, to the terms of a non-negative sum, shape (n, terms)."""


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
class Estimate:
    """A quantity at some clocks, with its uncertainty.

    Attributes:
        value: Shape (m,).
        error: Shape (m,): relative standard deviation.
    """

    value: Floats
    error: Floats


def estimate_times(stages: Sequence[Series], clocks_mhz: Floats) -> list[Estimate]:
    """Estimate the time of one kind of instruction on all stages at once, at any clocks [s]."""
    return _estimate(stages, clocks_mhz, _time_terms, knees=(1.0,))


def estimate_powers(stages: Sequence[Series], clocks_mhz: Floats) -> list[Estimate]:
    """Estimate the power of one kind of instruction on all stages at once, at any clocks [W]."""
    return _estimate(stages, clocks_mhz, _power_terms, knees=(0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9))


def _time_terms(clock: Floats, knee: float) -> Floats:
    return np.column_stack([np.ones_like(clock), 1 / clock])


def _power_terms(clock: Floats, knee: float) -> Floats:
    above = np.maximum(0.0, clock - knee)
    return np.column_stack([np.ones_like(clock), clock, clock * above**2, clock * above**4])


def _estimate(stages: Sequence[Series], clocks_mhz: Floats, terms: Terms, knees: Sequence[float]) -> list[Estimate]:
    top_mhz = max(float(s.clock_mhz.max()) for s in stages)
    scaled = [replace(s, clock_mhz=s.clock_mhz / top_mhz) for s in stages]
    physical = _PhysicalModel.fit(scaled, terms, knees)
    residuals = _ResidualModel.fit(scaled, physical)
    clocks = clocks_mhz / top_mhz
    estimates = []
    for number in range(len(stages)):
        residual, error = residuals.at(number, clocks)
        estimates.append(Estimate(physical.values(number, clocks) * np.exp(residual), error))
    return estimates


@dataclass(frozen=True)
class _PhysicalModel:
    terms: Terms
    knee: float
    limit: float
    coefficients: list[Floats]

    @classmethod
    def fit(cls, stages: Sequence[Series], terms: Terms, knees: Sequence[float]) -> _PhysicalModel:
        """Fit the knee, the limit and each stage's coefficients."""
        clocks = np.unique(np.concatenate([s.clock_mhz for s in stages]))
        # A limit is only assumed with enough rows on both sides of it; few rows fit any limit.
        limits = clocks[len(clocks) // 2 :] if len(clocks) > 4 else clocks[-1:]
        best: tuple[float, _PhysicalModel] | None = None
        for knee, limit in product(knees, limits[::-1]):
            fits = [_coefficients(terms(np.minimum(s.clock_mhz, limit), knee), s.value) for s in stages]
            # Of equal fits, the one with the higher limit is preferred: it assumes less.
            misfit = sum(fit[1] for fit in fits) * (1.001 if limit < clocks[-1] else 1.0) + 1e-12
            if best is None or misfit < best[0]:
                best = misfit, cls(terms, knee, float(limit), [fit[0] for fit in fits])
        assert best is not None
        return best[1]

    def values(self, stage: int, clock: Floats) -> Floats:
        values = self.terms(np.minimum(clock, self.limit), self.knee) @ self.coefficients[stage]
        return np.asarray(np.maximum(values, 1e-12))


def _coefficients(columns: Floats, value: Floats) -> tuple[Floats, float]:
    """Fit relative values with low weight for outliers; return the coefficients and the misfit."""
    weight = 1 / value
    for _ in range(3):
        found, _ = nnls(columns * weight[:, None], weight * value)
        off = np.abs(columns @ found / value - 1)
        spread = 1.5 * float(np.median(off)) + 1e-6
        weight = np.minimum(1.0, _OUTLIER * spread / np.maximum(off, 1e-12)) / value
    return found, float(np.sum(np.minimum(off, _OUTLIER * spread) ** 2))


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
    def fit(cls, stages: Sequence[Series], physical: _PhysicalModel) -> _ResidualModel:
        stage = np.concatenate([np.full(len(s.clock_mhz), number) for number, s in enumerate(stages)])
        clock = np.concatenate([s.clock_mhz for s in stages])
        residual = np.concatenate([np.log(s.value / physical.values(n, s.clock_mhz)) for n, s in enumerate(stages)])
        known = np.concatenate([s.error for s in stages])
        noises = _NOISES if np.isnan(known).any() else (1.0,)
        best: tuple[float, _ResidualModel] | None = None
        for noise, length_scale, amplitude in product(noises, _LENGTH_SCALES, _AMPLITUDES):
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
