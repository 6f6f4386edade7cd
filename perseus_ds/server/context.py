"""What a mode of the server works with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.protocol.job_messages import ToRank
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.look_ahead import LookAhead
from perseus_ds.server.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase


@dataclass(frozen=True)
class ModeContext:
    """A job, or its iterations of one order or with inputs of one shape.

    Attributes:
        job: The job.
        recorder: Records what happens.
        control: What the user asks for.
        look_ahead: The lengths that the job gives for iterations to come.
        send: Sends a message to a rank.
        timebase: The time of the server.
        worker: Computes plans in another process.
        beside: Ends what runs beside the mode, such as processes.
        order: Number of the order.
        shape: Number of the shape.
        resumes: What an earlier start of the job has left, if anything; the mode that begins first takes it.
        comparisons: Counts the comparisons of plans with default clocks, which share what errors may be spent.
    """

    job: Job
    recorder: Recorder
    control: JobControl
    look_ahead: LookAhead
    send: Callable[[int, ToRank], None]
    timebase: Timebase = REAL_TIME
    worker: Callable[..., OptimizeWorker] = OptimizeWorker
    beside: ExitStack = field(default_factory=ExitStack)
    order: int = 0
    shape: int = 0
    resumes: list[Mapping[str, Any]] = field(default_factory=list)
    comparisons: Iterator[int] = field(default_factory=itertools.count)

    def send_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in range(self.job.world_size):
            self.send(rank, message)
