"""Measures time and energy of instructions during training, with one GPU clock in each iteration.

Definitions:

- A *key* is a kind of instruction of one stage: its forward, its backward, its tail. All its instructions do the same
  work.
- A *row* is the time and the energy of one key at one clock. They are the result.
- A *reading* is the value of the energy counter right after a refresh, with its time. M readings in a row bound M - 1
  *intervals*. Their energies are known exactly, but each interval contains instructions of several keys, and waiting.
- *Waiting* is all time outside of instructions, at *blocking power*. Powers of instructions are expressed *beyond* it.

Times are those of the instructions as they ran, on average over iterations. Inputs may differ in length: a time is
proportional to the number of tokens to a power, which is fitted to the iterations at each clock, and rows are those for
the same number of tokens at all clocks. How much iterations vary beyond that is estimated from all clocks together, and
is part of the error of a row.

Energies follow from the intervals. The model of the power of a key at a clock is::

    blocking power + common(clock) * ratio(key) * (1 + deviation(key, clock))

A few intervals determine ``common`` well, but the differences between keys need many. So ``ratio`` is estimated from
all clocks together, and the deviation is only as large as the intervals at its clock require. All estimates are least
squares with priors. An energy is the power times the time.

Blocking power is measured before training, while all ranks wait for one (:mod:`perseus_ds.client.meeting`), and again
in the bubbles of these iterations, pooled over ranks. Plans replace waiting in bubbles, but its power is less certain
the less ranks wait. So that of the bubbles is used if it differs significantly from the other one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from perseus_ds.artifacts.profile import (
    Floats,
    Key,
    Measurement,
    RowKey,
    RowQuality,
    combine_ranks,
    incomplete_clocks,
)
from perseus_ds.gpu.base import GpuState
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.profiler.estimates import error_of_median
from perseus_ds.profiler.fixed_durations import tails_s
from perseus_ds.savings import STALL, exponent

# Error of the time of a reading [s].
_DELAY_S = 0.0006
# Lower bound of the relative variation of power between instructions. A larger one shows in the residuals.
_POWER_VARIATION = 0.02
# Number of intervals, beyond the number of unknown powers, from which on residuals show the variation of power. With
# fewer of them, differences between keys are assumed to have this relative variance.
_ENOUGH_FREE, _KEY_VARIANCE = 3, 0.1**2
# Dividing the energy of an interval among keys adds an error of about this size.
_LEAST_ERROR = 0.01
# Priors, as relative standard deviations. They were chosen so that profiles of simulated and recorded GPUs are right.
# Power while waiting, from blocking power: near the highest clock, and in addition at the lowest.
_WAITING_SPREAD, _WAITING_SPREAD_AT_LOW_CLOCKS = 0.1, 0.5
# Ratios of keys, from each other, and the deviation of a key at one clock from its ratio.
_RATIO_SPREAD = {kind: 0.5 if kind is Kind.TAIL else 0.1 for kind in Kind}
_DEVIATION_SPREAD = {kind: 0.2 if kind is Kind.TAIL else 0.02 for kind in Kind}
# Relative distance from the highest clock within which waiting draws the same power as at default clocks.
_NEAR_TOP = 0.1
# Largest condition number of equations that can be solved.
_DETERMINED = 1e12
# Number of turns in which common powers and ratios are estimated. Further ones change powers by less than their errors.
_TURNS = 3
# Relative error above which it is reported as unknown.
_UNKNOWN = 1e3
# Share of its period, at the end, in which a counter samples power: all of it, or only a part (a quarter on A100 and
# H100, arXiv 2312.02741). A share below 1 is assumed only if it reduces the squared residuals by this factor.
_ALWAYS, _SHARES, _CLEARLY = 1.0, (1.0, 0.5, 0.25, 0.1), 0.5
# Share of the instructions of a key that are no longer than usual. Stalls are rare, unlike inputs of other lengths.
_USUAL = 0.9
# Number of repeated iterations after which it is known how much they vary.
_ENOUGH_REPEATED = 3
# Relative difference between blocking powers that is negligible, and number of standard errors above which a difference
# is significant.
_AGREES, _SURE = 0.03, 3.0
# Largest ratio of the two that is plausible. If all intervals of a counter contain nearly the same mix of instructions
# and waiting, as in iterations as short as an interval, the result from bubbles is arbitrary.
_PLAUSIBLE = 1.5


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement and its quality."""

    measurement: Measurement
    quality: RowQuality


