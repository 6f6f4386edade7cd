"""Measures a profile while training goes on: ordinary iterations, each at one clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from perseus_ds.artifacts.run_records import against_default_clocks
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Span
from perseus_ds.errors import GpuError, PerseusError, ProfileError
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.online import OnlineProfiler
from perseus_ds.profiler.rows import MeasuredRow
from perseus_ds.profiler.search import clocks_to_choose_from, most_clocks
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration, Outlook, Phase, one_iteration
from perseus_ds.runtime.profile_files import clock_search, save_profile
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.warm_up import Baseline

# The clock follows a little after an iteration has begun, at the earliest [s]. A GPU that is slower is read back; one
# that a limit keeps below the clock is taken to have settled after this time.
_SETTLE_S = 0.05
# A counter that was refreshed this often, and whose power has no larger relative error than this, tells power; some
# clocks are visited more than once for that.
_REFRESHES = 10
_KNOWN = 0.05
_REFRESHES_A_VISIT = 5
_MOST_VISITS = 8


class ClockSource(Protocol):
    """Returns the clocks to measure and gets the measured rows; called on all ranks together."""

    def next_clocks(self) -> list[int]:
        """Return the clocks to measure now [MHz]; none when the measurement is finished."""

    def add(self, rows: Sequence[MeasuredRow] | Exception) -> None:
        """Add this rank's rows of those clocks, or the error that prevented them."""


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
    following = "plan" if job.config.mode == "auto" else "observe"
    cost = yield from measure_clocks(rank, baseline, search, most=most, following=following)
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


def measure_clocks(
    rank: Rank, baseline: Baseline, source: ClockSource, *, most: int, following: str
) -> Phase[ProfilingCost]:
    """Run ordinary iterations at the clocks that a source asks for, and give it their rows.

    Args:
        rank: This rank.
        baseline: Iterations before any clock was changed.
        source: Of the clocks.
        most: About how many clocks it asks for.
        following: The phase that follows.

    Raises:
        PerseusError: On all ranks, if one could not measure.
    """
    measurement = _OnlineMeasurement(rank, baseline)
    window_s = _SETTLE_S + _REFRESHES_A_VISIT * baseline.counter_period_s
    iterations = math.ceil(rank.communicator.all_max(window_s / baseline.time_s))
    refreshes = (iterations * baseline.time_s - _SETTLE_S) / baseline.counter_period_s
    ahead = _Ahead(most * iterations * math.ceil(_REFRESHES / refreshes), following)
    with measurement.log as log:
        rank.beside_training.callback(log.close)
        while clocks := source.next_clocks():
            yield from _measure_batch(measurement, clocks, iterations, ahead)
            source.add(measurement.rows_of(clocks))
    return measurement.cost()


@dataclass(frozen=True)
class _Ahead:
    """How many iterations are expected in all, and the phase that follows them."""

    iterations: int
    phase: str


def _measure_batch(
    measurement: _OnlineMeasurement, clocks: Sequence[int], iterations: int, ahead: _Ahead
) -> Phase[None]:
    """Visit some clocks until no rank asks for another visit of any of them.

    A rank asks with its report of a visit's last iteration, which is known after the next iteration. So a clock that
    needs more is visited again after the others, and the last one is repeated until its report is known.

    Args:
        measurement: Of this rank.
        clocks: The clocks.
        iterations: Iterations of a visit: as many as several refreshes of the energy counter take.
        ahead: What is expected.
    """
    waiting = deque(clocks)
    before: int | None = None
    clock, needs_more = waiting.popleft(), False
    while True:
        outlook = Outlook(ahead.phase, measurement.remaining_s(ahead.iterations))
        visit = yield from _visit(clock, iterations, outlook, needs_more=needs_more)
        needs_more = measurement.add(clock, visit)
        reports = visit.seen[0].reports
        # Reports that a checkpoint has cut off may have asked.
        asked = reports.vote if reports is not None else before is not None
        if asked and before is not None and before != clock and before not in waiting:
            waiting.append(before)
        if not waiting:
            if before == clock and not asked:
                return
            waiting.append(clock)
        before, clock = clock, waiting.popleft()


