"""Reports of all ranks about an iteration, and their summary for the whole job."""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.artifacts.profile import Floats
from perseus_ds.measures import error_of_median
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span

# The number that a rank reports for its shapes is below this.
SHAPES = 2**48
# A drift is significant if it exceeds this number of standard errors. Only the excess is reported.
_SURE = 3.0
_DRIFTS_IN_A_ROW = 2
# Time after which a GPU that heat has slowed down no longer counts as hot.
_HOT_S = 3600.0


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
"""Power limit of each limited rank [W], or 0 if heat slows its GPU down."""


class LimitConditions:
    """Tracks GPU limits, so that only iterations under equal limits are compared.

    A GPU that heat slows down from time to time counts as one condition. Alternating blocks are affected by it equally,
    and among many GPUs there is always one that begins or ceases to be slow.
    """

    def __init__(self) -> None:
        self._time_s = 0.0
        # By rank, the last time at which heat slowed it down, as the sum of iteration times.
        self._hot_s: dict[int, float] = {}

    def add(self, time_s: float, limits: Sequence[GpuLimit]) -> Conditions:
        """Return the conditions of an iteration, given its duration [s] and the limits of GPUs."""
        self._time_s += time_s
        self._hot_s |= {limit.rank: self._time_s for limit in limits if math.isfinite(limit.clock_mhz)}
        self._hot_s = {rank: hot_s for rank, hot_s in self._hot_s.items() if self._time_s - hot_s < _HOT_S}
        lowered = [(limit.rank, limit.power_w) for limit in limits if math.isfinite(limit.power_w)]
        return (*lowered, *((rank, 0.0) for rank in sorted(self._hot_s)))


@dataclass(frozen=True)
class JobReport:
    """An iteration of the whole job.

    Attributes:
        time_s: Iteration time of the slowest rank [s].
        energy_j: Energy of all GPUs [J]. NaN if one cannot be read.
        least_energy_j: Lowest energy of a GPU, by its counter [J]. NaN if one cannot be read.
        failed: Whether a rank has fallen back to default clocks.
        shapes: Integer that differs if the shapes of the inputs differ on any rank.
        drift: Lower median of the pipelines' deviation from the profile. NaN if it was not computed. A single
            deviating pipeline is a straggler, which does not require a new profile.
        drift_most: Deviation of the pipeline that deviates most.
        pace: Time of instructions divided by the time in the profile, as the median of all ranks. NaN if it was not
            computed.
        drift_beside_pace: As ``drift``, without a factor that all instructions have in common.
        drift_beside_pace_most: As ``drift_most``, without this factor.
        relative_time: Time at default clocks predicted for the lengths of its micro-batches, relative to an iteration
            of the profile's length. 1 if iterations are not planned by length, NaN if the prediction is unknown.
        relative_energy: The same for energy.
    """

    time_s: float
    energy_j: float
    least_energy_j: float
    failed: bool = False
    shapes: float = 0.0
    drift: float = math.nan
    drift_most: float = math.nan
    pace: float = math.nan
    drift_beside_pace: float = 0.0
    drift_beside_pace_most: float = 0.0
    relative_time: float = 1.0
    relative_energy: float = 1.0

    @classmethod
    def of(cls, ranks: RankReports, relative: tuple[float, float] = (1.0, 1.0)) -> JobReport:
        """Return the summary of all ranks' reports, with the given relative time and energy."""
        drift = drift_most = pace = math.nan
        beside = beside_most = 0.0
        if not math.isnan(ranks.drift[0]):
            drift, drift_most = _typical_and_most(ranks.by_pipeline(ranks.drift))
            pace, beside, beside_most = _pace_and_drift_beside_it(ranks)
        return cls(
            time_s=float(ranks.time_s.max()),
            energy_j=float(ranks.energy_j.sum()),
            least_energy_j=float(ranks.energy_j.min()),
            failed=bool(ranks.failed.any()),
            shapes=float(int(ranks.shapes.astype(np.int64).sum()) % SHAPES),
            drift=drift,
            drift_most=drift_most,
            pace=pace,
            drift_beside_pace=beside,
            drift_beside_pace_most=beside_most,
            relative_time=relative[0],
            relative_energy=relative[1],
        )