class Reading(NamedTuple):
    """Time [s] and value [J] of the energy counter right after a refresh."""

    at_s: float
    energy_j: float


@dataclass(frozen=True)
class _Visit:
    """The instructions of consecutive iterations at one clock, and the readings of the energy counter.

    Attributes:
        computed: Each instruction with its key.
        at_s: Times of the readings, shape (readings,) [s].
        energy_j: Their values, shape (readings,) [J].
    """

    computed: list[tuple[Span, Key]]
    at_s: Floats
    energy_j: Floats

    def beyond_j(self, blocking_power_w: float) -> Floats:
        """Return the readings without the energy of blocking power, shape (readings,) [J]."""
        return self.energy_j - blocking_power_w * self.at_s

    def spent_s(self, keys: Sequence[Key], share: float) -> Floats:
        """Return the time spent in each key and, in the last column, waiting [s].

        If the counter samples only the last ``share`` of its period, an interval counts as if all of it were like that
        part.

        Returns:
            Times, shape (intervals, keys + 1).
        """
        passed_s, end_s = np.diff(self.at_s), self.at_s[1:]
        sampled_from_s = end_s - share * passed_s
        spent_s = np.zeros((len(end_s), len(keys) + 1))
        for column, key in enumerate(keys):
            spans = sorted((span.start_s, span.end_s) for span, own_key in self.computed if own_key == key)
            if spans:
                sampled_s = _spent_until_s(spans, end_s) - _spent_until_s(spans, sampled_from_s)
                spent_s[:, column] = sampled_s / share
        spent_s[:, -1] = passed_s - spent_s[:, :-1].sum(axis=1)
        return spent_s


def _spent_until_s(spans: Sequence[tuple[float, float]], at_s: Floats) -> Floats:
    """Return the time within sorted spans, which do not overlap, until each of some times [s]."""
    bounds_s = np.array(spans)  # shape (spans, 2): start and end
    ends_s = np.cumsum(bounds_s[:, 1] - bounds_s[:, 0])
    at_bounds_s = np.column_stack([np.concatenate([[0.0], ends_s[:-1]]), ends_s])
    return np.asarray(np.interp(at_s, bounds_s.ravel(), at_bounds_s.ravel()))


class _Equations(NamedTuple):
    """Linear equations for powers beyond blocking power. Divided by a power, their errors have a deviation of 1.

    Attributes:
        coefficients: Of the power of each key and, last, of the power while waiting, shape (readings, keys + 1).
        beyond_w: Right-hand side, shape (readings,) [W].
    """

    coefficients: Floats
    beyond_w: Floats


