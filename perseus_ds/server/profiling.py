"""Measures a profile during training: a warm-up at default clocks, then iterations at each clock."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_events import ProfileWritten
from perseus_ds.artifacts.run_iterations import Sums
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import ProfileConfig
from perseus_ds.errors import GpuError, ProfileError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.energy_counter import CounterRefreshes
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Schedule, Span
from perseus_ds.profiler.clock_search import AdaptiveSampler, ClockSearch, Sweep
from perseus_ds.profiler.estimates import denoise
from perseus_ds.profiler.fixed_durations import (
    fixed_durations,
    launched_transfer_durations_s,
    launches_transfers,
    medians,
    pass_variation,
    passes_of,
    shortest_tail_s,
    tails_s,
    with_tail,
    without_gaps,
)
from perseus_ds.profiler.online import MeasuredRow, OnlineProfiler, chosen_power_w, pooled
from perseus_ds.protocol.job_messages import SetProfiledLimit, WatchDefaultClocks
from perseus_ds.savings import mean_without_stalls, sums_of
from perseus_ds.server.iterations import NextPhase, Run, Seen, iteration, iteration_of
from perseus_ds.server.job import Job
from perseus_ds.server.phases import ModeContext, observe
from perseus_ds.server.recorder import common_begins_s, known_of_all

_STEADY = 0.02
_MOST_TIMES_AS_LONG = 3


@dataclass(frozen=True)
class Baseline:
    """Iterations before any clock was changed.

    Attributes:
        spans: Operations of the shown pipeline, by rank and iteration.
        time_s: Mean time of the job's iterations without stalls [s]. Those of other orders are scaled to the last one.
        passes: Number of passes of a pipeline in such an iteration.
        tokens: Tokens of a micro-batch. None if they are unknown.
        info: The job, and the durations of operations without a choice of clock.
    """

    spans: list[list[list[Span]]]
    time_s: float
    passes: int
    tokens: float | None
    info: ProfileInfo


async def warm_up(context: ModeContext) -> Baseline:
    """Run iterations at default clocks until times are stable on all ranks.

    Raises:
        GpuError: The blocking power is not known.
    """
    job = context.job
    context.send_all(WatchDefaultClocks())
    context.send_all(SetProfiledLimit(None))  # the current limits are those of the profile
    taken: list[Seen] = []
    least = job.config.profile.warm_up
    while len(taken) < _MOST_TIMES_AS_LONG * least:
        left_s = taken[-1].time_s * max(1, least - len(taken)) if taken else None
        seen = await iteration_of(Run("warm-up", times="all", next_phase=NextPhase("profile", left_s)))
        taken.append(seen)
        if len(taken) >= least:
            before = taken[-2]
            drift = np.abs(seen.ranks.time_s / before.ranks.time_s - 1)
            if seen.order is before.order and drift.max() <= _STEADY:
                break
    # The first iteration allocates memory and exchanges shapes.
    measured = taken[1:]
    spans: list[list[list[Span]]] = [[] for _ in job.shown]
    for seen in measured:
        tail_s, after_s = _shortest_tail_s(seen, job.profiled), _after_tail_s(job, seen)
        for own, rank in zip(spans, job.shown, strict=True):
            found = with_tail(seen.spans(rank), tail_s)
            own.append(without_gaps(found, found[-1].end_s + after_s if found else 0.0))
    shares = [_passes(seen, job.shown) / _passes(measured[-1], job.shown) for seen in measured]
    times_s = [seen.time_s / share for seen, share in zip(measured, shares, strict=True)]
    passes = _passes(measured[-1], job.shown)
    tokens = [seen.size.mean for seen in measured if seen.size is not None]
    usual = statistics.geometric_mean(tokens) if len(tokens) == len(measured) else None
    info = _info(job, spans, measured).model_copy(update={"tokens_per_micro_batch": usual})
    return Baseline(spans, mean_without_stalls(times_s), passes, usual, info)


def _shortest_tail_s(seen: Seen, ranks: Iterable[int]) -> float:
    """Return the shortest tail of ranks in an iteration [s]."""
    return shortest_tail_s(seen.spans(rank) for rank in ranks)


def _after_tail_s(job: Job, seen: Seen) -> float:
    """Return the least time of a rank from its last operation to the end of an iteration [s]."""
    own = ((seen.messages[rank].report.time_s, seen.spans(rank)) for rank in job.profiled)
    return max(0.0, min((time_s - spans[-1].end_s for time_s, spans in own if spans), default=0.0))


def _info(job: Job, pipeline: list[list[list[Span]]], measured: Sequence[Seen]) -> ProfileInfo:
    """Return the description of the job with its measured properties and fixed durations."""
    default_mhz = [int(state.default_mhz) for state in job.states if state.default_mhz]
    tail_s = medians(tail for own in pipeline for spans in own for tail in tails_s(spans).items())
    fixed = replace(fixed_durations(pipeline), tail_s=tail_s)
    if launches_transfers(job.schedule):
        iterations = []
        for number, seen in enumerate(measured):
            if seen.order is not None and seen.order.job is job:  # that of the declared order
                spans = [own[number] for own in pipeline]
                iterations.append(passes_of(zip(spans, common_begins_s(job, seen), strict=True)))
        transfer_s = launched_transfer_durations_s(job.schedule, iterations)
        fixed = replace(fixed, transfer_s=transfer_s)
    rest = {
        "blocking_power_w": job.blocking_power_w(),
        "default_clock_mhz": statistics.median_low(default_mhz) if default_mhz else None,
        "job": job.profile_key(),
        "pass_variation": pass_variation(pipeline),
        "streams": ScheduleStreams.of(job.schedule),
        "memory_bytes": known_of_all([job.states[rank].memory_bytes or None for rank in job.shown]),
    }
    return job.info.model_copy(update={**rest, "rows": []}).with_fixed_durations(fixed)


# Minimum time from the start of an iteration until its clock is reached [s]. Slower changes are detected by reading the
# clock back. A GPU that a limit keeps below the clock is assumed to have settled after this time.
_SETTLE_S = 0.05
# Power at a clock is known after this number of counter refreshes, with at most this relative error. Some clocks are
# visited more than once for that.
_REFRESHES = 10
_KNOWN = 0.05
# Times at a clock are known with this relative error, which depends on how much iterations vary, such as by the lengths
# of their inputs. Clocks are visited more than once for that, too.
_TIMES_KNOWN = 0.04
_MOST_VISITS = 8
# Visits with too few refreshes become longer, up to this multiple.
_LONGEST_VISIT = 8
# Number of iterations at a clock that have already begun when the last necessary one is reported.
_UNDER_WAY = 2
# Fraction of clocks that cost another iteration, because the next one was not known before their last report.
_UNKNOWN = 0.5
# Number of iterations in which plans are computed.
_PLANNED_WITHIN = 3
# Number of iterations after which a profile that could not be written is written again.
_SAVED_AGAIN_AFTER = 10
# A tail shorter than this fraction of an iteration needs no separate clock.
_TAIL_MATTERS = 0.02


async def profile_online(context: ModeContext, baseline: Baseline) -> None:
    """Measure a profile and write it."""
    job, recorder = context.job, context.recorder
    settings = job.config.profile
    clocks = job.clocks_mhz()
    search = ClockSearch(_sampler(settings, clocks, baseline.info), baseline.info, job.output_dir, recorder.warn)
    most = settings.most_clocks(len(clocks))
    measurement = _Measurement(context, baseline)

    def longest_s(clock_mhz: int) -> float:
        return measurement.share * baseline.time_s * clocks[-1] / clock_mhz

    # Most measured clocks are in the upper half.
    visit = measurement.iterations_with(_REFRESHES, longest_s(clocks[3 * len(clocks) // 4]))
    expected = most * visit + math.ceil(_UNKNOWN * most) + _UNDER_WAY
    following = "optimizing" if job.config.mode == "auto" else "observe"
    begin = context.control.steps + 1
    outlook = f"profiling: about {expected} iterations from step {begin} on, slower ones included"
    if following == "optimizing":
        outlook += f"; first plan at about step {begin + expected + _PLANNED_WITHIN}"
    recorder.say(outlook)

    def next_phase() -> NextPhase:
        return NextPhase(following, measurement.remaining_s(expected))

    while chosen := search.next_clocks():
        for clock_mhz, then_mhz in zip(chosen, [*chosen[1:], search.likely_next()], strict=True):
            await measurement.measure(clock_mhz, longest_s(clock_mhz), next_phase, then_mhz)
        search.add(measurement.rows(chosen))
    power_w, why = measurement.blocking_power_w()
    if why is not None:
        measurement.use_blocking_power_w(power_w)
        search.add(measurement.rows([]))
    known = {"blocking_power_w": power_w, "least_dwell_s": job.least_dwell_s()}
    found = replace(baseline, info=baseline.info.model_copy(update=known))
    raw = search.finished(found.info)
    estimated = denoise(raw, clocks)
    await save_once_possible(context, lambda: save_profile(job, found, raw, estimated))
    recorder.announce(
        ProfileWritten(
            path=str(job.profile_path),
            resumed_clocks=search.resumed,
            iterations=measurement.iterations,
            lost_s=round(-measurement.sums.gained_s, 3),
            lost_j=round(-measurement.sums.saved_j, 3),
            waiting=why,
        )
    )


async def save_once_possible(context: ModeContext, save: Callable[[], None]) -> None:
    """Save a profile. If it cannot be written, train at default clocks and try again from time to time."""
    has_warned = False
    while True:
        try:
            save()
        except OSError as error:  # noqa: PERF203  # such as a full disk
            if not has_warned:
                has_warned = True
                context.recorder.warn(
                    f"the profile cannot be saved ({error}). It is kept in memory, and training continues at default "
                    "clocks until it can be saved"
                )
            await observe(_SAVED_AGAIN_AFTER)
        else:
            return


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
    """Iterations at one clock each, on the ranks that are profiled.

    Attributes:
        iterations: Number of measured iterations.
        sums: Sums over all iterations of the job during the measurement.
    """

    def __init__(self, context: ModeContext, baseline: Baseline) -> None:
        job = context.job
        self._ranks, self._shown, self._places = job.profiled, job.shown, job.places
        self._baseline = baseline
        self._period_s, self._settle_s = job.counter_period_s(), job.counter_settle_s()
        power_w = baseline.info.blocking_power_w or 0.0
        self._profilers = {rank: OnlineProfiler(power_w) for rank in self._ranks}
        self._counters = {rank: CounterRefreshes(job.facts[rank].gpu.name) for rank in self._ranks}
        # Powers that a counter always includes, such as that of a module, differ between ranks.
        self._more_w = {rank: job.blocking_power_of_w(rank) - power_w for rank in self._ranks}
        self._refreshes: Counter[tuple[int, int]] = Counter()
        # Consecutive iterations at the latest clock. By clock, the number of iterations requested and received since
        # its last evaluation.
        self._visit: list[Seen] = []
        self._visited_mhz: int | None = None
        self._requested: Counter[int] = Counter()
        self._measured: set[int] = set()  # others were requested early, and are not needed
        self._received: Counter[int] = Counter()
        self.iterations = 0
        self._shares: list[float] = []
        self.sums = Sums()
        self._recorder = context.recorder

    async def measure(
        self, clock_mhz: int, time_s: float, next_phase: Callable[[], NextPhase], then_mhz: int | None
    ) -> None:
        """Run iterations at a clock, which take about ``time_s``, until the power of each GPU is known.

        A request takes effect one or two iterations later. Therefore the next clock, if it is known, is requested
        before the last iteration at this clock is reported.

        Raises:
            GpuError: The clock could not be set, or the power remains unknown.
        """
        self._measured.add(clock_mhz)
        missing = _REFRESHES
        needed = first = self.iterations_with(missing, time_s)
        for _ in range(_MOST_VISITS):
            early = 0
            while self._received[clock_mhz] < needed:
                wanted_mhz = clock_mhz
                if then_mhz is not None and self._requested[clock_mhz] >= needed and early < _UNDER_WAY:
                    wanted_mhz, early = then_mhz, early + 1
                self._requested[wanted_mhz] += 1
                wanted = Run("profile", wanted_mhz, times="all", logs_energy=True, next_phase=next_phase())
                self._add_iteration(await iteration(wanted))
            self._end_visit()
            self._received[clock_mhz] = self._requested[clock_mhz] = 0
            were_missing = missing
            missing = _REFRESHES - min(self._refreshes[rank, clock_mhz] for rank in self._ranks)
            if 2 * missing > were_missing:  # iterations are shorter than expected, or not in a row
                needed = min(2 * needed, _LONGEST_VISIT * first)
            elif missing > 0:
                needed = self.iterations_with(missing, time_s)
            elif all(self._is_known(profiler, clock_mhz) for profiler in self._profilers.values()):
                break
            else:
                needed = max(needed, first)
        else:
            self.rows([clock_mhz])  # raises the error if the power remains unknown

    def _is_known(self, profiler: OnlineProfiler, clock_mhz: int) -> bool:
        return profiler.power_error(clock_mhz) <= _KNOWN and profiler.time_error(clock_mhz) <= _TIMES_KNOWN

    def iterations_with(self, refreshes: int, time_s: float) -> int:
        """Return the number of iterations of ``time_s`` [s] in which counters are refreshed this often."""
        return math.ceil((_SETTLE_S + self._settle_s + (refreshes + 1) * self._period_s) / time_s)

    def _add_iteration(self, seen: Seen) -> None:
        run, record = seen.run, self._recorder.last
        if record is not None and record.phase == "profile":
            self.sums.add(sums_of(record))
        is_measured = run is not None and run.phase == "profile" and all(seen.contents.get(r) for r in self._ranks)
        clock_mhz = run.clock_mhz if run is not None and is_measured else None
        is_gap = bool(self._visit) and seen.number != self._visit[-1].number + 1  # another order may have run there
        if clock_mhz != self._visited_mhz or is_gap:
            self._end_visit()
        for rank in self._ranks:
            message, counter = seen.messages[rank], self._counters[rank]
            counter.changes += pairs(message.refreshes)
            counter.clocks += [(moment_s, int(read_mhz)) for moment_s, read_mhz in pairs(message.clocks)]
        if clock_mhz is not None:
            self._visited_mhz = clock_mhz
            self._visit.append(seen)
            self._received[clock_mhz] += 1

    def _end_visit(self) -> None:
        clock_mhz, visit, self._visit = self._visited_mhz, self._visit, []
        if not visit or clock_mhz is None:
            return
        if visit[-1].job_report.failed:
            raise GpuError("the clock could not be set")
        tails_s = [_shortest_tail_s(seen, self._ranks) for seen in visit]
        for rank in self._ranks:
            self._add(rank, clock_mhz, visit, tails_s)
        for rank, counter in self._counters.items():  # the next iteration may have begun before the report of the last
            end_s = visit[-1].messages[rank].begun_s + visit[-1].messages[rank].report.time_s
            counter.forget(end_s if math.isfinite(end_s) else 0.0)
        self.iterations += len(visit)
        for seen in visit:
            passes = _passes(seen, self._shown)
            self._shares.append(passes / self._baseline.passes)

    def _add(self, rank: int, clock_mhz: int, visit: Sequence[Seen], tails_s: Sequence[float]) -> None:
        counter = self._counters[rank]
        begin_s, last = visit[0].messages[rank].begun_s, visit[-1]
        if not math.isfinite(begin_s) or not math.isfinite(last.messages[rank].begun_s):
            return  # the agent has not seen them
        start_s, end_s = begin_s + _SETTLE_S, last.messages[rank].begun_s + last.messages[rank].report.time_s
        reached_s = counter.reached_s(clock_mhz, start_s, end_s)
        reached_s = start_s if reached_s is None else reached_s
        more_w = self._more_w[rank]
        readings = [(at_s, j - more_w * at_s) for at_s, j in counter.readings(reached_s + self._settle_s, end_s)]
        spans = []
        for seen, tail_s in zip(visit, tails_s, strict=True):
            begun_s = seen.messages[rank].begun_s
            found = with_tail(seen.spans(rank), tail_s)
            spans.append([Span(span.operation, begun_s + span.start_s, begun_s + span.end_s) for span in found])
        state = GpuState(last.messages[rank].temperature_c, last.messages[rank].power_state)
        self._profilers[rank].add(
            clock_mhz, spans, readings, state, reached_s=reached_s, sizes=self._sizes(rank, visit)
        )
        self._refreshes[rank, clock_mhz] += len(readings)

    def _sizes(self, rank: int, visit: Sequence[Seen]) -> list[float]:
        """Return the sizes of a rank's inputs in iterations, relative to the usual one. 1 if they are unknown."""
        pipeline, usual = self._places[rank].pipeline, self._baseline.tokens
        sizes = []
        for seen in visit:
            tokens = seen.tokens[pipeline]
            sizes.append(tokens / usual if usual is not None and tokens > 0 else 1.0)
        return sizes

    def rows(self, clocks: Sequence[int]) -> dict[str, list[MeasuredRow]]:
        """Return all rows measured so far, by rank.

        Raises:
            GpuError: A rank has no rows at one of ``clocks``.
        """
        found = {}
        for rank in self._ranks:
            known = self._profilers[rank].rows()
            rows = found[f"rank {rank}"] = [row for row in known if row.measurement.clock_mhz in self._measured]
            missing = sorted(set(clocks) - {row.measurement.clock_mhz for row in rows})
            if missing:
                shortest_s = _SETTLE_S + self._settle_s + 3 * self._period_s
                raise GpuError(
                    f"the power at {missing[0]} MHz is not known: the energy counter of rank {rank} was refreshed "
                    f"{self._refreshes[rank, missing[0]]} times while it only included iterations at this clock. "
                    f"Iterations between those of other orders must take at least {shortest_s:.2g} s."
                )
        return found

    def blocking_power_w(self) -> tuple[float, str | None]:
        """Return the blocking power of all ranks [W], and an explanation if measurements of it differ."""
        bubbles = pooled(profiler.waiting_power_w() for profiler in self._profilers.values())
        return chosen_power_w(self._baseline.info.blocking_power_w or 0.0, bubbles)

    def use_blocking_power_w(self, power_w: float) -> None:
        for profiler in self._profilers.values():
            profiler.use_blocking_power_w(power_w)

    @property
    def share(self) -> float:
        """Mean number of passes of the measured iterations, relative to those of the warm-up."""
        return statistics.fmean(self._shares) if self._shares else 1.0

    def remaining_s(self, iterations: int) -> float:
        """Estimate the time until a number of iterations are measured, at least one more [s]."""
        sums = self.sums
        each_s = sums.time_s / sums.iterations if sums.iterations else self._baseline.time_s
        return max(1, iterations - self.iterations) * each_s


