"""Measures time and energy of instructions during training, with one clock per iteration.

Times are those of the instructions as they ran, on average over iterations. Inputs may differ in length: a time is
proportional to a power of the number of tokens, which is fitted to the iterations at each clock, and rows are those for
the same number of tokens at all clocks. How much iterations vary beyond that is estimated from all clocks together, and
is part of the error of a row.

Energies come from the energy counter: between two refreshes, the energy used is blocking power times the elapsed time,
plus the sum over all kinds of their power beyond blocking power times the time spent in them. The powers are estimated
by least squares over all refreshes at all clocks.

Blocking power, which a GPU draws while it waits for another one, is measured before training while all ranks wait for
one (:mod:`perseus_ds.client.meeting`), and in the bubbles of these iterations, pooled over ranks. Plans replace the
latter kind of waiting, but its power is less certain the less ranks wait. It is used if it differs significantly.
"""

from __future__ import annotations

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

# Error of the time of a refresh [s], and lower bound of the relative variation of power between instructions. A larger
# variation shows in the residuals.
_DELAY_S = 0.0006
_POWER_VARIATION = 0.02
# Relative variance of power between kinds, which is not an error of the counter. It is measured if there are more
# refreshes than unknown powers by this number.
_KIND_VARIATION, _ENOUGH_FREE = 0.1**2, 3
# Dividing the energy among kinds adds an error of about this size.
_LEAST_ERROR = 0.01
# Prior knowledge of power, as relative standard deviations: of the power while waiting from blocking power, of the
# kinds from each other at all clocks, and of a kind at one clock from its common ratio.
_WAITING_SPREAD = 0.1
_WAITING_SPREAD_AT_LOW_CLOCKS = 0.5
_KIND_SPREAD = {kind: 0.5 if kind is Kind.TAIL else 0.1 for kind in Kind}
_KIND_SPREAD_AT_A_CLOCK = {kind: 0.2 if kind is Kind.TAIL else 0.02 for kind in Kind}
# Relative distance from the highest clock within which waiting draws the same power as at default clocks, and largest
# condition number of solvable equations.
_NEAR_TOP, _DETERMINED = 0.1, 1e12
# Relative error above which it is reported as unknown.
_UNKNOWN = 1e3
# Share of its period in which a counter samples power: all of it, or only the last part (a quarter on A100 and H100,
# arXiv 2312.02741). A share below 1 is assumed only if it reduces the squared residuals by this factor.
_ALWAYS, _SHARES, _CLEARLY = 1.0, (1.0, 0.5, 0.25, 0.1), 0.5
# Number of repeated iterations after which it is known how much they vary.
_ENOUGH_REPEATED = 3
# Relative difference between blocking powers that is negligible, and number of standard errors above which a difference
# is significant.
_AGREES, _SURE = 0.03, 3.0


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement and its quality."""

    measurement: Measurement
    quality: RowQuality


@dataclass(frozen=True)
class _Part:
    """The instructions of consecutive iterations at one clock, and the refreshes of the energy counter."""

    computed: list[tuple[Span, Key]]
    moments_s: Floats
    energy_j: Floats

    def spent_s(self, keys: Sequence[Key], share: float) -> Floats:
        """Return the time spent in each kind and, last, outside of all kinds, between refreshes [s].

        ``share`` is the part of its period, at the end, in which the counter samples power.
        """
        passed_s, end_s = np.diff(self.moments_s), self.moments_s[1:]
        begin_s = end_s - share * passed_s
        spent_s = np.zeros((len(end_s), len(keys) + 1))
        for column, key in enumerate(keys):
            spans = sorted((span.start_s, span.end_s) for span, of in self.computed if of == key)
            if spans:
                spent_s[:, column] = (_spent_until_s(spans, end_s) - _spent_until_s(spans, begin_s)) / share
        spent_s[:, -1] = passed_s - spent_s.sum(axis=1)
        return spent_s


def _spent_until_s(spans: Sequence[tuple[float, float]], moments_s: Floats) -> Floats:
    """Return the time within sorted spans, which do not overlap, until each moment [s]."""
    bounds_s = np.array(spans)  # shape (spans, 2): start and end
    passed_s = np.cumsum(bounds_s[:, 1] - bounds_s[:, 0])
    at_bounds_s = np.column_stack([np.concatenate([[0.0], passed_s[:-1]]), passed_s])
    return np.asarray(np.interp(moments_s, bounds_s.ravel(), at_bounds_s.ravel()))


class _Refreshes:
    """Refreshes of the energy counter at one clock, for a given share of its period that it samples.

    Attributes:
        spent_s: For each part, seconds spent in each kind and, last, outside of all kinds, between refreshes.
        residuals_s: Deviation of the energies between refreshes from those if all kinds had the same power, expressed
            as time at that power [s].
    """

    def __init__(self, parts: Sequence[_Part], keys: Sequence[Key], share: float, blocking_power_w: float) -> None:
        self._parts = parts
        self._blocking_power_w = blocking_power_w
        self.spent_s = [part.spent_s(keys, share) for part in parts]
        spent_s = np.vstack(self.spent_s)
        used_j = np.concatenate([np.diff(part.energy_j - blocking_power_w * part.moments_s) for part in parts])
        columns = np.column_stack([spent_s[:, :-1].sum(axis=1), spent_s[:, -1]])
        # If refreshes cannot distinguish computing from waiting, this distributes the power over both, which
        # makes the relative residuals larger.
        power_w = np.linalg.lstsq(columns, used_j, rcond=None)[0]
        self.residuals_s: Floats = (used_j - columns @ power_w) / max(power_w[0], 1e-9)
        self._power_w, self._used_j = float(power_w[0]), used_j

    def _unexplained(self) -> float:
        """Return the mean square of deviations that differences between kinds do not explain [s²]."""
        spent_s, used_j = np.vstack(self.spent_s), self._used_j
        free = len(used_j) - int(np.linalg.matrix_rank(spent_s))
        if free >= _ENOUGH_FREE and self._power_w > 0:
            deviations_j = used_j - spent_s @ np.linalg.lstsq(spent_s, used_j, rcond=None)[0]
            return float(deviations_j @ deviations_j) / free / self._power_w**2
        computed_s = spent_s[:, :-1]
        shares = computed_s.sum(axis=0) / max(computed_s.sum(), 1e-9)
        unlike_s = computed_s - np.outer(computed_s.sum(axis=1), shares)
        return float(np.mean(self.residuals_s**2) - _KIND_VARIATION * np.mean(np.sum(unlike_s**2, axis=1)))

    @cached_property
    def variation_s(self) -> float:
        """Variance that the counted energy gains per second, relative to the power beyond blocking power [s].

        It is that of deviations which differences between kinds do not explain, but at least the natural variation
        between instructions.
        """
        least = _POWER_VARIATION**2 * statistics.mean(span.time_s for part in self._parts for span, _ in part.computed)
        if self._power_w <= 0:
            return least
        excess = self._unexplained() - 2 * _DELAY_S**2
        passed_s = np.concatenate([np.diff(part.moments_s) for part in self._parts])
        return max(least, excess / float(np.mean(passed_s)))

    @cached_property
    def power_error(self) -> float:
        """Relative error of the mean power beyond blocking power. Infinite if that power is not above 0."""
        if self._power_w <= 0:
            return math.inf
        spent_s = np.vstack(self.spent_s)
        computed_s = float(spent_s[:, :-1].sum())
        return math.sqrt(self.variation_s * spent_s.sum()) / computed_s if computed_s > 0 else math.inf

    @cached_property
    def equations(self) -> tuple[Floats, Floats]:
        """Linear equations, weighted so that their errors are about 1 times the power.

        The first array has the seconds spent in each kind and, last, outside of them, by refresh. The second has the
        energy beyond blocking power times the elapsed time [J].
        """
        spent, beyond = [], []
        for part, spent_s in zip(self._parts, self.spent_s, strict=True):
            seconds = np.cumsum(np.vstack([np.zeros(spent_s.shape[1]), spent_s]), axis=0)
            weight = _weights(part.moments_s, self.variation_s)
            spent.append(weight @ seconds)
            beyond.append(weight @ (part.energy_j - self._blocking_power_w * part.moments_s))
        return np.concatenate(spent), np.concatenate(beyond)

    def common_w(self, ratio: Floats, waiting_spread_w: float) -> float:
        """Return the power beyond blocking power of a kind with ratio 1 [W]. 0 if nothing ran."""
        spent_s, beyond_j = self.equations
        seconds = spent_s[:, :-1] @ ratio
        if not seconds.any():
            return 0.0
        scale = abs(float(seconds @ beyond_j / (seconds @ seconds))) + 1e-9
        matrix = np.vstack([np.column_stack([seconds, spent_s[:, -1]]) / scale, [[0.0, 1 / waiting_spread_w]]])
        return float(np.linalg.lstsq(matrix, np.append(beyond_j / scale, 0.0), rcond=None)[0][0])


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


class OnlineProfiler:
    """Collects iterations of one rank and computes rows from them."""

    def __init__(self, blocking_power_w: float) -> None:
        self._blocking_power_w = blocking_power_w
        self._keys: list[Key] = []
        self._state: dict[int, GpuState] = {}
        # By clock and kind, the relative size of the inputs of each iteration, and its times.
        self._ran: dict[tuple[int, Key], list[tuple[float, list[float]]]] = defaultdict(list)
        self._exponents: dict[Key, float] = {}
        self._seen: dict[int, list[_Part]] = defaultdict(list)
        # By clock and share. An entry stays valid until its clock is used again.
        self._known: dict[tuple[int, float], _Refreshes] = {}

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

        Instructions that began before the clock was reached are used only if there are no others of their kind.

        Args:
            clock_mhz: The clock.
            iterations: Operations of each iteration, on the same time axis as the readings.
            readings: Time [s] and value [J] of each refresh of the energy counter during the iterations.
            state: State of the GPU at the end.
            reached_s: Time at which the GPU reached the clock.
            sizes: Size of the inputs of each iteration, relative to that of the rows. By default, all are 1.
        """
        self._state[clock_mhz] = state
        computed: list[tuple[Span, Key]] = []
        # By kind and iteration, the times of instructions that began at the clock, and of the others.
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
            ran = [(sizes[number] if sizes else 1.0, times_s) for number, times_s in by_iteration.items()]
            self._ran[clock_mhz, key] += ran
        self._exponents = {key: self._exponent(key) for _, key in self._ran}
        keys = sorted({*self._keys, *taken_s})
        still_valid = [known for known in self._known if known[0] != clock_mhz and keys == self._keys]
        self._known = {known: self._known[known] for known in still_valid}
        self._keys = keys
        if len(readings) >= 2:
            moments, energy_j = np.array(readings).T
            self._seen[clock_mhz].append(_Part(computed, moments, energy_j))

    def power_error(self, clock_mhz: int) -> float:
        """Return the relative error of the mean power beyond blocking power at a clock, from the residuals."""
        return self._refreshes(clock_mhz, self._share()).power_error if clock_mhz in self._seen else math.inf

    def time_error(self, clock_mhz: int) -> float:
        """Return the relative error of times at a clock because iterations vary. Infinite if it is not known yet."""
        errors = []
        for clock, key in self._ran:
            if clock != clock_mhz or key[1] is Kind.TAIL:
                continue
            by_iteration = self._times_s(clock, key)
            variation, repeated = self._variation(key)
            if len(by_iteration) == 1 and repeated < _ENOUGH_REPEATED:
                return math.inf
            errors.append(variation / math.sqrt(len(by_iteration)))
        return statistics.fmean(errors) if errors else 0.0

    def _times_s(self, clock_mhz: int, key: Key) -> list[list[float]]:
        """Return the times of a kind in each iteration at a clock, as for inputs of the size of the rows [s]."""
        power = -self._exponents[key]
        return [[time_s * size**power for time_s in times_s] for size, times_s in self._ran[clock_mhz, key]]

    def _exponent(self, key: Key) -> float:
        """Return the power of the size to which the times of a kind are proportional."""
        by_clock = (ran for (_, of), ran in self._ran.items() if of == key)
        return exponent([(size, statistics.median(times_s)) for size, times_s in ran] for ran in by_clock)

    def _variation(self, key: Key) -> tuple[float, int]:
        """Return the relative variation of a kind between iterations at one clock, and the number of repetitions."""
        squares, repeated = 0.0, 0
        for clock_mhz, of in self._ran:
            if of == key:
                times_s = _without_stalls([statistics.median(own) for own in self._times_s(clock_mhz, key)])
                mean_s = statistics.fmean(times_s)
                squares += sum((time_s / mean_s - 1) ** 2 for time_s in times_s)
                repeated += len(times_s) - 1
        return math.sqrt(squares / repeated) if repeated else 0.0, repeated

    def use_blocking_power_w(self, power_w: float) -> None:
        """Compute rows from another blocking power [W]."""
        self._blocking_power_w = power_w
        self._known.clear()

    def waiting_power_w(self) -> WaitingPower | None:
        """Return the power of the GPU outside of instructions at clocks near the highest, without a prior for it.

        It is None if the GPU hardly waits.
        """
        share = self._share() if self._seen else _ALWAYS
        ratio = np.ones(len(self._keys))
        spread = np.array([_KIND_SPREAD[kind] for _, kind in self._keys])
        found, most_w = [], self._blocking_power_w
        for clock_mhz in (c for c in self._seen if c > (1 - _NEAR_TOP) * max(self._seen)):
            refreshes = self._refreshes(clock_mhz, share)
            common_w = refreshes.common_w(ratio, self._waiting_spread_w(clock_mhz))
            if common_w <= 0:
                continue
            spent_s, beyond_j = refreshes.equations
            prior = np.column_stack([np.diag(1 / spread), np.zeros(len(spread))]) / common_w
            matrix = np.vstack([spent_s / common_w, prior])
            values = np.concatenate([beyond_j / common_w, 1 / spread])
            information = matrix.T @ matrix
            if np.linalg.cond(information) < _DETERMINED:
                covariance = np.linalg.inv(information)
                beyond_w = float((covariance @ matrix.T @ values)[-1])
                found.append(WaitingPower(self._blocking_power_w + beyond_w, math.sqrt(covariance[-1, -1])))
                most_w = max(most_w, self._blocking_power_w + common_w)
        waiting = pooled(found)
        # A waiting GPU does not draw more than a computing one.
        return waiting if waiting is not None and 2 * waiting.error_w < waiting.power_w < most_w else None

    def rows(self) -> list[MeasuredRow]:
        """Return a row for each kind and clock for which the power could be estimated, in order of the clocks."""
        share = self._share()
        refreshes = {clock_mhz: self._refreshes(clock_mhz, share) for clock_mhz in self._seen}
        powers_w = self._powers_w(refreshes)
        return [
            self._row(clock_mhz, key, float(power_w[number]), refreshes[clock_mhz].power_error)
            for clock_mhz, power_w in sorted(powers_w.items())
            for number, key in enumerate(self._keys)
            if (clock_mhz, key) in self._ran and power_w[number] > 0
        ]

    def _row(self, clock_mhz: int, key: Key, power_w: float, power_error: float) -> MeasuredRow:
        by_iteration = self._times_s(clock_mhz, key)
        time_s, error = _typical(by_iteration, self._variation(key)[0])
        beyond = 1 - min(1.0, self._blocking_power_w / power_w)
        energy_error = math.hypot(error or 0.0, _LEAST_ERROR, beyond * power_error)
        quality = RowQuality(
            stage=key[0],
            kind=key[1],
            clock_mhz=clock_mhz,
            samples=sum(map(len, by_iteration)),
            time_relative_error=error,
            temperature_c=self._state[clock_mhz].temperature_c,
            power_state=self._state[clock_mhz].power_state,
            energy_relative_error=energy_error if energy_error < _UNKNOWN else None,
        )
        return MeasuredRow(Measurement(*key, clock_mhz, time_s, power_w * time_s), quality)

    def _powers_w(self, refreshes: dict[int, _Refreshes]) -> dict[int, Floats]:
        """Return the power of each kind at each clock [W].

        A few refreshes determine the common power of all kinds well, but their differences need many. So the ratios
        between kinds are estimated from all clocks together, and the power of a kind at one clock deviates from its
        ratio only as far as the refreshes at that clock require.
        """
        ratio = np.ones(len(self._keys))
        common_w: dict[int, float] = {}
        for _ in range(3):
            common_w = {c: w for c, r in refreshes.items() if (w := r.common_w(ratio, self._waiting_spread_w(c))) > 0}
            if not common_w:
                return {}
            ratio = self._ratio({c: refreshes[c] for c in common_w}, common_w)
            if not ratio.any():
                return {}
        return {
            c: self._at_clock(*refreshes[c].equations, ratio, w, self._waiting_spread_w(c)) for c, w in common_w.items()
        }

    def _waiting_spread_w(self, clock_mhz: int) -> float:
        """Return the standard deviation of power while waiting at default clocks from blocking power [W]."""
        below_top = 1 - clock_mhz / max(self._seen)
        return max(1.0, self._blocking_power_w) * (_WAITING_SPREAD + _WAITING_SPREAD_AT_LOW_CLOCKS * below_top)

    def _ratio(self, refreshes: dict[int, _Refreshes], common_w: dict[int, float]) -> Floats:
        """Return the power beyond blocking power of each kind relative to the others, for all clocks."""
        spread = np.array([_KIND_SPREAD[kind] for _, kind in self._keys])
        matrix = [found.equations[0][:, :-1] for found in refreshes.values()]
        values = [found.equations[1] / common_w[clock] for clock, found in refreshes.items()]
        return np.asarray(nnls(np.vstack([*matrix, np.diag(1 / spread)]), np.concatenate([*values, 1 / spread]))[0])

    def _at_clock(
        self, spent_s: Floats, beyond_j: Floats, ratio: Floats, common_w: float, waiting_spread_w: float
    ) -> Floats:
        expected_w = ratio * common_w
        spread = np.array([_KIND_SPREAD_AT_A_CLOCK[kind] for _, kind in self._keys])
        # Regularised towards the expected power of each kind, and towards blocking power outside of them.
        prior_w = np.append(expected_w, 0.0)
        spread_w = np.append(spread * np.maximum(expected_w, 1.0), waiting_spread_w)
        scale = float(expected_w.max())
        matrix = np.vstack([spent_s / scale, np.diag(1 / spread_w)])
        values = np.concatenate([beyond_j / scale, prior_w / spread_w])
        power_w = np.linalg.lstsq(matrix, values, rcond=None)[0]
        return np.asarray(self._blocking_power_w + np.maximum(power_w[:-1], 0.0))

    def _refreshes(self, clock_mhz: int, share: float) -> _Refreshes:
        if (clock_mhz, share) not in self._known:
            refreshes = _Refreshes(self._seen[clock_mhz], self._keys, share, self._blocking_power_w)
            self._known[clock_mhz, share] = refreshes
        return self._known[clock_mhz, share]

    def _share(self) -> float:
        """Return the share of its period in which the counter samples power, according to the residuals."""
        squares = {
            share: sum(float(np.sum(self._refreshes(clock, share).residuals_s ** 2)) for clock in self._seen)
            for share in _SHARES
        }
        best = min(_SHARES, key=lambda share: squares[share])
        return best if squares[best] < _CLEARLY * squares[_ALWAYS] else _ALWAYS