class _Energies:
    """The energies of all intervals at one clock, for a given share of its period that the counter samples.

    Attributes:
        residuals_s: Deviations of the energies from those if all keys had the same power, expressed as time at that
            power, shape (intervals,) [s].
    """

    def __init__(
        self,
        visits: Sequence[_Visit],
        keys: Sequence[Key],
        share: float,
        blocking_power_w: float,
        waiting_spread_w: float,
    ) -> None:
        """Divide the intervals of visits.

        Args:
            visits: All visits at the clock.
            keys: The keys of the GPU's instructions.
            share: Share of its period, at the end, in which the counter samples power.
            blocking_power_w: Power while waiting [W].
            waiting_spread_w: Standard deviation of the power while waiting from blocking power [W].
        """
        self._visits = visits
        self._blocking_power_w = blocking_power_w
        self._spent_by_visit_s = [visit.spent_s(keys, share) for visit in visits]
        # Of all visits, shapes (intervals, keys + 1) and (intervals,):
        self._spent_s = np.vstack(self._spent_by_visit_s)
        self._beyond_j = np.concatenate([np.diff(visit.beyond_j(blocking_power_w)) for visit in visits])
        columns = np.column_stack([self._spent_s[:, :-1].sum(axis=1), self._spent_s[:, -1]])
        # If all intervals contain nearly the same mix, as in iterations as long as an interval, only the prior of the
        # power while waiting distinguishes it from computing.
        error_j = _DELAY_S * self._beyond_j.sum() / max(columns[:, 0].sum(), 1e-9)
        equations = np.vstack([columns, [0.0, error_j / waiting_spread_w]])
        computing_w, waiting_w = np.linalg.lstsq(equations, np.append(self._beyond_j, 0.0), rcond=None)[0]
        self._mean_beyond_w = float(computing_w)
        self.residuals_s: Floats = (self._beyond_j - columns @ [computing_w, waiting_w]) / max(computing_w, 1e-9)

    @cached_property
    def variance_rate_s(self) -> float:
        """Variance that the counted energy gains per second, as time at the mean power squared per second [s].

        It is that of deviations which differences between keys do not explain, but at least the natural variation
        between instructions.
        """
        instructions_s = [span.time_s for visit in self._visits for span, _ in visit.computed]
        least_s = _POWER_VARIATION**2 * statistics.mean(instructions_s)
        if self._mean_beyond_w <= 0:
            return least_s
        free = len(self._beyond_j) - int(np.linalg.matrix_rank(self._spent_s))
        unexplained_s2 = self._residual_variance_s2(free) if free >= _ENOUGH_FREE else self._assumed_variance_s2()
        unexplained_s2 -= 2 * _DELAY_S**2  # an interval has a reading at both ends
        passed_s = np.concatenate([np.diff(visit.at_s) for visit in self._visits])
        return max(least_s, unexplained_s2 / float(np.mean(passed_s)))

    def _residual_variance_s2(self, free: int) -> float:
        """Return the variance of the deviations from a fit in which each key has its own power [s²]."""
        power_w = np.linalg.lstsq(self._spent_s, self._beyond_j, rcond=None)[0]
        deviations_j = self._beyond_j - self._spent_s @ power_w
        return float(deviations_j @ deviations_j) / free / self._mean_beyond_w**2

    def _assumed_variance_s2(self) -> float:
        """Return the mean square of the residuals without that of assumed differences between keys [s²].

        An interval deviates due to these differences if its mix of keys differs from that of all intervals.
        """
        computed_s = self._spent_s[:, :-1]
        mix = computed_s.sum(axis=0) / max(computed_s.sum(), 1e-9)
        unlike_s = computed_s - np.outer(computed_s.sum(axis=1), mix)
        return float(np.mean(self.residuals_s**2) - _KEY_VARIANCE * np.mean(np.sum(unlike_s**2, axis=1)))

    @cached_property
    def power_error(self) -> float:
        """Relative error of the mean power beyond blocking power. Infinite if that power is not above 0."""
        computed_s = float(self._spent_s[:, :-1].sum())
        if self._mean_beyond_w <= 0 or computed_s <= 0:
            return math.inf
        # Waiting gains variance, too, for simplicity.
        return math.sqrt(self.variance_rate_s * self._spent_s.sum()) / computed_s

    @cached_property
    def equations(self) -> _Equations:
        """One equation for each reading: its energy is that of the time spent until then."""
        coefficients, beyond_w = [], []
        for visit, spent_s in zip(self._visits, self._spent_by_visit_s, strict=True):
            until_s = np.cumsum(np.vstack([np.zeros(spent_s.shape[1]), spent_s]), axis=0)  # (readings, keys + 1)
            weights = _weights(visit.at_s, self.variance_rate_s)
            coefficients.append(weights @ until_s)
            beyond_w.append(weights @ visit.beyond_j(self._blocking_power_w))
        return _Equations(np.concatenate(coefficients), np.concatenate(beyond_w))

    def common_w(self, ratio: Floats, waiting_spread_w: float) -> float:
        """Return the power beyond blocking power of a key with ratio 1 [W]. 0 if nothing ran.

        Args:
            ratio: Ratio of each key, shape (keys,).
            waiting_spread_w: Standard deviation of the power while waiting from blocking power [W].
        """
        coefficients, beyond_w = self.equations
        of_common = coefficients[:, :-1] @ ratio
        if not of_common.any():
            return 0.0
        error_w = abs(float(of_common @ beyond_w / (of_common @ of_common))) + 1e-9
        matrix = np.vstack([np.column_stack([of_common, coefficients[:, -1]]) / error_w, [[0.0, 1 / waiting_spread_w]]])
        common_w, _waiting_w = np.linalg.lstsq(matrix, np.append(beyond_w / error_w, 0.0), rcond=None)[0]
        return float(common_w)


