"""Measures a profile outside of training: passes are repeated at each clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tqdm import tqdm

from perseus_ds.artifacts.run_records import ProfilingBegun
from perseus_ds.errors import GpuError, PerseusError, ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.fixed_durations import tails_s
from perseus_ds.profiler.offline import OfflineProfiler, RepeatableInstructions
from perseus_ds.profiler.rows import MeasuredRow
from perseus_ds.profiler.search import clocks_to_choose_from, most_clocks
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.online_profiling import measure_clocks
from perseus_ds.runtime.phases import Phase
from perseus_ds.runtime.profile_files import TAIL_MATTERS, clock_search, save_profile
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.warm_up import Baseline

_TAIL_CLOCKS = 6


def profile_offline(
    job: Job, rank: Rank, recorder: Recorder, baseline: Baseline, passes: RepeatableInstructions
) -> Phase[None]:
    """Measure a profile and write it, after which training goes on at default clocks.

    A tail that takes long enough is measured first, while training goes on: it cannot be repeated without changing
    weights.

    Raises:
        PerseusError: On all ranks, if one could not measure.
        OSError: On all ranks, if rank 0 could not write.
    """
    tail = yield from _measure_tail(job, rank, recorder, baseline)
    begin_s, begin_j = rank.timebase.now_s(), _energy_j(rank)
    try:
        with ExitStack() as isolated:
            rank.communicator.together(lambda: isolated.enter_context(passes.isolated()))
            _measure(job, rank, recorder, baseline, passes=passes, tail=tail)
    finally:
        rank.clocks.request(None)
    spent_s = rank.timebase.now_s() - begin_s
    spent_j = rank.communicator.all_sum(_energy_j(rank) - begin_j)
    recorder.profile_written(job.profile_path, spent_s=spent_s, spent_j=spent_j)
    recorder.say(f"wrote {job.profile_path}; measuring took {spent_s:.0f} s and {spent_j:.0f} J")


def _measure_tail(job: Job, rank: Rank, recorder: Recorder, baseline: Baseline) -> Phase[list[MeasuredRow]]:
    """Return the rows of the tail at a few clocks, while training goes on; none if the tail is too short."""
    tail_s = tails_s(span for spans in baseline.spans for span in spans)
    share = sum(tail_s.values()) / len(baseline.spans) / baseline.time_s
    if rank.communicator.all_max(share) < TAIL_MATTERS:
        return []
    # All ranks go through as many clocks: rank 0's.
    clocks = rank.communicator.from_first(lambda: clocks_to_choose_from(rank.gpu, job.config.profile))
    even = [clocks[round(i * (len(clocks) - 1) / (_TAIL_CLOCKS - 1))] for i in range(_TAIL_CLOCKS)]
    tail = _TailRows(sorted({c for c in even if c >= clocks[-1] / 2}, reverse=True))
    recorder.say(f"the tail takes {share:.0%} of an iteration: measuring it at {len(tail.left)} clocks while training")
    yield from measure_clocks(rank, baseline, tail, most=len(tail.left), following="profile")
    return tail.rows


class _TailRows:
    """A fixed list of clocks, of which only the rows of the tail are kept."""

    def __init__(self, clocks_mhz: list[int]) -> None:
        self.left = clocks_mhz
        self.rows: list[MeasuredRow] = []

    def next_clocks(self) -> list[int]:
        clocks, self.left = self.left, []
        return clocks

    def add(self, rows: Sequence[MeasuredRow] | Exception) -> None:
        if not isinstance(rows, Exception):
            self.rows += [row for row in rows if row.measurement.kind is Kind.TAIL]


def _measure(
    job: Job,
    rank: Rank,
    recorder: Recorder,
    baseline: Baseline,
    *,
    passes: RepeatableInstructions,
    tail: list[MeasuredRow],
) -> None:
    settings, communicator = job.config.profile, rank.communicator
    search = clock_search(job, rank, baseline)
    profiler = OfflineProfiler(
        gpu=rank.gpu,
        clocks=rank.clocks,
        execution=rank.timers,
        work=passes,
        peers=communicator,
        config=settings,
        blocking_power_w=baseline.info.blocking_power_w or 0.0,
        counter_period_s=baseline.counter_period_s,
        timebase=rank.timebase,
    )
    most = most_clocks(settings, len(clocks_to_choose_from(rank.gpu, settings)))
    longest_s = most * communicator.all_max(len(passes.instructions)) * settings.max_window_s
    recorder.say(
        f"measuring up to {most} clocks, usually at most {longest_s:.0f} s; the energy counter moves every "
        f"{baseline.counter_period_s * 1e3:.0f} ms"
    )
    recorder.event(ProfilingBegun(clocks=most, longest_s=round(longest_s, 3)))
    chosen = search.next_clocks()
    if search.resumed:
        recorder.say(f"{search.resumed} clocks were already measured by an interrupted run of this job")
    with tqdm(total=most, desc="perseus: profiling clocks", unit="clock", disable=not communicator.is_first) as bar:
        while chosen:
            for clock_mhz in chosen:
                search.add(_rows_or_error(profiler, clock_mhz))
                bar.update()
            chosen = search.next_clocks()
    search.add(tail)
    communicator.from_first(lambda: save_profile(job, search, baseline))


def _rows_or_error(profiler: OfflineProfiler, clock_mhz: int) -> Sequence[MeasuredRow] | Exception:
    try:
        return profiler.measure(clock_mhz)
    except Exception as error:  # the other ranks wait to be told
        return error if isinstance(error, PerseusError) else ProfileError(f"{type(error).__name__}: {error}")


def _energy_j(rank: Rank) -> float:
    """Return the energy counter [J]; 0 if it fails or hangs, which the measurement itself reports to all ranks."""
    try:
        return rank.driver.call(rank.gpu.energy_j)
    except GpuError:
        return 0.0