@dataclass(frozen=True)
class _Visit:
    """Iterations at one clock.

    Attributes:
        seen: What this rank measured of each.
        spans: Operations of each, in the rank's timebase.
    """

    seen: list[IterationMeasurement]
    spans: list[list[Span]]

    def add(self, seen: IterationMeasurement) -> None:
        """Add an iteration that has just ended: its operations are known until the next one begins."""
        self.seen.append(seen)
        self.spans.append([Span(s.operation, s.start_s + seen.start_s, s.end_s + seen.start_s) for s in seen.spans()])

    def runs(self) -> list[_Visit]:
        """Return them in parts of iterations one right after the other: those of other shapes may lie between."""
        parts: list[_Visit] = []
        for seen, spans in zip(self.seen, self.spans, strict=True):
            if not parts or parts[-1].seen[-1].number + 1 != seen.number:
                parts.append(_Visit([], []))
            parts[-1].seen.append(seen)
            parts[-1].spans.append(spans)
        return parts


def _visit(clock_mhz: int, iterations: int, outlook: Outlook, *, needs_more: bool) -> Phase[_Visit]:
    """Run iterations at one clock, and report whether the visit before needs another one."""
    wanted = NextIteration("profile", ClockPlan.constant(clock_mhz), aligns_tail=True, outlook=outlook)
    visit = _Visit([], [])
    for number in range(iterations):
        reported = {"vote": needs_more} if number == 0 else {}
        visit.add((yield from one_iteration(replace(wanted, reported=reported))))
    return visit


class _OnlineMeasurement:
    """Iterations at one clock each, of this rank.

    Attributes:
        log: Reads the energy counter.
    """

    def __init__(self, rank: Rank, baseline: Baseline) -> None:
        self.log = CounterLog(rank.gpu, rank.timebase)
        self._communicator = rank.communicator
        self._baseline = baseline
        self._profiler = OnlineProfiler(baseline.info.blocking_power_w or 0.0)
        self._refreshes: Counter[int] = Counter()
        self._visits: Counter[int] = Counter()
        self._iterations = 0
        self._lost_s = 0.0
        self._lost_j = 0.0
        self._error: PerseusError | None = None

    def add(self, clock_mhz: int, visit: _Visit) -> bool:
        """Take in the iterations of a visit; return whether another visit of this clock is needed."""
        try:
            for part in visit.runs():
                first, last = part.seen[0], part.seen[-1]
                start_s, end_s = first.start_s + _SETTLE_S, last.start_s + last.time_s
                reached_s = self.log.reached_s(clock_mhz, start_s, end_s)
                readings = self.log.readings(start_s if reached_s is None else reached_s, end_s)
                self._profiler.add(clock_mhz, part.spans, readings, self.log.state)
                self._refreshes[clock_mhz] += len(readings)
        except GpuError as error:  # the other ranks are told with the rows
            self._error = error
        except Exception as error:
            self._error = ProfileError(f"{type(error).__name__}: {error}")
        if visit.seen[-1].failed:
            self._error = GpuError("the clock could not be set")
        self.log.forget()
        self._visits[clock_mhz] += 1
        self._iterations += len(visit.seen)
        self._lost_s += sum(seen.time_s - self._baseline.time_s for seen in visit.seen)
        self._lost_j += sum(seen.energy_j - self._baseline.energy_j for seen in visit.seen)
        few = self._refreshes[clock_mhz] < _REFRESHES or self._profiler.power_error(clock_mhz) > _KNOWN
        return few and self._visits[clock_mhz] < _MOST_VISITS and self._error is None

    def rows_of(self, clocks: Sequence[int]) -> Sequence[MeasuredRow] | Exception:
        """Return the rows of some clocks, each of which has one at least; or why there are none."""
        if self._error is not None:
            return self._error
        try:
            rows = [row for row in self._profiler.rows() if row.measurement.clock_mhz in clocks]
        except Exception as error:  # the other ranks wait to be told
            return ProfileError(f"{type(error).__name__}: {error}")
        missing = sorted(set(clocks) - {row.measurement.clock_mhz for row in rows})
        if missing:
            return GpuError(
                f"no power could be told at {missing[0]} MHz: in {self._visits[missing[0]]} visits the energy counter "
                f'was refreshed {self._refreshes[missing[0]]} times. Use "mode": "profile", which measures longer.'
            )
        return rows

    def remaining_s(self, iterations: int) -> float:
        """Return about how long it takes until so many iterations are measured, one more at least [s]."""
        lost_s = self._lost_s / self._iterations if self._iterations else 0.0
        return max(1, iterations - self._iterations) * (self._baseline.time_s + lost_s)

    def cost(self) -> ProfilingCost:
        """Return the cost of all visits; every rank must ask at the same time."""
        lost_j = self._communicator.all_sum(self._lost_j)
        return ProfilingCost(self._iterations, self._communicator.all_max(self._lost_s), lost_j)
