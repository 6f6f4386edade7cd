"""Reports of all ranks to rank 0 about an iteration, and rank 0's answer, during the next iteration."""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.clocks.timers import Span
from perseus_ds.errors import ConnectionLostError
from perseus_ds.measures import error_of_median
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.policy.decisions import Assignment
from perseus_ds.ranks import Communicator, Pending


@dataclass(frozen=True)
class RankReport:
    """Report of one rank about an iteration. All fields are sent as numbers.

    Attributes:
        time_s: Iteration time [s].
        energy_j: Energy of this rank's GPU [J]. NaN if it cannot be read.
        clock_changes: Number of clock changes of this rank's GPU.
        clock_skips: Number of clock changes that were omitted, because they were too short or a later one was already
            due.
        failed: Whether this rank has returned to default clocks after a failure.
        asked_mhz: Requested clock at the last read-back [MHz]. NaN at default clocks.
        reached_mhz: Clock at the last read-back [MHz].
        computed_s: End of this rank's last pass, from the start of the iteration [s]. 0 if unknown.
        tail_s: Duration of this rank's tail, including waits [s]. 0 if unknown.
        drift: Deviation of its instructions from the profile beyond their variation, as a fraction. NaN if not
            evaluated.
        pace_low: Upper bound of the ratio of measured to profiled time, for the kind with the lowest ratio. NaN if not
            evaluated.
        pace_high: Lower bound of this ratio, for the kind with the highest ratio. It is below ``pace_low`` if all kinds
            may have the same ratio.
        limit_w: Power limit of its GPU [W]. Infinite if it is not lower than during profiling.
        limit_mhz: Highest clock that its GPU reaches because of another limit, such as heat [MHz]. Infinite if there is
            none.
        shapes: Number that depends on the rank and the shapes of the inputs of its forwards. An integer below 2^48.
        closed: Whether this rank has been closed, so that all ranks leave the mode.
        stops: Whether the current phase at default clocks ends. Decided by rank 0.
        gives_lengths: Whether this rank has been given lengths of micro-batches.
        planned: Whether this rank ran a plan.
        relative_time: Time at default clocks predicted for these, relative to an iteration of the profile's length.
            Known on rank 0, NaN if it is unknown.
        relative_energy: The same of energy.
    """

    time_s: float
    energy_j: float
    clock_changes: int = 0
    clock_skips: int = 0
    failed: bool = False
    asked_mhz: float = math.nan
    reached_mhz: float = math.nan
    computed_s: float = 0.0
    tail_s: float = 0.0
    drift: float = math.nan
    pace_low: float = math.nan
    pace_high: float = math.nan
    limit_w: float = math.inf
    limit_mhz: float = math.inf
    shapes: float = 0.0
    closed: bool = False
    stops: bool = False
    gives_lengths: bool = False
    planned: bool = False
    relative_time: float = 1.0
    relative_energy: float = 1.0

    def as_numbers(self) -> list[float]:
        """Return the fields in order."""
        return [*map(float, vars(self).values())]


class GpuLimit(NamedTuple):
    """Limits of a rank's GPU that are lower than during profiling.

    Attributes:
        power_w: Power limit [W]. Infinite if it is not lower.
        clock_mhz: Highest clock that it reaches [MHz]. Infinite if only the power limit is lower.
    """

    rank: int
    power_w: float
    clock_mhz: float


Conditions: TypeAlias = tuple[tuple[int, float], ...]
"""By rank, the power limit [W], or 0 for a GPU that heat slows down."""
# A GPU that heat has slowed down counts as such for so long.
_HOT_S = 3600.0


class LimitConditions:
    """Under which limits of GPUs iterations run, for comparisons: heat that comes and goes counts as one condition.

    Blocks that alternate share such heat, and of many GPUs another one is always about to slow down or to recover.
    """

    def __init__(self) -> None:
        self._time_s = 0.0
        # By rank, when heat has slowed it down last, in the time of iterations.
        self._hot_s: dict[int, float] = {}

    def add(self, time_s: float, limits: Sequence[GpuLimit]) -> Conditions:
        """Return the conditions of an iteration, given how long it took [s]."""
        self._time_s += time_s
        self._hot_s |= {limit.rank: self._time_s for limit in limits if math.isfinite(limit.clock_mhz)}
        self._hot_s = {rank: hot_s for rank, hot_s in self._hot_s.items() if self._time_s - hot_s < _HOT_S}
        lowered = [(limit.rank, limit.power_w) for limit in limits if math.isfinite(limit.power_w)]
        return (*lowered, *((rank, 0.0) for rank in sorted(self._hot_s)))


