"""The context that the modes of a job share, and their phases at default clocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.protocol.job_messages import Calibrate, ToRank
from perseus_ds.server.iterations import NextPhase, Run, iteration
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.orders import Orders
from perseus_ds.server.recorder import Recorder
from perseus_ds.server.state import PlanState
from perseus_ds.timebase import REAL_TIME, Timebase

_LONGER = 4
_LONG_AGO = 20


@dataclass(frozen=True)
class ModeContext:
    """Context of a job's mode.

    Attributes:
        send: Sends a message to a rank.
        worker: Computes plans in another process.
    """

    job: Job
    orders: Orders
    state: PlanState
    recorder: Recorder
    control: JobControl
    send: Callable[[int, ToRank], None]
    timebase: Timebase = REAL_TIME
    worker: Callable[..., OptimizeWorker] = OptimizeWorker

    def send_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in range(self.job.world_size):
            self.send(rank, message)


async def observe(iterations: float = math.inf) -> None:
    """Train at default clocks for at least ``iterations``, and until no rank reports a failure."""
    run, done, has_failed = Run("observe"), 0, False
    while done < iterations or has_failed:
        seen = await iteration(run)
        done, has_failed = done + 1, seen.job_report.failed


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
