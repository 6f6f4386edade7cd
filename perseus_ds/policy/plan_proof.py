"""Tests whether a plan keeps its promise in the job.

The promise is kept if the slowdown is at most 1 % above the promised one, with less energy than at default clocks.
Blocks of iterations alternate between default clocks and the plan: D P D P D ... Each block under the plan is compared
with the blocks on both sides of it, so that a steady drift of the host cancels. Iterations that contain a stall
(``measures.py``) are excluded in all blocks, and a block ends when it has enough others. Its level is the median time
and the mean power of these. The uncertainty of the mean difference follows from the variation of the differences from
block to block, by Student's t, and so includes all disturbances of the job. At each of several interim analyses the
plan is:

- *dropped* if it is certain that it is late or uses more energy,
- *kept* if it is certain that it is in time and saves energy.

Once the slowdown is known to 0.7 % with 95 % confidence, and the saving is certain or known equally well to be at most
0.7 %, or once the maximum number of blocks has run, the estimate of the slowdown decides, and a saving that is not
certain counts as none. A larger saving that is known well but is not yet certain gets more blocks: in the later
comparisons of a job, certainty requires more of them.
For the error rates, see ``docs/plans-in-a-job.md`` and ``benchmarks/plan_proof.py``.

*Certain* means that all interim analyses of all comparisons of a job together err about lateness with a probability of
5 %, and the same holds for energy. The first comparison may spend half of this probability, and each later one half of
the remainder.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

from perseus_ds.artifacts.profile import Floats
from perseus_ds.measures import STALL, Typical
from perseus_ds.policy.reports import JobReport

ANALYSES = (2, 3, 4, 6, 9, 13, 19, 28, 40)
"""Numbers of blocks under the plan after which there is an interim analysis. The last one decides."""
BLOCK_ITERATIONS = 8
MOST_BLOCKS = 4
"""Maximum number of blocks at default clocks before a comparison. One may be sufficient."""
TOLERANCE = 0.01
"""Accepted lateness of a plan as a fraction, because clock changes take effect with a small delay."""
_KNOWN_ERROR = 0.007
# One-sided probabilities: that a known figure is wrong, and that a figure deviates by more than its stated error. In
# simulations, the latter contains the true value in 95 % of comparisons, which end when errors happen to be small.
_KNOWN, _STATED = 0.025, 0.0075
_ERROR_SPENT = 0.05
# Over less than a few seconds, energy counters are noisy.
_BLOCK_REFRESHES = 30
_SURE = 4.0
# If iterations are faster than promised by this fraction, default clocks may be faster than they were, too.
_FASTER = 0.03
_WELL_KNOWN = 0.03
# The counter changes within an iteration that lasts at least this number of its periods.
_SURELY_REFRESHED = 3


@dataclass
class IterationSample:
    """Consecutive iterations of the whole job, all at default clocks or all under the same plan.

    Attributes:
        counter_period_s: Time between refreshes of energy counters [s].
        promised_slowdown: Slowdown promised by the plan, relative to default clocks.
        promised_power: Power promised by the plan, relative to default clocks.
    """

    counter_period_s: float
    promised_slowdown: float = 0.0
    promised_power: float = 1.0
    times_s: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    _sorted_s: list[float] = field(default_factory=list)
    _total_s: float = 0.0
    _typical: Typical | None = None
    _mean: Typical | None = None

    @classmethod
    def joined(cls, blocks: Sequence[IterationSample]) -> IterationSample:
        """Return the iterations of several blocks."""
        found = cls(blocks[0].counter_period_s)
        for block in blocks:
            for time_s, energy_j in zip(block.times_s, block.energies_j, strict=True):
                found.add(time_s, energy_j)
        return found

    def add(self, time_s: float, energy_j: float) -> None:
        """Add an iteration."""
        self.times_s.append(time_s)
        self.energies_j.append(energy_j)
        bisect.insort(self._sorted_s, time_s)
        self._total_s += time_s
        self._typical = self._mean = None

    def _without_stalls(self) -> tuple[int, float]:
        """Return the number of iterations without stalls, and their total time [s]."""
        if not self._sorted_s:
            return 0, 0.0
        longest_s = STALL * self._sorted_s[len(self._sorted_s) // 2]
        iterations = bisect.bisect_right(self._sorted_s, longest_s)
        return iterations, self._total_s - sum(self._sorted_s[iterations:])

    def add_reports(self, reports: JobReport) -> None:
        """Add an iteration that all ranks have reported.

        It is omitted if a rank had fallen back, could not read its energy counter, or had a counter that did not
        change.
        """
        is_stuck = reports.time_s > _SURELY_REFRESHED * self.counter_period_s and not reports.least_energy_j > 0
        if math.isfinite(reports.energy_j) and not (is_stuck or reports.failed):
            self.add(reports.time_s, reports.energy_j)

    @property
    def is_enough(self) -> bool:
        """True if time and energy are known well enough, or the maximum number of blocks has run."""
        return self.is_as_long_as(MOST_BLOCKS) or (self.is_as_long_as(1) and self.typical.energy_error < _WELL_KNOWN)

    def remaining_s(self, iteration_s: float, more: int = 0, blocks: int = 1) -> float:
        """Return the approximate time until the iterations amount to a number of blocks [s].

        ``more`` is the number of iterations before the next one is added.
        """
        counted, counted_s = self._without_stalls()
        iterations = max(0, blocks * BLOCK_ITERATIONS - counted) * iteration_s
        rest_s = blocks * _BLOCK_REFRESHES * self.counter_period_s - counted_s
        return max(iterations, rest_s, 0.0) + more * iteration_s

    @property
    def typical(self) -> Typical:
        """A typical iteration."""
        if self._typical is None:
            self._typical = Typical.of(self.times_s, self.energies_j, counter_period_s=self.counter_period_s)
        assert self._typical is not None, "there are iterations"
        return self._typical

    @property
    def mean(self) -> Typical:
        """The mean iteration, with which sums of iterations can be compared."""
        if self._mean is None:
            self._mean = Typical.mean_of(self.times_s, self.energies_j)
        assert self._mean is not None, "there are iterations"
        return self._mean

    @property
    def time_s(self) -> float:
        return self.typical.time_s

    @property
    def power_w(self) -> float:
        return self.typical.power_w or 0.0

    @property
    def energy_j(self) -> float:
        return self.typical.energy_j or 0.0

    def is_as_long_as(self, blocks: int, in_flight_s: float = 0.0) -> bool:
        """Return True if the iterations without stalls amount to a number of blocks, by number and time.

        Time and power of one block are known to about a percent. ``in_flight_s`` is the approximate time of an
        iteration that will be added but is not yet reported [s], 0 for none.
        """
        counted, counted_s = self._without_stalls()
        is_long = counted_s + in_flight_s >= blocks * _BLOCK_REFRESHES * self.counter_period_s
        iterations = counted + (in_flight_s > 0)
        return is_long and iterations >= blocks * BLOCK_ITERATIONS and any(self.energies_j)


def under_plan_minus_default(levels: Floats) -> tuple[Floats, Floats]:
    """Return the mean difference of planned blocks from the adjacent default ones, and its standard error.

    ``levels`` has shape (..., blocks). Blocks alternate, the first and the last are at default clocks.
    """
    default, planned = levels[..., ::2], levels[..., 1::2]
    differences: Floats = planned - (default[..., :-1] + default[..., 1:]) / 2
    blocks = differences.shape[-1]
    # Neighbouring differences share a block at default clocks. If each level has the variance v, differences have the
    # variance 1.5 v, neighbours the covariance v / 4, and the mean has v (1 / blocks + (blocks - 1 / 2) / blocks²).
    variance = differences.var(axis=-1, ddof=1) / (1.5 - 0.5 / blocks)
    error: Floats = np.sqrt(variance * (1 / blocks + (blocks - 0.5) / blocks**2))
    return np.mean(differences, axis=-1), error


def error_probability(comparisons: int) -> float:
    """Return the error probability of an interim analysis about lateness, and the same about energy.

    ``comparisons`` is the number of comparisons of the job before this one.
    """
    return _ERROR_SPENT / 2.0 ** (min(comparisons, 40) + 1) / len(ANALYSES)


@dataclass(frozen=True)
class PlanComparison:
    """Comparison of iterations under a plan with iterations at default clocks of the same job.

    Attributes:
        slowdown: Additional time under the plan, as a fraction of the time at default clocks.
        slowdown_error: Its standard error.
        saved: Energy saved by the plan, as a fraction of the energy at default clocks.
        saved_error: Its standard error.
        freedom: Degrees of freedom of the errors.
    """

    slowdown: float
    slowdown_error: float
    saved: float
    saved_error: float
    promised_slowdown: float = 0.0
    promised_saved: float = 0.0
    freedom: float = math.inf

    @classmethod
    def of_blocks(cls, blocks: Sequence[IterationSample]) -> PlanComparison:
        """Compare alternating blocks, of which the first and the last are at default clocks.

        Blocks may have different plans, if the policy changes them. Each is compared with its own promise, and the
        result is their mean.
        """
        promised = np.array([(math.log1p(b.promised_slowdown), math.log(b.promised_power)) for b in blocks]).T
        times, powers = np.log([(block.time_s, block.power_w) for block in blocks]).T - promised
        late, time_error = under_plan_minus_default(times)
        beyond, energy_error = under_plan_minus_default(times + powers)
        promised_time, promised_power = map(float, promised[:, 1::2].mean(axis=1))
        return cls.of_logarithms(
            float(late) + promised_time,
            float(time_error),
            float(beyond) + promised_time + promised_power,
            float(energy_error),
            promised=(promised_time, promised_power),
            freedom=len(blocks) // 2 - 1,
        )

    @classmethod
    def of_samples(cls, default: IterationSample, planned: IterationSample) -> PlanComparison:
        """Compare iterations under a plan with earlier ones at default clocks."""
        return cls.of_logarithms(
            math.log(planned.time_s / default.time_s),
            math.hypot(default.typical.time_error, planned.typical.time_error),
            math.log(planned.energy_j / default.energy_j),
            math.hypot(default.typical.energy_error, planned.typical.energy_error),
            promised=(math.log1p(planned.promised_slowdown), math.log(planned.promised_power)),
        )

    @classmethod
    def of_logarithms(
        cls,
        time: float,
        time_error: float,
        energy: float,
        energy_error: float,
        *,
        promised: tuple[float, float],
        freedom: float = math.inf,
    ) -> PlanComparison:
        """Return the comparison with given natural logarithms of the ratios of time and energy, and their errors.

        ``promised`` has the logarithms of the ratios of time and power that the plan promises.
        """
        time_ratio, energy_ratio = math.exp(time), math.exp(energy)
        return cls(
            slowdown=time_ratio - 1,
            slowdown_error=time_ratio * time_error,
            saved=1 - energy_ratio,
            saved_error=energy_ratio * energy_error,
            promised_slowdown=math.expm1(promised[0]),
            promised_saved=-math.expm1(sum(promised)),
            freedom=freedom,
        )

    def standard_errors(self, probability: float) -> float:
        """Return the number of standard errors exceeded with this probability, by Student's t."""
        return float(stdtrit(self.freedom, 1 - probability))

    @property
    def stated_errors(self) -> tuple[float, float]:
        """Errors of slowdown and saving that the true values exceed in at most 5 % of comparisons."""
        wide = self.standard_errors(_STATED)
        return wide * self.slowdown_error, wide * self.saved_error

    @property
    def late(self) -> float:
        """Time beyond the promised time, as a fraction of the promised time."""
        return (1 + self.slowdown) / (1 + self.promised_slowdown) - 1

    def is_small(self, error: float) -> bool:
        """Return True if an estimate with this standard error decides, even if it is not certain."""
        return self.standard_errors(_KNOWN) * error <= _KNOWN_ERROR

    @property
    def saves_little(self) -> bool:
        """True if the saving is known well and is small, so that more blocks will hardly make it certain."""
        return self.is_small(self.saved_error) and self.saved <= _KNOWN_ERROR

    def is_late(self, sure: float) -> bool:
        """Return True if the promised time is certainly exceeded, given the number of standard errors."""
        return self.slowdown - sure * self.slowdown_error > self.promised_slowdown + TOLERANCE

    def is_in_time(self, sure: float) -> bool:
        """Return True if the promised time is certainly kept, given the number of standard errors."""
        return self.slowdown + sure * self.slowdown_error <= self.promised_slowdown + TOLERANCE

    def uses(self, sure: float) -> int:
        """Return -1 or 1 if iterations certainly use less or more energy than at default clocks, otherwise 0."""
        return 0 if abs(self.saved) <= sure * self.saved_error else -int(math.copysign(1, self.saved))

    @property
    def is_in_doubt(self) -> bool:
        """True if iterations after an earlier comparison require another one, because the promise is not kept."""
        is_faster = self.slowdown < self.promised_slowdown - _FASTER - _SURE * self.slowdown_error
        return is_faster or self.is_late(_SURE) or self.uses(_SURE) > 0


