"""Auto mode on SIMULATED GPUs with the difficulties of real ones, with and without countermeasures.

    python benchmarks/adverse.py
    python benchmarks/adverse.py --condition slow-transfers sampled-counter
    python benchmarks/adverse.py --latencies         # savings by the latency of clock changes

A job like the demo's, with four unequal stages and eight micro-batches, in virtual time: every rank is a thread, passes
only take time, and the real runtime measures a profile, computes plans, compares its plan with default clocks and runs
under it. Iterations under the plan at the end of the job are compared with iterations at default clocks of the same
job. Energies are the true ones of the simulated GPUs, not those of their counters.

Without countermeasures, clocks are requested without regard to their latency, the counter's noise is not estimated, and
the cost of a clock change is not learnt from late plans. The decision whether a plan is kept is made in both cases.

``--latencies`` runs the job with latencies of 5, 15, 50 and 200 ms, and with 15 ms for the upper clocks and 200 ms for
the others, and for comparison with one clock per rank. Plans may take 0 or 5 % longer than the fastest one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from perseus_ds.agent import timeline
from perseus_ds.agent.timeline import ClockTransition, Spans, plan_transitions
from perseus_ds.optimizer.worker import OptimizeRequest
from perseus_ds.profiler import online
from perseus_ds.protocol.job_messages import LatencyTable
from perseus_ds.server import profiling
from perseus_ds.simulation import gpu as simulated
from perseus_ds.simulation.gpu import CONDITIONS

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from virtual.job import VirtualJob, WorkerAtOnce  # type: ignore[import-not-found]  # noqa: E402

LATENCIES_S = {"5 ms": (0.005, 0.005), "15 ms": (0.015, 0.015), "50 ms": (0.05, 0.05), "200 ms": (0.2, 0.2)}
MIXED = {"15 and 200 ms": (0.2, 0.015)}
"""Latencies of the lower and the upper clocks [s]."""
SLOWDOWNS = (0.0, 0.05)
UPPER = 0.75
"""Begin of the upper clocks, on a scale from 0 for the lowest clock to 1 for the highest."""
STAGES_S = (0.036, 0.034, 0.034, 0.05)
COMPARED = 20


@dataclass(frozen=True)
class Result:
    """End of a job, relative to its iterations at default clocks.

    Attributes:
        phase: Phase of its last iterations: "run" under a plan, "observe" if it has returned to default clocks.
        late: Increase of the iteration time, as a fraction.
        saved: Decrease of the energy, as a fraction.
        changes: Clock changes of all GPUs per iteration.
    """

    phase: str
    late: float
    saved: float
    changes: float

    @property
    def is_good(self) -> bool:
        """True if the job is at most 1 % late and uses no more energy, or has returned to default clocks."""
        return self.phase == "observe" or (self.late <= 0.01 and self.saved >= 0)

    def __str__(self) -> str:
        if self.phase == "observe":
            return f"{'default clocks again':34}"
        return f"{self.late:+7.2%} {-self.saved:+7.1%} {self.changes:6.1f} changes"


@dataclass(frozen=True)
class TwoLatencies:
    """A ``LatencyModel`` with one latency for the lower clocks and one for the upper ones [s]."""

    lower_s: float
    upper_s: float

    def sample_s(self, target: float, source: random.Random) -> float:
        """Return the time of one call."""
        return self.upper_s if target >= UPPER else self.lower_s


class OneClock(WorkerAtOnce):  # type: ignore[misc]
    """Computes plans with one clock per rank."""

    def __init__(self, request: OptimizeRequest, log_path: Path) -> None:
        settings = replace(request.settings, least_dwell_s=1e4)
        super().__init__(replace(request, settings=settings), log_path)


def settings_of(condition: str) -> dict[str, Any]:
    """Return the simulated GPUs' settings for a condition."""
    if condition == "heavy-tail":
        return {"lock_latency": "heavy-tail"}
    if condition in simulated.LATENCIES:
        return {"lock_latency": condition}
    if condition == "all":
        return {"lock_latency": "heavy-tail", "conditions": list(CONDITIONS), "time_noise": 0.005, "power_noise": 0.01}
    return {"conditions": [] if condition == "none" else [condition]}


def train(condition: str, iterations: int, worker: type[Any] = WorkerAtOnce, max_slowdown: float = 0.0) -> Result:
    """Run a job in auto mode."""
    goal = {"max_slowdown": max_slowdown}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = {"gpu": settings_of(condition), "mode": "auto", "goal": goal}
        job = VirtualJob(Path(folder), stages_s=STAGES_S, micro_batches=8, **settings)
        job.worker = worker
        job.train(iterations)
        records = job.close()
    # The first iterations after a change of phase begin at other clocks.
    default = [
        taken for before, taken in zip(job.taken, job.taken[1:], strict=False) if before[0] == taken[0] == "default"
    ]
    last = job.taken[-COMPARED:]
    default_s, default_j = (statistics.mean(values) for values in list(zip(*default, strict=True))[1:])
    time_s, energy_j = (statistics.mean(values) for values in list(zip(*last, strict=True))[1:])
    changes = statistics.mean(record.clock_changes for record in records[-COMPARED:])
    return Result(last[-1][0], time_s / default_s - 1, 1 - energy_j / default_j, changes)


@contextlib.contextmanager
def without_countermeasures() -> Any:
    """Disable the countermeasures against late clocks, noisy counters and delays by clock changes."""

    def plan_without_latencies(
        clocks_mhz: Sequence[int], spans_s: Spans, length_s: float, latencies: LatencyTable
    ) -> list[ClockTransition]:
        return plan_transitions(clocks_mhz, spans_s, length_s, LatencyTable())

    with (
        patch.object(timeline, "plan_transitions", plan_without_latencies),
        patch.object(online._Energies, "variance_rate_s", 2e-5),
        patch.object(profiling, "_KNOWN", math.inf),
    ):
        yield


def main() -> None:
    """Print a line for each condition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    conditions = ["none", "heavy-tail", *CONDITIONS, "all"]
    parser.add_argument("--condition", nargs="+", choices=conditions, default=conditions)
    parser.add_argument("--latencies", action="store_true", help="savings against how late clocks follow")
    parser.add_argument("--iterations", type=int, default=160)
    arguments = parser.parse_args()
    print("SIMULATED A100s; time and energy of an iteration under the plan against default clocks of the same job")
    if arguments.latencies:
        models = {name: TwoLatencies(*latencies_s) for name, latencies_s in {**LATENCIES_S, **MIXED}.items()}
        print(f"{'slowdown, clocks late by':27} {'one clock a rank':34} plans under auto mode")
        with patch.dict(simulated.LATENCIES, models):
            for slowdown, name in itertools.product(SLOWDOWNS, models):
                one_clock, ours = (
                    train(name, arguments.iterations, worker, slowdown) for worker in (OneClock, WorkerAtOnce)
                )
                print(f"{slowdown:4.0%}, {name:21} {one_clock!s:34} {ours}", flush=True)
        return
    print(f"{'condition':18} {'without countermeasures':34} with countermeasures")
    bad = []
    for condition in arguments.condition:
        with without_countermeasures():
            without = train(condition, arguments.iterations)
        result = train(condition, arguments.iterations)
        print(f"{condition:18} {without!s:34} {result}", flush=True)
        bad += [] if result.is_good else [condition]
    print(f"NOT MET: {', '.join(bad)}" if bad else "At most 1 % late and no more energy, or default clocks, everywhere")


if __name__ == "__main__":
    main()