class WaitingPower(NamedTuple):
    """Power while a GPU waits, and its standard error [W]."""

    power_w: float
    error_w: float


def pooled(found: Iterable[WaitingPower | None]) -> WaitingPower | None:
    """Return the mean of several measurements, weighted by their errors. None if there are none."""
    known = [one for one in found if one is not None and 0 < one.error_w < math.inf]
    if not known:
        return None
    weights = [1 / one.error_w**2 for one in known]
    power_w = sum(weight * one.power_w for weight, one in zip(weights, known, strict=True)) / sum(weights)
    return WaitingPower(power_w, 1 / math.sqrt(sum(weights)))


class _RanAtClock(NamedTuple):
    """An iteration, as far as it belongs to one key at one clock.

    Attributes:
        size: Size of its inputs, relative to that of the rows.
        times_s: Times of the instructions [s].
    """

    size: float
    times_s: list[float]

    def at_size_of_rows_s(self, exponent_of_size: float) -> list[float]:
        """Return the times as for inputs of the size of the rows [s]."""
        return [time_s / self.size**exponent_of_size for time_s in self.times_s]


class _Spread(NamedTuple):
    """Relative standard deviation of times between iterations, and the number of repetitions that it is based on."""

    relative: float
    repetitions: int


class OnlineProfiler:
    """Collects iterations of one rank and computes rows from them."""

    def __init__(self, blocking_power_w: float) -> None:
        self._blocking_power_w = blocking_power_w
        self._keys: list[Key] = []
        self._state: dict[int, GpuState] = {}
        self._ran: dict[tuple[int, Key], list[_RanAtClock]] = defaultdict(list)
        self._exponents: dict[Key, float] = {}
        self._visits: dict[int, list[_Visit]] = defaultdict(list)
        # By clock and share. It is valid until its clock is visited again, or keys or blocking power change.
        self._cache: dict[tuple[int, float], _Energies] = {}

    def add(
        self,
        clock_mhz: int,
        iterations: Sequence[Sequence[Span]],
        readings: Sequence[tuple[float, float]],
        state: GpuState = GpuState(),  # noqa: B008  # immutable
        *,
        reached_s: float = -math.inf,
        sizes: Sequence[float] = (),
    ) -> None:
        """Add consecutive iterations at one clock.

        Times of instructions that began before the clock was reached are used only if there are no others of their key.

        Args:
            clock_mhz: The clock.
            iterations: Operations of each iteration. Unlike those of other code, their times are absolute, on the time
                axis of the readings.
            readings: Time [s] and value [J] of each refresh of the energy counter once the clock was reached.
            state: State of the GPU at the end.
            reached_s: Time at which the GPU reached the clock.
            sizes: Size of the inputs of each iteration, relative to that of the rows. By default, all are 1.
        """
        self._state[clock_mhz] = state
        computed: list[tuple[Span, Key]] = []
        # By key and iteration, the times of instructions that began at the clock, and of the others.
        at_the_clock_s: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        before_s: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number, spans in enumerate(iterations):
            for span in spans:
                if isinstance(span.operation, Compute):
                    instruction = span.operation.instruction
                    key = instruction.stage, instruction.kind
                    computed.append((span, key))
                    if instruction.kind is not Kind.TAIL:
                        found_s = at_the_clock_s if span.start_s >= reached_s else before_s
                        found_s[key][number].append(span.time_s)
            for stage, time_s in tails_s(spans).items():
                at_the_clock_s[stage, Kind.TAIL][number].append(time_s)
        taken_s = {**before_s, **at_the_clock_s}
        for key, by_iteration in taken_s.items():
            for number, times_s in by_iteration.items():
                self._ran[clock_mhz, key].append(_RanAtClock(sizes[number] if sizes else 1.0, times_s))
        self._exponents = {key: self._exponent(key) for _, key in self._ran}
        keys = sorted({*self._keys, *taken_s})
        has_other_keys = keys != self._keys
        for clock, share in list(self._cache):
            if clock == clock_mhz or has_other_keys:
                del self._cache[clock, share]
        self._keys = keys
        for part in _undisturbed(readings, computed):
            at_s, energy_j = np.array(part).T
            self._visits[clock_mhz].append(_Visit(computed, at_s, energy_j))

    def power_error(self, clock_mhz: int) -> float:
        """Return the relative error of the mean power beyond blocking power at a clock, from the residuals."""
        return self._energies(clock_mhz, self._share()).power_error if clock_mhz in self._visits else math.inf

    def time_error(self, clock_mhz: int) -> float:
        """Return the relative error of times at a clock because iterations vary. Infinite if it is not known yet."""
        errors = []
        for clock, key in self._ran:
            if clock != clock_mhz or key[1] is Kind.TAIL:
                continue
            iterations, spread = len(self._ran[clock, key]), self._spread(key)
            # Two iterations at this clock are a repetition themselves.
            if iterations == 1 and spread.repetitions < _ENOUGH_REPEATED:
                return math.inf
            errors.append(spread.relative / math.sqrt(iterations))
        return statistics.fmean(errors) if errors else 0.0

    def _times_s(self, clock_mhz: int, key: Key) -> list[list[float]]:
        """Return the times of a key in each iteration at a clock, as for inputs of the size of the rows [s]."""
        return [ran.at_size_of_rows_s(self._exponents[key]) for ran in self._ran[clock_mhz, key]]

    def _exponent(self, key: Key) -> float:
        """Return the exponent of the size to which the times of a key are proportional."""
        by_clock = []
        for (_, own_key), iterations in self._ran.items():
            if own_key == key:
                by_clock.append([(ran.size, statistics.median(ran.times_s)) for ran in iterations])
        return exponent(by_clock)

    def _spread(self, key: Key) -> _Spread:
        """Return how much times of a key vary between iterations at one clock."""
        squares, repetitions = 0.0, 0
        for clock_mhz, own_key in self._ran:
            if own_key == key:
                times_s = _without_stalls([statistics.median(own) for own in self._times_s(clock_mhz, key)])
                mean_s = statistics.fmean(times_s)
                squares += sum((time_s / mean_s - 1) ** 2 for time_s in times_s)
                repetitions += len(times_s) - 1
        return _Spread(math.sqrt(squares / repetitions) if repetitions else 0.0, repetitions)

    def use_blocking_power_w(self, power_w: float) -> None:
        """Compute rows from another blocking power [W]."""
        self._blocking_power_w = power_w
        self._cache.clear()

    def waiting_power_w(self) -> WaitingPower | None:
        """Return the power of the GPU while it waits, from clocks near the highest.

        It is None if the GPU hardly waits, or if the result is not plausible: no more than twice its error, or more
        than while computing.
        """
        near_top = [clock for clock in self._visits if clock > (1 - _NEAR_TOP) * max(self._visits)]
        found, most_w = [], self._blocking_power_w
        for clock_mhz in near_top:
            energies = self._energies(clock_mhz, self._share())
            common_w = energies.common_w(np.ones(len(self._keys)), self._waiting_spread_w(clock_mhz))
            if common_w > 0:
                found.append(self._waiting_at(energies, common_w))
                most_w = max(most_w, self._blocking_power_w + common_w)
        waiting = pooled(found)
        return waiting if waiting is not None and 2 * waiting.error_w < waiting.power_w < most_w else None

    def _waiting_at(self, energies: _Energies, common_w: float) -> WaitingPower | None:
        """Return the power while waiting at a clock, without a prior for it. None if it is not determined.

        The prior of all keys is the same power.
        """
        coefficients, beyond_w = energies.equations
        spread = np.array([_RATIO_SPREAD[kind] for _, kind in self._keys])
        prior = np.column_stack([np.diag(1 / spread), np.zeros(len(spread))]) / common_w
        matrix = np.vstack([coefficients / common_w, prior])  # (readings + keys, keys + 1)
        values = np.concatenate([beyond_w / common_w, 1 / spread])
        information = matrix.T @ matrix
        if np.linalg.cond(information) >= _DETERMINED:
            return None
        covariance = np.linalg.inv(information)
        waiting_beyond_w = float((covariance @ matrix.T @ values)[-1])
        return WaitingPower(self._blocking_power_w + waiting_beyond_w, math.sqrt(covariance[-1, -1]))

    def rows(self) -> list[MeasuredRow]:
        """Return a row for each key and clock for which a power above 0 was estimated, in order of the clocks."""
        share = self._share()
        energies = {clock_mhz: self._energies(clock_mhz, share) for clock_mhz in self._visits}
        powers_w = self._powers_w(energies)
        return [
            self._row(clock_mhz, key, float(power_w[number]), energies[clock_mhz].power_error)
            for clock_mhz, power_w in sorted(powers_w.items())
            for number, key in enumerate(self._keys)
            if (clock_mhz, key) in self._ran and power_w[number] > 0
        ]

    def _row(self, clock_mhz: int, key: Key, power_w: float, power_error: float) -> MeasuredRow:
        typical = _typical(self._times_s(clock_mhz, key), self._spread(key).relative)
        share_beyond_blocking = 1 - min(1.0, self._blocking_power_w / power_w)
        energy_error = math.hypot(typical.error or 0.0, _LEAST_ERROR, share_beyond_blocking * power_error)
        quality = RowQuality(
            stage=key[0],
            kind=key[1],
            clock_mhz=clock_mhz,
            samples=sum(len(ran.times_s) for ran in self._ran[clock_mhz, key]),
            time_relative_error=typical.error,
            temperature_c=self._state[clock_mhz].temperature_c,
            power_state=self._state[clock_mhz].power_state,
            energy_relative_error=energy_error if energy_error < _UNKNOWN else None,
        )
        return MeasuredRow(Measurement(*key, clock_mhz, typical.time_s, power_w * typical.time_s), quality)

    def _powers_w(self, energies: dict[int, _Energies]) -> dict[int, Floats]:
        """Return the power of each key by clock, shape (keys,) [W]. Empty if nothing was computed.

        Common powers and ratios are estimated in turns, which converges quickly because both are close to their priors.
        """
        ratio = np.ones(len(self._keys))
        common_w: dict[int, float] = {}
        for _ in range(_TURNS):
            found_w = {clock: of.common_w(ratio, self._waiting_spread_w(clock)) for clock, of in energies.items()}
            common_w = {clock: power_w for clock, power_w in found_w.items() if power_w > 0}
            if not common_w:
                return {}
            ratio = self._ratio({clock: energies[clock].equations for clock in common_w}, common_w)
            if not ratio.any():
                return {}
        return {clock: self._at_clock(clock, energies[clock].equations, ratio * common_w[clock]) for clock in common_w}

    def _waiting_spread_w(self, clock_mhz: int) -> float:
        """Return the standard deviation of the power while waiting at a clock, around blocking power [W].

        Blocking power is that at default clocks. Some GPUs draw less of it at low clocks.
        """
        below_top = 1 - clock_mhz / max(self._visits)
        return max(1.0, self._blocking_power_w) * (_WAITING_SPREAD + _WAITING_SPREAD_AT_LOW_CLOCKS * below_top)

    def _ratio(self, equations: dict[int, _Equations], common_w: dict[int, float]) -> Floats:
        """Return the power beyond blocking power of each key relative to the others, for all clocks, shape (keys,).

        Waiting counts as blocking power here, because non-negative ratios say nothing about it.
        """
        spread = np.array([_RATIO_SPREAD[kind] for _, kind in self._keys])
        of_clocks = [found.coefficients[:, :-1] for found in equations.values()]
        relative_to_common = [found.beyond_w / common_w[clock] for clock, found in equations.items()]
        # Rows are the readings of all clocks, and a prior of 1 for each ratio. Shapes (rows, keys) and (rows,).
        matrix = np.vstack([*of_clocks, np.diag(1 / spread)])
        values = np.concatenate([*relative_to_common, 1 / spread])
        ratio, _ = nnls(matrix, values)
        return np.asarray(ratio)

    def _at_clock(self, clock_mhz: int, equations: _Equations, expected_w: Floats) -> Floats:
        """Return the power of each key at a clock, shape (keys,) [W].

        ``expected_w`` is the power of each key beyond blocking power, without its deviation at this clock.
        """
        spread = np.array([_DEVIATION_SPREAD[kind] for _, kind in self._keys])
        prior_w = np.append(expected_w, 0.0)
        spread_w = np.append(spread * np.maximum(expected_w, 1.0), self._waiting_spread_w(clock_mhz))
        error_w = float(expected_w.max())
        matrix = np.vstack([equations.coefficients / error_w, np.diag(1 / spread_w)])
        values = np.concatenate([equations.beyond_w / error_w, prior_w / spread_w])
        *beyond_w, _waiting_w = np.linalg.lstsq(matrix, values, rcond=None)[0]
        return np.asarray(self._blocking_power_w + np.maximum(beyond_w, 0.0))

    def _energies(self, clock_mhz: int, share: float) -> _Energies:
        if (clock_mhz, share) not in self._cache:
            energies = _Energies(
                self._visits[clock_mhz],
                self._keys,
                share,
                self._blocking_power_w,
                self._waiting_spread_w(clock_mhz),
            )
            self._cache[clock_mhz, share] = energies
        return self._cache[clock_mhz, share]

    def _share(self) -> float:
        """Return the share of its period in which the counter samples power, according to the residuals.

        Those of a single power for all keys suffice: a wrong share shifts whole instructions between intervals.
        """
        squares = dict.fromkeys(_SHARES, 0.0)
        for share in _SHARES:
            for clock_mhz in self._visits:
                squares[share] += float(np.sum(self._energies(clock_mhz, share).residuals_s ** 2))
        best = min(_SHARES, key=lambda share: squares[share])
        return best if squares[best] < _CLEARLY * squares[_ALWAYS] else _ALWAYS


