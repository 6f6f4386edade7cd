"""A job of real DeepSpeed ranks under random faults: of the driver, of files, and kills.

The real pynvml runs on a stub driver. GPUs take no time and draw power by clock. The losses must be those of a job
without Perseus at every step, and all ranks must be under a plan again after each fault.
"""

import csv
import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from fault_outcomes import Outcome
from frontiers import save_random_plan
from job import Running, run
from run_log import events, iterations, records, wait_until

from perseus_ds.errors import ConfigError
from perseus_ds.server.control_socket import send_command

RANKS = 4
DRIVER_FAULTS = {
    "driver error": ("set_locked", "unknown"),
    "driver busy": ("set_locked", "timeout"),
    "no permission": ("set_locked", "no_permission"),
    "counter fails": ("energy", "unknown"),
}
CAUSES = (*DRIVER_FAULTS, "driver hangs", "full disk", "orders", "kill one rank", "kill all ranks")
_POWER_LIMIT = {"watts": 1e6}


class HostileRanks:
    """A job of real ranks under random faults. See the module's docstring."""

    def __init__(self, folder, stub, *, seed, causes=CAUSES, longest_s=10.0):
        """Prepare the job."""
        self.outcomes = {cause: Outcome() for cause in causes}
        self._random = random.Random(seed)
        self._stub = stub
        self._longest_s = longest_s
        self._folder = Path(folder)
        for gpu in stub.gpus:
            gpu.power_by_clock = 0.5
        save_random_plan(self._folder / "frontier", ranks=RANKS, simulated=False)
        self._perseus = {
            "mode": "run",
            "frontier": str(self._folder / "frontier"),
            "device": "nvml",
            # A plan is kept while it draws less power, even if times on this machine are irregular.
            "goal": _POWER_LIMIT,
        }
        self._has_checkpoint = False

    def run(self, minutes):
        """Train this long, with each fault at least once, and return the violated guarantees."""
        causes: list[str] = []
        with ThreadPoolExecutor() as pool:
            self._pool = pool
            self._start()
            end_s = time.monotonic() + 60.0 * minutes
            try:
                while time.monotonic() < end_s or not all(outcome.times for outcome in self.outcomes.values()):
                    # Each cause once before any is repeated, so that a short run covers most of them.
                    causes = causes or self._random.sample(list(self.outcomes), len(self.outcomes))
                    self._let_happen(causes.pop())
            finally:
                self._job.order("stop")
                finished = self._finished.result()
        broken = [f"{cause}: {broken}" for cause, outcome in self.outcomes.items() for broken in outcome.broken]
        if finished.returncode != 0:
            return [*broken, f"the job failed: {finished.output[-2000:]}"]
        return [*broken, *self._differing_losses()]

    def _start(self):
        """Start the job, from its checkpoint if it has one."""
        checkpoint = {"resume_from": str(self._folder / "job" / "checkpoint")} if self._has_checkpoint else {}
        self._begun = len(records(self._folder / "job" / "perseus"))
        self._job = Running(self._folder / "job")
        self._finished = self._pool.submit(
            run,
            self._job.folder,
            RANKS,
            environment=self._stub.environment,
            perseus=self._perseus,
            give_up_s=math.inf,  # a job that hangs never returns to a plan, which is detected
            steps=1_000_000,
            followed=True,
            **checkpoint,
        )
        self._wait_until_back(self._begun)

    def _let_happen(self, cause):
        outcome = self.outcomes[cause]
        begun = len(records(self._job.folder / "perseus"))
        self._cause(cause, self._random.uniform(0.5, self._longest_s))
        ended_s = time.monotonic()
        self._wait_until_back(len(records(self._job.folder / "perseus")))
        back_s = time.monotonic() - ended_s
        warned = [event["rank"] for event in events(records(self._job.folder / "perseus")[begun:], "failure")]
        outcome.add(back_s, warned)

    def _cause(self, cause, for_s):
        """Cause a fault for some time [s]."""
        gpu = self._random.choice(self._stub.gpus)
        if cause in DRIVER_FAULTS:
            function, error = DRIVER_FAULTS[cause]
            gpu.fail(function, error)
            time.sleep(for_s)
            gpu.fail(function, "none")
        elif cause == "driver hangs":
            function = self._random.choice(("set_locked", "energy"))
            gpu.hang(function)
            time.sleep(for_s)
            gpu.hang(function, False)
        elif cause == "full disk":
            (server,) = self._stub.servers()
            server.rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))
            time.sleep(for_s)
            server.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        elif cause == "orders":
            self._give_orders()
        else:
            self._kill([self._random.randrange(RANKS)] if cause == "kill one rank" else range(RANKS), cause)

    def _give_orders(self):
        output = self._job.folder / "perseus"
        send_command(output, {"command": "pause"})
        self._job.wait_for(lambda found: iterations(found)[-1]["phase"] in ("pause", "default", "observe"))
        with suppress(ConfigError):  # there is no such pipeline
            send_command(output, {"command": "straggler", "pipeline": 7, "slowdown": 1.2})
        send_command(output, {"command": "set", "goal": _POWER_LIMIT})
        send_command(output, {"command": "resume"})

    def _kill(self, ranks, cause):
        if self._random.random() < 0.7:
            self._job.order("save")
            wait_until(lambda: not (self._job.folder / "save").exists(), "a checkpoint")
            self._has_checkpoint = True
        for rank in ranks:
            os.kill(self._pid(rank), signal.SIGKILL)
        self._finished.result()
        wait_until(lambda: not any(self._stub.locked_clocks_mhz()), f"default clocks after {cause}")
        self._start()

    def _pid(self, rank):
        return int((self._job.folder / f"pid{rank}").read_text())

    def _wait_until_back(self, seen):
        """Wait for an iteration under a plan on all ranks, after the first ``seen`` records."""

        def is_back(found):
            return any(r["plan"] is not None and not r["failed_ranks"] for r in iterations(found[seen:]))

        self._job.wait_for(is_back)

    def _differing_losses(self):
        """Return differences from a job without Perseus and without faults."""
        ours = losses(self._job.folder)
        steps = max(ours) + 1
        without = run(self._folder / "without", RANKS, give_up_s=math.inf, steps=steps, followed=True)
        if without.returncode != 0:
            return [f"the job without Perseus failed: {without.output[-2000:]}"]
        theirs = losses(self._folder / "without")
        if sorted(ours) != list(range(steps)):
            return ["steps are missing in losses.csv"]
        different = [step for step in ours if ours[step] != theirs.get(step)]
        return [f"losses differ from those without Perseus at steps {different[:5]} of {steps}"] if different else []


def losses(folder):
    """Return all losses that a ``followed`` job wrote for each step, as text."""
    found: dict[int, set[str]] = {}
    with (folder / "losses.csv").open() as file:
        for step, loss in csv.reader(file):
            found.setdefault(int(step), set()).add(loss)
    return found
