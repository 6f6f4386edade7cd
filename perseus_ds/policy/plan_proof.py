"""Whether a plan saves energy on the job it runs in: iterations under it against iterations at default clocks."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from perseus_ds.artifacts.rank_report import RankReports

# Windows of the energy counter below some seconds are noisy: this many refreshes, and at least so many iterations.
_REFRESHES = 60
_LEAST_ITERATIONS = 8
# A result within its error is measured for up to this many times as long.
_MOST_TIMES_AS_LONG = 4
# The begin and the end of a window are each known to a uniformly distributed part of a refresh.
_REFRESH_ERROR = math.sqrt(2 / 12)
_SURE = 2.0
# Clocks follow a little late, for which a promise makes no allowance.
_TIME_TOLERANCE = 0.01


@dataclass
class IterationSample:
    """Consecutive iterations of the whole job, all run alike.

    Attributes:
        counter_period_s: How often energy counters are refreshed [s].
        times_s: Iteration times [s].
        energies_j: Energies of all GPUs [J].
        shapes: What tells the shapes of their inputs from those of others.
    """

    counter_period_s: float
    times_s: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    shapes: set[tuple[float, ...]] = field(default_factory=set)

    def add(self, time_s: float, energy_j: float) -> None:
        """Add an iteration."""
        self.times_s.append(time_s)
        self.energies_j.append(energy_j)

    def add_reports(self, reports: RankReports) -> None:
        """Add an iteration that all ranks have reported."""
        self.shapes.add(reports.shapes)
        self.add(float(reports.column("time_s").max()), float(reports.column("energy_j").sum()))

    def has_other_shapes(self, reports: RankReports) -> bool:
        """Whether an iteration cannot be compared with these, its inputs being of other shapes."""
        return len(self.shapes) == 1 and reports.shapes not in self.shapes

    @property
    def varies_in_shape(self) -> bool:
        """Whether these iterations have inputs of several shapes."""
        return len(self.shapes) > 1

    @property
    def is_enough(self) -> bool:
        """Whether time and energy are known well enough to be compared."""
        return self._is_as_long_as(1)

    @property
    def is_most(self) -> bool:
        """Whether more iterations are no longer worth waiting for."""
        return self._is_as_long_as(_MOST_TIMES_AS_LONG)

    @property
    def time_s(self) -> float:
        """A typical iteration time [s]; a median, since single iterations may be held up."""
        return statistics.median(self.times_s)

    @property
    def energy_j(self) -> float:
        """Energy of a typical iteration [J]: the mean power times the typical time."""
        return sum(self.energies_j) / sum(self.times_s) * self.time_s

    @property
    def time_error(self) -> float:
        """Relative standard error of the typical time."""
        spread = 1.25 * statistics.stdev(self.times_s) if len(self.times_s) > 1 else math.inf
        return spread / math.sqrt(len(self.times_s)) / self.time_s

    @property
    def energy_error(self) -> float:
        """Relative standard error of the energy."""
        return math.hypot(self.time_error, _REFRESH_ERROR * self.counter_period_s / sum(self.times_s))

    def _is_as_long_as(self, times: int) -> bool:
        is_long = sum(self.times_s) >= times * _REFRESHES * self.counter_period_s
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
    def is_sure(self) -> bool:
        """Whether the energy differs from that at default clocks by more than the error."""
        return abs(self.saved) > _SURE * self.saved_error

    @property
    def wins(self) -> bool:
        """Whether the plan keeps its promise of time, and saves energy for sure."""
        return self.saved > 0 and self.is_sure and not self.is_late

    def __str__(self) -> str:
        return (
            f"{-self.saved:+.1%} energy (± {self.saved_error:.1%}) at {self.slowdown:+.1%} time "
            f"(± {self.slowdown_error:.1%}; promised {self.promised_slowdown:+.1%})"
        )
