"""Whether a plan saves energy on the job it runs in: iterations under it against iterations at default clocks."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from perseus_ds.artifacts.rank_report import JobReport

# Windows of the energy counter below some seconds are noisy: this many refreshes, and at least so many iterations.
_REFRESHES = 60
_LEAST_ITERATIONS = 8
# A result within its error is looked at again when the sample is this many times as long. Only then: whoever looks
# after each iteration finds a difference by chance sooner or later.
_LOOKS = (1, 2, 4)
# The begin and the end of a window are each known to a uniformly distributed part of a refresh.
_REFRESH_ERROR = math.sqrt(2 / 12)
_BLOCKS = 8
_SURE = 3.0
# Clocks follow a little late, for which a promise makes no allowance.
_TIME_TOLERANCE = 0.01
# Default clocks are measured again only for a clear gain of time.
_FASTER = 0.03
_WELL_KNOWN = 0.01
_COMES_AGAIN = 3
# The counter changes within an iteration that takes as long as so many refreshes.
_SURELY_REFRESHED = 3


@dataclass
class IterationSample:
    """Consecutive iterations of the whole job, all run alike.

    Attributes:
        counter_period_s: How often energy counters are refreshed [s].
        times_s: Iteration times [s].
        energies_j: Energies of all GPUs [J].
        shapes: How often they had which inputs, by what tells their shapes from others.
    """

    counter_period_s: float
    times_s: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    shapes: Counter[float] = field(default_factory=Counter)
    _total_s: float = 0.0

    def add(self, time_s: float, energy_j: float) -> None:
        """Add an iteration."""
        self.times_s.append(time_s)
        self.energies_j.append(energy_j)
        self._total_s += time_s

    def add_reports(self, reports: JobReport) -> None:
        """Add an iteration that all ranks have reported.

        Not one in which a rank had fallen back, could not read its energy counter, or whose counter stood still.
        """
        stands_still = reports.time_s > _SURELY_REFRESHED * self.counter_period_s and not reports.least_energy_j > 0
        if math.isfinite(reports.energy_j) and not (stands_still or reports.failed):
            self.shapes[reports.shapes] += 1
            self.add(reports.time_s, reports.energy_j)

    def has_other_shapes(self, reports: JobReport) -> bool:
        """Whether an iteration cannot be compared with these, its inputs being of other shapes."""
        return len(self.shapes) == 1 and reports.shapes not in self.shapes

    def has_shapes_beside(self, reports: JobReport) -> bool:
        """Whether the inputs of these and an iteration are not all of one shape."""
        return self.varies_in_shape or self.has_other_shapes(reports)

    @property
    def mixes_shapes(self) -> bool:
        """Whether they have inputs of several shapes, at least one of which comes again and again."""
        return self.varies_in_shape and max(self.shapes.values()) >= max(_COMES_AGAIN, len(self.times_s) / 10)

    @property
    def varies_in_shape(self) -> bool:
        """Whether these iterations have inputs of several shapes."""
        return len(self.shapes) > 1

    @property
    def looks(self) -> int:
        """How many of the lengths it has reached at which a comparison may be made; 3 at most, 0 without energies."""
        return sum(map(self._is_as_long_as, _LOOKS)) if any(self.energies_j) else 0

    @property
    def is_enough(self) -> bool:
        """Whether time and energy are known well enough to compare plans with them."""
        return self.is_longest or (self.looks > 0 and self.energy_error < _WELL_KNOWN)

    @property
    def is_longest(self) -> bool:
        """Whether more iterations are no longer worth waiting for."""
        return self.looks == len(_LOOKS)

    def remaining_s(self, iteration_s: float, more: int = 0) -> float:
        """Return about how long it takes until the next look [s].

        Args:
            iteration_s: A typical iteration time [s].
            more: Iterations until the first one is added.
        """
        times = _LOOKS[min(self.looks, len(_LOOKS) - 1)]
        iterations = max(0, times * _LEAST_ITERATIONS - len(self.times_s)) * iteration_s
        return max(iterations, times * _REFRESHES * self.counter_period_s - self._total_s, 0.0) + more * iteration_s

    @property
    def time_s(self) -> float:
        """A typical iteration time [s]; a median, since single iterations may be held up."""
        return statistics.median(self.times_s)

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs [W]."""
        return sum(self.energies_j) / self._total_s

    @property
    def energy_j(self) -> float:
        """Energy of a typical iteration [J]: the mean power times the typical time."""
        return self.power_w * self.time_s

    @property
    def time_error(self) -> float:
        """Relative standard error of the typical time; from the median deviation, which no single iteration decides."""
        deviation_s = statistics.median(abs(time_s - self.time_s) for time_s in self.times_s)
        return 1.25 * 1.4826 * deviation_s / math.sqrt(len(self.times_s)) / self.time_s

    @property
    def power_error(self) -> float:
        """Relative standard error of the mean power: from the parts of the window, and not below the counter's."""
        size = len(self.times_s) // _BLOCKS
        cuts = [number * size for number in range(_BLOCKS)] + [len(self.times_s)]
        parts = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
        powers_w = [sum(self.energies_j[part]) / sum(self.times_s[part]) for part in parts]
        spread = statistics.stdev(powers_w) / math.sqrt(_BLOCKS) / self.power_w
        # The end of a part is the begin of the next one: refreshes that are seen late make parts differ, not the whole.
        by_refresh = _REFRESH_ERROR * self.counter_period_s / self._total_s
        return max(by_refresh, math.sqrt(max(0.0, spread**2 - _BLOCKS * by_refresh**2)))

    @property
    def energy_error(self) -> float:
        """Relative standard error of the energy."""
        return math.hypot(self.time_error, self.power_error)

    def _is_as_long_as(self, times: int) -> bool:
        is_long = self._total_s >= times * _REFRESHES * self.counter_period_s
        return is_long and len(self.times_s) >= times * _LEAST_ITERATIONS