def _weights(moments_s: Floats, variation_s: float) -> Floats:
    """Return the matrix that whitens the errors of readings and removes their common offset.

    Each refresh is seen with a random delay. Power varies between instructions, and the resulting deviation of the
    energy accumulates, so later readings include that of earlier ones.
    """
    accumulated = variation_s * (np.minimum.outer(moments_s, moments_s) - moments_s[0])
    factor = np.linalg.cholesky(accumulated + _DELAY_S**2 * np.eye(len(moments_s)))
    weights = np.linalg.inv(factor)
    begin = weights.sum(axis=1)
    return np.asarray(weights - np.outer(begin, begin @ weights) / (begin @ begin))


def _without_stalls(times_s: Sequence[float]) -> list[float]:
    longest_s = STALL * statistics.median(times_s)
    return [time_s for time_s in times_s if time_s <= longest_s]


def _typical(by_iteration: Sequence[Sequence[float]], variation: float) -> tuple[float, float | None]:
    """Return the mean over iterations of their median time, and its relative standard error.

    ``variation`` is that between iterations. The error is None for fewer than three times.
    """
    medians_s = [statistics.median(times_s) for times_s in by_iteration]
    mean_s = statistics.fmean(_without_stalls(medians_s))
    deviations_s = [
        time_s - median_s for times_s, median_s in zip(by_iteration, medians_s, strict=True) for time_s in times_s
    ]
    if len(deviations_s) < 3:
        return mean_s, None
    within = error_of_median(deviations_s, len(deviations_s)) / mean_s
    return mean_s, max(within, variation / math.sqrt(len(medians_s)))


