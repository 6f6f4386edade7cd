"""One job, no second command: warm up, profile online, optimise in the background, run, keep watching."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from perseus_ds.cache import Cache, cache_key
from perseus_ds.clock_plan import ClockPlan
from perseus_ds.errors import PerseusError, ProfileError
from perseus_ds.execution import SimulatedExecution, Span
from perseus_ds.instruction import Kind
from perseus_ds.phases import Calibrate, Observe, OfflineProfiling, Phase, Run, Seen, Tools, load_plan
from perseus_ds.profile_info import RowQuality
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.offline import Row, check_sweep
from perseus_ds.profiler.online import OnlineProfiler
from perseus_ds.profiler.rest import without_gaps
from perseus_ds.profiler.session import RankReport, combine
from perseus_ds.schedule import Compute
from perseus_ds.stage_profile import StageProfile

ClockTimes = dict[tuple[int, Kind, int], float]
"""What the profile says that instructions take, by stage, kind and clock [s]."""

_SETTLE_S = 0.05
_WATCH_EVERY = 10
_STRIKES = 2


class WarmUp:
    """Ordinary iterations at default clocks, in which loads, transfers and the tail are measured."""

    name = "warm-up"
    clock_plan = ClockPlan.none()
    records = False
    measures = True

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._spans: list[list[Span]] = []

    def after(self, seen: Seen) -> Phase:
        self._spans.append(without_gaps(seen.spans(), seen.time_s))
        if len(self._spans) < self._tools.config.profile.warm_up:
            return self
        return ProfileOnline(self._tools, self._spans[1:])


class ProfileOnline:
    """Each iteration runs at one clock, from the highest down, until energy rises."""

    name = "profile"
    records = False
    measures = True

    def __init__(self, tools: Tools, spans: list[list[Span]]) -> None:
        self._tools = tools
        self._spans = spans
        self._profiler = OnlineProfiler()
        supported = tools.gpu.supported_clocks_mhz()
        config = tools.config.profile
        low, high = config.min_clock_mhz or supported[0], config.max_clock_mhz or supported[-1]
        stride = config.online_stride
        self._clocks = [c for c in reversed(supported) if low <= c <= high][::stride]
        self._step = 0
        self._energies_j: list[float] = []
        self._log = CounterLog(tools.gpu)
        self._log.__enter__()
        tools.announce(
            f"profiling online: at most {len(self._clocks) * config.online_iterations} iterations, "
            f"{len(self._clocks)} clocks from {self._clocks[0]} MHz down"
        )

    @property
    def clock_plan(self) -> ClockPlan:
        return ClockPlan.constant(self._clock_mhz)

    @property
    def _clock_mhz(self) -> int:
        return self._clocks[self._step // self._tools.config.profile.online_iterations]

    def after(self, seen: Seen) -> Phase:
        tools = self._tools
        spans = [Span(s.operation, s.start_s + seen.start_s, s.end_s + seen.start_s) for s in seen.spans()]
        # The clock follows a little after the iteration has begun.
        begin_s = seen.start_s + _SETTLE_S
        self._profiler.add(self._clock_mhz, spans, self._log.readings(begin_s, seen.start_s + seen.time_s))
        self._step += 1
        if self._step % tools.config.profile.online_iterations:
            return self
        done_mhz = self._clocks[self._step // tools.config.profile.online_iterations - 1]
        at_clock = [row.energy_j for row in self._profiler.rows() if row.clock_mhz == done_mhz]
        self._energies_j.append(sum(at_clock))
        last = self._step == len(self._clocks) * tools.config.profile.online_iterations
        rising = len(self._energies_j) > 2 and self._energies_j[-1] > self._energies_j[-2] > self._energies_j[-3]
        if not last and tools.ranks.all_max(0.0 if rising else 1.0) > 0:
            return self
        self._log.__exit__(None, None, None)
        return self._finish()

    def _finish(self) -> Phase:
        """Write the profile and start to plan."""
        tools = self._tools
        rows = [
            Row(
                m,
                RowQuality(
                    stage=m.stage, kind=m.kind, clock_mhz=m.clock_mhz, samples=tools.config.profile.online_iterations
                ),
            )
            for m in self._profiler.rows()
        ]
        reports = tools.ranks.gather(
            RankReport(tools.ranks.place, rows, self._spans, self._profiler.blocking_power_w() or 0.0)
        )

        def write() -> ClockTimes:
            if not all(report.rows for report in reports):
                raise ProfileError("online profiling: a rank saw too few refreshes of the energy counter")
            profile = combine(reports, tools.job.info)
            profile.save(tools.profile_path)
            return {(m.stage, m.kind, m.clock_mhz): m.time_s for m in profile.measurements}

        try:
            expected = tools.ranks.from_first(write)
        except (PerseusError, OSError) as error:
            tools.fail(error)
            return Observe()
        tools.recorder.event("profile", path=str(tools.profile_path), iterations=self._step)
        tools.announce(f"wrote {tools.profile_path} after {self._step} profiled iterations")
        return Plan(tools, expected)


class Plan:
    """Default clocks, while rank 0 optimises in a process of its own."""

    name = "plan"
    clock_plan = ClockPlan.none()
    records = False
    measures = False

    def __init__(self, tools: Tools, expected: ClockTimes) -> None:
        self._tools = tools
        self._expected = expected
        self._directory = Path(tools.config.output_dir)
        self._process = self._start() if tools.ranks.is_first else None

    def _start(self) -> subprocess.Popen[bytes]:
        # A process, not a thread, which would slow down rank 0's training; and a polite one.
        command = ["nice", "-n", "10", sys.executable, "-m", "perseus_ds", "optimize"]
        command += [f"profile={self._tools.profile_path}", f"out={self._directory}"]
        with (self._directory / "optimize.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def after(self, seen: Seen) -> Phase:
        returncode = self._tools.ranks.from_first(lambda: self._process.poll() if self._process else None)
        if returncode is None:
            return self
        if returncode != 0:
            self._tools.fail(PerseusError(f"optimising failed, see {self._directory / 'optimize.log'}"))
            return Observe()
        try:
            clock_plan = load_plan(self._tools, str(self._directory / "frontier.json"))
        except PerseusError as error:
            self._tools.fail(error)
            return Observe()
        self._keep()
        self._tools.recorder.event("plan", plan=clock_plan.number)
        self._tools.announce(f"running under plan {clock_plan.number} of {self._directory / 'frontier.csv'}")
        return Watch(self._tools, clock_plan, self._expected)

    def _keep(self) -> None:
        """Leave profile and frontier for the next run of this job."""
        cache = _cache(self._tools)
        if self._tools.ranks.is_first and self._tools.config.cache:
            try:
                cache.store(self._directory)
            except OSError as error:
                self._tools.recorder.event("cache", error=str(error))


class Watch:
    """Train under a plan, and profile again when instructions take longer or shorter than profiled."""

    name = "run"
    records = False
    measures = False

    def __init__(self, tools: Tools, clock_plan: ClockPlan, expected: ClockTimes) -> None:
        self._tools = tools
        self.clock_plan = clock_plan
        self._expected = expected
        self._iterations = 0
        self._strikes = 0

    def after(self, seen: Seen) -> Phase:
        self._iterations += 1
        if self._iterations % _WATCH_EVERY:
            return self
        drift = self._tools.ranks.all_max(abs(self._ratio(seen.spans()) - 1))
        self._strikes = self._strikes + 1 if drift > self._tools.config.max_drift else 0
        if self._strikes < _STRIKES:
            return self
        self._tools.recorder.event("drift", drift=drift)
        self._tools.announce(f"instructions take {drift:.0%} longer or shorter than profiled; profiling again")
        return WarmUp(self._tools)

    def _ratio(self, spans: list[Span]) -> float:
        """Return how long this rank's instructions take, relative to the profile, as a median."""
        ratios = []
        for span in spans:
            if isinstance(span.operation, Compute):
                instruction = span.operation.instruction
                key = (instruction.stage, instruction.kind, self.clock_plan.clock.get(instruction, 0))
                if key in self._expected:
                    ratios.append(span.time_s / self._expected[key])
        return statistics.median(ratios) if ratios else 1.0


