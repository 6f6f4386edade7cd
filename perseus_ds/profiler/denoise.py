"""Estimates rows for all clocks between the lowest and the highest measured one, with less noise.

An optimiser that is given raw rows selects those that look best because of noise. Rows are therefore
replaced by estimates from all rows of a kind together (:mod:`perseus_ds.profiler.clock_model`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.clock_model import estimate
from perseus_ds.profiler.physical_model import Series

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
    errors: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for row in everything.info.rows:
        if (row.stage, row.kind, row.clock_mhz) in measured:
            errors[row.stage, row.kind].append(row.energy_relative_error or 0.0)
    allowed = {key: max(_LARGEST_ERROR, 2 * statistics.median(found)) for key, found in errors.items()}
    rows = [
        row
        for row in everything.info.rows
        if (row.stage, row.kind, row.clock_mhz) in measured
        or (row.energy_relative_error or 0.0) <= allowed[row.stage, row.kind]
    ]
    kept = measured | {(row.stage, row.kind, row.clock_mhz) for row in rows}
    return StageProfile(
        [m for m in everything.measurements if (m.stage, m.kind, m.clock_mhz) in kept],
        profile.info.model_copy(update={"rows": rows}),
    )


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
        time_error = np.array([_number(row.time_relative_error if row else None) for row in rows])
        energy_error = np.array([_number(row.energy_relative_error if row else None) for row in rows])
        clocks = options.clock_mhz.astype(float)
        times.append(Series(clocks, options.time_s, time_error))
        powers.append(Series(clocks, options.energy_j / options.time_s, np.hypot(time_error, energy_error)))
    return times, powers


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
