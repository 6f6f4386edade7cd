"""Defines the time and energy of an iteration and its saving compared with default clocks.

The log, ``watch``, ``control status``, metrics, ``compare``, the report and the demo's table take their figures from
this module, which computes them from the job's records:

- An iteration *counts* unless it is the first one after a start or after a change of phase or plan, because its clocks
  may still be the previous ones, or a rank had fallen back to default clocks.
- An iteration contains a *stall* if it took more than 1.5 times the median of its series, such as one in which a
  checkpoint was written. It is left out, because waiting takes less power, so a stall would look like a saving.
- The *typical* iteration of a series has the median time of those without stalls, because single iterations may be
  delayed. Its energy is their mean power multiplied by that time, because energy counters are refreshed so rarely that
  the reading of a short iteration is too large or zero.
- The *mean* iteration of a series, also without stalls, is used where sums of iterations are compared with default
  clocks: times are skewed, so that their mean is up to some per cent above their median.
- The *baseline* of a plan is the series of iterations at default clocks with which its verdict compared it. Without a
  verdict, it is the longest series at default clocks of this run or another run of the same job: preferably in
  observe mode or for a comparison, otherwise while plans were computed, otherwise in the warm-up. A series of fewer
  than five iterations is used only if the profile has no prediction for default clocks.
- A prediction of the profile is not a baseline while passes deviate from the profile by more than ``max_drift``.
  Iterations under plans then have none in their records.
- The *saving of the whole job* compares what iterations took under plans and while the profile was measured with what
  default clocks take, as the iterations under plans recorded it: as measured in the job, also for iterations before
  that measurement, and as predicted by the profile only if they were never measured. All others run at default
  clocks: they add to the job's total, and save nothing. Default clocks are those of the mean iteration. Iterations
  under plans that contain a stall are not compared: these took more than 1.5 times the median at default clocks,
  multiplied by the slowdown that is predicted for the plan.
- *Power over a second* is the mean power of the fewest consecutive whole iterations that take at least a second: the
  power within an iteration is unknown. With an energy counter that is refreshed every 100 ms, the power of a GPU
  over one second has an error of 4 %.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

from perseus_ds.artifacts.run_records import (
    IterationRecord,
    OrderPlanned,
    PlanJudged,
    ProfileWritten,
    Record,
    Started,
    WholeSummary,
    is_training_iteration,
)

AT_DEFAULT_CLOCKS: Mapping[str, str] = {
    "observe": "in observe mode",
    "default": "measured for the comparison",
    "optimizing": "while plans were computed",
    "warm-up": "while it warmed up",
}
"""The phases at default clocks, and how to describe the iterations of each."""
# Computing plans uses processor time. In the warm-up, ranks wait for each other before the tail, unlike in an ordinary
# iteration.
_LAST_CHOICES = ("optimizing", "warm-up")
_LEAST_MEASURED = 5
_MOST_KEPT = 2000
"""Maximum length of a series; of a longer one, only the last iterations are kept."""
STALL = 1.5
"""An iteration that takes more than this many times the median of its series contains a stall."""
_PARTS = 8
_SECOND_S = 1.0


@dataclass(frozen=True)
class Typical:
    """The typical iteration of a series that ran under the same conditions.

    Attributes:
        iterations: Number of iterations in the series, with and without stalls.
        power_w: Power of all GPUs [W], or None if no energy could be read.
        time_error: Relative standard error of the time; likewise of the power.
    """

    iterations: int
    time_s: float
    power_w: float | None
    time_error: float = 0.0
    power_error: float = 0.0

    @classmethod
    def of(
        cls, times_s: Sequence[float], energies_j: Sequence[float | None], *, counter_period_s: float = 0.0
    ) -> Typical | None:
        """Return the typical iteration of a series, or None if the series is empty.

        Energies are those of all GPUs [J], None for those that could not be read. The refresh period of the counters
        [s] adds to the error.
        """
        if not times_s:
            return None
        found = _without_stalls(times_s, energies_j)
        time_s = statistics.median(one_s for one_s, _ in found)
        time_error = error_of_median([one_s - time_s for one_s, _ in found], len(found)) / time_s
        known = [(one_s, one_j) for one_s, one_j in found if one_j is not None]
        power_w = _power_w(known) if known else None
        power_error = _power_error(known, power_w, counter_period_s) if power_w else 0.0
        return cls(len(times_s), time_s, power_w, time_error, power_error)

    @classmethod
    def mean_of(cls, times_s: Sequence[float], energies_j: Sequence[float | None]) -> Typical | None:
        """Return the mean iteration of a series instead, with which sums can be compared. None if it is empty."""
        typical = cls.of(times_s, energies_j)
        if typical is None:
            return None
        kept_s = [one_s for one_s, _ in _without_stalls(times_s, energies_j)]
        time_s = statistics.fmean(kept_s)
        return replace(typical, time_s=time_s, time_error=statistics.pstdev(kept_s) / math.sqrt(len(kept_s)) / time_s)

    @property
    def energy_j(self) -> float | None:
        return None if self.power_w is None else self.power_w * self.time_s

    @property
    def energy_error(self) -> float:
        return math.hypot(self.time_error, self.power_error)


def _without_stalls(times_s: Sequence[float], energies_j: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """Return times and energies of the iterations without stalls."""
    longest_s = STALL * statistics.median(times_s)
    return [(one_s, one_j) for one_s, one_j in zip(times_s, energies_j, strict=True) if one_s <= longest_s]


def sums_by_part(sums: Sequence[float], parts: Sequence[float]) -> list[float]:
    """Return the elementwise sum of two sequences, of which the shorter one is padded with zeros."""
    if len(sums) == len(parts):
        return list(map(operator.add, sums, parts))
    return [total + part for total, part in itertools.zip_longest(sums, parts, fillvalue=0.0)]


def error_of_median(deviations: Iterable[float], samples: int) -> float:
    """Return a robust estimate of the standard error of the median of that number of samples."""
    return 1.25 * 1.4826 * statistics.median(map(abs, deviations)) / math.sqrt(samples)


def _power_w(known: Iterable[tuple[float, float]]) -> float:
    times_s, energies_j = zip(*known, strict=True)
    return float(sum(energies_j) / sum(times_s))


def _power_error(known: Sequence[tuple[float, float]], power_w: float, counter_period_s: float) -> float:
    """Return the relative standard error of the mean power.

    It is estimated from the mean powers of the parts of the window.
    """
    # The begin and the end of the window each have a uniformly distributed error of up to one refresh of the counter.
    by_refresh = math.sqrt(2 / 12) * counter_period_s / sum(time_s for time_s, _ in known)
    size = len(known) // _PARTS
    if not size:
        return by_refresh
    cuts = [number * size for number in range(_PARTS)] + [len(known)]
    powers_w = [_power_w(known[begin:end]) for begin, end in itertools.pairwise(cuts)]
    spread = statistics.stdev(powers_w) / math.sqrt(_PARTS) / power_w
    # A part ends when the next one begins, so late refreshes add to the spread of the parts but not to the total.
    return max(by_refresh, math.sqrt(max(0.0, spread**2 - _PARTS * by_refresh**2)))


class PowerFigures(NamedTuple):
    """Power of all GPUs over a second, as defined at the top of this module.

    ``change_w`` is the largest change from one second to the next, and ``window_s`` the mean length of these seconds,
    which consist of whole iterations.
    """

    mean_w: float
    highest_w: float
    lowest_w: float
    change_w: float
    window_s: float


class PowerBySecond:
    """The power over each second of a job, or of the last ones."""

    def __init__(self, most: int | None = None) -> None:
        # Time, energy, and whether it follows the previous second without a gap.
        self._seconds: deque[tuple[float, float, bool]] = deque(maxlen=most)
        self._time_s = self._energy_j = 0.0
        self._ended: float | None = None
        self._follows = False

    def add(self, time_s: float, energy_j: float | None, ended: float | None) -> None:
        """Add an iteration, of which energy and end [Unix seconds] may be unknown."""
        is_apart = ended is not None and self._ended is not None and ended - time_s - self._ended > _SECOND_S
        self._ended = ended
        if energy_j is None or is_apart:
            self._time_s, self._energy_j, self._follows = 0.0, 0.0, False
        if energy_j is None:
            return
        self._time_s, self._energy_j = self._time_s + time_s, self._energy_j + energy_j
        if self._time_s >= _SECOND_S:
            self._seconds.append((self._time_s, self._energy_j, self._follows))
            self._time_s, self._energy_j, self._follows = 0.0, 0.0, True

    @property
    def figures(self) -> PowerFigures | None:
        """The figures of the kept seconds, or None if there are fewer than two."""
        if len(self._seconds) < 2:
            return None
        times_s, energies_j, follow = zip(*self._seconds, strict=True)
        powers_w = [energy_j / time_s for time_s, energy_j in zip(times_s, energies_j, strict=True)]
        pairs = zip(itertools.pairwise(powers_w), follow[1:], strict=True)
        change_w = max((abs(b - a) for (a, b), follows in pairs if follows), default=0.0)
        mean_w, window_s = sum(energies_j) / sum(times_s), sum(times_s) / len(times_s)
        return PowerFigures(mean_w, max(powers_w), min(powers_w), change_w, window_s)


@dataclass(frozen=True)
class Baseline:
    """Iterations at default clocks with which other iterations are compared.

    Attributes:
        phase: The phase in which they ran, or None if the profile predicts them.
        run: The name of the run that they belong to, or None for the same run.
        is_of_each: Whether iterations of orders are each compared with their own; ``typical`` is their mean.
    """

    typical: Typical
    phase: str | None = None
    run: str | None = None
    is_of_each: bool = False

    @property
    def is_measured(self) -> bool:
        return self.phase is not None

    @property
    def is_enough(self) -> bool:
        return self.typical.iterations >= _LEAST_MEASURED

    def __str__(self) -> str:
        if self.phase is None:
            return "default clocks, by the profile"
        if self.is_of_each:
            return "default clocks, as measured in this job for the same order"
        run = "this job" if self.run is None else f"run {self.run}"
        return f"default clocks, {self.typical.iterations} iterations of {run} {AT_DEFAULT_CLOCKS[self.phase]}"


class IterationKind(NamedTuple):
    """The order of iterations, by which they have their own plans and default clocks."""

    order: int = 0

    @classmethod
    def of(cls, record: IterationRecord) -> IterationKind:
        return cls(record.order or 0)


class StableKind(NamedTuple):
    """Identifies a kind of iterations over all starts of a job, as in ``KindSummary``."""

    micro_batches: int | None
    order: int


@dataclass(frozen=True)
class Measured:
    """Iterations under a plan, compared with their baseline.

    Attributes:
        plan: The plan's index on the frontier, or None for all plans of a kind other than the first.
        ran: Number of iterations under the plan, including those that do not count.
    """

    plan: int | None
    kind: IterationKind
    ran: int
    typical: Typical
    baseline: Baseline

    @property
    def slowdown(self) -> float:
        """Increase of the iteration time, as a fraction of the baseline's time."""
        return self.typical.time_s / self.baseline.typical.time_s - 1

    @property
    def slowdown_error(self) -> float:
        return (1 + self.slowdown) * math.hypot(self.typical.time_error, self.baseline.typical.time_error)

    @property
    def saved(self) -> float | None:
        """Decrease of the iteration's energy, as a fraction of the baseline's energy."""
        energy_j, default_j = self.typical.energy_j, self.baseline.typical.energy_j
        return 1 - energy_j / default_j if energy_j is not None and default_j else None

    @property
    def saved_error(self) -> float | None:
        if self.saved is None:
            return None
        return (1 - self.saved) * math.hypot(self.typical.energy_error, self.baseline.typical.energy_error)

    @property
    def saving(self) -> Saving | None:
        """The saving of all ``ran`` iterations, or None if their energy is unknown."""
        ours, theirs = self.typical, self.baseline.typical
        if ours.energy_j is None or not theirs.energy_j:
            return None
        return Saving(1, ours.time_s, ours.energy_j, theirs.time_s, theirs.energy_j).times(self.ran)