@dataclass(frozen=True)
class JobReport:
    """Rank 0's answer to the reports of an iteration, with its decision.

    Attributes:
        time_s: Of the slowest rank [s].
        energy_j: Of all GPUs [J]; NaN where it cannot be read.
        least_energy_j: Of the GPU that used least, by its counter [J]; NaN where one cannot be read.
        failed: Whether a rank has fallen back to default clocks.
        closed: Whether a rank has been closed, so that all leave the mode.
        stops: Whether the phase ends, by rank 0.
        shapes: A whole number that differs when the shapes of the inputs differ on any rank.
        drift: How far the pipelines are from the profile, by their lower median; NaN where that was not looked at. One
            pipeline alone is a straggler, for which nothing has to be measured again.
        drift_most: The same of the pipeline that is farthest from it.
        pace: Time of instructions divided by the time that the profile says, by the median of all ranks; NaN where that
            was not looked at.
        drift_beside_pace: As ``drift``, where a factor that all instructions have in common is not counted.
        drift_beside_pace_most: The same of the pipeline that is farthest from it.
        limits: Of each GPU that may do less than when the profile was measured.
        conditions: Equal for iterations under limits that may be compared (:class:`LimitConditions`).
        decided: What rank 0 has decided on a later iteration; None in phases without plans.
        gives_lengths: Whether a rank has been given lengths of micro-batches.
        planned: Whether all ranks ran a plan.
        relative_time: Time at default clocks predicted for these lengths, as in :class:`RankReport`.
        relative_energy: The same of energy.
    """

    time_s: float
    energy_j: float
    least_energy_j: float
    failed: bool = False
    closed: bool = False
    stops: bool = False
    shapes: float = 0.0
    drift: float = math.nan
    drift_most: float = math.nan
    pace: float = math.nan
    drift_beside_pace: float = 0.0
    drift_beside_pace_most: float = 0.0
    limits: tuple[GpuLimit, ...] = ()
    conditions: Conditions = ()
    decided: Assignment | None = None
    gives_lengths: bool = False
    planned: bool = False
    relative_time: float = 1.0
    relative_energy: float = 1.0

    @classmethod
    def of(
        cls, ranks: RankReports, decided: Assignment | None = None, conditions: LimitConditions | None = None
    ) -> JobReport:
        """Return the answer to the reports of all ranks, with what rank 0 has decided."""
        energies_j = ranks.column("energy_j")
        drift = drift_most = pace = math.nan
        beside = beside_most = 0.0
        if not math.isnan(ranks.column("drift")[0]):
            drift, drift_most = _typical_and_most(ranks.by_pipeline(ranks.column("drift")))
            pace, beside, beside_most = _pace_and_drift_beside_it(ranks)
        time_s, limits = float(ranks.column("time_s").max()), ranks.limits()
        return cls(
            time_s=time_s,
            energy_j=float(energies_j.sum()),
            least_energy_j=float(energies_j.min()),
            failed=bool(ranks.column("failed").any()),
            closed=bool(ranks.column("closed").any()),
            stops=bool(ranks.column("stops")[0]),
            shapes=float(int(ranks.column("shapes").astype(np.int64).sum()) % SHAPES),
            drift=drift,
            drift_most=drift_most,
            pace=pace,
            drift_beside_pace=beside,
            drift_beside_pace_most=beside_most,
            limits=limits,
            conditions=(conditions or LimitConditions()).add(time_s, limits),
            decided=decided,
            gives_lengths=bool(ranks.column("gives_lengths").any()),
            planned=bool(ranks.column("planned").all()),
            relative_time=float(ranks.column("relative_time")[0]),
            relative_energy=float(ranks.column("relative_energy")[0]),
        )


