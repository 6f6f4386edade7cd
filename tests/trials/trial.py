"""Measures when the clocks of a job on stub GPUs are the default ones again after the job was ended."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import job
import psutil
from forked import fork, free_port
from frontiers import MODEL, save_random_plan
from job import QUICK_PROFILE
from stub_nvml.controller import StubGpu, StubNvml
from trials.cgroups import new_cgroup
from trials.light_job import RANKS, LightJob, launch

GIVE_UP_S = 300.0
"""Timeout of a trial that hangs."""
_POLL_S = 0.002
_LOOK_S = 0.02
_WITHIN_S = {"starting": 1.5, "profile": 0.25, "run": 0.25, "closing": 0.2}
"""A job is ended at a random moment within this time."""
_SAYS_SO = "died and left the clock of"
_CGROUPS = {"cgroup": "killed as a whole", "small_cgroup": "of little memory"}


class NotPossibleError(Exception):
    """This system lacks what the trial needs."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        locked: Number of GPUs with locked clocks when the job was ended.
        restored_s: Time from then until ranks or agents of the job had reset all clocks, or only the clock of a rank
            that has ended itself [s]. None if a clock was still locked when all of them had ended.
        restored_later: Whether the next job or ``perseus-ds reset`` has restored such a clock.
    """

    locked: int
    restored_s: float | None
    restored_later: bool = False


@dataclass(frozen=True)
class Scenario:
    """A way in which a job is ended.

    Attributes:
        name: Name in the table.
        end: Ends the job, and returns the time of ``time.monotonic`` from which its clocks must be restored [s].
        when: State of the job: ``starting``, a phase, or ``closing``.
        settings: Settings of the :class:`LightJob` that differ from the defaults.
        ends_agent: Whether the agent is killed together with the job, or right before it.
        launcher: ``torchrun`` or ``deepspeed`` for a job of DeepSpeed. None for a :class:`LightJob`.
        prepare: Prepares the GPUs.
        loses_records: Whether the records of locked clocks are lost at the end of the job.
        gpus: Number of GPUs of the node. Another job runs on those that this job does not use.
        clocks_mhz: Clocks of the plan, of which each instruction has a random one.
    """

    name: str
    end: Callable[[Trial], float]
    when: str = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ends_agent: bool = False
    launcher: str | None = None
    prepare: Callable[[StubNvml], object] = lambda node: None
    loses_records: bool = False
    gpus: int = RANKS
    clocks_mhz: Sequence[int] = MODEL.clocks_mhz[40:]


class Trial:
    """A job that will be ended."""

    def __init__(self, node: StubNvml, draw: random.Random, folder: Path) -> None:
        self.node = node
        self.draw = draw
        self.folder = folder
        self.cgroup: Path | None = None
        self.port = str(free_port())
        self.other: Trial | None = None
        self._launcher: psutil.Process | None = None
        self._seen: set[psutil.Process] = set()

    def watch(self, launcher_pid: int) -> None:
        self._launcher = psutil.Process(launcher_pid)

    def look(self) -> None:
        """Record the current processes."""
        self._seen |= {*self.tree, *self.node.agents(), *(() if self.other is None else self.other.tree)}

    @property
    def launcher(self) -> psutil.Process:
        assert self._launcher is not None
        return self._launcher

    @property
    def ranks(self) -> list[psutil.Process]:
        found = self.launcher.children()
        if len(found) == 1:  # DeepSpeed's launcher starts another one for each node
            found = found[0].children()
        return sorted(found, key=lambda process: process.pid)

    @property
    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.launcher, *self.launcher.children(recursive=True)]
        return []

    @property
    def agents(self) -> list[psutil.Process]:
        """The job's agent. Several while one replaces another."""
        return [
            agent
            for agent in self.node.agents()
            if self.other is None or agent.environ().get("MASTER_PORT") == self.port
        ]

    def has_agent(self, besides: Iterable[psutil.Process]) -> bool:
        """True if an agent other than the given ones watches all ranks."""
        return self.node.has_agent(RANKS, besides)

    def has_ended(self) -> bool:
        """True if all processes of the job and the node's agents have ended."""
        time.sleep(_LOOK_S)
        self.look()
        return not any(map(_is_running, self._seen))

    def output(self) -> str:
        path = self.folder / "output.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + GIVE_UP_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"it did not happen: {what}\n{self.output()[-3000:]}")
            time.sleep(_POLL_S)

    def kill_all_that_is_left(self) -> None:
        for _ in range(2):  # an agent may have been about to start
            self.look()
            for process in self._seen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def send(processes: Iterable[psutil.Process], number: int) -> float:
    """Send a signal to processes, and return the time before that [s]."""
    now_s = time.monotonic()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return now_s


def kill(processes: Iterable[psutil.Process]) -> float:
    """Kill processes, all of which are stopped before the first one ends, and return the time [s]."""
    chosen = tuple(processes)
    send(chosen, signal.SIGSTOP)
    return send(chosen, signal.SIGKILL)


def attempt(scenario: Scenario, library: Path, folder: Path, seed: int, extensions: Path | None = None) -> Outcome:
    """Run a job and end it."""
    folder.mkdir(parents=True)
    node = StubNvml(library, folder / "gpus", scenario.gpus)
    scenario.prepare(node)
    trial = Trial(node, random.Random(f"{scenario.name} {seed}"), folder)
    with contextlib.ExitStack() as until_the_end:
        _start(scenario, trial, extensions, until_the_end)
        if scenario.gpus > RANKS:
            start_other(trial, CUDA_VISIBLE_DEVICES=",".join(map(str, range(RANKS, scenario.gpus))))
        _wait_for_the_moment(scenario, trial)
        trial.look()
        ended_s = scenario.end(trial)
        trial.wait_until(trial.has_ended, "the end of all processes")
        locked = sum(_is_locked_at(gpu, ended_s) for gpu in node.gpus)
        if any(node.locked_clocks_mhz()):
            if scenario.loses_records:
                shutil.rmtree(node.memory)
                node.memory.mkdir()
            is_restored = _is_restored_later(trial, by_command=bool(seed % 2), says_so=not scenario.loses_records)
            return Outcome(locked, None, is_restored)
        # The other ranks continue until they notice that a rank has ended itself.
        concerned = node.gpus[-1:] if "end_by" in scenario.settings else node.gpus
        return Outcome(locked, max([0.0, *(_restored_at_s(gpu) - ended_s for gpu in concerned)]))