@dataclass(frozen=True)
class Comparison:
    """Iterations under a plan against iterations at default clocks, both measured in the same job.

    Attributes:
        slowdown: How much longer they took, as a fraction of the time at default clocks.
        slowdown_error: Its standard error.
        saved: How much less energy they used, as a fraction of the energy at default clocks.
        saved_error: Its standard error.
        promised_slowdown: The slowdown by the profile.
    """

    slowdown: float
    slowdown_error: float
    saved: float
    saved_error: float
    promised_slowdown: float

    @classmethod
    def of(cls, default: IterationSample, planned: IterationSample, promised_slowdown: float) -> Comparison:
        """Compare two samples."""
        time_ratio, energy_ratio = planned.time_s / default.time_s, planned.energy_j / default.energy_j
        return cls(
            slowdown=time_ratio - 1,
            slowdown_error=time_ratio * math.hypot(default.time_error, planned.time_error),
            saved=1 - energy_ratio,
            saved_error=energy_ratio * math.hypot(default.energy_error, planned.energy_error),
            promised_slowdown=promised_slowdown,
        )

    @property
    def is_late(self) -> bool:
        """Whether iterations took longer than promised, beyond doubt."""
        return self.slowdown > self.promised_slowdown + _TIME_TOLERANCE + _SURE * self.slowdown_error

    @property
    def is_faster(self) -> bool:
        """Whether iterations were much faster than promised: default clocks may be faster than they were, too."""
        return self.slowdown < self.promised_slowdown - _FASTER - _SURE * self.slowdown_error

    @property
    def is_sure(self) -> bool:
        """Whether the energy differs from that at default clocks by more than the error."""
        return abs(self.saved) > _SURE * self.saved_error

    @property
    def loses(self) -> bool:
        """Whether the plan is late or takes more energy, beyond doubt."""
        return self.is_late or (self.is_sure and self.saved < 0)

    @property
    def wins(self) -> bool:
        """Whether the plan keeps its promise of time, and saves energy for sure."""
        return self.saved > 0 and self.is_sure and not self.is_late

    @property
    def draws_less(self) -> bool:
        """Whether mean power is lower than at default clocks, beyond doubt."""
        return self._power_ratio < 1 - self._power_doubt

    @property
    def draws_more(self) -> bool:
        """Whether mean power is higher than at default clocks, beyond doubt."""
        return self._power_ratio > 1 + self._power_doubt

    @property
    def _power_ratio(self) -> float:
        return (1 - self.saved) / (1 + self.slowdown)

    @property
    def _power_doubt(self) -> float:
        return _SURE * math.hypot(self.saved_error, self.slowdown_error)

    def __str__(self) -> str:
        return (
            f"{-self.saved:+.1%} energy (+/- {self.saved_error:.1%}) at {self.slowdown:+.1%} time "
            f"(+/- {self.slowdown_error:.1%}; promised {self.promised_slowdown:+.1%})"
        )


def is_kept(comparison: Comparison, *, caps_power: bool) -> bool:
    """Return whether a plan is kept: it saves energy in time, or keeps power down under a policy that asks for it."""
    return comparison.draws_less if caps_power else comparison.wins


def is_in_doubt(comparison: Comparison, *, caps_power: bool) -> bool:
    """Return whether default clocks have to be measured again: a plan no longer wins, or all may be faster."""
    no_longer_wins = comparison.draws_more if caps_power else comparison.loses
    return no_longer_wins or comparison.is_faster
