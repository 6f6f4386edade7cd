"""Measures a profile during training: at default clocks until times are stable, then at each clock."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from perseus_ds.artifacts.profile import ByLength, ProfileInfo, StageProfile
from perseus_ds.artifacts.run_records import ProfileWritten
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.clocks.timers import Span
from perseus_ds.errors import GpuError, ProfileError
from perseus_ds.optimizer.lengths import Lengths
from perseus_ds.pipeline.dag import Boundary, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Schedule
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.blocking_power import chosen_power_w, measure_blocking_power_w, pooled
from perseus_ds.profiler.clock_search import AdaptiveSampler, ClockSearch, Sweep
from perseus_ds.profiler.estimates import denoise
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
from perseus_ds.profiler.lengths import FEWEST_LENGTHS, LengthModel, fit_by_length, typical_error
from perseus_ds.profiler.online import MeasuredRow, OnlineProfiler
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.config import ProfileConfig
from perseus_ds.runtime.default_clocks import SETTLED
from perseus_ds.runtime.devices import peak_memory_bytes
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase, Phase, one_iteration
from perseus_ds.runtime.job import Job, ModeContext, RankContext
from perseus_ds.runtime.recorder import known_of_all

_STEADY = 0.02
# Number of refreshes of the counter for measuring blocking power, maximum time [s], and minimum number of refreshes.
_WAITED_REFRESHES, _BLOCKING_WINDOW_S, _FEWEST_REFRESHES = 20, 2.0, 4.5
_SHORT_WINDOW_S = 0.35
_WINDOW_S = 1.0
_MOST_TIMES_AS_LONG = 3
# The lengths of an iteration are known on all ranks when it has ended; the first ones were given before.
_LENGTHS_KNOWN_AFTER = 4


@dataclass(frozen=True)
class Baseline:
    """This rank's measurement of iterations before clocks were changed.

    Attributes:
        energy_j: Of this rank's GPU in a typical iteration [J].
        counter_period_s: How often the slowest energy counter of all ranks is refreshed [s].
        counter_settle_s: How long, on any rank, the counter still tells what was drawn before a step of power [s].
        info: The job, and the durations of what has no clock to choose; complete on rank 0.
        tails_of: On rank 0, the profile whose tails are used, since these were not measured; None where they were.
        by_length: How the passes of this rank depend on lengths; None where the job gives none.
    """

    spans: list[list[Span]]
    time_s: float
    energy_j: float
    counter_period_s: float
    counter_settle_s: float
    info: ProfileInfo
    tails_of: StageProfile | None = None
    by_length: ByLength | None = None


def warm_up(context: ModeContext, *, tails_of: StageProfile | None = None) -> Phase[Baseline]:
    """Run iterations at default clocks until times are stable on all ranks.

    If a profile is given, its tails are used, because they are the same for inputs of other shapes.

    Raises:
        PerseusError: On all ranks, if the GPU of one cannot be measured.
    """
    job, rank = context.job, context.rank
    rank.clocks.watch_default_clocks()
    rank.clocks.set_profiled_limit(None)  # the current limits are those of the profile
    taken: list[IterationMeasurement] = []
    least = job.config.profile.warm_up
    while len(taken) < _MOST_TIMES_AS_LONG * least:
        left_s = taken[-1].time_s * max(1, least - len(taken)) if taken else None
        wanted = NextIteration("warm-up", aligns_tail=True, next_phase=NextPhase("profile", left_s))
        taken.append((yield from one_iteration(wanted)))
        is_unknown = context.look_ahead.is_used and context.look_ahead.used_for <= _LENGTHS_KNOWN_AFTER
        if len(taken) >= least and not is_unknown:
            drift = abs(taken[-1].time_s / taken[-2].time_s - 1)
            if rank.communicator.all_max(drift) <= _STEADY:
                break
    # The first iteration allocates memory and exchanges shapes.
    spans = [without_gaps(seen.spans(), seen.time_s) for seen in taken[1:]]
    time_s = statistics.median(seen.time_s for seen in taken[1:])
    energy_j = statistics.mean(seen.energy_j for seen in taken[1:])
    period_s, settle_s, power_w = _counter_and_blocking_power(rank, taken[-1].energy_j / taken[-1].time_s)
    info = _info(job, rank, spans, [seen.start_s for seen in taken[1:]], power_w)
    if tails_of is not None:
        info = info.model_copy(update={"tail_s": tails_of.info.tail_s})
    by_length = None
    if context.look_ahead.is_used:
        by_length, of_pipeline = _by_length(
            rank, [(seen.lengths(), own) for seen, own in zip(taken[1:], spans, strict=True)]
        )
        info = info.model_copy(update={"by_length": of_pipeline})
    return Baseline(spans, time_s, energy_j, period_s, settle_s, info, tails_of, by_length)


def _by_length(
    rank: RankContext, iterations: Sequence[tuple[Lengths | None, Sequence[Span]]]
) -> tuple[ByLength | None, ByLength | None]:
    """Return how passes depend on lengths: those of this rank and, on rank 0, those of its pipeline."""
    known = [(lengths, spans) for lengths, spans in iterations if lengths is not None]
    own = [length for lengths, _ in known for length in lengths]
    length = rank.communicator.computed_on_rank_0(lambda: statistics.fmean(own) if own else None)
    by_length = None
    if length is not None:
        times: dict[tuple[int, Kind], list[tuple[float, float]]] = defaultdict(list)
        for lengths, spans in known:
            for span in spans:
                if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL:
                    instruction = span.operation.instruction
                    if instruction.micro_batch < len(lengths):
                        times[instruction.stage, instruction.kind].append(
                            (lengths[instruction.micro_batch], span.time_s)
                        )
        by_length = fit_by_length(times, length)
    is_shown = rank.communicator.topology.is_shown
    ours = [one for one in rank.communicator.gather(by_length if is_shown else None) if one is not None]
    if not ours:
        return by_length, None
    return by_length, ByLength(length=ours[0].length, passes=[one for found in ours for one in found.passes])


def _info(job: Job, rank: RankContext, spans: list[list[Span]], begins_s: list[float], power_w: float) -> ProfileInfo:
    """Return the job with measured values. On rank 0 they include the durations without a clock to choose."""
    communicator = rank.communicator
    profile_key = job.profile_key(communicator)
    # There are many spans. Only those of one pipeline are sent to rank 0, and mean power and tails of all other ranks.
    ours = []
    if communicator.topology.is_shown:
        ahead_s = communicator.ahead_s(rank.timebase) if launches_transfers(job.schedule) else 0.0
        begins_s = [begin_s - ahead_s for begin_s in begins_s]
        ours = communicator.pipeline_gather((spans, begins_s, peak_memory_bytes(rank.device)))
    pipeline = [spans for spans, *_ in ours]
    reports = communicator.gather((tail_durations_s(spans), power_w, rank.clocks.status.default_mhz))
    default_mhz = [int(clock_mhz) for *_, clock_mhz in reports if clock_mhz]
    if not reports:
        return job.info.model_copy(update={"blocking_power_w": power_w})
    fixed = FixedDurations(
        load_s=load_durations_s(pipeline),
        transfer_s=_transfers_s(job.schedule, [(spans, begins_s) for spans, begins_s, _ in ours]),
        tail_s=medians(tail for tails, *_ in reports for tail in tails.items()),
        other_s=other_durations_s(pipeline),
    )
    rest = {
        "blocking_power_w": statistics.mean(power_w for _, power_w, _ in reports),
        "default_clock_mhz": statistics.median_low(default_mhz) if default_mhz else None,
        "job": profile_key,
        "streams": ScheduleStreams.of(job.schedule),
        "memory_bytes": known_of_all([memory_bytes for *_, memory_bytes in ours]),
    }
    return job.info.model_copy(update={**rest, "rows": []}).with_fixed_durations(fixed)


def _transfers_s(schedule: Schedule, ranks: list[tuple[list[list[Span]], list[float]]]) -> dict[Boundary, float]:
    """Return the durations of transfers, given spans and begins of the iterations of each rank [s]."""
    if not launches_transfers(schedule):
        return transfer_durations_s([spans for spans, _ in ranks])
    iterations = zip(*(zip(spans, begins_s, strict=True) for spans, begins_s in ranks), strict=True)
    return launched_transfer_durations_s(schedule, map(passes_of, iterations))


def counter_period_s(rank: RankContext) -> float:
    """Return the refresh period of the slowest energy counter of all ranks [s].

    All ranks call this together.

    Raises:
        GpuError: On all ranks, if it cannot be measured on one.
    """

    def measured() -> float:
        for window_s in (_SHORT_WINDOW_S, _WINDOW_S):
            (period_s,) = rank.clocks.ask("period", window_s).values()
            if period_s:
                return period_s
        return _WINDOW_S

    return rank.communicator.all_max(rank.communicator.raise_on_all_ranks(measured))


def _counter_and_blocking_power(rank: RankContext, before_w: float) -> tuple[float, float, float]:
    """Return period and settling time of the slowest counter [s], and this GPU's blocking power [W].

    ``before_w`` is its power in the last iteration.
    """
    communicator = rank.communicator
    rank.timers.wait()
    own_s, settle_s = communicator.raise_on_all_ranks(lambda: rank.clocks.ask("step", before_w).values())
    period_s = communicator.all_max(own_s or _WINDOW_S)
    settle_s = communicator.all_max(settle_s)
    window_s = max(min(_WAITED_REFRESHES * period_s, _BLOCKING_WINDOW_S), _FEWEST_REFRESHES * period_s)
    power_w = communicator.raise_on_all_ranks(
        lambda: measure_blocking_power_w(
            rank.clocks.counter_log,
            communicator.topology,
            rank.device,
            settle_s=settle_s + period_s,
            window_s=window_s,
            timebase=rank.timebase,
        )
    )
    return period_s, settle_s, power_w


logger = logging.getLogger("perseus_ds")

# The clock takes effect after the begin of an iteration, at the earliest after this time [s]. Slower GPUs are read
# back. A GPU that a limit keeps below the clock is assumed to have settled after this time.
_SETTLE_S = 0.05
# Minimum number of refreshes and maximum relative error of the power at a clock. Some clocks are repeated for this.
_REFRESHES = 10
_KNOWN = 0.05
_MOST_VISITS = 8
# A tail with a smaller share of an iteration needs no clock.
_TAIL_MATTERS = 0.02
# Maximum error of predicted rows, unless those of the measured ones are larger. Plans from rows with errors of 2 % take
# 0.6 to 2.5 % longer (benchmarks/varying.py).
_MOST_PREDICTED_ERROR = 0.02


def profile_online(context: ModeContext, baseline: Baseline) -> Phase[None]:
    """Measure a profile and write it.

    Raises:
        PerseusError: On all ranks, if one could not measure.
        OSError: On all ranks, if rank 0 could not write.
    """
    job, rank, recorder = context.job, context.rank, context.recorder
    settings = job.config.profile
    clocks = settings.clocks_of(rank.gpu)
    search = ClockSearch(rank.communicator, _sampler(settings, clocks, baseline.info), baseline.info, job.output_dir)
    most = settings.most_clocks(len(clocks))
    measurement = _Measurement(rank, baseline)
    window_s = _SETTLE_S + baseline.counter_settle_s + (_REFRESHES + 1) * baseline.counter_period_s
    at_highest = rank.communicator.all_max(window_s / baseline.time_s)

    def iterations(clock_mhz: int) -> int:
        """Return the number of iterations at a clock in which the energy counter is refreshed often enough."""
        return max(1, math.ceil(at_highest * clock_mhz / clocks[-1]))

    expected = most * iterations(clocks[len(clocks) // 2])
    following = "optimizing" if job.config.mode == "auto" else "observe"
    recorder.say(
        f"profiling during training: about {most} clocks in {expected} iterations, which take "
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

    with measurement.log as log, rank.beside_training.running(log.close):
        while chosen := search.next_clocks():
            for clock_mhz in chosen:
                yield from measurement.measure(clock_mhz, iterations(clock_mhz), next_phase)
            search.add(rank.communicator.raise_on_all_ranks(partial(measurement.rows, chosen)))

    power_w, why = measurement.blocking_power_w()
    if why is not None:
        recorder.say(why)
        measurement.use_blocking_power_w(power_w)
        search.add(rank.communicator.raise_on_all_ranks(lambda: measurement.rows([])))

    def save() -> None:
        found = replace(baseline, info=baseline.info.model_copy(update={"blocking_power_w": power_w}))
        raw = search.finished(found.info)
        save_profile(job, found, raw, denoise(raw, clocks))

    rank.communicator.computed_on_rank_0(save)
    # Relative to default clocks: the largest loss of time of a rank, and the energy of all GPUs.
    lost_s = rank.communicator.all_max(measurement.lost_s)
    lost_j = rank.communicator.all_sum(measurement.lost_j)
    recorder.announce(
        ProfileWritten(
            path=str(job.profile_path),
            order=context.order,
            shape=context.shape,
            resumed_clocks=search.resumed,
            iterations=measurement.iterations,
            lost_s=round(lost_s, 3),
            lost_j=round(lost_j, 3),
        )
    )


def _sampler(settings: ProfileConfig, clocks_mhz: list[int], info: ProfileInfo) -> AdaptiveSampler | Sweep:
    if settings.sampling == "adaptive":
        return AdaptiveSampler(
            clocks_mhz,
            blocking_power_w=info.blocking_power_w or 0.0,
            budget=settings.most_clocks(len(clocks_mhz)),
            default_mhz=info.default_clock_mhz,
        )
    return Sweep(clocks_mhz[::-1][:: settings.clock_stride if settings.sampling == "stride" else 1])


class _Measurement:
    """Iterations of this rank at one clock each.

    Attributes:
        iterations: Number of measured iterations.
        lost_s: Additional time relative to default clocks [s].
        lost_j: Additional energy relative to default clocks [J].
    """

    def __init__(self, rank: RankContext, baseline: Baseline) -> None:
        self.log = rank.clocks.counter_log()
        self._communicator = rank.communicator
        self._baseline = baseline
        self._profiler = OnlineProfiler(baseline.info.blocking_power_w or 0.0)
        self._refreshes: Counter[int] = Counter()
        self.iterations = 0
        self.lost_s = 0.0
        self.lost_j = 0.0

    def measure(self, clock_mhz: int, iterations: int, next_phase: Callable[[], NextPhase]) -> Phase[None]:
        """Run iterations at a clock, repeatedly until each rank knows the power of its GPU.

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
        """Add iterations at a clock."""
        if visit[-1].failed:
            raise GpuError("the clock could not be set")
        # In consecutive groups, because iterations of other shapes may lie in between.
        for _, placed in groupby(enumerate(visit), lambda placed: placed[1].number - placed[0]):
            run = [seen for _, seen in placed]
            first, last = run[0], run[-1]
            start_s, end_s = first.start_s + _SETTLE_S, last.start_s + last.time_s
            reached_s = self.log.reached_s(clock_mhz, start_s, end_s)
            reached_s = start_s if reached_s is None else reached_s
            readings = self.log.readings(reached_s + self._baseline.counter_settle_s, end_s)
            spans = [
                [Span(span.operation, span.start_s + seen.start_s, span.end_s + seen.start_s) for span in seen.spans()]
                for seen in run
            ]
            factors = [self._factors(seen) for seen in run]
            self._profiler.add(clock_mhz, spans, readings, self.log.state, factors, reached_s=reached_s)
            self._refreshes[clock_mhz] += len(readings)
        self.log.forget()
        self.iterations += len(visit)
        usual = _passes(self._baseline.spans[-1])
        for seen in visit:
            share = _passes(seen.spans()) / usual if usual else 1.0  # with another number of micro-batches
            self.lost_s += seen.time_s - share * self._baseline.time_s
            self.lost_j += seen.energy_j - share * self._baseline.energy_j

    def _factors(self, seen: IterationMeasurement) -> Mapping[Instruction, float]:
        """Return how many times as long passes take as with inputs of the profile's length."""
        by_length, lengths = self._baseline.by_length, seen.lengths()
        if by_length is None or lengths is None:
            return {}
        return {
            Instruction(stage, kind, micro_batch): factor
            for micro_batch, length in enumerate(lengths)
            for (stage, kind), factor in by_length.factors(length).items()
        }

    def rows(self, clocks: Sequence[int]) -> list[MeasuredRow]:
        """Return all rows, computed from all measurements so far.

        Raises:
            GpuError: There is no row at one of the given clocks.
        """
        rows = self._profiler.rows()
        missing = sorted(set(clocks) - {row.measurement.clock_mhz for row in rows})
        if missing:
            raise GpuError(
                f"could not measure power at {missing[0]} MHz: the energy counter was refreshed "
                f"{self._refreshes[missing[0]]} times."
            )
        return rows

    def blocking_power_w(self) -> tuple[float, str | None]:
        """Return the blocking power of all ranks, and why if measurements differ; every rank must ask at once."""
        found = self._communicator.gather(self._profiler.waiting_power_w())
        alone_w = self._baseline.info.blocking_power_w or 0.0
        return self._communicator.computed_on_rank_0(lambda: chosen_power_w(alone_w, pooled(found)))

    def use_blocking_power_w(self, power_w: float) -> None:
        """Have rows computed from another blocking power [W]."""
        self._profiler.blocking_power_w = power_w

    def remaining_s(self, iterations: int) -> float:
        """Return the estimated time until the given number of iterations is measured, at least one more [s]."""
        lost_s = self.lost_s / self.iterations if self.iterations else 0.0
        return max(1, iterations - self.iterations) * (self._baseline.time_s + lost_s)


