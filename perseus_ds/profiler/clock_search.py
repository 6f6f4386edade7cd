"""Chooses the clocks to measure: all, every n-th, or a few, selected from the rows measured so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowKey, StageProfile, leave_out, lower_hull
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.estimates import estimate_all
from perseus_ds.profiler.online import MeasuredRow, combine_rows

# Distance between the clocks of the descent, relative to the clock.
_STEP = 0.1
# The descent continues while a step saves this fraction of effective energy (instructions with slack use low clocks).
_SAVING_PER_STEP = 0.015
# It does not stop before instructions are slower than the fastest by this factor.
_SLOWED = 1.1
_RISES_TO_STOP = 5
# A clock is measured if it might save plans this fraction of the energy of all instructions.
_SMALLEST_GAIN = 0.0005
_BATCH = 2
# Possible gains assume that the energy at a clock is this many standard errors lower than estimated.
_OPTIMISM = 1.5


class Sweep:
    """Measures clocks one after the other until energy has risen five times in a row."""

    def __init__(self, clocks_mhz: Sequence[int]) -> None:
        self._left = list(clocks_mhz)

    def likely_next(self, rows: Sequence[Measurement]) -> int | None:
        """Return the next clock unless the sweep finishes before, or None if there is none [MHz]."""
        return self._left[0] if self._left else None

    def next_clocks(self, rows: Sequence[Measurement]) -> list[int]:
        """Return the clock to measure next [MHz]. Empty if the sweep is finished."""
        falling_clocks = sorted(_sums_by_clock(rows).items(), reverse=True)
        energies_j = [of_clock.energy_j for _, of_clock in falling_clocks]
        last = energies_j[-_RISES_TO_STOP - 1 :]
        rising = len(last) > _RISES_TO_STOP and all(a < b for a, b in pairwise(last))
        return [] if rising or not self._left else [self._left.pop(0)]


class AdaptiveSampler:
    """Measures clocks in coarse steps down until energy rises, then those that may improve plans most.

    Of the clocks above the one that the GPU reaches under load, only the highest is measured, because all of them give
    the same results.

    For each (stage, kind), plans use the clocks on the lower convex hull of effective energy over time. After the
    descent, the next clock is the one that may lie farthest below the hull of the measured clocks, within the error
    bars of the fitted profile.

    Clocks are ascending. ``budget`` is the maximum number of clocks to measure, and ``default_mhz`` the clock that GPUs
    reach under load at default clocks, if known.
    """

    def __init__(
        self, clocks_mhz: Sequence[int], *, blocking_power_w: float, budget: int, default_mhz: int | None = None
    ) -> None:
        self._clocks = list(clocks_mhz)
        self._blocking_power_w = blocking_power_w
        self._budget = budget
        self._reached_mhz = default_mhz or self._clocks[-1]
        self._requested: set[int] = set()

    def next_clocks(self, rows: Sequence[Measurement]) -> list[int]:
        """Return the clocks to measure next, the highest first [MHz]. Empty if the search is finished."""
        sums = _sums_by_clock(rows)
        left = self._budget - len(self._requested)
        chosen = (self._descend(sums) or self._refine(rows, sums))[: max(0, left)]
        self._requested.update(chosen)
        return sorted(chosen, reverse=True)

    def likely_next(self, rows: Sequence[Measurement]) -> int | None:
        """Return the next clock if the descent continues [MHz]. None if unknown."""
        likely = self._descend(_sums_by_clock(rows)) if len(self._requested) < self._budget else []
        return likely[0] if likely else None

    def _descend(self, sums: dict[int, _OneOfEach]) -> list[int]:
        if not self._requested:
            return self._clocks[-1:]
        lowest = min(self._requested)
        if lowest == self._clocks[0] or self._descended(sums):
            return []
        below = [clock for clock in self._clocks if clock < lowest]
        if self._reached_mhz < (1 - _STEP) * lowest:
            return [min(below, key=lambda clock: abs(clock - self._reached_mhz))]
        # Equal steps down to the lowest clock, so that the last step is not smaller than the others.
        steps = math.ceil(math.log(lowest / self._clocks[0]) / math.log(1 / (1 - _STEP)) - 0.5)
        target_mhz = lowest * (self._clocks[0] / lowest) ** (1 / max(1, steps))
        return [min(below, key=lambda clock: abs(clock - target_mhz))]

    def _descended(self, sums: dict[int, _OneOfEach]) -> bool:
        """Return True if instructions are slower, energy has risen, and effective energy no longer falls."""
        if len(sums) < 3:
            return False
        lowest_mhz, before_mhz, *_ = sorted(sums)
        lowest, before = sums[lowest_mhz], sums[before_mhz]
        saved_j = before.energy_j - lowest.energy_j + self._blocking_power_w * (lowest.time_s - before.time_s)
        effective_j = before.energy_j - self._blocking_power_w * before.time_s
        is_slower = lowest.time_s > _SLOWED * min(each.time_s for each in sums.values())
        has_risen = lowest.energy_j > min(each.energy_j for each in sums.values())
        return is_slower and has_risen and saved_j < _SAVING_PER_STEP * effective_j

    def _refine(self, rows: Sequence[Measurement], sums: dict[int, _OneOfEach]) -> list[int]:
        """Return the clocks between measured ones that may improve plans the most."""
        if len(sums) < 3:
            return []
        candidates = [c for c in self._clocks if c not in self._requested and c > min(self._requested)]
        chosen: list[int] = []
        gain = self._possible_gains(rows, candidates)
        while gain and len(chosen) < _BATCH:
            best = max(gain, key=lambda clock: gain[clock])
            # The error bars of a fit to few rows are too small, so half of the budget is always used.
            if gain[best] < _SMALLEST_GAIN and 2 * len(self._requested) >= self._budget:
                break
            chosen.append(best)
            # The next clock is chosen from another gap between measured clocks.
            below = max(clock for clock in self._requested if clock < best)
            above = min(clock for clock in self._requested if clock > best)
            gain = {clock: of_clock for clock, of_clock in gain.items() if not below < clock < above}
        return chosen

    def _possible_gains(self, rows: Sequence[Measurement], candidates: Sequence[int]) -> dict[int, float]:
        """Return the possible saving by each clock, as a fraction of the energy of all instructions."""
        profile = StageProfile(rows)
        fitted = estimate_all(profile, candidates)
        found = fitted.info.quality
        total_j = sum(profile.at_highest_clock(*key).energy_j for key in profile.keys)
        gains: dict[int, float] = defaultdict(float)
        for stage, kind in fitted.keys:
            options = fitted.options(stage, kind)
            cost_j = options.effective_energy_j(self._blocking_power_w)
            measured = np.isin(options.clock_mhz, list(self._requested))
            fastest_first = np.flatnonzero(measured)[np.lexsort((cost_j[measured], options.time_s[measured]))]
            hull = fastest_first[lower_hull(options.time_s[fastest_first], cost_j[fastest_first])]
            # The lines between its corners are the lowest effective energies of mixtures of clocks.
            hull_j = np.interp(options.time_s, options.time_s[hull], cost_j[hull])
            for number in np.flatnonzero(~measured):
                clock = int(options.clock_mhz[number])
                row = found.get((stage, kind, clock))
                error_j = (row.energy_relative_error or 0.0) * options.energy_j[number] if row else 0.0
                gain_j = hull_j[number] - cost_j[number] + _OPTIMISM * error_j
                gains[clock] += max(0.0, float(gain_j)) / total_j
        return dict(gains)


class _OneOfEach(NamedTuple):
    """Total time [s] and energy [J] of one instruction of each stage and kind at a clock."""

    time_s: float
    energy_j: float


def _sums_by_clock(rows: Iterable[Measurement]) -> dict[int, _OneOfEach]:
    """Return, by clock, the totals of one instruction of each stage and kind.

    Clocks without a row of each stage and kind are omitted, because their sums would be too small.
    """
    by_clock: dict[int, list[Measurement]] = defaultdict(list)
    for row in rows:
        if row.kind is not Kind.TAIL:
            by_clock[row.clock_mhz].append(row)
    keys = {(row.stage, row.kind) for found in by_clock.values() for row in found}
    sums = {}
    for clock_mhz, found in by_clock.items():
        if len(found) == len(keys):
            sums[clock_mhz] = _OneOfEach(sum(row.time_s for row in found), sum(row.energy_j for row in found))
    return sums


class ClockSearch:
    """Chooses clocks to measure until the profile is accurate enough.

    Rows are written to ``measured.csv`` after every clock. The search continues an interrupted one if ``measured.csv``
    has rows of the same job, by ``info.job``, and no profile was written after them. If they cannot be written, they
    are kept in memory, and ``warn`` is called once.

    Attributes:
        resumed: Number of clocks that an interrupted search had measured.
    """

    def __init__(
        self, sampler: AdaptiveSampler | Sweep, info: ProfileInfo, directory: Path, warn: Callable[[str], None]
    ) -> None:
        self._info = info
        self._warn = warn
        self._has_warned = False
        self._directory = directory
        self._sampler = sampler
        self._rows: dict[RowKey, MeasuredRow] = {}
        self._incomplete: dict[RowKey, list[str]] = {}
        self._earlier = self._rows_of_an_interrupted_search()
        self.resumed = 0

    def next_clocks(self) -> list[int]:
        """Return the clocks to measure now, the highest first [MHz]. Empty if the search is finished."""
        while clocks := self._sampler.next_clocks([row.measurement for row in self._rows.values()]):
            known = [clock for clock in clocks if clock in self._earlier]
            for clock in known:
                self._add_rows(self._earlier.pop(clock))
            self.resumed += len(known)
            if unknown := [clock for clock in clocks if clock not in known]:
                return unknown
        return []

    def likely_next(self) -> int | None:
        """Return the clock that will probably be measured after those of :meth:`next_clocks` [MHz]."""
        likely = self._sampler.likely_next([row.measurement for row in self._rows.values()])
        return None if likely in self._earlier else likely

    def add(self, by_rank: Mapping[str, Sequence[MeasuredRow]]) -> None:
        """Add all rows that each rank has measured so far."""
        combined, self._incomplete = combine_rows(by_rank, self._info.blocking_power_w or 0.0)
        self._add_rows(combined)
        for key in self._incomplete:
            self._rows.pop(key, None)
        try:
            self.measured(self._info).save(self._directory / "measured.csv")
        except OSError as error:  # such as a full disk
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"the measured rows cannot be saved ({error}). Profiling continues without saving them")

    def finished(self, info: ProfileInfo) -> StageProfile:
        """Return :meth:`measured`, and log the clocks that are omitted because a rank lacks their rows.

        Raises:
            ProfileError: There are no rows, or none of a stage's forward or backward.
        """
        profile = self.measured(info)
        leave_out(self._incomplete, profile.keys)
        return profile

    def measured(self, info: ProfileInfo) -> StageProfile:
        """Return the rows as they were measured."""
        if not self._rows:
            raise ProfileError("no instruction was measured at any clock.")
        rows = [row for _, row in sorted(self._rows.items())]
        return StageProfile([r.measurement for r in rows], info.model_copy(update={"rows": [r.quality for r in rows]}))

    def _add_rows(self, rows: Iterable[MeasuredRow]) -> None:
        self._rows |= {(r.measurement.stage, r.measurement.kind, r.measurement.clock_mhz): r for r in rows}

    def _rows_of_an_interrupted_search(self) -> dict[int, list[MeasuredRow]]:
        path, finished = self._directory / "measured.csv", self._directory / "profile.csv"
        if not path.exists() or (finished.exists() and finished.stat().st_mtime >= path.stat().st_mtime):
            return {}
        try:
            earlier = StageProfile.load(path)
        except ProfileError:
            return {}
        if earlier.info.job is None or earlier.info.job != self._info.job:
            return {}
        found: dict[int, list[MeasuredRow]] = {}
        for quality in earlier.info.rows:
            row = MeasuredRow(earlier.at(quality.stage, quality.kind, quality.clock_mhz), quality)
            found.setdefault(quality.clock_mhz, []).append(row)
        return found
