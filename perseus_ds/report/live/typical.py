"""What is typical of some iterations, against default clocks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from perseus_ds.artifacts.run_records import IterationRecord


def kind_of(record: IterationRecord) -> tuple[str, int | None, bool]:
    """Return what iterations have in common that are compared with default clocks together.

    Each shape of inputs has plans of its own, which alternate, and default clocks of its own to compare with.
    """
    has_shape = bool(record.shape)
    return record.phase, None if has_shape else record.plan, has_shape


def change(value: float | None, default: float | None) -> float | None:
    """Return how much more a figure is than at default clocks, as a fraction."""
    return value / default - 1 if value is not None and default else None


def saving_of(value: float | None, default: float | None) -> float | None:
    """Return how much less a figure is than at default clocks, as a fraction."""
    return 1 - value / default if value is not None and default else None


def mean_power_w(records: Iterable[IterationRecord]) -> float | None:
    """Return the mean power of all GPUs [W]; None where no energy could be read."""
    known = [(record.energy_j, record.time_s) for record in records if record.energy_j is not None]
    return sum(energy_j for energy_j, _ in known) / sum(time_s for _, time_s in known) if known else None


def typical_changes(records: Iterable[IterationRecord]) -> tuple[float | None, float | None]:
    """Return slowdown and saving of a typical iteration against default clocks.

    The time is a median, since single iterations may be held up. The energy is the mean power times that: a counter is
    refreshed so rarely that single short iterations read too much or nothing.
    """
    timed = [record for record in records if record.default_time_s]
    if not timed:
        return None, None
    ratio = statistics.median(record.time_s / (record.default_time_s or 1.0) for record in timed)
    known = [
        (record.energy_j, record.time_s, record.default_energy_j, record.default_time_s)
        for record in timed
        if record.energy_j is not None and record.default_energy_j and record.default_time_s
    ]
    if not known:
        return ratio - 1, None
    energy_j, time_s, default_j, default_s = (sum(column) for column in zip(*known, strict=True))
    return ratio - 1, 1 - ratio * (energy_j / time_s) / (default_j / default_s)