def _cache(tools: Tools) -> Cache:
    """Return the cache's entry for this job; every rank must ask at the same time."""
    simulated = tools.config.simulated.model_dump() if tools.gpu.simulated else {}
    profile = tools.config.profile.model_dump()
    fingerprints = tools.ranks.all_gather(tools.job.fingerprint)
    return Cache(cache_key(tools.job.info, fingerprints, {"profile": profile, "simulated": simulated}))


def _from_cache(tools: Tools) -> Phase | None:
    """Start under the plan of an earlier run, if there is one that still fits."""
    cache = _cache(tools)
    directory = Path(tools.config.output_dir)

    def restore() -> ClockTimes | None:
        if not (tools.config.cache and cache.is_complete):
            return None
        cache.restore(directory)
        measurements = StageProfile.load(directory / "profile.csv").measurements
        return {(m.stage, m.kind, m.clock_mhz): m.time_s for m in measurements}

    try:
        expected = tools.ranks.from_first(restore)
        if expected is None:
            return None
        clock_plan = load_plan(tools, str(directory / "frontier.json"))
    except (PerseusError, OSError) as error:
        tools.announce(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    tools.announce(f"starting under plan {clock_plan.number}, profiled by an earlier run ({cache.directory})")
    return Watch(tools, clock_plan, expected)


def first_phase(tools: Tools) -> Phase:
    """Return what the job does first, after checking everything that can be checked.

    Raises:
        PerseusError: On all ranks, what is wrong on one.
    """
    phase: Phase
    if tools.config.mode == "run":
        phase = Run(load_plan(tools, str(tools.config.frontier)))
    elif tools.config.mode == "profile":
        phase = OfflineProfiling(tools)
    elif tools.config.mode == "auto":
        tools.ranks.together(lambda: check_sweep(tools.gpu, tools.config.profile))
        phase = _from_cache(tools) or WarmUp(tools)
    else:
        phase = Observe()
    return Calibrate(tools, phase) if isinstance(tools.execution, SimulatedExecution) else phase