def _passes(spans: Sequence[Span]) -> int:
    return sum(isinstance(s.operation, Compute) and s.operation.instruction.kind is not Kind.TAIL for s in spans)


def save_profile(job: Job, baseline: Baseline, raw: StageProfile, estimated: StageProfile) -> None:
    """Write the estimates for planning, and the measured rows to another file. Only on rank 0.

    Raises:
        ProfileError: No forward or backward was measured.
        OSError: The files cannot be written.
    """
    waiting_w = baseline.info.blocking_power_w or 0.0
    if baseline.tails_of is None:
        # If a tail is short, or its GPU draws no more power than while waiting, any clock is suitable.
        idle = {
            (stage, kind)
            for stage, kind in estimated.keys
            if kind is Kind.TAIL
            and (
                estimated.at_highest_clock(stage, kind).time_s < _TAIL_MATTERS * baseline.time_s
                or min(estimated.options(stage, kind).effective_energy_j(waiting_w)) <= 0
            )
        }
        profile = estimated.where(lambda *row: row[:2] not in idle)
    else:
        profile = _with_tails_of(baseline.tails_of, estimated)
    profile = _above_waiting(profile, waiting_w)
    if not profile.keys:
        raise ProfileError("no forward or backward was measured")
    raw.save(job.profile_path.with_name("measured.csv"))
    profile.save(job.profile_path)