def _weights(at_s: Floats, variance_rate_s: float) -> Floats:
    """Return the matrix that whitens the errors of readings and removes their common offset.

    Each reading has a random delay. Power varies between instructions, and the resulting deviation of the energy
    accumulates, so later readings include that of earlier ones.

    Returns:
        Weights, shape (readings, readings) [1/s].
    """
    accumulated_s2 = variance_rate_s * (np.minimum.outer(at_s, at_s) - at_s[0])
    factor = np.linalg.cholesky(accumulated_s2 + _DELAY_S**2 * np.eye(len(at_s)))
    weights = np.linalg.inv(factor)
    offset = weights.sum(axis=1)  # the whitened constant, which is projected out
    return np.asarray(weights - np.outer(offset, offset @ weights) / (offset @ offset))


def _undisturbed(
    readings: Sequence[tuple[float, float]], computed: Sequence[tuple[Span, Key]]
) -> list[list[tuple[float, float]]]:
    """Divide readings at intervals in which an instruction stalled, for example for its data, and leave these out.

    The GPU waited for most of a stalled instruction, so its power is not that of its key.
    """
    times_s: dict[Key, list[float]] = defaultdict(list)
    for span, key in computed:
        times_s[key].append(span.time_s)
    longest_s = {key: STALL * _usually_longest_s(own_s) for key, own_s in times_s.items()}
    stalled = [span for span, key in computed if span.time_s > longest_s[key]]
    parts = [[reading] for reading in readings[:1]]
    for before, after in itertools.pairwise(readings):
        if any(span.start_s < after[0] and span.end_s > before[0] for span in stalled):
            parts.append([])
        parts[-1].append(after)
    return [part for part in parts if len(part) >= 2]


