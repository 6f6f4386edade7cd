"""Time and power of instructions as functions of the clock: a physical model, and a Gaussian process for its residuals.

The residuals are smooth in the clock and similar on all stages, since all stages run the same kernels
(on A40 the backward of GPT-3 is 8 % slower just above 960 MHz than below). They are modelled by a
Gaussian process whose amplitude and length scale maximise the likelihood of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from perseus_ds.profiler.physical_model import Floats, PowerModel, Series, TimeModel

Stages = npt.NDArray[np.intp]

_AMPLITUDES = (0.0005, 0.002, 0.005, 0.015, 0.04)
_LENGTH_SCALES_MHZ = (30.0, 60.0, 120.0, 300.0)
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.04)
# Deviation of one stage from the other stages, relative to the deviation of all stages from the physical model.
_PER_STAGE = 0.2


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
