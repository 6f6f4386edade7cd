"""The context that the modes of a job share, and their phases at default clocks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.policy.plan_proof import MOST_BLOCKS, IterationSample
from perseus_ds.policy.reports import Conditions
from perseus_ds.protocol.job_messages import Calibrate, ToRank
from perseus_ds.server.iterations import NextPhase, Run, Seen, iteration
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase

SETTLED = 1
"""Number of iterations ignored after a change of clocks, because the first one begins at the previous clocks."""
_LONGER = 4
_LONG_AGO = 20


@dataclass(frozen=True)
class ModeContext:
    """Context of a job, or of its iterations of one order.

    Attributes:
        send: Sends a message to a rank.
        worker: Computes plans in another process.
        comparisons: Numbers the comparisons of plans with default clocks, which share a total error probability.
    """

    job: Job
    recorder: Recorder
    control: JobControl
    send: Callable[[int, ToRank], None]
    timebase: Timebase = REAL_TIME
    worker: Callable[..., OptimizeWorker] = OptimizeWorker
    comparisons: Iterator[int] = field(default_factory=itertools.count)

    def send_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in range(self.job.world_size):
            self.send(rank, message)


class DefaultIterations:
    """Consecutive iterations at default clocks.

    Attributes:
        sample: Time and energy of the whole job under the current limits of its GPUs.
        conditions: Limits of GPUs under which they run.
        last_s: Time of the last iteration [s]; None before the first.
    """

    def __init__(self, job: Job) -> None:
        self.sample = IterationSample(job.counter_period_s())
        self.conditions: Conditions = ()
        self._iterations = 0
        self.last_s: float | None = None

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore iterations of an earlier start of the job."""
        try:
            for time_s, energy_j in zip(kept["times_s"], kept["energies_j"], strict=True):
                self.sample.add(float(time_s), float(energy_j))
        except (KeyError, TypeError, ValueError):  # of an edited file, or of another version
            self.sample = IterationSample(self.sample.counter_period_s)

    def remaining_s(self, blocks: int = 1) -> float | None:
        """Estimate the time until there are enough iterations for ``blocks`` [s]. None before the first."""
        if self.last_s is None:
            return None
        return self.sample.remaining_s(self.last_s, max(0, SETTLED + 1 - self._iterations), blocks)

    def add(self, seen: Seen) -> None:
        """Add an iteration. If limits of GPUs have changed, the previous ones are discarded."""
        if seen.conditions != self.conditions:
            self.conditions, self.sample = seen.conditions, IterationSample(self.sample.counter_period_s)
            self._iterations = 0
        self._iterations += 1
        self.last_s = seen.time_s
        if self._iterations > SETTLED:
            self.sample.add_reports(seen.reports)


async def measure_default(
    default: DefaultIterations, say: Callable[[str], None], stops: Callable[[], bool] = lambda: False
) -> None:
    """Run iterations at default clocks until plans can be compared with their time and energy.

    They are added to ``default``. Their approximate number is printed as soon as the time of one is known.
    """
    is_announced = False
    while not (default.sample.is_enough or stops()):
        if default.last_s and not is_announced:
            is_announced = True
            left_s = [default.remaining_s(blocks) or 0.0 for blocks in (1, MOST_BLOCKS)]
            least, most = (max(1, math.ceil(time_s / default.last_s)) for time_s in left_s)
            say(f"measuring iterations at default clocks, to compare plans with: about {least} to {most}")
        run = Run("default", times="all", next_phase=NextPhase("run", default.remaining_s()))
        await default_iteration(run, default)


async def default_iteration(run: Run, default: DefaultIterations) -> None:
    """Wait for the next iteration, and add it if it ran at default clocks."""
    seen = await iteration(run)
    if seen.run is not None and seen.run.clocks == run.clocks:
        default.add(seen)


async def observe(iterations: float = math.inf) -> None:
    """Train at default clocks for at least ``iterations``, and until no rank reports a failure."""
    run, done, has_failed = Run("observe"), 0, False
    while done < iterations or has_failed:
        seen = await iteration(run)
        done, has_failed = done + 1, seen.reports.failed


async def calibrate(context: ModeContext) -> None:
    """Run an iteration to calibrate simulated GPUs, and send each rank the work of its passes."""
    job = context.job
    if not job.facts[0].calibrates:
        return
    following = job.config.mode if job.config.mode in ("observe", "run") else "warm-up"
    seen = await iteration(Run("calibrate", next_phase=NextPhase(following)))
    if all(message.report.is_calibrated for message in seen.messages):
        return
    flops = [state.flops for state in job.states]
    pipelines = [place.pipeline for place in job.places]
    by_pipeline = most_in_step(pipelines, [dict(own) for own in flops])
    largest = max((count for most in by_pipeline.values() for count in most.values()), default=0)
    simulated = job.config.simulated
    per_s = simulated.flops_per_s
    each_s = simulated.longest_instruction_s / max(1, largest) if per_s is None else 1 / per_s
    for rank, own in enumerate(flops):
        most = by_pipeline[pipelines[rank]]
        context.send(rank, Calibrate(each_s, tuple(most[key] for key, _ in own)))


def most_in_step(pipeline_of_rank: Sequence[int], flops: Sequence[Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Return for each pipeline the largest work of each pass on any of its ranks.

    Ranks that share a stage exchange partial results within a pass, so none finishes before the others: experts with
    few tokens wait for those with many.
    """
    most: dict[int, dict[str, int]] = defaultdict(dict)
    for pipeline, own in zip(pipeline_of_rank, flops, strict=True):
        most[pipeline].update({key: max(count, most[pipeline].get(key, 0)) for key, count in own.items()})
    return dict(most)


class BackOff:
    """Number of iterations that a job trains at default clocks before it tries again.

    It is four times the previous number, unless the previous time is long past.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._last = 0
        self._until = 0

    def next(self, step: int) -> int:
        """Return the number of iterations to back off after a step of the job."""
        is_long_ago = step - self._until > _LONG_AGO * self._last
        self._last = self._first if is_long_ago or not self._last else _LONGER * self._last
        self._until = step + self._last
        return self._last


async def back_off_for(iterations: int, stops: Callable[[], bool]) -> None:
    """Train at default clocks for a number of iterations, until ``stops()`` or the limits of GPUs change."""
    conditions: Conditions | None = None
    run = Run("observe", next_phase=NextPhase("default"))
    for _ in range(iterations):
        if stops():
            break
        seen = await iteration(run)
        if conditions not in (None, seen.conditions):
            break
        conditions = seen.conditions
