"""Context of the modes of a job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.protocol.job_messages import ToRank
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.look_ahead import LookAhead
from perseus_ds.server.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase


@dataclass(frozen=True)
class ModeContext:
    """Context of a job, or of its iterations of one order or with inputs of one shape.

    Attributes:
        job: The job.
        recorder: Records iterations and events.
        control: The user's control of the job.
        look_ahead: Lengths of future iterations, and plans for them.
        send: Sends a message to a rank.
        timebase: Timebase of the server.
        worker: Computes plans in another process.
        comparisons: Numbers the comparisons of plans with default clocks, which share a total error probability.
    """

    job: Job
    recorder: Recorder
    control: JobControl
    look_ahead: LookAhead
    send: Callable[[int, ToRank], None]
    timebase: Timebase = REAL_TIME
    worker: Callable[..., OptimizeWorker] = OptimizeWorker
    comparisons: Iterator[int] = field(default_factory=itertools.count)

    def send_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in range(self.job.world_size):
            self.send(rank, message)
