"""How time and power of instructions depend on the clock: physics where rows are few, the rows where they insist.

Physics: time has a part that scales with ``1/f`` and a part that does not; power is static power
plus ``f V(f)^2`` with a voltage that is flat up to a knee and then rises; at a power limit the board
holds its clock, so time and power stay as they are. Knee and limit belong to the device, so all
stages share them.

What physics leaves over is smooth in the clock and alike on all stages, since they run the same
kernels (on A40 the backward of GPT-3 is 8 % slower just above 960 MHz than below): a Gaussian
process, whose size and reach are those under which the rows are most likely.
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

_SIZES = (0.0005, 0.002, 0.005, 0.015, 0.04)
_REACHES = (0.02, 0.04, 0.08, 0.2)
_NOISES = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.04)
# What one stage may deviate from the others, relative to what all of them deviate from physics.
_OWN = 0.2
# Rows that lie this many standard deviations off are outliers, and count less the farther off they are.
_OUTLIER = 3.0

Terms = Callable[[Floats, float], Floats]
"""Columns that a quantity is a non-negative sum of, shape (n, terms), for clocks and a knee relative to the top."""


@dataclass(frozen=True)
class Series:
    """One quantity of one stage at the clocks where it was measured.

    Attributes:
        clock_mhz: Shape (n,).
        value: Shape (n,), positive.
        error: Shape (n,): relative standard error; NaN where it is not known.
    """

    clock_mhz: Floats
    value: Floats
    error: Floats


@dataclass(frozen=True)
class Estimate:
    """What a quantity is at some clocks.

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
    physics = _Physics.fit([_scaled(s, top_mhz) for s in stages], terms, knees)
    asked = clocks_mhz / top_mhz
    means = [np.log(physics.values(number, asked)) for number in range(len(stages))]
    rest = _Rest.fit([_scaled(s, top_mhz) for s in stages], physics)
    estimates = []
    for number, mean in enumerate(means):
        deviation, error = rest.at(number, asked)
        estimates.append(Estimate(np.exp(mean + deviation), error))
    return estimates


def _scaled(series: Series, top_mhz: float) -> Series:
    return Series(series.clock_mhz / top_mhz, series.value, series.error)


@dataclass(frozen=True)
class _Physics:
    terms: Terms
    knee: float
    limit: float
    coefficients: list[Floats]

    @classmethod
    def fit(cls, stages: Sequence[Series], terms: Terms, knees: Sequence[float]) -> _Physics:
        """Find the knee, the limit and each stage's coefficients that fit best."""
        clocks = np.unique(np.concatenate([s.clock_mhz for s in stages]))
        # With few rows anything fits; a limit is believed only with rows on both sides of it.
        limits = clocks[len(clocks) // 2 :] if len(clocks) > 4 else clocks[-1:]
        best: tuple[float, _Physics] | None = None
        for knee, limit in product(knees, limits[::-1]):
            fits = [_coefficients(terms(np.minimum(s.clock_mhz, limit), knee), s.value) for s in stages]
            # A tie goes to the higher limit, which claims less.
            misfit = sum(fit[1] for fit in fits) * (1.001 if limit < clocks[-1] else 1.0) + 1e-12
            if best is None or misfit < best[0]:
                best = misfit, cls(terms, knee, float(limit), [fit[0] for fit in fits])
        assert best is not None
        return best[1]

    def values(self, stage: int, clock: Floats) -> Floats:
        values = self.terms(np.minimum(clock, self.limit), self.knee) @ self.coefficients[stage]
        return np.asarray(np.maximum(values, 1e-12))


def _coefficients(columns: Floats, value: Floats) -> tuple[Floats, float]:
    """Fit relative values robustly; return coefficients and misfit."""
    weight = 1 / value
    for _ in range(3):
        found, _ = nnls(columns * weight[:, None], weight * value)
        off = np.abs(columns @ found / value - 1)
        spread = 1.5 * float(np.median(off)) + 1e-6
        weight = np.minimum(1.0, _OUTLIER * spread / np.maximum(off, 1e-12)) / value
    return found, float(np.sum(np.minimum(off, _OUTLIER * spread) ** 2))


@dataclass(frozen=True)
class _Kernel:
    """Covariance of relative deviations: a Matérn 3/2 in the clock, most of it shared by all stages."""

    size: float
    reach: float

    def __call__(self, stage: Stages, clock: Floats, other_stage: Stages, other: Floats) -> Floats:
        distance = np.sqrt(3) * np.abs(np.subtract.outer(clock, other)) / self.reach
        shape = (1 + distance) * np.exp(-distance)
        return np.asarray(self.size**2 * shape * (1 + _OWN**2 * np.equal.outer(stage, other_stage)))


@dataclass(frozen=True)
class _Rest:
    """What physics leaves over: a Gaussian process over (stage, clock)."""

    stage: Stages
    clock: Floats
    kernel: _Kernel
    factor: tuple[Floats, bool]
    solved: Floats
    calibration: float = 1.0

    @classmethod
    def fit(cls, stages: Sequence[Series], physics: _Physics) -> _Rest:
        stage = np.concatenate([np.full(len(s.clock_mhz), number) for number, s in enumerate(stages)])
        clock = np.concatenate([s.clock_mhz for s in stages])
        left = np.concatenate([np.log(s.value / physics.values(n, s.clock_mhz)) for n, s in enumerate(stages)])
        known = np.concatenate([s.error for s in stages])
        noises = _NOISES if np.isnan(known).any() else (1.0,)
        best: tuple[float, _Rest] | None = None
        for noise, reach, size in product(noises, _REACHES, _SIZES):
            error = np.where(np.isnan(known), noise, np.maximum(known, _NOISES[0]))
            kernel = _Kernel(size, reach)
            factor = cho_factor(kernel(stage, clock, stage, clock) + np.diag(error**2), lower=True)
            solved = cho_solve(factor, left)
            likelihood = -0.5 * float(left @ solved) - float(np.log(np.diag(factor[0])).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, cls(stage, clock, kernel, factor, solved)
        assert best is not None
        return replace(best[1], calibration=best[1]._calibrated(left))

    def _calibrated(self, left: Floats) -> float:
        """Return by how much error bars must grow to hold for clocks left out, which neighbours then predict.

        Stages that are copies of each other vouch for each other, so the average over stages is looked at.
        """
        clocks = np.unique(self.clock)
        mean = np.array([left[self.clock == clock].mean() for clock in clocks])
        same = np.zeros(len(clocks), dtype=np.intp)
        covariance = self.kernel(same, clocks, same, clocks) + _NOISES[0] ** 2 * np.eye(len(clocks))
        inverse = np.linalg.inv(covariance)
        standardised = (inverse @ mean / np.sqrt(np.diag(inverse)))[1:-1]
        return max(1.0, float(np.sqrt(np.mean(standardised**2)))) if len(standardised) else 1.0

    def at(self, stage: int, clock: Floats) -> tuple[Floats, Floats]:
        """Return deviation from physics and its standard deviation, both relative."""
        stages = np.full(len(clock), stage)
        cross = self.kernel(stages, clock, self.stage, self.clock)
        variance = self.kernel.size**2 * (1 + _OWN**2) - np.einsum("ij,ji->i", cross, cho_solve(self.factor, cross.T))
        return cross @ self.solved, self.calibration * np.sqrt(np.maximum(variance, 0.0))
