"""Rows as ranks measure them, and what becomes of them together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perseus_ds.artifacts.profile_csv import Measurement
from perseus_ds.artifacts.profile_metadata import RowQuality
from perseus_ds.pipeline.instruction import Kind


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement and how it was made."""

    measurement: Measurement
    quality: RowQuality


def combined(rows: Iterable[MeasuredRow]) -> list[MeasuredRow]:
    """Make one row of those of ranks that share a stage: the slowest time, the mean energy."""
    by_key: dict[tuple[int, Kind, int], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        by_key[row.measurement.stage, row.measurement.kind, row.measurement.clock_mhz].append(row)
    return [_combine(*key, shared) for key, shared in sorted(by_key.items())]


def _combine(stage: int, kind: Kind, clock_mhz: int, rows: list[MeasuredRow]) -> MeasuredRow:
    slowest = max(rows, key=lambda row: row.measurement.time_s)
    energy_j = sum(row.measurement.energy_j for row in rows) / len(rows)
    errors = [row.quality.energy_relative_error for row in rows]
    known = [error for error in errors if error is not None]
    return MeasuredRow(
        Measurement(stage, kind, clock_mhz, slowest.measurement.time_s, energy_j),
        slowest.quality.model_copy(
            update={
                "samples": min(row.quality.samples for row in rows),
                "energy_relative_error": math.hypot(*known) / len(known) if len(known) == len(rows) else None,
                "reached_mhz": min((r for row in rows if (r := row.quality.reached_mhz) is not None), default=None),
            }
        ),
    )


def reached_only(rows: Iterable[MeasuredRow]) -> tuple[list[MeasuredRow], list[MeasuredRow]]:
    """Separate the rows to keep from those at clocks the GPU did not reach.

    A GPU held by a limit is as fast at one clock beyond it as at another; the lowest of them is
    kept, to stand for the fastest it can be.
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
