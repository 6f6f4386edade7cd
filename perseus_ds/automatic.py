"""One job, no second command: warm up, profile online, optimise in the background, run, keep watching."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from perseus_ds.cache import Cache
from perseus_ds.clock_plan import ClockPlan
from perseus_ds.errors import PerseusError
from perseus_ds.execution import SimulatedExecution
from perseus_ds.frontier import Frontier
from perseus_ds.phases import Calibrate, Observe, Phase, Seen, Tools
from perseus_ds.profiler.search import clocks_to_choose_from
from perseus_ds.profiling import profile_offline, profile_online
from perseus_ds.running import Running, load_frontier
from perseus_ds.warm_up import WarmUp

# A clock follows some 15 ms late; what runs meanwhile runs at the wrong one.
_SWITCH_COST_J = 0.5


class Plan:
    """Default clocks, while rank 0 optimises in a process of its own."""

    name = "plan"
    clock_plan = ClockPlan.none()
    records = False
    measures = False

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._directory = Path(tools.config.output_dir)
        self._process = self._start() if tools.ranks.is_first else None

    def _start(self) -> subprocess.Popen[bytes]:
        # A process, not a thread, which would slow down rank 0's training; and a polite one.
        command = ["nice", "-n", "10", sys.executable, "-m", "perseus_ds", "optimize"]
        command += [f"profile={self._tools.profile_path}", f"out={self._directory}", f"switch_cost_j={_SWITCH_COST_J}"]
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
            frontier = load_frontier(self._tools, str(self._directory / "frontier.json"))
        except PerseusError as error:
            self._tools.fail(error)
            return Observe()
        self._keep()
        running = _running(self._tools, frontier)
        self._tools.recorder.event("plan", plan=running.clock_plan.number)
        self._tools.announce(f"running under plan {running.clock_plan.number} of {self._directory / 'frontier.csv'}")
        return running

    def _keep(self) -> None:
        """Leave profile and frontier for the next run of this job."""
        cache = _cache(self._tools)
        if self._tools.ranks.is_first and self._tools.config.cache:
            try:
                cache.store(self._directory)
            except OSError as error:
                self._tools.recorder.event("cache", error=str(error))


def _cache(tools: Tools) -> Cache:
    """Return the cache's entry for this job; every rank must ask at the same time."""
    return Cache(tools.job_key())


def _from_cache(tools: Tools) -> Phase | None:
    """Start under the plan of an earlier run, if there is one that still fits."""
    cache = _cache(tools)
    directory = Path(tools.config.output_dir)

    def restore() -> bool:
        found = tools.config.cache and cache.is_complete
        if found:
            cache.restore(directory)
        return found

    try:
        if not tools.ranks.from_first(restore):
            return None
        frontier = load_frontier(tools, str(directory / "frontier.json"))
    except (PerseusError, OSError) as error:
        tools.announce(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    running = _running(tools, frontier)
    number = running.clock_plan.number
    tools.announce(f"starting under plan {number}, profiled by an earlier run ({cache.directory})")
    return running


def _running(tools: Tools, frontier: Frontier) -> Running:
    return Running(tools, frontier, lambda: _profile_and_plan(tools))


def _profile_and_plan(tools: Tools) -> Phase:
    return WarmUp(tools, lambda tools, before: profile_online(tools, before, lambda: Plan(tools)))


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
        phase = Running(tools, load_frontier(tools, str(tools.config.frontier)))
    elif tools.config.mode == "profile":
        _check_clocks(tools)
        phase = WarmUp(tools, profile_offline, records=True)
    elif tools.config.mode == "auto":
        _check_clocks(tools)
        phase = _from_cache(tools) or _profile_and_plan(tools)
    else:
        phase = Observe()
    return Calibrate(tools, phase) if isinstance(tools.execution, SimulatedExecution) else phase