def _usually_longest_s(times_s: Sequence[float]) -> float:
    """Return the time that few instructions of a key exceed [s], whose inputs may have different lengths."""
    return max(statistics.median(times_s), sorted(times_s)[int(_USUAL * (len(times_s) - 1))])


def _without_stalls(times_s: Sequence[float]) -> list[float]:
    longest_s = STALL * statistics.median(times_s)
    return [time_s for time_s in times_s if time_s <= longest_s]


class _Typical(NamedTuple):
    """A time [s] and its relative standard error, None if it is unknown."""

    time_s: float
    error: float | None


def _typical(by_iteration: Sequence[Sequence[float]], spread: float) -> _Typical:
    """Return the mean over iterations of their median time. Its error is None for fewer than three times.

    The error is that of the median of all times about those of their iterations, or that due to the ``spread`` between
    iterations, whichever is larger.
    """
    medians_s = [statistics.median(times_s) for times_s in by_iteration]
    mean_s = statistics.fmean(_without_stalls(medians_s))
    deviations_s = []
    for times_s, median_s in zip(by_iteration, medians_s, strict=True):
        deviations_s += [time_s - median_s for time_s in times_s]
    if len(deviations_s) < 3:
        return _Typical(mean_s, None)
    within = error_of_median(deviations_s, len(deviations_s)) / mean_s
    return _Typical(mean_s, max(within, spread / math.sqrt(len(medians_s))))


