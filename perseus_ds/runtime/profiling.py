"""The phases that measure: profiling while training goes on, and outside of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tqdm import tqdm

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Span
from perseus_ds.errors import GpuError, PerseusError, ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.fixed_durations import tails_s
from perseus_ds.profiler.offline import OfflineProfiler
from perseus_ds.profiler.online import OnlineProfiler
from perseus_ds.profiler.rows import MeasuredRow
from perseus_ds.profiler.search import ClockSearch, clocks_to_choose_from, most_clocks
from perseus_ds.runtime.phases import Observe, Phase, Seen, Tools
from perseus_ds.runtime.warm_up import Before

# The clock follows a little after an iteration has begun [s].
_SETTLE_S = 0.05
# A counter that was refreshed this often tells power; an iteration may be too short for that.
_REFRESHES = 10
_MOST_ITERATIONS = 8
# A tail that takes less of an iteration than this needs no clock of its own.
_TAIL_MATTERS = 0.02
_TAIL_CLOCKS = 6


class Clocks(Protocol):
    """Says which clocks to measure and takes what was measured; all ranks at once."""

    def next_clocks(self) -> list[int]: ...

    def add(self, rows: Sequence[MeasuredRow] | Exception) -> None: ...


class OnlineIterations:
    """Ordinary iterations, each at one clock.

    Args:
        tools: Of this rank.
        before: What iterations were like before.
        clocks: Which clocks.
        following: Makes the next phase; called with the iterations used, and seconds and joules lost by them.
    """

    name = "profile"
    records = False
    measures = True

    def __init__(
        self, tools: Tools, before: Before, clocks: Clocks, following: Callable[[int, float, float], Phase]
    ) -> None:
        self._tools = tools
        self._before = before
        self._source = clocks
        self._following = following
        self._profiler = OnlineProfiler(before.info.blocking_power_w or 0.0)
        self._clocks = clocks.next_clocks()
        self._batch = list(self._clocks)
        self._refreshes = 0
        self._at_this_clock = 0
        self._iterations = 0
        self._lost_s = 0.0
        self._lost_j = 0.0
        self._error: GpuError | None = None
        self._log = CounterLog(tools.gpu)
        self._log.__enter__()

    @property
    def clock_plan(self) -> ClockPlan:
        return ClockPlan.constant(self._clocks[0])

    def after(self, seen: Seen) -> Phase:
        try:
            return self._after(seen)
        except (PerseusError, OSError) as error:
            self.stop()
            self._tools.fail(error)
            return Observe()

    def stop(self) -> None:
        self._log.__exit__(None, None, None)

    def _after(self, seen: Seen) -> Phase:
        spans = [Span(s.operation, s.start_s + seen.start_s, s.end_s + seen.start_s) for s in seen.spans()]
        readings: list[tuple[float, float]] = []
        try:
            readings = self._log.readings(seen.start_s + _SETTLE_S, seen.start_s + seen.time_s)
        except GpuError as error:  # the other ranks will hear of it with the rows
            self._error = error
        if seen.failed:
            self._error = GpuError("the clock could not be set")
        self._log.forget()
        self._profiler.add(self._clocks[0], spans, readings)
        self._iterations += 1
        self._at_this_clock += 1
        self._lost_s += seen.time_s - self._before.time_s
        self._lost_j += seen.energy_j - self._before.energy_j
        self._refreshes += len(readings)
        too_few = self._refreshes < _REFRESHES and self._at_this_clock < _MOST_ITERATIONS and self._error is None
        if self._tools.ranks.all_max(float(too_few)):
            return self
        self._refreshes = self._at_this_clock = 0
        self._clocks.pop(0)
        return self if self._clocks else self._next_batch()

    def _next_batch(self) -> Phase:
        self._source.add(self._error or self._measured())
        self._clocks = self._source.next_clocks()
        self._batch = list(self._clocks)
        if self._clocks:
            return self
        self.stop()
        lost_j = float(self._tools.ranks.all_gather_numbers([self._lost_j]).sum())
        return self._following(self._iterations, self._tools.ranks.all_max(self._lost_s), lost_j)

    def _measured(self) -> Sequence[MeasuredRow] | Exception:
        try:
            return [row for row in self._profiler.rows() if row.measurement.clock_mhz in self._batch]
        except Exception as error:  # the other ranks wait to hear of it
            return ProfileError(f"{type(error).__name__}: {error}")


def profile_online(tools: Tools, before: Before, then: Callable[[], Phase]) -> Phase:
    """Measure a profile while training goes on.

    Args:
        tools: Of this rank.
        before: What iterations were like before.
        then: Makes the next phase, once the profile is written.
    """
    clocks = clocks_to_choose_from(tools.gpu, tools.config.profile)
    search = _search(tools, before, clocks, online=True)
    most = most_clocks(tools.config.profile, len(clocks), online=True)
    tools.announce(
        f"profiling while training goes on: about {most} iterations, each at a clock of its own; they take "
        f"{before.time_s:.2f} s at default clocks, up to {clocks[-1] / clocks[0]:.1f} times that at the lowest"
    )

    def finish(iterations: int, lost_s: float, lost_j: float) -> Phase:
        tools.ranks.from_first(lambda: _save(tools, search, before))
        cost = {"iterations": iterations, "lost_s": round(lost_s, 3), "lost_j": round(lost_j, 1)}
        tools.recorder.event("profile", path=str(tools.profile_path), resumed_clocks=search.resumed, **cost)
        tools.announce(
            f"wrote {tools.profile_path} after {iterations} profiled iterations, which cost {lost_s:+.1f} s and "
            f"{lost_j:+.0f} J against iterations at default clocks"
        )
        return then()

    return OnlineIterations(tools, before, search, finish)


def profile_offline(tools: Tools, before: Before) -> Phase:
    """Measure a profile outside of training, after which training goes on at default clocks.

    A tail that matters is measured first, while training goes on: it cannot be repeated without changing weights.
    """
    clocks = clocks_to_choose_from(tools.gpu, tools.config.profile)
    tail_s = tails_s(span for spans in before.spans for span in spans)
    share = sum(tail_s.values()) / len(before.spans) / before.time_s
    if tools.ranks.all_max(share) < _TAIL_MATTERS:
        return _repeat_instructions(tools, before, [])
    even = [clocks[round(i * (len(clocks) - 1) / (_TAIL_CLOCKS - 1))] for i in range(_TAIL_CLOCKS)]
    tail = _TailRows(sorted({c for c in even if c >= clocks[-1] / 2}, reverse=True))
    tools.announce(
        f"the tail takes {share:.0%} of an iteration: measuring it at {len(tail.left)} clocks while training"
    )
    return OnlineIterations(tools, before, tail, lambda *_: _repeat_instructions(tools, before, tail.rows))


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


def _repeat_instructions(tools: Tools, before: Before, tail: list[MeasuredRow]) -> Phase:
    begin_s, begin_j = time.monotonic(), _energy_j(tools)
    try:
        with tools.isolated():
            _measure_offline(tools, before, tail)
    except (PerseusError, OSError) as error:
        tools.fail(error)
        return Observe()
    finally:
        tools.clocks.request(None)
    spent_s = time.monotonic() - begin_s
    spent_j = float(tools.ranks.all_gather_numbers([_energy_j(tools) - begin_j]).sum())
    tools.recorder.event("profile", path=str(tools.profile_path), spent_s=round(spent_s, 3), spent_j=round(spent_j, 1))
    tools.announce(f"wrote {tools.profile_path}; measuring took {spent_s:.0f} s and {spent_j:.0f} J")
    return Observe()


def _energy_j(tools: Tools) -> float:
    """Return the energy counter [J]; 0 if it fails or hangs, of which the measurement itself tells all ranks."""
    try:
        return tools.patience.call(tools.gpu.energy_j)
    except GpuError:
        return 0.0


def _measure_offline(tools: Tools, before: Before, tail: list[MeasuredRow]) -> None:
    assert tools.work is not None
    clocks = clocks_to_choose_from(tools.gpu, tools.config.profile)
    search = _search(tools, before, clocks)
    profiler = OfflineProfiler(
        gpu=tools.gpu,
        clocks=tools.clocks,
        execution=tools.execution,
        work=tools.work,
        peers=tools.ranks,
        config=tools.config.profile,
        blocking_power_w=before.info.blocking_power_w or 0.0,
        counter_period_s=before.counter_period_s,
    )
    most = most_clocks(tools.config.profile, len(clocks))
    instructions = tools.ranks.all_max(len(tools.work.instructions))
    longest_s = most * instructions * tools.config.profile.max_window_s
    tools.announce(
        f"measuring up to {most} clocks, at most {longest_s:.0f} s; the energy counter moves every "
        f"{before.counter_period_s * 1e3:.0f} ms"
    )
    chosen = search.next_clocks()
    if search.resumed:
        tools.announce(f"{search.resumed} clocks were already measured by an interrupted run of this job")
    with tqdm(total=most, desc="perseus: profiling clocks", unit="clock", disable=not tools.ranks.is_first) as bar:
        while chosen:
            for clock_mhz in chosen:
                search.add(_rows_or_error(profiler, clock_mhz))
                bar.update()
            chosen = search.next_clocks()
    search.add(tail)
    tools.ranks.from_first(lambda: _save(tools, search, before))


def _rows_or_error(profiler: OfflineProfiler, clock_mhz: int) -> Sequence[MeasuredRow] | Exception:
    try:
        return profiler.measure(clock_mhz)
    except Exception as error:  # the other ranks wait to hear of it
        return error if isinstance(error, PerseusError) else ProfileError(f"{type(error).__name__}: {error}")


def _search(tools: Tools, before: Before, clocks: Sequence[int], *, online: bool = False) -> ClockSearch:
    directory = tools.profile_path.parent
    return ClockSearch(tools.ranks, clocks, tools.config.profile, before.info, directory, online=online)


def _save(tools: Tools, search: ClockSearch, before: Before) -> None:
    measured = search.finish(before.info)
    profile = _without_idle_tails(measured.profile, before)
    if not profile.keys:
        raise ProfileError("no forward or backward was measured")
    measured.raw.save(tools.profile_path.with_name("measured.csv"))
    profile.save(tools.profile_path)


def _without_idle_tails(profile: StageProfile, before: Before) -> StageProfile:
    """Leave out the rows of tails that are short, or in which the GPU draws no more than waiting: any clock will do."""
    idle = {
        stage
        for stage, kind in profile.keys
        if kind is Kind.TAIL
        and (
            profile.at_highest_clock(stage, kind).time_s < _TAIL_MATTERS * before.time_s
            or min(profile.options(stage, kind).effective_energy_j(before.info.blocking_power_w or 0.0)) <= 0
        )
    }
    rows = [row for row in profile.info.rows if row.kind is not Kind.TAIL or row.stage not in idle]
    return StageProfile(
        [m for m in profile.measurements if m.kind is not Kind.TAIL or m.stage not in idle],
        profile.info.model_copy(update={"rows": rows}),
    )
