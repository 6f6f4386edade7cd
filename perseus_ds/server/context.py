"""What a mode of the server works with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perseus_ds.optimizer.worker import OptimizeWorker
from perseus_ds.protocol.job_messages import ToRank
from perseus_ds.server.job import Job
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.look_ahead import LookAhead
from perseus_ds.server.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase


class BesideTraining:
    """What a job has running beside training, such as threads and processes."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], object]] = []

    @contextmanager
    def running(self, end: Callable[[], object]) -> Iterator[None]:
        """Surround a phase that has something running, which is ended after it, or before when the job closes."""
        self._ends.append(end)
        try:
            yield
        finally:
            self._ends.remove(end)
            end()

    def until_closed(self, end: Callable[[], object]) -> None:
        """Have something ended when the job closes."""
        self._ends.append(end)

    def close(self) -> None:
        """End all of it; what is ended must be harmless when ended again."""
        for end in reversed(self._ends):
            end()


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
        beside: What the modes have running beside training.
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
    beside: BesideTraining = field(default_factory=BesideTraining)
    order: int = 0
    shape: int = 0
    resumes: list[Mapping[str, Any]] = field(default_factory=list)
    comparisons: Iterator[int] = field(default_factory=itertools.count)

    def send_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        for rank in range(self.job.world_size):
            self.send(rank, message)
