"""Whether a plan keeps its promise on the job it runs in: at most 1 % above the slowdown it promises, on less energy.

Blocks of iterations alternate between default clocks and the plan: D P D P D ... Each block under the plan is compared
with the blocks on both sides of it, so that a steady drift of the host cancels. Iterations that contain a stall are set
aside on both sides (``measures.py``); a block counts once enough others have run. Its level is the median time and the
mean power of these. How far the differences vary from block to block says how uncertain their mean is, by Student's t:
whatever disturbs the job is in there. At each of several interim analyses the plan is:

- *dropped* once it is certain that it is late or uses more energy,
- *kept* once it is certain that it is in time and saves energy.

Once the slowdown is known to 0.7 % at 95 %, and the saving is certain or known as well, or the most blocks have run,
the estimate of the slowdown decides, and savings that are not certain by then count as none. How often that is wrong:
``docs/plans-in-a-job.md``, ``benchmarks/plan_proof.py``.

*Certain* means that all interim analyses of all comparisons of a job err about lateness with a probability of 5 %
together, and about energy as well: the first comparison may spend half of it, each later one half of what is left.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.measures import STALL, Typical
from perseus_ds.policy.reports import JobReport

ANALYSES = (2, 3, 4, 6, 9, 13, 19, 28, 40)
"""After how many blocks under the plan there is an interim analysis; the last one decides."""
BLOCK_ITERATIONS = 8
MOST_BLOCKS = 4
"""Of iterations at default clocks before a comparison, which may be known well enough after one."""
TOLERANCE = 0.01
"""How much later than promised a plan may be, as a fraction: clocks follow a little late."""
_KNOWN_ERROR = 0.007
# One-sided probabilities: that what is known is not so; and that a figure is off by more than its stated error, which
# by simulation contains the truth in 95 % of comparisons, since these end when errors happen to be small.
_KNOWN, _STATED = 0.025, 0.0075
_ERROR_SPENT = 0.05
# Energy counters make windows below some seconds noisy.
_BLOCK_REFRESHES = 30
_SURE = 4.0
# Iterations that are faster by this fraction than promised: default clocks may be faster than they were, too.
_FASTER = 0.03
_WELL_KNOWN = 0.03
_COMES_AGAIN = 3
# The counter changes within an iteration that takes as long as so many refreshes.
_SURELY_REFRESHED = 3

Numbers = npt.NDArray[np.float64]


@dataclass
class IterationSample:
    """Consecutive iterations of the whole job, all run alike.

    Attributes:
        counter_period_s: How often energy counters are refreshed [s].
        times_s: Iteration times [s].
        energies_j: Energies of all GPUs [J].
        promised_slowdown: Of the plan that they ran, against default clocks; 0 at default clocks.
        promised_power: Of the plan that they ran, relative to default clocks; 1 at default clocks.
        shapes: How often they had which inputs, by what tells their shapes from others.
    """

    counter_period_s: float
    promised_slowdown: float = 0.0
    promised_power: float = 1.0
    times_s: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    shapes: Counter[float] = field(default_factory=Counter)
    _sorted_s: list[float] = field(default_factory=list)
    _total_s: float = 0.0
    _typical: Typical | None = None

    @classmethod
    def joined(cls, blocks: Sequence[IterationSample]) -> IterationSample:
        """Return the iterations of several blocks."""
        found = cls(blocks[0].counter_period_s, shapes=sum((block.shapes for block in blocks), Counter()))
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
        self._typical = None

    def _without_stalls(self) -> tuple[int, float]:
        """Return the number of iterations without stalls, and how long they took together [s]."""
        if not self._sorted_s:
            return 0, 0.0
        longest_s = STALL * self._sorted_s[len(self._sorted_s) // 2]
        iterations = bisect.bisect_right(self._sorted_s, longest_s)
        return iterations, self._total_s - sum(self._sorted_s[iterations:])

    def add_reports(self, reports: JobReport) -> None:
        """Add an iteration that all ranks have reported.

        Not one in which a rank had fallen back, could not read its energy counter, or whose counter stood still. Where
        the lengths of its micro-batches are known, time and energy are those of an iteration of the profile's length.
        """
        stands_still = reports.time_s > _SURELY_REFRESHED * self.counter_period_s and not reports.least_energy_j > 0
        is_known = math.isfinite(reports.energy_j) and math.isfinite(reports.relative_time)
        if is_known and not (stands_still or reports.failed):
            self.shapes[reports.shapes] += 1
            self.add(reports.time_s / reports.relative_time, reports.energy_j / reports.relative_energy)

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
    def is_enough(self) -> bool:
        """Whether time and energy are known to a percent, or more iterations are no longer worth waiting for."""
        return self.is_as_long_as(MOST_BLOCKS) or (self.is_as_long_as(1) and self.energy_error < _WELL_KNOWN)

    def remaining_s(self, iteration_s: float, more: int = 0, blocks: int = 1) -> float:
        """Return about how long it takes until they are as many and as long as so many blocks [s].

        Args:
            iteration_s: A typical iteration time [s].
            more: Iterations until the first one is added.
            blocks: How many blocks.
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
    def time_s(self) -> float:
        """A typical iteration time [s]."""
        return self.typical.time_s

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs [W]."""
        return self.typical.power_w or 0.0

    @property
    def energy_j(self) -> float:
        """Energy of a typical iteration [J]."""
        return self.typical.energy_j or 0.0

    @property
    def time_error(self) -> float:
        """Relative standard error of the typical time."""
        return self.typical.time_error

    @property
    def energy_error(self) -> float:
        """Relative standard error of the energy."""
        return self.typical.energy_error

    def is_as_long_as(self, blocks: int, in_flight_s: float = 0.0) -> bool:
        """Whether those without stalls are as many and as long as so many blocks.

        Time and power of one block are known to about a percent.

        Args:
            blocks: How many.
            in_flight_s: About how long an iteration takes that is to be added, but is not reported yet [s]; 0 for none.
        """
        counted, counted_s = self._without_stalls()
        is_long = counted_s + in_flight_s >= blocks * _BLOCK_REFRESHES * self.counter_period_s
        iterations = counted + (in_flight_s > 0)
        return is_long and iterations >= blocks * BLOCK_ITERATIONS and any(self.energies_j)


def under_plan_minus_default(levels: Numbers) -> tuple[Numbers, Numbers]:
    """Return by how much blocks under the plan differ from those at default clocks on both sides, and the error.

    Args:
        levels: Of the blocks, which alternate, the first and the last at default clocks; shape (..., blocks).

    Returns:
        The mean difference, and its standard error, by how far the differences vary.
    """
    default, planned = levels[..., ::2], levels[..., 1::2]
    differences: Numbers = planned - (default[..., :-1] + default[..., 1:]) / 2
    blocks = differences.shape[-1]
    # Neighbouring differences share a block at default clocks: where levels vary by v each, differences do by 1.5 v,
    # by v / 4 of it together, and their mean by v (1 / blocks + (blocks - 1 / 2) / blocks²).
    variance = differences.var(axis=-1, ddof=1) / (1.5 - 0.5 / blocks)
    error: Numbers = np.sqrt(variance * (1 / blocks + (blocks - 0.5) / blocks**2))
    return np.mean(differences, axis=-1), error


def error_probability(comparisons: int) -> float:
    """Return the probability with which an interim analysis may err about lateness, and about energy.

    Args:
        comparisons: How many comparisons of the job there were before this one.
    """
    return _ERROR_SPENT / 2.0 ** (min(comparisons, 40) + 1) / len(ANALYSES)


@dataclass(frozen=True)
class PlanComparison:
    """Iterations under a plan against iterations at default clocks, both measured in the same job.

    Attributes:
        slowdown: How much longer they took, as a fraction of the time at default clocks.
        slowdown_error: Its standard error.
        saved: How much less energy they used, as a fraction of the energy at default clocks.
        saved_error: Its standard error.
        promised_slowdown: The slowdown that the plan promises.
        promised_saved: The saving that it promises.
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
        """Compare blocks that alternate; the first and the last are at default clocks.

        Those under plans may be under several, as policies ask for them: each is held to its own promise, and the
        result is the mean of them.
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
        """Compare iterations under a plan with others at default clocks that may be long ago."""
        return cls.of_logarithms(
            math.log(planned.time_s / default.time_s),
            math.hypot(default.time_error, planned.time_error),
            math.log(planned.energy_j / default.energy_j),
            math.hypot(default.energy_error, planned.energy_error),
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
        """Return the comparison of which the natural logarithms of the ratios of time and energy are known.

        Args:
            time: Of the ratio of times.
            time_error: Standard error of that, and of the slowdown relative to the ratio.
            energy: Of the ratio of energies.
            energy_error: Relative standard error of that.
            promised: Of the ratios of time and power that the plan promises.
            freedom: Degrees of freedom of the errors.
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
        """Return the number of standard errors that a figure exceeds only with this probability, by Student's t."""
        return float(stdtrit(self.freedom, 1 - probability))

    @property
    def stated_errors(self) -> tuple[float, float]:
        """The errors of slowdown and saving as stated: the truth is farther away in at most 5 % of comparisons."""
        wide = self.standard_errors(_STATED)
        return wide * self.slowdown_error, wide * self.saved_error

    @property
    def late(self) -> float:
        """How much longer than promised iterations took, as a fraction of the time promised."""
        return (1 + self.slowdown) / (1 + self.promised_slowdown) - 1

    @property
    def knows_slowdown(self) -> bool:
        """Whether the estimate of the slowdown decides, certain or not."""
        return self.standard_errors(_KNOWN) * self.slowdown_error <= _KNOWN_ERROR

    @property
    def knows_saving(self) -> bool:
        """Whether a saving that is not certain counts as none."""
        return self.standard_errors(_KNOWN) * self.saved_error <= _KNOWN_ERROR

    def is_late(self, sure: float) -> bool:
        """Whether it is certain, at so many standard errors, that the promise is not kept."""
        return self.slowdown - sure * self.slowdown_error > self.promised_slowdown + TOLERANCE

    def is_in_time(self, sure: float) -> bool:
        """Whether it is certain that it is kept."""
        return self.slowdown + sure * self.slowdown_error <= self.promised_slowdown + TOLERANCE

    def uses(self, sure: float) -> int:
        """Return -1 or 1 where it is certain that iterations use less or more energy than at default clocks, else 0."""
        return 0 if abs(self.saved) <= sure * self.saved_error else -int(math.copysign(1, self.saved))

    @property
    def is_in_doubt(self) -> bool:
        """Whether iterations long after a comparison call for another one: the plan no longer keeps its promise."""
        is_faster = self.slowdown < self.promised_slowdown - _FASTER - _SURE * self.slowdown_error
        return is_faster or self.is_late(_SURE) or self.uses(_SURE) > 0


