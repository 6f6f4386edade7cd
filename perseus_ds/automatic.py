"""One job, no second command: warm up, profile online, optimise in the background, run, keep watching."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from perseus_ds.cache import Cache
from perseus_ds.clock_plan import ClockPlan
from perseus_ds.errors import PerseusError
from perseus_ds.execution import SimulatedExecution, Span
from perseus_ds.instruction import Kind
from perseus_ds.phases import Calibrate, Observe, Phase, Run, Seen, Tools, load_plan
from perseus_ds.profiler.search import clocks_to_choose_from
from perseus_ds.profiling import WarmUp, profile_offline, profile_online
from perseus_ds.schedule import Compute
from perseus_ds.stage_profile import StageProfile

ClockTimes = dict[tuple[int, Kind, int], float]
"""What the profile says that instructions take, by stage, kind and clock [s]."""

_WATCH_EVERY = 10
_STRIKES = 2


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
        return _profile_and_plan(self._tools)

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


def _times_s(profile: StageProfile) -> ClockTimes:
    return {(m.stage, m.kind, m.clock_mhz): m.time_s for m in profile.measurements}


def _cache(tools: Tools) -> Cache:
    """Return the cache's entry for this job; every rank must ask at the same time."""
    return Cache(tools.job_key())


def _from_cache(tools: Tools) -> Phase | None:
    """Start under the plan of an earlier run, if there is one that still fits."""
    cache = _cache(tools)
    directory = Path(tools.config.output_dir)

    def restore() -> ClockTimes | None:
        if not (tools.config.cache and cache.is_complete):
            return None
        cache.restore(directory)
        return _times_s(StageProfile.load(directory / "profile.csv"))

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


def _profile_and_plan(tools: Tools) -> Phase:
    def plan(profile: StageProfile) -> Phase:
        return Plan(tools, _times_s(profile))

    return WarmUp(tools, lambda tools, before: profile_online(tools, before, plan))


def _check_clocks(tools: Tools) -> None:
    def check() -> None:
        clocks_to_choose_from(tools.gpu, tools.config.profile)

    tools.ranks.together(check)


def first_phase(tools: Tools) -> Phase:
    """Return what the job does first, after checking everything that can be checked.

    Raises:
        PerseusError: On all ranks, what is wrong on one.
    """
    phase: Phase
    if tools.config.mode == "run":
        phase = Run(load_plan(tools, str(tools.config.frontier)))
    elif tools.config.mode == "profile":
        _check_clocks(tools)
        phase = WarmUp(tools, profile_offline, records=True)
    elif tools.config.mode == "auto":
        _check_clocks(tools)
        phase = _from_cache(tools) or _profile_and_plan(tools)
    else:
        phase = Observe()
    return Calibrate(tools, phase) if isinstance(tools.execution, SimulatedExecution) else phase