def share_profile(context: ModeContext, path: Path) -> bool:
    """Copy the profile of another order, if it has all passes of this one. All ranks call this together.

    Returns:
        Whether the job has a profile now.

    Raises:
        PerseusError: On all ranks, if it cannot be read.
        OSError: On all ranks, if it cannot be written.
    """
    job, communicator = context.job, context.rank.communicator
    of_order = {
        "job": job.profile_key(communicator),
        "schedule": job.schedule.name,
        "micro_batches": job.schedule.micro_batches,
        "streams": ScheduleStreams.of(job.schedule),
        "memory_bytes": [],  # which depends on the order
    }

    passes = {(i.stage, i.kind) for stream in job.schedule.instructions for i in stream if i.kind is not Kind.TAIL}

    def share() -> bool:
        profile = StageProfile.load(path)
        has_all = passes <= set(profile.keys)
        if has_all:
            StageProfile(profile.measurements, profile.info.model_copy(update=of_order)).save(job.profile_path)
        return has_all

    return communicator.computed_on_rank_0(share)


def predict_profile(context: ModeContext, length: float, measured: Mapping[float, Path]) -> float | None:
    """Write the profile for a length of inputs, if it can be predicted from measured ones.

    All ranks call this
    together.

    Args:
        context: Context of the iterations with such inputs.
        length: Length of their inputs. Rank 0's value is used.
        measured: Profiles by length. Some of them may be incomplete or predicted.

    Returns:
        The typical relative error of its rows. None if no profile was written.

    Raises:
        OSError: On all ranks, if it cannot be written.
    """
    job, communicator = context.job, context.rank.communicator
    key = job.profile_key(communicator)

    def predict() -> float | None:
        profiles = {}
        for other, path in measured.items():
            with contextlib.suppress(ProfileError):
                profile = StageProfile.load(path)
                if math.isfinite(other) and any(row.samples for row in profile.info.rows):
                    profiles[other] = profile
        if not math.isfinite(length) or len(profiles) < FEWEST_LENGTHS:
            return None
        profile = LengthModel(profiles).at(length)
        error = typical_error(profile)
        if error > max(_MOST_PREDICTED_ERROR, *map(typical_error, profiles.values())):
            return None
        StageProfile(profile.measurements, profile.info.model_copy(update={"job": key})).save(job.profile_path)
        return error

    return communicator.computed_on_rank_0(predict)


