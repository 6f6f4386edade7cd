"""Profiles of passes as a function of input length, fitted to profiles of several lengths.

The *length* of an input is its number of tokens, or any number proportional to it. A pass computes most operations once
per token, attention once per pair of tokens, and some work, such as launching kernels, once. So at each clock its time
and energy are ``a + b n + c n²`` for a length n, without negative coefficients. Error bars are those of the
unconstrained fit. They grow with the errors of the profiles, with their deviations from the formula, and outside of the
measured lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls

from perseus_ds.artifacts.profile import (
    ByLength,
    Floats,
    Measurement,
    PassByLength,
    RowKey,
    RowQuality,
    StageProfile,
)
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


def profile_for_length(profiles: Mapping[float, StageProfile], length: float) -> StageProfile:
    """Return the profile for a length, given those of the same passes for at least :data:`FEWEST_LENGTHS` lengths.

    Each row has error bars and 0 samples. Tails do not depend on the length. Their rows are those of the profile with
    the nearest length.
    """
    longest = max(profiles)
    terms, wanted = (np.vander(np.array(lengths) / longest, 3, increasing=True) for lengths in ([*profiles], [length]))
    measurements, qualities = [], []
    for (stage, kind, clock_mhz), (times, energies) in _series(profiles.values()).items():
        time_s, time_error = _estimate(times, terms, wanted[0])
        energy_j, energy_error = _estimate(energies, terms, wanted[0])
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
    nearest = profiles[min(profiles, key=lambda other: abs(other - length))]
    tails = nearest.where(lambda stage, kind, clock_mhz: kind is Kind.TAIL)
    info = nearest.info.model_copy(update={"rows": [*qualities, *tails.info.rows], "memory_bytes": []})
    known = [profile.info.fixed_durations for profile in profiles.values()]

    def fitted(durations: Sequence[Mapping[K, float]]) -> dict[K, float]:
        """Return the durations that are known for all lengths, as a constant part and a part per token [s]."""
        shared = set(durations[0]).intersection(*durations[1:])
        fits = {key: nnls(terms[:, :2], np.array([of_length[key] for of_length in durations]))[0] for key in shared}
        return {key: float(wanted[0, :2] @ fits[key]) for key in durations[0] if key in shared}

    fixed = FixedDurations(
        load_s=fitted([one.load_s for one in known]),
        transfer_s=fitted([one.transfer_s for one in known]),
        other_s=fitted([one.other_s for one in known]),
    )
    return StageProfile([*measurements, *tails.measurements], info.with_fixed_durations(fixed))


def _series(profiles: Collection[StageProfile]) -> dict[RowKey, tuple[Floats, Floats]]:
    """Return times and energies of each pass: values and relative errors, shape (lengths, 2)."""
    found: dict[RowKey, list[tuple[Measurement, RowQuality | None]]] = defaultdict(list)
    for profile in profiles:
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
        if key[1] is not Kind.TAIL and len(rows) == len(profiles)
    }


def _estimate(series: Floats, terms: Floats, wanted: Floats) -> tuple[float, float]:
    """Return a value at the wanted length, and its relative standard error."""
    value, error = series.T
    error = np.maximum(np.where(np.isnan(error), _UNKNOWN_ERROR, error), _LEAST_ERROR)
    weighted = terms / (value * error)[:, None]
    coefficients, misfit = nnls(weighted, 1 / error)
    free = len(value) - terms.shape[1]
    scatter = max(1.0, misfit**2 / free) if free else 1.0
    found = float(wanted @ coefficients)
    variance = scatter * float(wanted @ np.linalg.solve(weighted.T @ weighted, wanted))
    return found, float(np.sqrt(variance)) / found


def fit_by_length(times: Mapping[tuple[int, Kind], Sequence[tuple[float, float]]], length: float) -> ByLength | None:
    """Return the dependence of passes on the lengths of their inputs, relative to a length. None if these hardly vary.

    ``times`` has lengths and times [s] of passes at one clock, by stage and kind.
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