@dataclass(frozen=True)
class Verdict:
    """Decision of a comparison: whether the plan is kept, or dropped because iterations take longer than promised."""

    comparison: PlanComparison
    kept: bool
    is_late: bool
    reason: str

    @classmethod
    def of(cls, comparison: PlanComparison, probability: float, *, is_last: bool) -> Verdict | None:
        """Return the decision of an interim analysis. None if more blocks are needed.

        ``probability`` is that with which it may err about lateness, and the same about energy.
        """
        sure = comparison.standard_errors(probability)
        uses = comparison.uses(sure)
        kept = is_late = False
        if comparison.is_late(sure):
            is_late, reason = True, "it takes longer than promised"
        elif uses > 0:
            reason = "it uses more energy"
        elif comparison.is_in_time(sure) and uses < 0:
            kept, reason = True, "it is in time and saves energy"
        elif not is_last and not (comparison.is_small(comparison.slowdown_error) and (uses or comparison.saves_little)):
            return None
        elif comparison.slowdown > comparison.promised_slowdown + TOLERANCE:
            is_late, reason = True, "it seems to take longer than promised"
        elif uses == 0:
            reason = "it saves no energy that could be measured"
        else:
            kept, reason = True, "it seems to be in time, and saves energy"
        return cls(comparison, kept, is_late, reason)


class PlanProof:
    """One comparison of a plan with default clocks, with the probability from :func:`error_probability`.

    Attributes:
        blocks: Blocks so far, with an even index at default clocks, with an odd one under the plan.
        verdict: The decision. None while there is none.
    """

    def __init__(self, probability: float) -> None:
        self.blocks: list[IterationSample] = []
        self.verdict: Verdict | None = None
        self._probability = probability

    @property
    def next_is_planned(self) -> bool:
        """True if the next block is under the plan."""
        return len(self.blocks) % 2 == 1

    @property
    def blocks_to_analysis(self) -> int:
        """Number of blocks until the next interim analysis."""
        planned = (len(self.blocks) - 1) // 2
        return 2 * next((pairs for pairs in ANALYSES if pairs > planned), ANALYSES[-1]) + 1 - len(self.blocks)

    def add(self, block: IterationSample) -> None:
        """Add the next block, and decide if an interim analysis is due."""
        is_analysed = self.blocks_to_analysis == 1
        self.blocks.append(block)
        if is_analysed:
            is_last = len(self.blocks) // 2 == ANALYSES[-1]
            self.verdict = Verdict.of(PlanComparison.of_blocks(self.blocks), self._probability, is_last=is_last)