def _passes(seen: Seen, ranks: Iterable[int]) -> int:
    """Return the number of passes of ranks in an iteration, at least 1."""
    operations = (span.operation for rank in ranks for span in seen.spans(rank) if isinstance(span.operation, Compute))
    return max(1, sum(operation.instruction.kind is not Kind.TAIL for operation in operations))


def pairs(content: bytes) -> list[tuple[float, float]]:
    """Decode pairs of numbers that were sent as doubles."""
    numbers = np.frombuffer(content[: len(content) // 16 * 16])
    found: list[tuple[float, float]] = [(at_s, value) for at_s, value in numbers.reshape(-1, 2).tolist()]
    return found


def save_profile(job: Job, baseline: Baseline, raw: StageProfile, estimated: StageProfile) -> None:
    """Write the estimated profile, and the measured rows to ``measured.csv`` in the same folder."""
    waiting_w = baseline.info.blocking_power_w or 0.0
    # If a tail is short or draws no more power than waiting, its clock does not matter.
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
    if not profile.keys:
        raise ProfileError("no forward or backward was measured")
    with contextlib.suppress(OSError):  # plans do not need it
        raw.save(job.profile_path.with_name("measured.csv"))
    profile.save(job.profile_path)


def share_profile(job: Job, profile: StageProfile) -> None:
    """Write a job's profile from that of another order.

    Raises:
        PerseusError: It lacks some of the job's passes.
        OSError: The disk is full.
    """
    if not has_passes_of(job, profile):
        raise ProfileError("some of its passes were not measured")
    of_order = {
        "job": job.profile_key(),
        "schedule": job.schedule.name,
        "micro_batches": job.schedule.micro_batches,
        "streams": ScheduleStreams.of(job.schedule),
        "memory_bytes": [],  # which depends on the order
    }
    StageProfile(profile.measurements, profile.info.model_copy(update=of_order)).save(job.profile_path)


def has_passes_of(job: Job, profile: StageProfile) -> bool:
    """Return whether a profile has all passes of a job."""
    return passes_of_stages(job.schedule) <= set(profile.keys)


def passes_of_stages(schedule: Schedule) -> set[tuple[int, Kind]]:
    """Return stage and kind of all passes of a schedule."""
    return {(i.stage, i.kind) for stream in schedule.instructions for i in stream if i.kind is not Kind.TAIL}
