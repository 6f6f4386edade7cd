"""One job, no second command: warm up, profile online, optimise in the background, run, keep watching."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.cli.arguments import quoted
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import SimulatedExecution
from perseus_ds.errors import PerseusError
from perseus_ds.profiler.search import clocks_to_choose_from
from perseus_ds.runtime.cache import Cache
from perseus_ds.runtime.phases import Calibrate, Observe, Phase, Seen, Tools
from perseus_ds.runtime.profiling import profile_offline, profile_online
from perseus_ds.runtime.running import Running, load_frontier
from perseus_ds.runtime.warm_up import WarmUp

# A clock follows some 15 ms late; what runs meanwhile runs at the wrong one.
_SWITCH_COST_J = 0.5
# Times that keep changing, as with sequences of any length, fit no profile; to go on measuring would only cost.
_MOST_PROFILES = 3


class Plan:
    """Default clocks, while rank 0 optimises in a process of its own."""

    name = "plan"
    clock_plan = ClockPlan.none()
    records = False
    measures = False

    def __init__(self, tools: Tools, profiles: int) -> None:
        self._tools = tools
        self._directory = Path(tools.config.output_dir)
        self._profiles = profiles
        self._process: subprocess.Popen[bytes] | None = None
        tools.ranks.from_first(self._start)

    def _start(self) -> None:
        # A process, not a thread, which would slow down rank 0's training; and a polite one.
        command = ["nice", "-n", "10", sys.executable, "-m", "perseus_ds", "optimize"]
        command += [f"profile={quoted(self._tools.profile_path)}", f"out={quoted(self._directory)}"]
        command += [f"switch_cost_j={_SWITCH_COST_J}"]
        with (self._directory / "optimize.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

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
        running = _running(self._tools, frontier, self._profiles)
        self._tools.recorder.event("plan", plan=running.clock_plan.number)
        self._tools.announce(f"running under plan {running.clock_plan.number} of {self._directory / 'frontier.csv'}")
        return running

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

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
    return Cache(tools.profile_key())


def _from_cache(tools: Tools) -> Phase | None:
    """Start under the plan of an earlier run, if there is one that still fits."""
    cache = _cache(tools)
    directory = Path(tools.config.output_dir)

    def restore() -> str | None:
        if not tools.config.cache or not cache.is_complete:
            return None
        cache.restore(directory)
        return str(cache.directory)

    try:
        source = tools.ranks.from_first(restore)
        if source is None:
            return None
        frontier = load_frontier(tools, str(directory / "frontier.json"))
    except (PerseusError, OSError) as error:
        tools.announce(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    running = _running(tools, frontier, profiles=0)
    tools.announce(f"starting under plan {running.clock_plan.number}, profiled by an earlier run ({source})")
    return running


def _running(tools: Tools, frontier: Frontier, profiles: int) -> Running:
    again = (lambda: _profile_and_plan(tools, profiles)) if profiles < _MOST_PROFILES else None
    return Running(tools, frontier, again)


def _profile_and_plan(tools: Tools, profiles: int = 0) -> Phase:
    """Profile and plan, after so many times in this job."""
    return WarmUp(tools, lambda tools, before: profile_online(tools, before, lambda: Plan(tools, profiles + 1)))


def _check_clocks(tools: Tools) -> None:
    def check() -> None:
        clocks_to_choose_from(tools.gpu, tools.config.profile)

    tools.ranks.together(check)
    highest_mhz = clocks_to_choose_from(tools.gpu, tools.config.profile)[-1]
    gpu_mhz = tools.gpu.supported_clocks_mhz()[-1]
    if highest_mhz < gpu_mhz:
        tools.announce(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"told against that, not against the GPU's own {gpu_mhz} MHz"
        )


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
