"""Chooses which clocks to measure: all, every n-th, or a few, chosen from the rows measured so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import Measurement, StageProfile, lower_hull
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.denoise import estimate_all

Floats = npt.NDArray[np.float64]

# Distance between the clocks of the descent, relative to the clock.
_STEP = 0.1
# The descent goes on while a step saves this fraction of effective energy (instructions with slack use low clocks).
_SAVING_PER_STEP = 0.01
# It does not stop before instructions are slower than the fastest by this factor.
_SLOWED = 1.1
_RISES_TO_STOP = 5
# A clock is measured if it might save plans this fraction of the energy of all instructions.
_SMALLEST_GAIN = 0.0005
_BATCH = 2
# Possible gains assume that a clock is better than estimated by this many standard deviations.
_OPTIMISM = 1.5


class Sampler(Protocol):
    """Chooses the clocks to measure next from the rows measured so far; runs on one rank, for all."""

    def next_clocks(self) -> list[int]:
        """Return the clocks to measure next, the highest first [MHz]; none when enough is known."""

    def add(self, rows: Iterable[Measurement]) -> None:
        """Add the rows measured at those clocks, of all stages."""


def make_sampler(
    sampling: Literal["full", "stride", "adaptive"],
    clocks_mhz: Sequence[int],
    *,
    stride: int,
    blocking_power_w: float,
    budget: int,
) -> Sampler:
    """Return the sampler of a profile.

    Args:
        sampling: ``full``: every clock, ``stride``: every n-th, both from the highest down until energy has risen
            five times in a row; ``adaptive``: a few.
        clocks_mhz: The clocks that may be measured, ascending.
        stride: The n of ``stride``.
        blocking_power_w: Power of a GPU that waits [W].
        budget: Most clocks that ``adaptive`` measures.
    """
    if sampling == "adaptive":
        return AdaptiveSampler(clocks_mhz, blocking_power_w=blocking_power_w, budget=budget)
    return Sweep(clocks_mhz[::-1][:: stride if sampling == "stride" else 1])


class Sweep:
    """Measures one clock after the other until energy has risen five times in a row.

    Args:
        clocks_mhz: In the order in which they are measured.
    """

    def __init__(self, clocks_mhz: Sequence[int]) -> None:
        self._left = list(clocks_mhz)
        self._energies_j: list[float] = []

    def next_clocks(self) -> list[int]:
        last = self._energies_j[-_RISES_TO_STOP - 1 :]
        rising = len(last) > _RISES_TO_STOP and all(a < b for a, b in pairwise(last))
        return [] if rising or not self._left else [self._left.pop(0)]

    def add(self, rows: Iterable[Measurement]) -> None:
        self._energies_j += (energy_j for _, energy_j in _sums_by_clock(rows).values())


class AdaptiveSampler:
    """Measures clocks in coarse steps down until energy rises, then those that may improve plans the most.

    Plans use, of every (stage, kind), the clocks on the lower convex hull of effective energy over
    time. After the descent, the next clock is the one that may lie farthest below the hull of the
    measured ones, within the error bars of the fitted profile. Where rows deviate from the physical
    model, error bars are larger, so more clocks are measured there.

    Args:
        clocks_mhz: The clocks that may be measured, ascending.
        blocking_power_w: Power of a GPU that waits [W].
        budget: Most clocks to measure.
    """

    def __init__(self, clocks_mhz: Sequence[int], *, blocking_power_w: float, budget: int) -> None:
        self._clocks = list(clocks_mhz)
        self._blocking_power_w = blocking_power_w
        self._budget = budget
        self._rows: list[Measurement] = []
        self._sums: dict[int, tuple[float, float]] = {}
        self._asked: set[int] = set()

    def next_clocks(self) -> list[int]:
        left = self._budget - len(self._asked)
        chosen = (self._descend() or self._refine())[: max(0, left)]
        self._asked.update(chosen)
        return sorted(chosen, reverse=True)

    def add(self, rows: Iterable[Measurement]) -> None:
        rows = list(rows)
        self._rows += rows
        self._sums.update(_sums_by_clock(rows))

    def _descend(self) -> list[int]:
        if not self._asked:
            return self._clocks[-1:]
        lowest = min(self._asked)
        if lowest == self._clocks[0] or self._descended():
            return []
        # Equal steps down to the lowest clock, so that the last step is not smaller than the others.
        steps = math.ceil(math.log(lowest / self._clocks[0]) / math.log(1 / (1 - _STEP)) - 0.5)
        target_mhz = lowest * (self._clocks[0] / lowest) ** (1 / max(1, steps))
        below = [clock for clock in self._clocks if clock < lowest]
        return [min(below, key=lambda clock: abs(clock - target_mhz))]

    def _descended(self) -> bool:
        """Whether instructions are slower, their energy has risen, and their effective energy no longer falls."""
        if len(self._sums) < 3:
            return False
        (time_s, energy_j), (before_s, before_j), *_ = (sums for _, sums in sorted(self._sums.items()))
        saved_j = before_j - energy_j + self._blocking_power_w * (time_s - before_s)
        effective_j = before_j - self._blocking_power_w * before_s
        slowed = time_s > _SLOWED * min(t for t, _ in self._sums.values())
        return slowed and energy_j > min(e for _, e in self._sums.values()) and saved_j < _SAVING_PER_STEP * effective_j

    def _refine(self) -> list[int]:
        """Return the clocks between measured ones that may improve plans the most."""
        if len(self._sums) < 3:
            return []
        candidates = [c for c in self._clocks if c not in self._asked and c > min(self._asked)]
        chosen: list[int] = []
        gain = self._possible_gains(candidates)
        while gain and len(chosen) < _BATCH:
            best = max(gain, key=lambda clock: gain[clock])
            # A fit to few rows has error bars that are too small, so half of the budget is used in any case.
            if gain[best] < _SMALLEST_GAIN and 2 * len(self._asked) >= self._budget:
                break
            chosen.append(best)
            # The next one lies in another gap between measured clocks.
            below = max(c for c in self._asked if c < best)
            above = min(c for c in self._asked if c > best)
            gain = {c: p for c, p in gain.items() if not below < c < above}
        return chosen

    def _possible_gains(self, candidates: Sequence[int]) -> dict[int, float]:
        """Return how much each clock may improve plans, as a fraction of the energy of all instructions."""
        fitted = estimate_all(StageProfile(self._rows), candidates)
        rows = {(row.stage, row.kind, row.clock_mhz): row for row in fitted.info.rows}
        total_j = sum(m.energy_j for m in self._rows if m.clock_mhz == max(self._sums))
        gains: dict[int, float] = defaultdict(float)
        for stage, kind in fitted.keys:
            options = fitted.options(stage, kind)
            cost_j = options.effective_energy_j(self._blocking_power_w)
            measured = np.isin(options.clock_mhz, list(self._asked))
            hull_j = _LowerHull(options.time_s[measured], cost_j[measured])
            for number in np.flatnonzero(~measured):
                clock = int(options.clock_mhz[number])
                row = rows.get((stage, kind, clock))
                error_j = (row.energy_relative_error or 0.0) * options.energy_j[number] if row else 0.0
                gain_j = hull_j(float(options.time_s[number])) - cost_j[number] + _OPTIMISM * error_j
                gains[clock] += max(0.0, float(gain_j)) / total_j
        return dict(gains)


class _LowerHull:
    """The lowest effective energy of a mixture of options, as a function of time."""

    def __init__(self, time_s: Floats, cost_j: Floats) -> None:
        order = np.lexsort((cost_j, time_s))
        kept = order[lower_hull(time_s[order], cost_j[order])]
        self._time_s, self._cost_j = time_s[kept], cost_j[kept]

    def __call__(self, time_s: float) -> float:
        if time_s < self._time_s[0]:
            # Faster than all measured options: extrapolate the first edge of the hull.
            if len(self._time_s) < 2:
                return float(self._cost_j[0])
            slope = (self._cost_j[0] - self._cost_j[1]) / (self._time_s[1] - self._time_s[0])
            return float(self._cost_j[0] + slope * (self._time_s[0] - time_s))
        return float(np.interp(time_s, self._time_s, self._cost_j))


def _sums_by_clock(rows: Iterable[Measurement]) -> dict[int, tuple[float, float]]:
    """Return, by clock, the summed time [s] and energy [J] of one instruction of each stage and kind, without tails."""
    sums: dict[int, tuple[float, float]] = {}
    for row in rows:
        if row.kind is not Kind.TAIL:
            time_s, energy_j = sums.get(row.clock_mhz, (0.0, 0.0))
            sums[row.clock_mhz] = (time_s + row.time_s, energy_j + row.energy_j)
    return sums