@dataclass
class RankReports:
    """Reports of all ranks about an iteration, as an array of shape (ranks,) for each figure.

    Attributes:
        pipeline: Data-parallel pipeline of each rank.
        time_s: Iteration time [s].
        energy_j: Energy of the GPU [J]. NaN if it cannot be read.
        clock_changes: Number of clock changes of the GPU.
        clock_skips: Number of clock changes that were skipped because they were too short, or a later one was due.
        failed: Whether the rank has fallen back to default clocks.
        asked_mhz: Requested clock when the GPU's clock was last read [MHz]. NaN at default clocks.
        reached_mhz: Clock that was read then [MHz].
        computed_s: Time from the iteration's start to the end of the rank's last pass [s]. 0 if unknown.
        tail_s: Duration of its tail, including waits [s]. 0 if unknown.
        limit_w: Power limit of its GPU [W]. Infinite if it is not lower than during profiling.
        limit_mhz: Highest clock that its GPU reaches if something else limits it, such as heat [MHz]. Infinite
            otherwise.
        shapes: Integer below 2^48 that differs if the shapes of the inputs of the rank's forwards differ, and between
            ranks.
        drift: Deviation of its instruction times from the profile beyond their own variation, as a fraction. NaN if it
            was not computed.
        pace_low: Upper bound of the lowest ratio, over all kinds, of measured time to time in the profile. NaN if it
            was not computed.
        pace_high: Lower bound of the highest such ratio. It is below ``pace_low`` if all kinds may have the same ratio.
    """

    pipeline: npt.NDArray[np.int64]
    time_s: Floats
    energy_j: Floats
    clock_changes: Floats
    clock_skips: Floats
    failed: Floats
    asked_mhz: Floats
    reached_mhz: Floats
    computed_s: Floats
    tail_s: Floats
    limit_w: Floats
    limit_mhz: Floats
    shapes: Floats

    def __post_init__(self) -> None:
        self.drift, self.pace_low, self.pace_high = np.full((3, len(self.time_s)), np.nan)

    def by_pipeline(self, of_ranks: Floats) -> Floats:
        """Return the largest value of each pipeline, shape (pipelines,)."""
        largest = np.full(self.pipeline.max() + 1, -np.inf)
        np.fmax.at(largest, self.pipeline, of_ranks)
        return largest

    @cached_property
    def limits(self) -> tuple[GpuLimit, ...]:
        """Limits of GPUs that are lower than during profiling."""
        ranks = np.flatnonzero(np.isfinite(np.minimum(self.limit_w, self.limit_mhz))).tolist()
        return tuple(GpuLimit(rank, float(self.limit_w[rank]), float(self.limit_mhz[rank])) for rank in ranks)


def shapes_number(rank: int, shapes: float) -> int:
    """Return the number that a rank reports for the shapes of its inputs.

    The job's number is the sum over ranks.
    """
    content = struct.pack("<qd", rank, shapes)
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little") if shapes else 0


def _typical_and_most(pipelines: Floats) -> tuple[float, float]:
    return float(np.sort(pipelines)[(len(pipelines) - 1) // 2]), float(pipelines.max())


def _pace_and_drift_beside_it(ranks: RankReports) -> tuple[float, float, float]:
    """Return the pace, and the typical and largest deviation of a pipeline from it."""
    low, high = ranks.pace_low, ranks.pace_high
    known = (low > 0) & (high > 0)  # bounds of very unsure ratios may be negative
    if not known.any():
        return math.nan, 0.0, 0.0
    pace = float(np.median(np.sqrt(low[known] * high[known])))
    beside = ranks.by_pipeline(np.where(known, np.maximum(high / pace - 1, 1 - low / pace), 0.0))
    return pace, *_typical_and_most(beside)


def reported_drift(
    spans: Sequence[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes
) -> dict[str, float]:
    """Return the figures of :class:`RankReports` about a rank's deviation from the profile.

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