@dataclass(frozen=True)
class Saving:
    """Time and energy of a number of typical iterations of the whole job, and of their baseline."""

    iterations: int
    time_s: float
    energy_j: float
    default_s: float
    default_j: float

    def __add__(self, other: Saving) -> Saving:
        return Saving(*map(operator.add, astuple(self), astuple(other)))

    def times(self, iterations: int) -> Saving:
        """Return the saving scaled to another number of iterations."""
        _, *figures = astuple(self)
        return Saving(iterations, *(iterations / self.iterations * figure for figure in figures))

    @property
    def saved_j(self) -> float:
        return self.default_j - self.energy_j

    @property
    def saved(self) -> float:
        """Energy saved, as a fraction of the energy at default clocks."""
        return self.saved_j / self.default_j

    @property
    def gained_s(self) -> float:
        """Time saved compared with default clocks [s], negative if the iterations took longer."""
        return self.default_s - self.time_s

    @property
    def slowdown(self) -> float:
        """Increase of the time, as a fraction of the time at default clocks."""
        return self.time_s / self.default_s - 1


@dataclass
class _Sums:
    iterations: int = 0
    known: int = 0  # those with a known energy
    time_s: float = 0.0
    energy_j: float = 0.0

    def add(self, record: IterationRecord) -> None:
        self.iterations += 1
        self.time_s += record.time_s
        if record.energy_j is not None:
            self.known += 1
            self.energy_j += record.energy_j

    def compared(self, default_s: float, default_j: float) -> tuple[float, float]:
        return self.iterations * default_s - self.time_s, self.known * default_j - self.energy_j


