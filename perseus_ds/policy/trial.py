"""The trial of plans in a job: blocks at default clocks alternate with blocks under plans, without end.

Definitions:

- A *block* is a number of consecutive iterations, all at default clocks or all under plans. Its level is their mean
  time and energy, each relative to those of default clocks for the order and the inputs of the iteration. Iterations
  that contain a stall (``savings.py``) are left out of all blocks.
- A *pair* compares the blocks under plans between two blocks at default clocks with their neighbours: the first with
  the block before it, the last with the block after it. So a steady drift of the job cancels. Neighbours under
  different limits of GPUs are not compared, and a pair without comparable neighbours is no evidence.
- The *evidence* consists of the last 24 pairs. Its error follows from their variation, by Student's t, and so includes
  noise, drift, the energy counter and any other disturbance of the job.

Plans are *late* or *cost energy* if that is certain, and *good* if it is certain that they are in time and save energy.
After 12 pairs, plans *save nothing* if the estimate of the saving is zero or less, and after 24 pairs also if it is not
certain. Then plans that are probably late count as late, and others that save energy as good. All other plans are
*unknown* so far. Each block under plans is followed by one at default clocks. As long as plans are good, the number of
blocks under plans between two at default clocks doubles each time.

Every decision can be reversed by later pairs, so no error probability is shared among the decisions of a job. Error
rates: ``benchmarks/trial.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, PrivateAttr
from scipy.special import stdtrit

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.profile import Floats
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.savings import STALL, DefaultClocks, Size

TOLERANCE = 0.01
"""Accepted lateness of a plan as a fraction, because clock changes take effect with a small delay."""
FEWEST_ITERATIONS, _MOST_ITERATIONS = 4, 16
"""A block has at least the first number of iterations. More are added if the mean time of fewer is not certain."""
_WELL_KNOWN = 0.0025
# Over fewer refreshes, energy counters are noisy: a block has the energy of one refresh too much or too little.
_REFRESHES = 20
# A block ends without a result after this number of iterations and this multiple of its least time.
_GIVEN_UP_AFTER, _TIMES_AS_LONG = 64, 4
_KEPT_PAIRS = 24
_FEWEST_PAIRS = 3
# After this number of pairs, plans that seem to save nothing are given up, though it is not certain.
_ENOUGH_PAIRS = 12
# A plan that is no longer good is detected in the last pairs, even if the earlier ones were good.
_LATEST_PAIRS = 6
_MOST_BLOCKS = 64
_SURE, _STATED, _PROBABLE = 0.995, 0.99, 0.9
_SPREADS = 2.0
# Neighbouring pairs share a block at default clocks. If blocks have the variance v, pairs have 1.5 v and neighbouring
# pairs the covariance v / 4, which increases the variance of their mean by up to a third.
_SHARED = math.sqrt(4 / 3)

Limits = frozenset[tuple[int, float]]
"""The limited ranks, with the power limit of each [W], or 0 if heat slows its GPU down."""


class BlockIteration(NamedTuple):
    """An iteration of a block.

    Attributes:
        order: Number of its order.
        time_s: Its time [s].
        energies_j: Energy of each rank's GPU [J], NaN if it cannot be read, shape (ranks,).
        promised_slowdown: Slowdown that its plans promise, as a fraction.
        size: Size of its inputs. None if it is unknown.
    """

    order: int
    time_s: float
    energies_j: Floats
    promised_slowdown: float = 0.0
    size: Size | None = None


class Block:
    """Consecutive iterations of the job, all at default clocks or all under plans.

    Attributes:
        is_planned: Whether they run under plans.
        iterations: The iterations that count.
        limits: Limits of GPUs during any of them.
    """

    def __init__(
        self, default: DefaultClocks, *, is_planned: bool, counter_period_s: float, counter_settle_s: float = 0.0
    ) -> None:
        """Begin a block.

        Args:
            default: What default clocks take for each order.
            is_planned: Whether its iterations are to run under plans.
            counter_period_s: Refresh period of the energy counter [s].
            counter_settle_s: Time for which the counter still includes the power before a change of clocks [s].
        """
        self.is_planned = is_planned
        self.iterations: list[BlockIteration] = []
        self.limits: Limits = frozenset()
        self._default = default
        self._least_s = _REFRESHES * counter_period_s
        self._settles_for_s = counter_settle_s
        self._given_up_after_s = counter_settle_s + _TIMES_AS_LONG * self._least_s
        self._seen, self._seen_s = 0, 0.0

    def pass_over(self, time_s: float, *, is_at_its_clocks: bool = False) -> None:
        """Take note of an iteration that does not count.

        Args:
            time_s: Its time [s].
            is_at_its_clocks: Whether it ran at the clocks of the block, such as the first one after their change.
        """
        self._seen += 1
        self._seen_s += time_s
        if is_at_its_clocks:
            self._settles_for_s -= time_s

    def add(self, iteration: BlockIteration, limits: Limits = frozenset()) -> None:
        """Add an iteration, and the limits of GPUs in it. While the counter settles, it is passed over."""
        if self._settles_for_s > 0:
            self.pass_over(iteration.time_s, is_at_its_clocks=True)
            return
        self._seen += 1
        self._seen_s += iteration.time_s
        self.iterations.append(iteration)
        self.limits |= limits

    def _relative(self) -> tuple[list[BlockIteration], list[float]]:
        """Return the iterations without stalls, and their times relative to those that are promised."""
        times = []
        for iteration in self.iterations:
            default = self._default.of(iteration.order, iteration.size)
            if default is None:
                return [], []
            times.append(iteration.time_s / default.time_s / (1 + iteration.promised_slowdown))
        longest = STALL * statistics.median(times or [0.0])
        kept = [number for number, time in enumerate(times) if time <= longest]
        return [self.iterations[number] for number in kept], [times[number] for number in kept]

    @property
    def is_complete(self) -> bool:
        """True if it has enough iterations and refreshes of the energy counter."""
        counted, times = self._relative()
        if len(counted) < FEWEST_ITERATIONS or math.fsum(one.time_s for one in counted) < self._least_s:
            return False
        error = statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)
        return error <= _WELL_KNOWN or len(counted) >= _MOST_ITERATIONS

    @property
    def is_given_up(self) -> bool:
        """True if it is still not complete after many iterations."""
        return self._seen >= _GIVEN_UP_AFTER and self._seen_s >= self._given_up_after_s

    @property
    def level(self) -> Level:
        """The level of a complete block."""
        counted, _ = self._relative()
        default_s = default_j = 0.0
        for one in counted:
            default = self._default.of(one.order, one.size)
            assert default is not None, "it is complete"
            default_s += default.time_s
            default_j += default.energy_j
        energies_j = np.sum([one.energies_j for one in counted], axis=0)
        return Level(
            time=math.log(math.fsum(one.time_s for one in counted) / default_s),
            promised=statistics.fmean(math.log1p(one.promised_slowdown) for one in counted),
            energies=np.where(energies_j > 0, energies_j, np.nan) / default_j,
        )


class Level(NamedTuple):
    """Mean time and energy of the iterations of a block, relative to those of default clocks.

    Attributes:
        time: Logarithm of the relative time.
        promised: Logarithm of the relative time that plans promise.
        energies: Energy of each rank's GPU, relative to that of all GPUs, shape (ranks,). NaN if it is unknown.
    """

    time: float
    promised: float
    energies: Floats


class Pair(NamedTuple):
    """Blocks under plans, compared with neighbours at default clocks.

    Attributes:
        slowdown: Logarithm of the ratio of times.
        promised: Logarithm of the ratio that plans promise.
        energy: Logarithm of the ratio of energies. None if no GPU's energy is known.
    """

    slowdown: float
    promised: float
    energy: float | None

    @property
    def late(self) -> float:
        return self.slowdown - self.promised


def compare(sides: Sequence[tuple[Block | None, Block | None]]) -> Pair | None:
    """Return the comparison of blocks under plans with their neighbours at default clocks.

    Args:
        sides: Blocks at default clocks and under plans that follow each other. None for a block without a result.

    Returns:
        The mean over sides with equal limits of GPUs. None if there is none.
    """
    found = []
    for default, planned in sides:
        if default is not None and planned is not None and default.limits == planned.limits:
            found.append(_side(default.level, planned.level))
    if not found:
        return None
    energies = [side.energy for side in found if side.energy is not None]
    return Pair(
        slowdown=statistics.fmean(side.slowdown for side in found),
        promised=statistics.fmean(side.promised for side in found),
        energy=statistics.fmean(energies) if energies else None,
    )


def _side(default: Level, planned: Level) -> Pair:
    """Compare two blocks. Energies are those of the GPUs whose energy is known in both."""
    known = np.isfinite(default.energies) & np.isfinite(planned.energies)
    energy = None
    if known.any():
        energy = math.log(float(planned.energies[known].sum()) / float(default.energies[known].sum()))
    return Pair(planned.time - default.time, planned.promised, energy)


class Verdict(str, Enum):
    """What the evidence says about plans."""

    GOOD = "good"
    LATE = "late"
    COSTS_ENERGY = "costs energy"
    SAVES_NOTHING = "saves nothing"
    UNKNOWN = "unknown"

    @property
    def is_dropped(self) -> bool:
        """True if plans are not to run for a while."""
        return self not in (Verdict.GOOD, Verdict.UNKNOWN)


class Estimate(NamedTuple):
    """The mean of a figure over pairs, and its standard error. Without pairs, both are NaN."""

    mean: float
    error: float
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        if len(values) < _FEWEST_PAIRS:
            return cls(statistics.fmean(values) if values else math.nan, math.nan, len(values))
        error = _SHARED * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), error, len(values))

    def uncertainty(self, probability: float) -> float:
        """Return the deviation of the mean that is exceeded with ``1 - probability`` on each side."""
        return float(stdtrit(self.pairs - 1, probability)) * self.error

    def is_above(self, limit: float, probability: float = _SURE) -> bool:
        """Return whether it is certain, or has this probability, that the true value is above a limit."""
        return self.mean - self.uncertainty(probability) > limit

    def is_below(self, limit: float) -> bool:
        """Return whether it is certain that the true value is below a limit."""
        return self.mean + self.uncertainty(_SURE) < limit


class Trial(FileModel):
    """What is known of the plans that run now. It is saved as it is, and a restarted job continues with it.

    Attributes:
        pairs: The evidence.
        blocks: Number of blocks under plans between two at default clocks.
        left: Number of these blocks that are still to run.
    """

    pairs: list[Pair] = Field(default_factory=list, max_length=_KEPT_PAIRS)
    blocks: Annotated[int, Field(ge=1, le=_MOST_BLOCKS)] = 1
    left: Annotated[int, Field(ge=0, le=_MOST_BLOCKS)] = 1
    _recorded: tuple[list[Pair], TrialState] | None = PrivateAttr(None)

    def add(self, pair: Pair | None) -> Verdict:
        """Add a pair, or None if the last blocks could not be compared, and return the verdict."""
        is_alarming = pair is not None and self._is_alarming(pair)
        if pair is not None:
            self.pairs = [*self.pairs, pair][-_KEPT_PAIRS:]
        verdict = self.verdict()
        if pair is None or (verdict is Verdict.GOOD and not is_alarming):
            self.blocks = min(2 * self.blocks, _MOST_BLOCKS)
        else:
            self.blocks = 1
        self.left = self.blocks
        return verdict

    def _is_alarming(self, pair: Pair) -> bool:
        """Return True if a pair suggests that plans are no longer good, beyond the variation of the earlier ones."""
        if len(self.pairs) < _FEWEST_PAIRS:
            return False
        energies = [each.energy for each in self.pairs if each.energy is not None]
        is_late = pair.late > TOLERANCE + _SPREADS * statistics.stdev(each.late for each in self.pairs)
        costs = pair.energy is not None and len(energies) > 1 and pair.energy > _SPREADS * statistics.stdev(energies)
        return is_late or costs

    def compare_soon(self) -> None:
        """End the blocks under plans with the present one, because the job has changed."""
        self.left = min(self.left, 1)

    def restart(self) -> None:
        """Forget the evidence, because other plans run from now on."""
        self.pairs, self.blocks, self.left = [], 1, 1

    def estimates(self, latest: int = _KEPT_PAIRS) -> tuple[Estimate, Estimate]:
        """Return the lateness of plans and the change of energy over the latest pairs, as logarithms of ratios."""
        pairs = self.pairs[-latest:]
        energies = [pair.energy for pair in pairs if pair.energy is not None]
        return Estimate.of([pair.late for pair in pairs]), Estimate.of(energies)

    @property
    def lateness(self) -> float:
        """Fraction by which plans take longer than promised: in the latest pairs, if these are later than all pairs."""
        latest, _ = self.estimates(_LATEST_PAIRS)
        late, _ = self.estimates()
        return math.expm1(max(latest.mean, late.mean))

    def verdict(self) -> Verdict:
        """Return what the evidence says now."""
        if len(self.pairs) < _FEWEST_PAIRS:
            return Verdict.UNKNOWN
        for latest in (_LATEST_PAIRS, _KEPT_PAIRS):
            late, energy = self.estimates(latest)
            if late.is_above(TOLERANCE):
                return Verdict.LATE
            if energy.is_above(0.0):
                return Verdict.COSTS_ENERGY
        # Where no GPU's energy is known, the profile's is believed.
        saves = energy.is_below(0.0) or energy.pairs == 0
        if late.is_below(TOLERANCE) and saves:
            return Verdict.GOOD
        if energy.pairs >= _ENOUGH_PAIRS and energy.mean >= 0:
            return Verdict.SAVES_NOTHING
        if len(self.pairs) < _KEPT_PAIRS:
            return Verdict.UNKNOWN
        if late.is_above(TOLERANCE, _PROBABLE):
            return Verdict.LATE
        return Verdict.GOOD if saves else Verdict.SAVES_NOTHING

    @property
    def is_confirmed(self) -> bool:
        """True if all pairs that are kept are evidence for the present plans."""
        return len(self.pairs) == _KEPT_PAIRS

    def recorded(self) -> TrialState:
        """Return what records of iterations contain of the trial."""
        if self._recorded is None or self._recorded[0] is not self.pairs:
            figures = self.figures
            state = TrialState(
                pairs=figures.pairs,
                verdict=self.verdict().value,
                **_known("slowdown", figures.slowdown, figures.slowdown_error),
                **_known("saved", figures.saved, figures.saved_error),
            )
            self._recorded = self.pairs, state
        return self._recorded[1]

    @property
    def figures(self) -> TrialFigures:
        """Slowdown and saving that the evidence shows."""
        slowdown = Estimate.of([pair.slowdown for pair in self.pairs])
        # What plans promise may differ between pairs, which is no error.
        late, energy = self.estimates()
        time_ratio, energy_ratio = math.exp(slowdown.mean), math.exp(energy.mean)
        promised = statistics.fmean(pair.promised for pair in self.pairs) if self.pairs else math.nan
        return TrialFigures(
            pairs=len(self.pairs),
            slowdown=time_ratio - 1,
            slowdown_error=time_ratio * late.uncertainty(_STATED),
            promised_slowdown=math.expm1(promised),
            saved=1 - energy_ratio,
            saved_error=energy_ratio * energy.uncertainty(_STATED),
        )


def _known(name: str, value: float, error: float) -> dict[str, float]:
    """Return a figure with its error. Empty if there are too few pairs."""
    return {name: round(value, 6), f"{name}_error": round(error, 6)} if math.isfinite(error) else {}


class TrialFigures(NamedTuple):
    """Slowdown and saving of plans relative to default clocks, as fractions. NaN for what is not known.

    True values differ by more than the errors in at most 5 % of the cases.
    """

    pairs: int
    slowdown: float
    slowdown_error: float
    promised_slowdown: float
    saved: float
    saved_error: float
