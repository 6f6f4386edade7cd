"""Measures a profile while training goes on: ordinary iterations, each at one clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perseus_ds.artifacts.run_records import against_default_clocks
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Span
from perseus_ds.errors import GpuError, ProfileError
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.online import OnlineProfiler
from perseus_ds.profiler.rows import MeasuredRow
from perseus_ds.profiler.search import clocks_to_choose_from, most_clocks
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration, Phase, one_iteration
from perseus_ds.runtime.profile_files import clock_search, save_profile
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.warm_up import Baseline

# The clock follows a little after an iteration has begun [s].
_SETTLE_S = 0.05
# A counter that was refreshed this often tells power; an iteration may be too short for that.
_REFRESHES = 10
_MOST_ITERATIONS = 8


class ClockSource(Protocol):
    """Says which clocks to measure and takes the rows that were measured; all ranks at once."""

    def next_clocks(self) -> list[int]:
        """Return the clocks to measure now [MHz]; none when enough is known."""

    def add(self, rows: Sequence[MeasuredRow] | Exception) -> None:
        """Take in this rank's rows of those clocks, or why it has none."""


@dataclass(frozen=True)
class ProfilingCost:
    """Cost of measuring while training goes on, against iterations at default clocks.

    Attributes:
        iterations: Iterations that were measured.
        lost_s: By how much they took longer, on the rank that lost most [s].
        lost_j: By how much they used more energy, of all GPUs [J].
    """

    iterations: int
    lost_s: float
    lost_j: float


def profile_online(job: Job, rank: Rank, recorder: Recorder, baseline: Baseline) -> Phase[None]:
    """Measure a profile and write it.

    Args:
        job: The job.
        rank: This rank.
        recorder: Of the job.
        baseline: Iterations before any clock was changed.

    Raises:
        PerseusError: On all ranks, if one could not measure.
        OSError: On all ranks, if rank 0 could not write.
    """
    clocks = clocks_to_choose_from(rank.gpu, job.config.profile)
    search = clock_search(job, rank, baseline, online=True)
    most = most_clocks(job.config.profile, len(clocks), online=True)
    recorder.say(
        f"profiling while training goes on: about {most} clocks, an iteration or more at each; iterations take "
        f"{baseline.time_s:.2f} s at default clocks, up to {clocks[-1] / clocks[0]:.1f} times that at the lowest"
    )
    cost = yield from measure_clocks(rank, baseline, search)
    rank.communicator.from_first(lambda: save_profile(job, search, baseline))
    recorder.profile_written(
        job.profile_path,
        resumed_clocks=search.resumed,
        iterations=cost.iterations,
        lost_s=cost.lost_s,
        lost_j=cost.lost_j,
    )
    recorder.say(
        f"wrote {job.profile_path} after {cost.iterations} profiled iterations, which took "
        f"{against_default_clocks(cost.lost_s, cost.lost_j)}"
    )


def measure_clocks(rank: Rank, baseline: Baseline, source: ClockSource) -> Phase[ProfilingCost]:
    """Run ordinary iterations at the clocks that a source asks for, and give it their rows.

    Raises:
        PerseusError: On all ranks, if one could not measure.
    """
    iterations, lost_s, lost_j = 0, 0.0, 0.0
    measurement = _OnlineMeasurement(rank, baseline)
    with measurement.log:
        while clocks := source.next_clocks():
            for seen in (yield from _one_batch(measurement, clocks)):
                iterations += 1
                lost_s += seen.time_s - baseline.time_s
                lost_j += seen.energy_j - baseline.energy_j
            source.add(measurement.rows_of(clocks))
    total_j = float(rank.communicator.all_gather_numbers([lost_j]).sum())
    return ProfilingCost(iterations, rank.communicator.all_max(lost_s), total_j)


def _one_batch(measurement: _OnlineMeasurement, clocks: Sequence[int]) -> Phase[list[IterationMeasurement]]:
    """Measure some clocks until no rank asks for another iteration at any of them.

    A rank asks with its report of an iteration, which is known after the next one. So a clock that needs more is
    measured again after the others, and the last one is repeated until its report is known.
    """
    waiting = deque(clocks)
    seen_before: list[IterationMeasurement] = []
    before: int | None = None
    clock, needs_more = waiting.popleft(), False
    while True:
        seen = yield from one_iteration(
            NextIteration("profile", ClockPlan.constant(clock), aligns_tail=True, reported={"vote": needs_more})
        )
        seen_before.append(seen)
        needs_more = measurement.add(clock, seen)
        asked = seen.reports is not None and bool(seen.reports.column("vote").any())
        if asked and before is not None and before != clock and before not in waiting:
            waiting.append(before)
        if not waiting:
            if before == clock and not asked:
                return seen_before
            waiting.append(clock)
        before, clock = clock, waiting.popleft()


class _OnlineMeasurement:
    """Iterations at one clock each, of this rank.

    Attributes:
        log: Watches the energy counter.
    """

    def __init__(self, rank: Rank, baseline: Baseline) -> None:
        self.log = CounterLog(rank.gpu, rank.timebase)
        self._profiler = OnlineProfiler(baseline.info.blocking_power_w or 0.0)
        self._refreshes: Counter[int] = Counter()
        self._iterations: Counter[int] = Counter()
        self._error: GpuError | None = None

    def add(self, clock_mhz: int, seen: IterationMeasurement) -> bool:
        """Take in an iteration; return whether more of them are needed at this clock."""
        spans = [Span(s.operation, s.start_s + seen.start_s, s.end_s + seen.start_s) for s in seen.spans()]
        readings: list[tuple[float, float]] = []
        try:
            readings = self.log.readings(seen.start_s + _SETTLE_S, seen.start_s + seen.time_s)
        except GpuError as error:  # the other ranks are told with the rows
            self._error = error
        if seen.failed:
            self._error = GpuError("the clock could not be set")
        self.log.forget()
        self._profiler.add(clock_mhz, spans, readings)
        self._iterations[clock_mhz] += 1
        self._refreshes[clock_mhz] += len(readings)
        few = self._refreshes[clock_mhz] < _REFRESHES and self._iterations[clock_mhz] < _MOST_ITERATIONS
        return few and self._error is None

    def rows_of(self, clocks: Sequence[int]) -> Sequence[MeasuredRow] | Exception:
        """Return the rows of some clocks, or why there are none."""
        if self._error is not None:
            return self._error
        try:
            return [row for row in self._profiler.rows() if row.measurement.clock_mhz in clocks]
        except Exception as error:  # the other ranks wait to be told
            return ProfileError(f"{type(error).__name__}: {error}")