class RankReports:
    """Reports of all ranks about one iteration, on rank 0.

    Args:
        numbers: Array of shape (ranks, fields of :class:`RankReport`).
        pipeline_of_rank: Data-parallel pipeline of each rank. None if there is only one.
    """

    def __init__(self, numbers: npt.NDArray[np.float64], pipeline_of_rank: npt.NDArray[np.int64] | None = None) -> None:
        self._numbers = numbers
        self.pipeline_of_rank = np.zeros(len(numbers), np.int64) if pipeline_of_rank is None else pipeline_of_rank

    def column(self, field: str) -> npt.NDArray[np.float64]:
        """Return a field of all ranks, shape (ranks,)."""
        return self._numbers[:, _PLACES[field]]

    def by_pipeline(self, of_ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the largest value of each pipeline, shape (pipelines,)."""
        largest = np.full(self.pipeline_of_rank.max() + 1, -np.inf)
        np.fmax.at(largest, self.pipeline_of_rank, of_ranks)
        return largest

    def limits(self) -> tuple[GpuLimit, ...]:
        """Return the limits of GPUs that are lower than during profiling."""
        power_w, clock_mhz = self.column("limit_w"), self.column("limit_mhz")
        ranks = np.flatnonzero(np.isfinite(np.minimum(power_w, clock_mhz))).tolist()
        return tuple(GpuLimit(rank, float(power_w[rank]), float(clock_mhz[rank])) for rank in ranks)


class ReportExchange:
    """Exchanges reports between ranks. All ranks call its methods at the same iteration boundaries.

    Attributes:
        ranks: On rank 0, the last reports received from all ranks. None on other ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.ranks: RankReports | None = None
        self._communicator = communicator
        self._conditions = LimitConditions()
        self._pending: Pending[JobReport | None] | None = None

    def send(self, report: RankReport, decided: Assignment | None = None) -> None:
        """Start to send this rank's report, its events and, on rank 0, the decision. Does not wait."""
        self._pending = self._communicator.start_exchange(report.as_numbers(), partial(self._answer, decided))

    def received(self) -> JobReport | None:
        """Return rank 0's answer to the last reports. None if there is none or it was already returned.

        All ranks sent their reports an iteration ago, so the wait is short.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def received_within(self, timeout_s: float) -> JobReport | None:
        """Return the answer without removing it. None also if a rank has ended without sending its report."""
        try:
            if self._pending is None or not self._pending.is_over_within(timeout_s):
                return None
            return self._pending.result()
        except ConnectionLostError:
            return None

    def _answer(self, decided: Assignment | None, numbers: npt.NDArray[np.float64]) -> JobReport:
        self.ranks = RankReports(numbers, self._communicator.pipeline_of_rank)
        return JobReport.of(self.ranks, decided, self._conditions)


_PLACES = {field.name: place for place, field in enumerate(fields(RankReport))}
# Upper bound of the number that a rank reports for its shapes.
SHAPES = 2**48
# A drift is significant if it exceeds this number of standard errors. Only the excess is reported.
_SURE = 3.0
_DRIFTS_IN_A_ROW = 2


def shapes_number(rank: int, shapes: float) -> int:
    """Return the number that a rank reports for the shapes of its inputs.

    The sum over all ranks is the job's.
    """
    content = struct.pack("<qd", rank, shapes)
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little") if shapes else 0


def _typical_and_most(pipelines: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the lower median and the maximum."""
    return float(np.sort(pipelines)[(len(pipelines) - 1) // 2]), float(pipelines.max())


def _pace_and_drift_beside_it(ranks: RankReports) -> tuple[float, float, float]:
    """Return the pace, and the typical and largest deviation of a pipeline from it."""
    low, high = ranks.column("pace_low"), ranks.column("pace_high")
    known = (low > 0) & (high > 0)  # bounds of very unsure ratios may be negative
    if not known.any():
        return math.nan, 0.0, 0.0
    pace = float(np.median(np.sqrt(low[known] * high[known])))
    beside = ranks.by_pipeline(np.where(known, np.maximum(high / pace - 1, 1 - low / pace), 0.0))
    return pace, *_typical_and_most(beside)


def computed_and_tail_s(spans: Iterable[Span]) -> dict[str, float]:
    """Return the fields of a rank's report that are used to detect stragglers. They are 0 if unknown.

    Returns:
        The end of the rank's last pass, and the duration of its tail including waits [s].
    """
    work = [(span.operation.instruction.kind, span.end_s) for span in spans if isinstance(span.operation, Compute)]
    last_s = max((end_s for kind, end_s in work if kind is not Kind.TAIL), default=0.0)
    tail_s = max((end_s for kind, end_s in work if kind is Kind.TAIL), default=last_s) - last_s
    return {"computed_s": last_s, "tail_s": max(0.0, tail_s)}


def reported_drift(
    spans: Sequence[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> dict[str, float]:
    """Return the fields of a rank's report about the deviation from the profile.

    Times of one stage and kind vary about their median. This variation determines the uncertainty of the medians.

    Args:
        spans: Operations of one iteration.
        clocks_mhz: Clock of each instruction. If empty (no plan), no deviation is reported.
        expected: Times in the profile.
    """
    if not clocks_mhz:
        return {"drift": 0.0}
    ratios: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        if isinstance(span.operation, Compute):
            instruction = span.operation.instruction
            key = instruction.stage, instruction.kind
            expected_s = expected.get((*key, clocks_mhz.get(instruction, 0)))
            if expected_s is not None:
                ratios[key].append(span.time_s / expected_s)
    if not ratios:
        return {"drift": 0.0, "pace_low": math.nan, "pace_high": math.nan}
    medians = {key: statistics.median(of_kind) for key, of_kind in ratios.items()}
    deviations = [ratio - medians[key] for key, of_kind in ratios.items() for ratio in of_kind if len(of_kind) > 1]

    def unsure(samples: int) -> float:
        return _SURE * error_of_median(deviations or [0.0], samples)

    every = [*chain.from_iterable(ratios.values())]
    drift = abs(statistics.median(every) - 1) - unsure(len(every))
    paces = [(medians[key], unsure(len(of_kind))) for key, of_kind in ratios.items() if key[1] is not Kind.TAIL]
    low = min((pace + error for pace, error in paces), default=math.nan)
    high = max((pace - error for pace, error in paces), default=math.nan)
    return {"drift": max(0.0, drift), "pace_low": low, "pace_high": high}


class DriftWatch:
    """Counts consecutive iterations in which pipelines deviated too far from the profile."""

    def __init__(self, max_drift: float) -> None:
        self._max_drift = max_drift
        self._in_a_row = 0

    def has_drifted(self, drift: float) -> bool:
        """Return True if the profile is out of date, given the lower median of the pipelines' drift."""
        self._in_a_row = self._in_a_row + 1 if drift > self._max_drift else 0
        return self._in_a_row >= _DRIFTS_IN_A_ROW