def chosen_power_w(before_training_w: float, bubbles: WaitingPower | None) -> tuple[float, str | None]:
    """Return the blocking power for plans [W], and a message if the measurements differ.

    They are the power while all ranks wait for one, and that in the bubbles of iterations, pooled over ranks.
    """
    if bubbles is None or abs(bubbles.power_w - before_training_w) <= _AGREES * before_training_w:
        return before_training_w, None
    if not before_training_w / _PLAUSIBLE <= bubbles.power_w <= before_training_w * _PLAUSIBLE:
        return before_training_w, None
    differ = (
        f"a waiting GPU draws {bubbles.power_w:.1f} +/- {2 * bubbles.error_w:.1f} W in the bubbles of iterations, and "
        f"{before_training_w:.1f} W where all ranks wait for one"
    )
    if abs(bubbles.power_w - before_training_w) > _SURE * bubbles.error_w:
        return bubbles.power_w, f"{differ}: plans are made for the former, the waiting that they replace"
    return before_training_w, f"{differ}: plans are made for the latter, as the former is not certain to differ"


def combine_rows(
    by_rank: Mapping[str, Iterable[MeasuredRow]], blocking_power_w: float
) -> tuple[list[MeasuredRow], dict[RowKey, list[str]]]:
    """Combine the rows of the ranks of a stage into one row for each key and clock.

    The time is that of the slowest rank, for which the others wait. The energy is the mean, including that of waiting.

    Returns:
        The rows, sorted by stage, kind and clock, and the omitted clocks, each with the ranks that lack its row.
    """
    by_key: dict[RowKey, list[MeasuredRow]] = defaultdict(list)
    measured: dict[Key, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, rows in by_rank.items():
        for row in rows:
            stage, kind, clock_mhz = row.measurement.stage, row.measurement.kind, row.measurement.clock_mhz
            by_key[stage, kind, clock_mhz].append(row)
            measured[stage, kind][rank].add(clock_mhz)
    incomplete = incomplete_clocks(measured)
    for key in incomplete:
        del by_key[key]
    combined = []
    for _, of_ranks in sorted(by_key.items()):
        slowest = max(of_ranks, key=lambda row: row.measurement.time_s)
        errors = [row.quality.energy_relative_error for row in of_ranks]
        found = [error for error in errors if error is not None]
        quality = {
            "samples": min(row.quality.samples for row in of_ranks),
            "energy_relative_error": math.hypot(*found) / len(found) if len(found) == len(of_ranks) else None,
        }
        measurement = combine_ranks([row.measurement for row in of_ranks])
        waited_s = statistics.mean(measurement.time_s - row.measurement.time_s for row in of_ranks)
        measurement = replace(measurement, energy_j=measurement.energy_j + blocking_power_w * waited_s)
        combined.append(MeasuredRow(measurement, slowest.quality.model_copy(update=quality)))
    return combined, incomplete