@dataclass
class _Uncompared:
    """Iterations of one kind for which default clocks have not been measured yet.

    Attributes:
        all: Sums over these iterations.
        profiled: Sums over those without default clocks by the profile, which the next one under a plan has.
        gained_s, saved_j: Saving of the others according to the profile.
        is_predicted: Whether the profile predicts default clocks, which it no longer does if passes have deviated.
    """

    all: _Sums = field(default_factory=_Sums)
    profiled: _Sums = field(default_factory=_Sums)
    gained_s: float = 0.0
    saved_j: float = 0.0
    is_predicted: bool = False

    def forget_predicted(self) -> None:
        """Forget what was compared with the profile, because passes deviate from it."""
        self.gained_s = self.saved_j = 0.0
        self.is_predicted = False


class WholeJob:
    """Sums up the saving of the whole job from its iterations, in order."""

    def __init__(self) -> None:
        self._steps = self._stalls = 0
        self._time_s = self._energy_j = self._gained_s = self._saved_j = 0.0
        self._uncompared: defaultdict[IterationKind, _Uncompared] = defaultdict(_Uncompared)
        self._is_measured = False

    def add(self, record: IterationRecord) -> None:
        self._steps += 1
        self._time_s += record.time_s
        self._energy_j += record.energy_j or 0.0
        kind, default_s, default_j = IterationKind.of(record), record.default_time_s, record.default_energy_j
        if default_s is None or default_j is None or record.stall_s is None:
            if record.phase == "profile":
                self._uncompared[kind].all.add(record)
                self._uncompared[kind].profiled.add(record)
            elif record.phase == "run" and record.plan is not None:
                self._uncompared[kind].all.add(record)
                self._uncompared[kind].forget_predicted()
            return
        waiting = self._uncompared[kind]
        if record.time_s > record.stall_s:
            self._stalls += 1
        else:
            waiting.all.add(record)
            waiting.profiled.add(record)
        if record.default_measured:
            gained_s, saved_j = self._uncompared.pop(kind).all.compared(default_s, default_j)
            self._gained_s, self._saved_j = self._gained_s + gained_s, self._saved_j + saved_j
            self._is_measured = True
        else:
            gained_s, saved_j = waiting.profiled.compared(default_s, default_j)
            waiting.gained_s, waiting.saved_j = waiting.gained_s + gained_s, waiting.saved_j + saved_j
            waiting.profiled = _Sums()
            waiting.is_predicted = True

    @property
    def saving(self) -> WholeSummary | None:
        """The saving so far, or None before an iteration could be compared."""
        is_compared = self._is_measured or any(one.is_predicted for one in self._uncompared.values())
        if not is_compared or not self._energy_j:
            return None
        gained_s = self._gained_s + sum(one.gained_s for one in self._uncompared.values())
        saved_j = self._saved_j + sum(one.saved_j for one in self._uncompared.values())
        return WholeSummary(
            steps=self._steps,
            saved_j=saved_j,
            saved=saved_j / (self._energy_j + saved_j),
            gained_s=gained_s,
            gained=gained_s / (self._time_s + gained_s),
            stalls=self._stalls,
        )


