"""Figures of an iteration by rank and for the whole job: times, energy, limits of GPUs, deviation from the profile."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import ClockTimes
from perseus_ds.artifacts.profile import Floats
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Span
from perseus_ds.profiler.estimates import error_of_median
from perseus_ds.protocol.job_messages import ClockStatus, RankReport, Report

# A drift is significant if it exceeds this number of standard errors. Only the excess is reported.
_SURE = 3.0


class GpuLimit(NamedTuple):
    """Limits of a rank's GPU that are lower than during profiling, infinite if they are not."""

    rank: int
    power_w: float
    clock_mhz: float


def _figures() -> Mapping[str, Callable[[RankReport], Any]]:
    """Return functions that get each figure of a rank's report, by name."""
    of_client = {name: attrgetter(f"report.{name}") for name in Report.__struct_fields__}
    of_clock = {name: attrgetter(f"status.{name}") for name in ClockStatus.__struct_fields__}
    of_agent = {name: attrgetter(name) for name in RankReport.__struct_fields__ if name not in ("report", "status")}
    return of_client | of_clock | of_agent


class RankReports:
    """Reports of all ranks about an iteration.

    Each number in :class:`RankReport`, and in the :class:`Report` and the :class:`ClockStatus` within it, is an
    attribute with the same name: an array of shape (ranks,), which is made when it is needed. Unknown figures are NaN.

    Attributes:
        pipeline: Data-parallel pipeline of each rank.
        energy_j: Energy of the GPU [J]. NaN if it cannot be read, and 0 if it is that of another rank.
        FIGURES: By name, a function that gets the figure from the report of a rank.
    """

    FIGURES = _figures()

    def __init__(
        self,
        messages: Sequence[RankReport],
        pipeline: npt.NDArray[np.int64],
        counts_energy: Sequence[bool] | None = None,
    ) -> None:
        """Collect the reports of all ranks.

        Args:
            messages: The report of each rank.
            pipeline: Its data-parallel pipeline.
            counts_energy: Whether its energy counts; several ranks may share a counter. By default all count.
        """
        self.pipeline = pipeline
        self._messages = messages
        energy_j = self._of_all("energy_j")
        self.energy_j = energy_j if counts_energy is None else np.where(counts_energy, energy_j, 0.0)

    def __getattr__(self, name: str) -> Floats:
        if name not in self.FIGURES:
            raise AttributeError(f"no figure of a rank's report is named {name}")
        values = self._of_all(name)
        setattr(self, name, values)  # it is made once
        return values

    def _of_all(self, name: str) -> Floats:
        return np.array([*map(self.FIGURES[name], self._messages)], np.float64)

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
            bool(ranks.has_failed.any()),
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
