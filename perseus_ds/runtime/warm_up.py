"""Ordinary iterations until times are steady, in which loads, transfers and the tail are measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial

from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.clocks.timers import Span
from perseus_ds.gpu.energy_counter import CounterAnswer, answer_to_a_step
from perseus_ds.gpu.energy_counter import counter_period_s as measured_period_s
from perseus_ds.pipeline.dag import Boundary, FixedDurations
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.profiler.counter_log import measure_blocking_power_w
from perseus_ds.profiler.fixed_durations import (
    launched_transfer_durations_s,
    launches_transfers,
    load_durations_s,
    medians,
    other_durations_s,
    passes_of,
    tail_durations_s,
    transfer_durations_s,
    without_gaps,
)
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase, Phase, one_iteration
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_context import ModeContext

_STEADY = 0.02
# Blocking power is measured over so many refreshes of the counter, at most for so long [s], but over the fewest.
_REFRESHES, _BLOCKING_WINDOW_S, _FEWEST_REFRESHES = 20, 2.0, 4.5
_SHORT_WINDOW_S = 0.35
_WINDOW_S = 1.0
_MOST_TIMES_AS_LONG = 3


@dataclass(frozen=True)
class Baseline:
    """Iterations before any clock was changed, as this rank measured them.

    Attributes:
        energy_j: Of this rank's GPU in a typical iteration [J].
        counter_period_s: How often the slowest energy counter of all ranks is refreshed [s].
        counter_settle_s: How long, on any rank, the counter still tells what was drawn before a step of power [s].
        info: The job, and the durations of what has no clock to choose; complete on rank 0.
        tails_of: On rank 0, the profile whose tails are used, since these were not measured; None where they were.
    """

    spans: list[list[Span]]
    time_s: float
    energy_j: float
    counter_period_s: float
    counter_settle_s: float
    info: ProfileInfo
    tails_of: StageProfile | None = None

    def with_tails_of(self, profile: StageProfile | None) -> Baseline:
        """Return it with the tails of a profile, which are the same for inputs of other shapes."""
        if profile is None:
            return self
        info = self.info.model_copy(update={"tail_s": profile.info.tail_s})
        return replace(self, info=info, tails_of=profile)


def warm_up(context: ModeContext) -> Phase[Baseline]:
    """Run ordinary iterations until times are steady on all ranks.

    Raises:
        PerseusError: On all ranks, if the GPU of one cannot be measured.
    """
    job, rank = context.job, context.rank
    rank.clocks.watch_default_clocks()
    rank.clocks.limits.profiled_w = None  # those of now are the profile's
    taken: list[IterationMeasurement] = []
    least = job.config.profile.warm_up
    while len(taken) < _MOST_TIMES_AS_LONG * least:
        left_s = taken[-1].time_s * max(1, least - len(taken)) if taken else None
        wanted = NextIteration("warm-up", aligns_tail=True, next_phase=NextPhase("profile", left_s))
        taken.append((yield from one_iteration(wanted)))
        if len(taken) >= least:
            drift = abs(taken[-1].time_s / taken[-2].time_s - 1)
            if rank.communicator.all_max(drift) <= _STEADY:
                break
    # The first iteration allocates memory and exchanges shapes.
    spans = [without_gaps(seen.spans(), seen.time_s) for seen in taken[1:]]
    time_s = statistics.median(seen.time_s for seen in taken[1:])
    energy_j = statistics.mean(seen.energy_j for seen in taken[1:])
    period_s, settle_s, power_w = _counter_and_blocking_power(rank, taken[-1].energy_j / taken[-1].time_s)
    info = _info(job, rank, spans, [seen.start_s for seen in taken[1:]], power_w)
    return Baseline(spans, time_s, energy_j, period_s, settle_s, info)


def _info(job: Job, rank: RankContext, spans: list[list[Span]], begins_s: list[float], power_w: float) -> ProfileInfo:
    """Return the job and what was measured of it; on rank 0, with the durations of what has no clock to choose."""
    communicator = rank.communicator
    profile_key = job.profile_key(communicator)
    # Spans are many: those of one pipeline go to rank 0, and of all other ranks only the mean power and the tails.
    ours = []
    if communicator.topology.is_shown:
        ahead_s = communicator.ahead_s(rank.timebase) if launches_transfers(job.schedule) else 0.0
        ours = communicator.pipeline_gather((spans, [begin_s - ahead_s for begin_s in begins_s]))
    pipeline = [spans for spans, _ in ours]
    reports = communicator.gather((tail_durations_s(spans), power_w, rank.clocks.readback.default_mhz))
    default_mhz = [clock_mhz for *_, clock_mhz in reports if clock_mhz is not None]
    if not reports:
        return job.info.model_copy(update={"blocking_power_w": power_w})
    fixed = FixedDurations(
        load_s=load_durations_s(pipeline),
        transfer_s=_transfers_s(job.schedule, ours),
        tail_s=medians(tail for tails, *_ in reports for tail in tails.items()),
        other_s=other_durations_s(pipeline),
    )
    rest = {
        "blocking_power_w": statistics.mean(power_w for _, power_w, _ in reports),
        "default_clock_mhz": statistics.median_low(default_mhz) if default_mhz else None,
        "job": profile_key,
        "streams": ScheduleStreams.of(job.schedule),
    }
    return job.info.model_copy(update={**rest, "rows": []}).with_fixed_durations(fixed)


def _transfers_s(schedule: Schedule, ranks: list[tuple[list[list[Span]], list[float]]]) -> dict[Boundary, float]:
    """Return the durations of transfers, given of each rank its spans by iteration and when each of them began [s]."""
    if not launches_transfers(schedule):
        return transfer_durations_s([spans for spans, _ in ranks])
    iterations = zip(*(zip(spans, begins_s, strict=True) for spans, begins_s in ranks), strict=True)
    return launched_transfer_durations_s(schedule, map(passes_of, iterations))


def counter_period_s(rank: RankContext) -> float:
    """Return how often the slowest energy counter of all ranks is refreshed [s]; every rank must ask at once.

    Raises:
        GpuError: On all ranks, if it cannot be measured on one.
    """

    def measured() -> float:
        for window_s in (_SHORT_WINDOW_S, _WINDOW_S):
            found = rank.clocks.call(partial(measured_period_s, rank.gpu, window_s, rank.timebase))
            if period_s := found.value():
                return period_s
        return _WINDOW_S

    return rank.communicator.all_max(rank.communicator.raise_on_all_ranks(measured))


def _counter_and_blocking_power(rank: RankContext, before_w: float) -> tuple[float, float, float]:
    """Return period and settling time of the slowest counter [s], and what this rank's GPU draws while it waits [W].

    In the last iteration it has drawn ``before_w``.
    """
    communicator, answer = rank.communicator, CounterAnswer(None, 0.0)

    def ask() -> None:
        nonlocal answer
        answer = answer_to_a_step(rank.gpu, before_w, rank.timebase)

    rank.timers.wait()
    communicator.raise_on_all_ranks(lambda: rank.clocks.call(ask).value())
    period_s = communicator.all_max(answer.period_s or _WINDOW_S)
    settle_s = communicator.all_max(answer.settle_s)
    window_s = max(min(_REFRESHES * period_s, _BLOCKING_WINDOW_S), _FEWEST_REFRESHES * period_s)
    power_w = communicator.raise_on_all_ranks(
        lambda: measure_blocking_power_w(
            rank.gpu,
            communicator.topology,
            rank.device,
            settle_s=settle_s + period_s,
            window_s=window_s,
            timebase=rank.timebase,
        )
    )
    return period_s, settle_s, power_w