class _Series:
    """The last iterations that count, of those that ran under the same conditions."""

    def __init__(self) -> None:
        self.ran = 0
        self._times_s: deque[float] = deque(maxlen=_MOST_KEPT)
        self._energies_j: deque[float | None] = deque(maxlen=_MOST_KEPT)
        self._typical: Typical | None = None
        self._mean: Typical | None = None

    def add(self, time_s: float, energy_j: float | None) -> None:
        self._times_s.append(time_s)
        self._energies_j.append(energy_j)
        self._typical = self._mean = None

    @property
    def typical(self) -> Typical | None:
        if self._typical is None:
            self._typical = Typical.of([*self._times_s], [*self._energies_j])
        return self._typical

    @property
    def mean(self) -> Typical | None:
        if self._mean is None:
            self._mean = Typical.mean_of([*self._times_s], [*self._energies_j])
        return self._mean


def _preference(baseline: Baseline) -> tuple[bool, int, int]:
    """Return the sort key by which a series at default clocks is preferred."""
    choice = _LAST_CHOICES.index(baseline.phase) + 1 if baseline.phase in _LAST_CHOICES else 0
    return baseline.is_enough, -choice, baseline.typical.iterations


class JobMeasures:
    """Times, energies and savings of a job, computed from its records in order.

    ``frontier`` identifies the frontier to which the plans of the next records belong.
    """

    def __init__(self) -> None:
        self._default: dict[str, _Series] = {phase: _Series() for phase in AT_DEFAULT_CLOCKS}
        # By plan of the first kind of iterations, or by kind.
        self._plans: defaultdict[int | IterationKind, _Series] = defaultdict(_Series)
        self._verdicts: dict[int | None, Baseline] = {}
        self._is_judged = False  # whether any plan of the frontier, also of other kinds and under limits
        self._compared = _Series()
        self._predicted: Baseline | None = None
        # The mean of the predictions at default clocks, of each kind but the first.
        self._kinds: dict[IterationKind, Baseline] = {}
        # The totals under plans of earlier frontiers.
        self._planned_before: Counter[StableKind] = Counter()
        self._saved_before: dict[StableKind, Saving] = {}
        self._micro_batches: dict[int, int | None] = {}
        # Phase, plan and limits of the last iteration of each kind.
        self._last: dict[IterationKind, tuple[str, int | None, bool]] = {}
        self.frontier: tuple[str | None, int] = None, 0
        # Whether GPUs were limited in the last iteration.
        self._is_limited = False
        self._frontier_of_plans: tuple[str | None, int] | None = None

    def add(self, record: Record) -> bool:
        """Add a record and return whether it is an iteration that counts."""
        if isinstance(record, IterationRecord):
            return is_training_iteration(record) and self._add_iteration(record)
        if isinstance(record, Started):
            self._last.clear()
            self.frontier = record.frontier, self.frontier[1]
            self._number_order(0, record.micro_batches)
        elif isinstance(record, OrderPlanned) and not record.given_up:
            self._number_order(record.order, record.micro_batches)
        elif isinstance(record, ProfileWritten) and not record.order:
            self.frontier = self.frontier[0], self.frontier[1] + 1
        elif isinstance(record, PlanJudged):
            self._is_judged = True
            if not (self._is_limited or record.order):
                self._add_verdict(record.plan)
        return False

    def _number_order(self, order: int, micro_batches: int | None) -> None:
        """Set the number of micro-batches of an order.

        A resumed job numbers orders anew, so a number may then identify another order.
        """
        if self._micro_batches.setdefault(order, micro_batches) != micro_batches:
            self._keep_savings()
            self._micro_batches[order] = micro_batches
            self.frontier = self.frontier[0], self.frontier[1] + 1

    def _keep_savings(self) -> None:
        """Keep the savings of plans with numbers that are no longer valid."""
        self._planned_before, self._saved_before = Counter(self.planned_by_kind()), self.saving_by_kind()
        self._plans.clear()
        self._verdicts.clear()
        self._is_judged = False
        self._kinds.clear()
        self._predicted = None

    def _add_iteration(self, record: IterationRecord) -> bool:
        # Each order has its own plans, which alternate, and its own default clocks to compare with. The same applies to
        # limits of GPUs.
        kind = IterationKind.of(record)
        is_relative = any(kind) or record.limited
        self._is_limited = record.limited
        conditions = record.phase, None if is_relative else record.plan, is_relative
        counts = conditions == self._last.get(kind) and not record.failed_ranks
        self._last[kind] = conditions
        if record.phase in self._default:
            if counts and not (record.limited or record.order):
                self._default[record.phase].add(record.time_s, record.energy_j)
                if record.phase == "default":
                    self._compared.add(record.time_s, record.energy_j)
        elif record.phase == "run" and record.plan is not None:
            self._add_planned(record, record.plan if not is_relative else kind, counts=counts)
        return counts

    def _add_planned(self, record: IterationRecord, plan: int | IterationKind, *, counts: bool) -> None:
        if self._frontier_of_plans != self.frontier:  # plan numbers are valid for one frontier only
            self._frontier_of_plans = self.frontier
            self._keep_savings()
        default_s, default_j = record.default_time_s, record.default_energy_j
        series = self._plans[plan]
        if isinstance(plan, IterationKind):
            if counts and default_s and default_j:
                series.add(record.time_s / default_s, None if record.energy_j is None else record.energy_j / default_j)
                self._add_default(plan, default_s, default_j, is_measured=record.default_measured)
        else:
            if counts:
                series.add(record.time_s, record.energy_j)
            if default_s and default_j:
                self._predicted = Baseline(Typical(1, default_s, default_j / default_s))
            else:
                self._predicted = None
        series.ran += 1

    def _add_default(self, kind: IterationKind, default_s: float, default_j: float, *, is_measured: bool) -> None:
        """Add what an iteration takes at default clocks, measured or predicted."""
        known = self._kinds[kind].typical if kind in self._kinds else Typical(0, 0.0, 0.0)
        iterations = known.iterations + 1
        time_s = known.time_s + (default_s - known.time_s) / iterations
        known_j = known.energy_j or 0.0
        energy_j = known_j + (default_j - known_j) / iterations
        typical = Typical(iterations, time_s, energy_j / time_s)
        self._kinds[kind] = Baseline(typical, "default" if is_measured else None, is_of_each=True)

    def _add_verdict(self, plan: int | None) -> None:
        typical = self._compared.typical
        if typical is not None and typical.energy_j:
            self._verdicts[plan] = Baseline(typical, "default")
            self._compared = _Series()
        elif self.verdict is not None:
            self._verdicts[plan] = self.verdict

    def longest_at_default_clocks(self) -> Baseline | None:
        """Return the preferred series at default clocks of known energy, or None if there is none."""
        found = [
            Baseline(series.typical, phase)
            for phase, series in self._default.items()
            if series.typical is not None and series.typical.energy_j
        ]
        return max(found, key=_preference, default=None)

    @property
    def verdict(self) -> Baseline | None:
        """The baseline of the last verdict, or None if there was none."""
        return [*self._verdicts.values()][-1] if self._verdicts else None

    def is_undecided(self, baseline: Baseline) -> bool:
        """Return whether a saving against this baseline precedes the first complete comparison with default clocks."""
        return not self._is_judged and baseline.phase != "observe"

    def baseline(self, plan: int | None = None, others: Mapping[str, JobMeasures] | None = None) -> Baseline | None:
        """Return the baseline of iterations under a plan, from this run or other runs of the job, by name."""
        if (found := self._verdicts.get(plan) or self.verdict) is not None:
            return found
        candidates = [self.longest_at_default_clocks()]
        for name, other in (others or {}).items():
            theirs = other.verdict or other.longest_at_default_clocks()
            candidates.append(theirs and replace(theirs, run=name))
        measured = [one for one in candidates if one is not None]
        longest = max(measured, key=_preference, default=None)
        if longest is None or (not longest.is_enough and self._predicted is not None):
            return self._predicted
        return longest

    def plan(self, plan: int | IterationKind, others: Mapping[str, JobMeasures] | None = None) -> Measured | None:
        """Return the iterations under a plan of the current frontier, or of a kind that has its own plans.

        None if no iteration counts or there is no baseline.
        """
        series = self._plans.get(plan)
        if series is None or series.typical is None or series.mean is None:
            return None
        if not isinstance(plan, IterationKind):
            baseline = self.baseline(plan, others)
            if baseline is None:
                return None
            # Records of iterations under plans contain means at default clocks.
            typical = series.mean if baseline is self._predicted else series.typical
            return Measured(plan, IterationKind(), series.ran, typical, baseline)
        if plan not in self._kinds:
            return None
        # The figures are relative to the default clocks of each iteration.
        relative, default = series.mean, self._kinds[plan].typical
        power_w = relative.power_w and default.power_w and relative.power_w * default.power_w
        typical = replace(relative, time_s=relative.time_s * default.time_s, power_w=power_w)
        return Measured(None, plan, series.ran, typical, self._kinds[plan])

    def of(self, record: IterationRecord) -> tuple[Measured | None, Baseline | None]:
        """Return the iterations that ran under the same plans as one of them, and their baseline."""
        kind = IterationKind.of(record)
        if any(kind) or record.limited:
            return self.plan(kind), self._kinds.get(kind)
        return self.plan(record.plan or 0), self.baseline(record.plan)

    def plans(self, others: Mapping[str, JobMeasures] | None = None) -> list[Measured]:
        """Return the iterations under each plan, in the order in which the plans first ran."""
        found = (self.plan(plan, others) for plan in self._plans)
        return [one for one in found if one is not None]

    def typical_of_plans(self) -> dict[int, Typical]:
        """Return the typical iteration under each plan, independent of any baseline."""
        found = ((plan, series.typical) for plan, series in self._plans.items())
        return {plan: typical for plan, typical in found if not isinstance(plan, IterationKind) and typical is not None}

    @property
    def planned(self) -> int:
        return sum(self.planned_by_kind().values())

    def saving(self, others: Mapping[str, JobMeasures] | None = None) -> Saving | None:
        """Return the saving of all iterations under plans, also of earlier frontiers, or None if it is unknown."""
        found = [*self.saving_by_kind(others).values()]
        return sum(found[1:], found[0]) if found else None

    def planned_by_kind(self) -> dict[StableKind, int]:
        """Return the number of iterations of each kind that ran under plans."""
        found = self._planned_before.copy()
        for plan, series in self._plans.items():
            found[self.stable_kind(plan if isinstance(plan, IterationKind) else IterationKind())] += series.ran
        return dict(found)

    def saving_by_kind(self, others: Mapping[str, JobMeasures] | None = None) -> dict[StableKind, Saving]:
        """Return the saving of the planned iterations of each kind for which it is known."""
        found = dict(self._saved_before)
        for measured in self.plans(others):
            if (saving := measured.saving) is not None:
                kind = self.stable_kind(measured.kind)
                found[kind] = found[kind] + saving if kind in found else saving
        return found

    def stable_kind(self, kind: IterationKind) -> StableKind:
        """Return the identifier of a kind over all starts of a job, each of which numbers orders anew."""
        micro_batches = self._micro_batches.get(kind.order)
        return StableKind(micro_batches, kind.order if micro_batches is None else 0)