@dataclass(frozen=True)
class Verdict:
    """What a comparison has decided.

    Attributes:
        kept: Whether the plan stays.
        is_late: Whether it is dropped because iterations take longer than promised.
    """

    comparison: PlanComparison
    kept: bool
    is_late: bool
    reason: str

    @classmethod
    def of(cls, comparison: PlanComparison, probability: float, *, is_last: bool) -> Verdict | None:
        """Decide by an interim analysis; None to go on.

        Args:
            comparison: Of the blocks so far.
            probability: With which it may err about lateness, and about energy.
            is_last: Whether no more blocks follow.
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
        elif not (is_last or (comparison.knows_slowdown and (uses or comparison.knows_saving))):
            return None
        elif comparison.slowdown > comparison.promised_slowdown + TOLERANCE:
            is_late, reason = True, "it seems to take longer than promised"
        elif uses == 0:
            reason = "it saves no energy that could be measured"
        else:
            kept, reason = True, "it seems to be in time, and saves energy"
        return cls(comparison, kept, is_late, reason)


Answer: TypeAlias = Literal["keep", "drop", "more"]


class PlanProof:
    """One comparison of a plan with default clocks: it is given blocks, and answers what follows from them.

    Attributes:
        blocks: Those given so far; of an even index at default clocks, of an odd one under the plan.
        verdict: The decision; None while there is none.
    """

    def __init__(self, probability: float) -> None:
        """Begin without blocks; each interim analysis may err with a probability (:func:`error_probability`)."""
        self.blocks: list[IterationSample] = []
        self.verdict: Verdict | None = None
        self._probability = probability

    @property
    def next_is_planned(self) -> bool:
        """Whether the next block is under the plan."""
        return len(self.blocks) % 2 == 1

    @property
    def blocks_to_analysis(self) -> int:
        """How many more blocks there are until the next interim analysis."""
        planned = (len(self.blocks) - 1) // 2
        return 2 * next((pairs for pairs in ANALYSES if pairs > planned), ANALYSES[-1]) + 1 - len(self.blocks)

    def add(self, block: IterationSample) -> Answer:
        """Add the next block; return whether to keep the plan, to drop it, or to run one more block."""
        is_analysed = self.blocks_to_analysis == 1
        self.blocks.append(block)
        if not is_analysed:
            return "more"
        is_last = len(self.blocks) // 2 == ANALYSES[-1]
        self.verdict = Verdict.of(PlanComparison.of_blocks(self.blocks), self._probability, is_last=is_last)
        if self.verdict is None:
            return "more"
        return "keep" if self.verdict.kept else "drop"


# Lateness below this fraction of an iteration, or below so many standard errors, is not worth other plans.
_MATTERS = 0.008
# Lateness above this fraction has another cause than changes of the clock.
_MOST_LATE = 0.1
_SURELY_LATE = 3.0
_MOST_PLANS = 3
# A switch cost that is this much higher makes other plans.
_HIGHER = 1.2


class SwitchCost:
    """Divides the lateness of plans by their clock changes, as default clocks have neither.

    A plan that is late in spite of the delay that it allows for shows that changes delay the job by more, such as two
    ranks at once: the largest of the quotients counts.

    Attributes:
        time_s: By how much plans should take a change of clock to delay what follows it [s].
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self._plans = 0

    def learn(self, plan: FrequencyPlan, comparison: PlanComparison, default_s: float) -> bool:
        """Take in how late a plan was; returns whether plans with another switch cost should be made.

        Args:
            plan: As it ran; its time allows for the switch cost so far.
            comparison: With default clocks.
            default_s: Iteration time at default clocks [s].
        """
        late = comparison.slowdown - comparison.promised_slowdown
        changes = max(plan.changes_by_rank)
        self._plans += 1
        least = _MATTERS + _SURELY_LATE * comparison.slowdown_error
        if not least <= late <= _MOST_LATE or self._plans == _MOST_PLANS or not changes:
            return False
        known_s, self.time_s = self.time_s, self.time_s + late * default_s / changes
        return self.time_s > _HIGHER * known_s
