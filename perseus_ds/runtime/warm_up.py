"""Ordinary iterations until times are steady, in which loads, transfers and the tail are measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from perseus_ds.artifacts.profile import ProfileInfo, StageProfile, TransferDuration
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.clocks.timers import Span
from perseus_ds.errors import GpuError
from perseus_ds.gpu.energy_counter import CounterAnswer, answer_to_a_step
from perseus_ds.gpu.energy_counter import counter_period_s as measured_period_s
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.profiler.blocking import measure_blocking_power_w
from perseus_ds.profiler.fixed_durations import (
    launched_transfer_durations,
    launches_transfers,
    load_durations_s,
    medians,
    other_durations,
    passes_of,
    tail_durations_s,
    transfer_durations,
    without_gaps,
)
from perseus_ds.runtime.iterations import NextIteration, NextPhase, Phase, one_iteration
from perseus_ds.runtime.job import Job, RankContext

_STEADY = 0.02
# Blocking power is measured over so many refreshes of the counter, at most for so long [s], but over the fewest.
_REFRESHES, _BLOCKING_WINDOW_S, _FEWEST_REFRESHES = 20, 2.0, 4.5
_SHORT_WINDOW_S = 0.35
_WINDOW_S = 1.0
_MOST_TIMES_AS_LONG = 3
_BARRIERS = 5


@dataclass(frozen=True)
class Baseline:
    """Iterations before any clock was changed, as this rank measured them.

    Attributes:
        energy_j: Of this rank's GPU in a typical iteration [J].
        counter_period_s: How often the energy counter is refreshed [s].
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


def warm_up(job: Job, rank: RankContext) -> Phase[Baseline]:
    """Run ordinary iterations until times are steady on all ranks.

    Raises:
        PerseusError: On all ranks, if the GPU of one cannot be measured.
    """
    rank.clocks.watch_default_clocks()
    spans: list[list[Span]] = []
    begins_s: list[float] = []
    times_s: list[float] = []
    energies_j: list[float] = []
    least = job.config.profile.warm_up
    drifts = True
    while True:
        seen = yield from one_iteration(
            NextIteration(
                "warm-up",
                aligns_tail=True,
                next_phase=NextPhase("profile", times_s[-1] * max(1, least - len(spans)) if times_s else None),
                reported={"vote": drifts},
            )
        )
        spans.append(without_gaps(seen.spans(), seen.time_s))
        begins_s.append(seen.start_s)
        times_s.append(seen.time_s)
        energies_j.append(seen.energy_j)
        drifted_before = seen.reports is None or seen.reports.vote
        if len(spans) >= least and (not drifted_before or len(spans) >= _MOST_TIMES_AS_LONG * least):
            break
        drifts = len(times_s) < 2 or abs(times_s[-1] / times_s[-2] - 1) > _STEADY
    # The first iteration allocates memory and exchanges shapes.
    answer, power_w = _counter_and_blocking_power(rank, energies_j[-1] / times_s[-1])
    info = _info(job, rank, spans[1:], begins_s[1:], power_w)
    return Baseline(
        spans[1:],
        statistics.median(times_s[1:]),
        statistics.mean(energies_j[1:]),
        answer.period_s or _WINDOW_S,
        answer.settle_s,
        info,
    )


def _info(job: Job, rank: RankContext, spans: list[list[Span]], begins_s: list[float], power_w: float) -> ProfileInfo:
    """Return the job and what was measured of it; on rank 0, with the durations of what has no clock to choose."""
    communicator = rank.communicator
    profile_key = job.profile_key(communicator)
    offset_s = _offset_s(rank) if launches_transfers(job.schedule) else 0.0
    # Spans are many: those of one pipeline go to rank 0, and of all other ranks only the mean power and the tails.
    ours = []
    if communicator.topology.is_shown:
        ours = communicator.pipeline_gather((spans, [begin_s - offset_s for begin_s in begins_s]))
    pipeline = [spans for spans, _ in ours]
    reports = communicator.gather((tail_durations_s(spans), power_w, rank.clocks.readback.default_mhz))
    default_mhz = [clock_mhz for *_, clock_mhz in reports if clock_mhz is not None]
    rest = {
        "load_s": load_durations_s(pipeline),
        "transfers": _transfers(job.schedule, ours) if reports else [],
        "others": other_durations(pipeline),
        "tail_s": medians(tail for tails, *_ in reports for tail in tails.items()),
        "blocking_power_w": statistics.mean(power_w for _, power_w, _ in reports) if reports else power_w,
        "default_clock_mhz": statistics.median_low(default_mhz) if default_mhz else None,
        "job": profile_key,
        "streams": ScheduleStreams.of(job.schedule),
    }
    return job.info.model_copy(update={**rest, "rows": []} if reports else {"blocking_power_w": power_w})


