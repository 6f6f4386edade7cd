"""Measures a profile while training goes on, in ordinary iterations at one clock each, and writes it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import numpy as np

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import ProfileWritten
from perseus_ds.clocks.timers import Span
from perseus_ds.clocks.transitions import ClockPlan
from perseus_ds.errors import GpuError, ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.clock_search import ClockSearch
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.estimates import denoise
from perseus_ds.profiler.online import MeasuredRow, OnlineProfiler
from perseus_ds.runtime.default_clocks import SETTLED
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase, Phase, one_iteration
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_context import ModeContext
from perseus_ds.runtime.warm_up import Baseline

logger = logging.getLogger("perseus_ds")

# The clock follows a little after an iteration has begun, at the earliest [s]. A GPU that is slower is read back; one
# that a limit keeps below the clock is taken to have settled after this time.
_SETTLE_S = 0.05
# A counter that was refreshed this often, and whose power has no larger relative error than this, tells power; some
# clocks are visited more than once for that.
_REFRESHES = 10
_KNOWN = 0.05
_MOST_VISITS = 8
# A tail that takes less of an iteration than this needs no clock of its own.
_TAIL_MATTERS = 0.02


def profile_online(context: ModeContext, baseline: Baseline) -> Phase[None]:
    """Measure a profile and write it.

    Raises:
        PerseusError: On all ranks, if one could not measure.
        OSError: On all ranks, if rank 0 could not write.
    """
    job, rank, recorder = context.job, context.rank, context.recorder
    settings = job.config.profile
    clocks = settings.clocks_of(rank.gpu)
    search = ClockSearch(rank.communicator, clocks, settings, baseline.info, job.output_dir)
    most = settings.most_clocks(len(clocks))
    measurement = _Measurement(rank, baseline)
    window_s = _SETTLE_S + baseline.counter_settle_s + (_REFRESHES + 1) * baseline.counter_period_s
    at_highest = rank.communicator.all_max(window_s / baseline.time_s)

    def iterations(clock_mhz: int) -> int:
        """Return in how many iterations at a clock the energy counter is refreshed often enough."""
        return max(1, math.ceil(at_highest * clock_mhz / clocks[-1]))

    expected = most * iterations(clocks[len(clocks) // 2])
    following = "optimizing" if job.config.mode == "auto" else "observe"
    recorder.say(
        f"profiling while training goes on: about {most} clocks in {expected} iterations, which take "
        f"{baseline.time_s:.2f} s at default clocks, up to {clocks[-1] / clocks[0]:.1f} times that at the lowest"
    )
    if following == "optimizing":
        default = IterationSample(baseline.counter_period_s)
        compared = math.ceil(default.remaining_s(baseline.time_s, more=SETTLED + 1) / baseline.time_s)
        recorder.say(
            f"a plan runs in about {expected + compared} iterations: {expected} to measure the profile, and at least "
            f"{compared} at default clocks, while plans are computed and to compare them with"
        )

    def next_phase() -> NextPhase:
        return NextPhase(following, measurement.remaining_s(expected))

    with measurement.log as log:
        rank.beside_training.callback(log.close)
        while chosen := search.next_clocks():
            for clock_mhz in chosen:
                yield from measurement.measure(clock_mhz, iterations(clock_mhz), next_phase)
            search.add(rank.communicator.raise_on_all_ranks(partial(measurement.rows, chosen)))

    def save() -> None:
        raw = search.measured(baseline.info)
        save_profile(job, baseline, raw, denoise(raw, clocks))

    rank.communicator.computed_on_rank_0(save)
    lost_s, lost_j = measurement.cost()
    recorder.announce(
        ProfileWritten(
            path=str(job.profile_path),
            resumed_clocks=search.resumed,
            iterations=measurement.iterations,
            lost_s=round(lost_s, 3),
            lost_j=round(lost_j, 3),
        )
    )


class _Measurement:
    """Iterations at one clock each, of this rank.

    Attributes:
        iterations: How many were measured.
    """

    def __init__(self, rank: RankContext, baseline: Baseline) -> None:
        self.log = CounterLog(rank.gpu, rank.timebase)
        self._communicator = rank.communicator
        self._baseline = baseline
        self._profiler = OnlineProfiler(baseline.info.blocking_power_w or 0.0)
        self._refreshes: Counter[int] = Counter()
        self.iterations = 0
        self._lost_s = 0.0
        self._lost_j = 0.0

    def measure(self, clock_mhz: int, iterations: int, next_phase: Callable[[], NextPhase]) -> Phase[None]:
        """Run so many iterations at a clock, and as many again until each rank knows what its GPU draws.

        Raises:
            PerseusError: On all ranks, if one could not measure.
        """
        for _ in range(_MOST_VISITS):
            visit = []
            for _ in range(iterations):
                wanted = NextIteration("profile", ClockPlan(first=clock_mhz), aligns_tail=True, next_phase=next_phase())
                visit.append((yield from one_iteration(wanted)))
            self._communicator.raise_on_all_ranks(partial(self._add, clock_mhz, visit))
            few = self._refreshes[clock_mhz] < _REFRESHES or self._profiler.power_error(clock_mhz) > _KNOWN
            if not self._communicator.all_max(few):
                break

    def _add(self, clock_mhz: int, visit: Sequence[IterationMeasurement]) -> None:
        """Take in iterations at a clock."""
        if visit[-1].failed:
            raise GpuError("the clock could not be set")
        for run in _one_after_the_other(visit):
            first, last = run[0], run[-1]
            start_s, end_s = first.start_s + _SETTLE_S, last.start_s + last.time_s
            reached_s = self.log.reached_s(clock_mhz, start_s, end_s)
            settled_s = (start_s if reached_s is None else reached_s) + self._baseline.counter_settle_s
            readings = self.log.readings(settled_s, end_s)
            spans = [
                [Span(span.operation, span.start_s + seen.start_s, span.end_s + seen.start_s) for span in seen.spans()]
                for seen in run
            ]
            self._profiler.add(clock_mhz, spans, readings, self.log.state)
            self._refreshes[clock_mhz] += len(readings)
        self.log.forget()
        self.iterations += len(visit)
        self._lost_s += sum(seen.time_s - self._baseline.time_s for seen in visit)
        self._lost_j += sum(seen.energy_j - self._baseline.energy_j for seen in visit)

    def rows(self, clocks: Sequence[int]) -> list[MeasuredRow]:
        """Return all rows measured so far, by what is known now.

        Raises:
            GpuError: There is none at one of some clocks.
        """
        rows = self._profiler.rows()
        missing = sorted(set(clocks) - {row.measurement.clock_mhz for row in rows})
        if missing:
            raise GpuError(
                f"no power could be told at {missing[0]} MHz: the energy counter was refreshed "
                f"{self._refreshes[missing[0]]} times."
            )
        return rows

    def remaining_s(self, iterations: int) -> float:
        """Return about how long it takes until so many iterations are measured, one more at least [s]."""
        lost_s = self._lost_s / self.iterations if self.iterations else 0.0
        return max(1, iterations - self.iterations) * (self._baseline.time_s + lost_s)

    def cost(self) -> tuple[float, float]:
        """Return how much more time [s], on the rank that lost most, and energy [J], of all GPUs, the iterations took.

        Against iterations at default clocks. Every rank must ask at the same time.
        """
        return self._communicator.all_max(self._lost_s), self._communicator.all_sum(self._lost_j)


def _one_after_the_other(visit: Sequence[IterationMeasurement]) -> list[list[IterationMeasurement]]:
    """Return iterations in runs without a gap: those of other shapes may lie between."""
    runs = groupby(enumerate(visit), lambda placed: placed[1].number - placed[0])
    return [[seen for _, seen in run] for _, run in runs]


def save_profile(job: Job, baseline: Baseline, raw: StageProfile, estimated: StageProfile) -> None:
    """Write the estimates to plan with, and the rows as they were measured beside them; on rank 0 only.

    Raises:
        ProfileError: No forward or backward was measured.
        OSError: The files cannot be written.
    """
    if baseline.tails_of is None:
        profile = _without_idle_tails(estimated, baseline)
    else:
        profile = _with_tails_of(baseline.tails_of, estimated)
    profile = _above_waiting(profile, baseline.info.blocking_power_w or 0.0)
    if not profile.keys:
        raise ProfileError("no forward or backward was measured")
    raw.save(job.profile_path.with_name("measured.csv"))
    profile.save(job.profile_path)


def _without_idle_tails(profile: StageProfile, baseline: Baseline) -> StageProfile:
    """Leave out the rows of tails that are short, or in which the GPU draws no more than waiting: any clock will do."""
    blocking_power_w = baseline.info.blocking_power_w or 0.0
    idle = {
        stage
        for stage, kind in profile.keys
        if kind is Kind.TAIL
        and (
            profile.at_highest_clock(stage, kind).time_s < _TAIL_MATTERS * baseline.time_s
            or min(profile.options(stage, kind).effective_energy_j(blocking_power_w)) <= 0
        )
    }
    return profile.where(lambda stage, kind, _: kind is not Kind.TAIL or stage not in idle)


def _with_tails_of(other: StageProfile, profile: StageProfile) -> StageProfile:
    """Replace the rows of tails by those of another profile."""
    passes = profile.where(lambda stage, kind, clock_mhz: kind is not Kind.TAIL)
    tails = other.where(lambda stage, kind, clock_mhz: kind is Kind.TAIL)
    rows = [*passes.info.rows, *tails.info.rows]
    return StageProfile([*passes.measurements, *tails.measurements], profile.info.model_copy(update={"rows": rows}))


def _above_waiting(profile: StageProfile, blocking_power_w: float) -> StageProfile:
    """Leave out rows that noise has put below what waiting takes, which no plan can be made from; two clocks stay."""
    below: set[tuple[int, Kind, int]] = set()
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        is_below = options.effective_energy_j(blocking_power_w) <= 0
        if np.count_nonzero(~is_below) >= 2:
            below.update((stage, kind, int(clock_mhz)) for clock_mhz in options.clock_mhz[is_below])
    if below:
        clocks = sorted({clock_mhz for _, _, clock_mhz in below})
        logger.warning(
            "perseus: %d rows at %s MHz are left out of the profile: they say less power than waiting takes, %.1f W.",
            len(below),
            f"{clocks[0]} to {clocks[-1]}" if len(clocks) > 1 else clocks[0],
            blocking_power_w,
        )
    return profile.where(lambda *row: row not in below)