def _start(scenario: Scenario, trial: Trial, extensions: Path | None, until_the_end: contextlib.ExitStack) -> None:
    save_random_plan(trial.folder / "frontier", simulated=False, clocks_mhz=scenario.clocks_mhz)
    block: dict[str, Any] = {"device": "nvml", "output_dir": str(trial.folder / "perseus"), "cache": False}
    if scenario.when != "profile":
        block |= {"mode": "run", "frontier": str(trial.folder / "frontier")}
    else:
        block |= {"mode": "auto", "profile": {**QUICK_PROFILE, "warm_up": 3}}
    if scenario.launcher is not None:
        assert extensions is not None
        copied = shutil.copytree(extensions, trial.folder / "extensions")
        environment = {**trial.node.environment, "TORCH_EXTENSIONS_DIR": str(copied)}
        with (trial.folder / "output.log").open("w") as output:
            process = job.start(
                trial.folder, RANKS, environment, scenario.launcher, output, perseus=block, steps=1_000_000
            )
        trial.watch(process.pid)
        until_the_end.callback(process.wait)
        until_the_end.callback(trial.kill_all_that_is_left)
        return
    settings = dict(scenario.settings)
    for name, kind in _CGROUPS.items():
        if settings.get(name):
            settings[name] = until_the_end.enter_context(new_cgroup(kind, f"perseus-trial-{os.getpid()}"))
            if settings[name] is None:
                raise NotPossibleError(f"{scenario.name}: no such cgroup can be made here")
    trial.cgroup = settings.get("cgroup")
    settings["end_after_s"] = trial.draw.uniform(0.0, 0.25)
    _launch(trial, LightJob(trial.folder, _environment(trial), block, **settings))
    until_the_end.callback(trial.kill_all_that_is_left)


def _launch(trial: Trial, light: LightJob) -> None:
    pid = int(fork(launch, light).pid or 0)
    trial.watch(pid)
    trial.wait_until(lambda: os.getpgid(pid) == pid, "its own process group")  # signals are sent to this group


def _environment(trial: Trial) -> dict[str, str]:
    return {**trial.node.environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": trial.port}


def start_other(trial: Trial, **variables: str) -> Trial:
    """Start another job on the node, with additional environment variables."""
    (trial.folder / "other").mkdir()
    trial.other = other = Trial(trial.node, trial.draw, trial.folder / "other")
    block = {"mode": "run", "frontier": str(trial.folder / "frontier"), "device": "nvml"}
    environment = {**_environment(trial), **variables, "MASTER_PORT": other.port}
    _launch(other, LightJob(other.folder, environment, {**block, "output_dir": str(other.folder / "perseus")}))
    return other


def _wait_for_the_moment(scenario: Scenario, trial: Trial) -> None:
    """Wait until the moment at which the job is ended."""
    if scenario.launcher is None and scenario.when != "starting":
        trial.wait_until((trial.folder / scenario.when).exists, scenario.when)
    if "end_by" in scenario.settings:
        return  # it ends itself, maybe before all clocks are seen locked at the same time
    time.sleep(trial.draw.uniform(0.0, _WITHIN_S[scenario.when]))
    if scenario.when in ("profile", "run"):
        trial.wait_until(lambda: all(trial.node.locked_clocks_mhz()), "locked clocks on all GPUs")


def _is_locked_at(gpu: StubGpu, moment_s: float) -> bool:
    before = [clock for clock, at_s in zip(gpu.changes_mhz(), gpu.change_times_s(), strict=True) if at_s <= moment_s]
    return bool(before and before[-1])


def _restored_at_s(gpu: StubGpu) -> float:
    """Return when a GPU's clock was reset for the last time [s], or -inf if it was never locked."""
    locked = [number for number, clock in enumerate(gpu.changes_mhz()) if clock]
    return gpu.change_times_s()[locked[-1] + 1] if locked else -math.inf


def _is_restored_later(trial: Trial, *, by_command: bool, says_so: bool) -> bool:
    """Return True if ``perseus-ds reset`` or the next job on the node restores the clocks left locked."""
    node = trial.node
    if by_command:
        done = node.run("-m", "perseus_ds", "reset")
        return done.returncode == 0 and not any(node.locked_clocks_mhz())
    left = [(gpu, gpu.change_count) for gpu in node.gpus if gpu.locked_clock_mhz]
    before = trial.output().count(_SAYS_SO)
    block = {"mode": "run", "frontier": str(trial.folder / "frontier"), "device": "nvml"}
    block["output_dir"] = str(trial.folder / "next")
    environment = {**_environment(trial), "MASTER_PORT": str(free_port())}
    _launch(trial, LightJob(trial.folder, environment, block, steps=3))
    trial.look()
    trial.wait_until(trial.has_ended, "the end of the next job")
    is_reset_first = all(gpu.changes_since_mhz(count)[:1] == [0] for gpu, count in left)
    said = trial.output().count(_SAYS_SO) - before
    # An agent may have been killed after resetting a clock and before recording that.
    return is_reset_first and (len(left) <= said <= RANKS if says_so else said == 0)