def chosen_power_w(alone_w: float, bubbles: WaitingPower | None) -> tuple[float, str | None]:
    """Return the blocking power for plans [W], and a message if the measurements differ.

    They are the power while all ranks wait for one, and that in the bubbles of iterations, pooled over ranks.
    """
    if bubbles is None or abs(bubbles.power_w - alone_w) <= _AGREES * alone_w:
        return alone_w, None
    differ = (
        f"a waiting GPU draws {bubbles.power_w:.1f} +/- {2 * bubbles.error_w:.1f} W in the bubbles of iterations, and "
        f"{alone_w:.1f} W where all ranks wait for one"
    )
    if abs(bubbles.power_w - alone_w) > _SURE * bubbles.error_w:
        return bubbles.power_w, f"{differ}: plans are made for the former, the waiting that they replace"
    return alone_w, f"{differ}: plans are made for the latter, as the former is not certain to differ"


def combine_rows(
    by_rank: Mapping[str, Iterable[MeasuredRow]], blocking_power_w: float
) -> tuple[list[MeasuredRow], dict[RowKey, list[str]]]:
    """Combine the rows of ranks that share a stage into one row for each kind and clock.

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
    for _, shared in sorted(by_key.items()):
        slowest = max(shared, key=lambda row: row.measurement.time_s)
        errors = [row.quality.energy_relative_error for row in shared]
        found = [error for error in errors if error is not None]
        quality = {
            "samples": min(row.quality.samples for row in shared),
            "energy_relative_error": math.hypot(*found) / len(found) if len(found) == len(shared) else None,
        }
        measurement = combine_ranks([row.measurement for row in shared])
        waited_s = statistics.mean(measurement.time_s - row.measurement.time_s for row in shared)
        measurement = replace(measurement, energy_j=measurement.energy_j + blocking_power_w * waited_s)
        combined.append(MeasuredRow(measurement, slowest.quality.model_copy(update=quality)))
    return combined, incomplete
