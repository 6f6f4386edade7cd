"""Profiles of passes as a function of input length, fitted to profiles of several lengths.

The *length* of an input is its number of tokens, or any number proportional to it. A pass computes most operations once
per token, attention once per pair of tokens, and some work, such as launching kernels, once. So at each clock its time
and energy are ``a + b n + c n²`` for a length n, without negative coefficients. Error bars are those of the
unconstrained fit. They grow with the errors of the profiles, with their deviations from the formula, and outside of the
measured lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls

from perseus_ds.artifacts.profile import ByLength, Floats, Measurement, PassByLength, RowQuality, StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind

K = TypeVar("K", bound=Hashable)

FEWEST_LENGTHS = 3
"""Number of measured lengths below which a formula of three terms has no error bars."""
# Lower bound of the relative error of a row, because no formula is exact, and the error of rows without one.
_LEAST_ERROR, _UNKNOWN_ERROR = 0.003, 0.01
_LEAST_VARIATION = 0.01
"""Relative variation of lengths below which iterations are planned as if all had one length."""
_ROBUST_FITS, _OUTLIER = 4, 3.0


class LengthModel:
    """Time and energy of passes for any length of their inputs.

    Args:
        profiles: Profiles of the same passes by length, for at least :data:`FEWEST_LENGTHS` lengths.

    Raises:
        ProfileError: There are fewer lengths.
    """

    def __init__(self, profiles: Mapping[float, StageProfile]) -> None:
        if len(profiles) < FEWEST_LENGTHS:
            raise ProfileError(
                f"Profiles of {len(profiles)} lengths do not determine how passes depend on the length: expected "
                f"{FEWEST_LENGTHS} or more. Measure more lengths."
            )
        self._profiles = dict(sorted(profiles.items()))
        self._longest = max(profiles)

    def at(self, length: float) -> StageProfile:
        """Return the profile for a length. Each row has error bars and 0 samples.

        Tails do not depend on the length. Their rows are those of the profile with the nearest length.
        """
        nearest = self._profiles[min(self._profiles, key=lambda other: abs(other - length))]
        measurements, qualities = [], []
        for (stage, kind, clock_mhz), series in self._series().items():
            (time_s, time_error), (energy_j, energy_error) = (self._estimate(each, length) for each in series)
            measurements.append(Measurement(stage, kind, clock_mhz, time_s, energy_j))
            qualities.append(
                RowQuality(
                    stage=stage,
                    kind=kind,
                    clock_mhz=clock_mhz,
                    samples=0,
                    time_relative_error=time_error,
                    energy_relative_error=energy_error,
                )
            )
        tails = [row for row in nearest.measurements if row.kind is Kind.TAIL]
        of_tails = [row for row in nearest.info.rows if row.kind is Kind.TAIL]
        info = nearest.info.model_copy(update={"rows": [*qualities, *of_tails], "memory_bytes": []})
        return StageProfile([*measurements, *tails], info.with_fixed_durations(self._fixed(length)))

    def _series(self) -> dict[tuple[int, Kind, int], tuple[Floats, Floats]]:
        """Return times and energies of each pass: values and relative errors, shape (lengths, 2)."""
        found: dict[tuple[int, Kind, int], list[tuple[Measurement, RowQuality | None]]] = defaultdict(list)
        for profile in self._profiles.values():
            known = profile.info.quality
            for row in profile.measurements:
                key = row.stage, row.kind, row.clock_mhz
                found[key].append((row, known.get(key)))
        return {
            key: (
                np.array([(row.time_s, quality and quality.time_relative_error) for row, quality in rows], float),
                np.array([(row.energy_j, quality and quality.energy_relative_error) for row, quality in rows], float),
            )
            for key, rows in found.items()
            if key[1] is not Kind.TAIL and len(rows) == len(self._profiles)
        }

    def _estimate(self, series: Floats, length: float) -> tuple[float, float]:
        """Return a value at a length, and its relative standard error."""
        value, error = series.T
        error = np.maximum(np.where(np.isnan(error), _UNKNOWN_ERROR, error), _LEAST_ERROR)
        terms = self._terms(self._profiles) / (value * error)[:, None]
        coefficients, misfit = nnls(terms, 1 / error)
        free = len(value) - terms.shape[1]
        scatter = max(1.0, misfit**2 / free) if free else 1.0
        wanted = self._terms([length])[0]
        found = float(wanted @ coefficients)
        variance = scatter * float(wanted @ np.linalg.solve(terms.T @ terms, wanted))
        return found, float(np.sqrt(variance)) / found

    def _terms(self, lengths: Iterable[float]) -> Floats:
        """Return the three terms of the formula for each length, shape (lengths, 3)."""
        return np.vander(np.fromiter(lengths, np.float64) / self._longest, 3, increasing=True)

    def _fixed(self, length: float) -> FixedDurations:
        """Return the fixed durations for a length, fitted as a constant part and a part per token."""
        known = [profile.info.fixed_durations for profile in self._profiles.values()]
        return FixedDurations(
            load_s=self._fitted([fixed.load_s for fixed in known], length),
            transfer_s=self._fitted([fixed.transfer_s for fixed in known], length),
            other_s=self._fitted([fixed.other_s for fixed in known], length),
        )

    def _fitted(self, durations: Sequence[Mapping[K, float]], length: float) -> dict[K, float]:
        """Return the durations at a length that are known in all profiles [s]."""
        terms, wanted = self._terms(self._profiles)[:, :2], self._terms([length])[0, :2]
        shared = [key for key in durations[0] if all(key in of_length for of_length in durations)]
        return {
            key: float(wanted @ nnls(terms, np.array([of_length[key] for of_length in durations]))[0]) for key in shared
        }


def fit_by_length(times: Mapping[tuple[int, Kind], Sequence[tuple[float, float]]], length: float) -> ByLength | None:
    """Return the dependence of passes on the lengths of their inputs. None if these hardly vary.

    Args:
        times: Lengths and times [s] of passes at one clock, by stage and kind.
        length: Length to which the result is relative.
    """
    passes = []
    for (stage, kind), measured in times.items():
        lengths, times_s = np.array(measured, float).reshape(-1, 2).T
        if len(lengths) <= FEWEST_LENGTHS or np.std(lengths) < _LEAST_VARIATION * length:
            continue
        terms = np.vander(lengths / length, 3, increasing=True)
        weights = 1 / times_s
        for _ in range(_ROBUST_FITS):  # a pass that was delayed by something else has little weight
            parts, _ = nnls(terms * weights[:, None], times_s * weights)
            if parts.sum() <= 0:
                break
            deviation = np.abs(times_s / (terms @ parts) - 1)
            scale = max(float(np.median(deviation)), _LEAST_ERROR)
            weights = 1 / times_s / (1 + (deviation / (_OUTLIER * scale)) ** 2)
        if (total := float(parts.sum())) > 0:
            constant, linear, quadratic = (parts / total).tolist()
            one = PassByLength(stage=stage, kind=kind, constant=constant, linear=linear, quadratic=quadratic)
            passes.append(one)
    return ByLength(length=length, passes=passes) if passes else None


def typical_error(profile: StageProfile) -> float:
    """Return the larger of the relative errors of time and energy, as the mean over all rows of passes."""
    errors = [
        max(row.time_relative_error or 0.0, row.energy_relative_error or 0.0)
        for row in profile.info.rows
        if row.kind is not Kind.TAIL
    ]
    return fmean(errors) if errors else float("inf")