def _transfers(schedule: Schedule, ranks: list[tuple[list[list[Span]], list[float]]]) -> list[TransferDuration]:
    """Return the durations of transfers.

    Args:
        schedule: The operations of each rank.
        ranks: Spans by iteration, and when each of them began [s], of each rank.
    """
    if not launches_transfers(schedule):
        return transfer_durations([spans for spans, _ in ranks])
    iterations = zip(*(zip(spans, begins_s, strict=True) for spans, begins_s in ranks), strict=True)
    return launched_transfer_durations(schedule, map(passes_of, iterations))


def _offset_s(rank: RankContext) -> float:
    """Return how much this rank's time is ahead of rank 0's [s]: ranks leave a barrier together."""
    offsets_s = []
    for _ in range(_BARRIERS):
        rank.communicator.barrier()
        now_s = rank.timebase.now_s()
        offsets_s.append(now_s - rank.communicator.computed_on_rank_0(lambda: now_s))  # noqa: B023  # called at once
    return statistics.median(offsets_s)


def counter_period_s(rank: RankContext) -> float:
    """Return how often the slowest energy counter of all ranks is refreshed [s]; every rank must ask at once.

    Raises:
        GpuError: On all ranks, if it cannot be measured on one.
    """
    period_s, problem = _own_counter_period_s(rank)
    _raise_on_all_ranks(rank, problem)
    return rank.communicator.all_max(period_s)


def _own_counter_period_s(rank: RankContext) -> tuple[float, GpuError | None]:
    gpu, timebase = rank.gpu, rank.timebase
    try:
        for window_s in (_SHORT_WINDOW_S, _WINDOW_S):
            measured = rank.clocks.call(lambda: measured_period_s(gpu, window_s, timebase))  # noqa: B023  # waited for
            if period_s := measured.value():
                return period_s, None
        return _WINDOW_S, None
    except GpuError as error:
        return 0.0, error


def _counter_and_blocking_power(rank: RankContext, before_w: float) -> tuple[CounterAnswer, float]:
    """Return how the energy counter answers to the end of a load, and what this rank's GPU draws while it waits [W].

    Args:
        rank: This rank.
        before_w: What its GPU has drawn in the last iteration [W].

    Raises:
        GpuError: On all ranks, if it cannot be told on one.
    """
    communicator, answer, problem, power_w = rank.communicator, CounterAnswer(None, 0.0), None, 0.0

    def ask() -> None:
        nonlocal answer
        answer = answer_to_a_step(rank.gpu, before_w, rank.timebase)

    rank.timers.wait()
    try:
        rank.clocks.call(ask).value()
    except GpuError as error:
        problem = error
    period_s = communicator.all_max(answer.period_s or _WINDOW_S)
    settle_s = communicator.all_max(answer.settle_s)
    window_s = max(min(_REFRESHES * period_s, _BLOCKING_WINDOW_S), _FEWEST_REFRESHES * period_s)
    try:
        power_w = measure_blocking_power_w(
            rank.gpu,
            communicator.topology,
            rank.device,
            settle_s=settle_s + period_s,
            window_s=window_s,
            timebase=rank.timebase,
        )
    except GpuError as error:
        problem = problem or error
    _raise_on_all_ranks(rank, problem)
    return replace(answer, settle_s=settle_s), power_w


def _raise_on_all_ranks(rank: RankContext, problem: GpuError | None) -> None:
    found = rank.communicator.first_not_none(problem)
    if found is not None:
        raise found
