"""Figures of an iteration by rank and for the whole job: times, energy, limits of GPUs, deviation from the profile."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.artifacts.profile import Floats
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.profiler.estimates import error_of_median

# A drift is significant if it exceeds this number of standard errors. Only the excess is reported.
_SURE = 3.0


class GpuLimit(NamedTuple):
    """Limits of a rank's GPU that are lower than during profiling, infinite if they are not."""

    rank: int
    power_w: float
    clock_mhz: float


@dataclass
class RankReports:
    """Reports of all ranks about an iteration, as an array of shape (ranks,) for each figure.

    Attributes:
        pipeline: Data-parallel pipeline of each rank.
        energy_j: Energy of the GPU [J]. NaN if it cannot be read.
        clock_skips: Number of clock changes that were skipped because they were too short, or a later one was due.
        failed: Whether the rank has fallen back to default clocks.
        asked_mhz: Requested clock when the GPU's clock was last read [MHz]. NaN at default clocks.
        reached_mhz: Clock that was read then [MHz].
        computed_s: Time from the iteration's start to the end of the rank's last pass [s]. 0 if unknown.
        tail_s: Duration of its tail, including waits [s]. 0 if unknown.
        limit_w: Power limit of its GPU [W]. Infinite if it is not lower than during profiling.
        limit_mhz: Highest clock of its GPU under another limit, such as heat [MHz]. Infinite without one.
        tokens: Tokens in the inputs of its pipeline, if the rank reads them. 0 if unknown.
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
    tokens: Floats

    def by_pipeline(self, of_ranks: Floats) -> Floats:
        """Return the largest value of each pipeline, shape (pipelines,)."""
        largest = np.full(self.pipeline.max() + 1, -np.inf)
        np.maximum.at(largest, self.pipeline, of_ranks)
        return largest

    @cached_property
    def limits(self) -> tuple[GpuLimit, ...]:
        """Limits of GPUs that are lower than during profiling."""
        ranks = np.flatnonzero(np.isfinite(np.minimum(self.limit_w, self.limit_mhz))).tolist()
        return tuple(GpuLimit(rank, float(self.limit_w[rank]), float(self.limit_mhz[rank])) for rank in ranks)


@dataclass(frozen=True)
class JobReport:
    """An iteration of the whole job.

    Attributes:
        time_s: Iteration time of the slowest rank [s].
        energy_j: Energy of all GPUs [J]. NaN if one cannot be read.
        least_energy_j: Lowest energy of a GPU, by its counter [J]. NaN if one cannot be read.
        failed: Whether a rank has fallen back to default clocks.
    """

    time_s: float
    energy_j: float
    least_energy_j: float
    failed: bool = False

    @classmethod
    def of(cls, ranks: RankReports) -> JobReport:
        """Return the summary of all ranks' reports."""
        return cls(
            float(ranks.time_s.max()),
            float(ranks.energy_j.sum()),
            float(ranks.energy_j.min()),
            bool(ranks.failed.any()),
        )


def rank_drift(spans: Iterable[Span], clocks_mhz: Mapping[Instruction, int], expected: ClockTimes) -> float:
    """Return by how much a rank's instruction times deviate from the profile's, beyond their own variation.

    Times of one stage and kind vary about their median. This variation determines the uncertainty of the deviation,
    which is a fraction, and negative if instructions are faster.
    """
    ratios: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        if isinstance(span.operation, Compute):
            instruction = span.operation.instruction
            key = instruction.stage, instruction.kind
            if (expected_s := expected.get((*key, clocks_mhz.get(instruction, 0)))) is not None:
                ratios[key].append(span.time_s / expected_s)
    if not ratios:
        return 0.0
    medians = {key: statistics.median(of_kind) for key, of_kind in ratios.items()}
    deviations = [ratio - medians[key] for key, of_kind in ratios.items() for ratio in of_kind if len(of_kind) > 1]
    every = [*chain.from_iterable(ratios.values())]
    unsure = _SURE * error_of_median(deviations or [0.0], len(every))
    deviation = statistics.median(every) - 1
    return math.copysign(max(0.0, abs(deviation) - unsure), deviation)


@dataclass(frozen=True)
class JobDrift:
    """Deviation of an iteration of the whole job from the profile, as fractions.

    Attributes:
        typical: Lower median of the pipelines' deviation, negative if instructions are faster. A single deviating
            pipeline is a straggler, which does not require a new profile.
        most: Absolute deviation of the pipeline that deviates most.
    """

    typical: float
    most: float

    @classmethod
    def of(cls, pipelines: Sequence[int], drifts: Sequence[float]) -> JobDrift:
        """Return the deviation of the job, given pipeline and deviation of each measured rank."""
        most: dict[int, float] = {}
        for pipeline, drift in zip(pipelines, drifts, strict=True):
            most[pipeline] = max(drift, most.get(pipeline, 0.0), key=abs)
        by_size = sorted(most.values(), key=abs)
        return cls(by_size[(len(by_size) - 1) // 2], abs(by_size[-1]))
