"""Measured rows with their quality: combined over ranks that share a stage, without clocks that were not reached."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.profile_csv import Measurement, combine_ranks
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.pipeline.instruction import Kind


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement and how well it was made."""

    measurement: Measurement
    quality: RowQuality


def typical(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the median and its relative standard error from the median deviation, which outliers do not change."""
    median_s = statistics.median(times_s)
    deviation_s = statistics.median(abs(time_s - median_s) for time_s in times_s)
    # A standard deviation is 1.48 median deviations; the standard error of a median is 1.25 times that of a mean.
    error = 1.48 * 1.25 * deviation_s / math.sqrt(len(times_s)) / median_s
    return median_s, error if len(times_s) > 2 else math.inf


def known(relative_error: float) -> float | None:
    """Return an error as rows say it: None for one that too few readings leave unknown, which is infinite."""
    return relative_error if math.isfinite(relative_error) else None


def combine_rows(rows: Iterable[MeasuredRow]) -> list[MeasuredRow]:
    """Combine the rows of ranks that share a stage into one per kind and clock: slowest time, mean energy."""
    by_key: dict[tuple[int, Kind, int], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        by_key[row.measurement.stage, row.measurement.kind, row.measurement.clock_mhz].append(row)
    return [_combine_one(shared) for _, shared in sorted(by_key.items())]


def _combine_one(rows: list[MeasuredRow]) -> MeasuredRow:
    slowest = max(rows, key=lambda row: row.measurement.time_s)
    errors = [row.quality.energy_relative_error for row in rows]
    found = [error for error in errors if error is not None]
    return MeasuredRow(
        combine_ranks([row.measurement for row in rows]),
        slowest.quality.model_copy(
            update={
                "samples": min(row.quality.samples for row in rows),
                "energy_relative_error": math.hypot(*found) / len(found) if len(found) == len(rows) else None,
                "reached_mhz": min((r for row in rows if (r := row.quality.reached_mhz) is not None), default=None),
            }
        ),
    )


def reached_only(rows: Iterable[MeasuredRow]) -> tuple[list[MeasuredRow], list[MeasuredRow]]:
    """Return the rows to keep, and those to leave out because the GPU did not reach their clock.

    All clocks above a power or thermal limit are equally fast. Of these, the lowest is kept: it is
    the fastest that the GPU can be.
    """
    held: dict[tuple[int, Kind], list[MeasuredRow]] = defaultdict(list)
    kept = []
    for row in rows:
        if row.quality.reached_mhz is None:
            kept.append(row)
        else:
            held[row.measurement.stage, row.measurement.kind].append(row)
    left_out = []
    for found in held.values():
        lowest, *others = sorted(found, key=lambda row: row.measurement.clock_mhz)
        kept.append(lowest)
        left_out += others
    return kept, left_out
