"""What the phases of a mode work with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.recorder import Recorder


@dataclass(frozen=True)
class ModeContext:
    """The job as its mode sees it on one rank.

    Attributes:
        job: The training job, or its iterations with inputs of one shape.
        rank: This rank.
        recorder: Of the job.
        control: The user's policy, reported stragglers and pause.
        comparisons: Counts the comparisons of plans with default clocks, which share what errors may be spent.
    """

    job: Job
    rank: RankContext
    recorder: Recorder
    control: JobControl
    comparisons: Iterator[int] = field(default_factory=itertools.count)