def _with_tails_of(other: StageProfile, profile: StageProfile) -> StageProfile:
    """Replace the rows of tails by those of another profile."""
    passes = profile.where(lambda stage, kind, clock_mhz: kind is not Kind.TAIL)
    tails = other.where(lambda stage, kind, clock_mhz: kind is Kind.TAIL)
    rows = [*passes.info.rows, *tails.info.rows]
    return StageProfile([*passes.measurements, *tails.measurements], profile.info.model_copy(update={"rows": rows}))


def _above_waiting(profile: StageProfile, blocking_power_w: float) -> StageProfile:
    """Omit rows with less power than waiting, which are due to noise. At least two clocks are kept."""
    below: set[tuple[int, Kind, int]] = set()
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        is_below = options.effective_energy_j(blocking_power_w) <= 0
        if np.count_nonzero(~is_below) >= 2:
            below.update((stage, kind, int(clock_mhz)) for clock_mhz in options.clock_mhz[is_below])
    if below:
        clocks = sorted({clock_mhz for _, _, clock_mhz in below})
        logger.warning(
            "perseus: %d rows at %s MHz are left out of the profile: their power is below that of waiting, %.1f W.",
            len(below),
            f"{clocks[0]} to {clocks[-1]}" if len(clocks) > 1 else clocks[0],
            blocking_power_w,
        )
    return profile.where(lambda *row: row not in below)
