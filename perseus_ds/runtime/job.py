"""The training job, and the resources of one of its ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import Started
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.clocks.timers import Execution
from perseus_ds.gpu.base import KnownGpu
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.job_control import JobControl
from perseus_ds.ranks import Communicator
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.look_ahead import LookAhead
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase


@dataclass(frozen=True)
class Job:
    """The training job.

    Attributes:
        schedule: Operations of every rank of a pipeline in one iteration.
        info: Model, parallelism and versions, for the profile.
        fingerprint: Text that identifies the properties of this rank's share of the model that affect times.
        engines: Models of the engines in this process, first the one that trains. Empty for a loop without an engine.
    """

    config: PerseusConfig
    schedule: Schedule
    info: ProfileInfo
    fingerprint: str = ""
    engines: tuple[str, ...] = ()

    @property
    def output_dir(self) -> Path:
        """Folder of all files that this job writes."""
        return Path(self.config.output_dir)

    @property
    def profile_path(self) -> Path:
        """Path of the profile that this job writes."""
        return self.output_dir / "profile.csv"

    def of_shape(self, number: int, shape: str) -> Job:
        """Return the job of the iterations with inputs of one shape, with its own folder and fingerprint."""
        config = self.config.model_copy(update={"output_dir": str(self.output_dir / "shapes" / str(number))})
        return replace(self, config=config, fingerprint=f"{self.fingerprint}, inputs {shape}")

    def of_order(self, number: int, schedule: Schedule) -> Job:
        """Return the job of the iterations of another order, with its own schedule and folder."""
        config = self.config.model_copy(update={"output_dir": str(self.output_dir / "orders" / str(number))})
        info = self.info.model_copy(update={"schedule": schedule.name, "micro_batches": schedule.micro_batches})
        return replace(self, config=config, schedule=schedule, info=info)

    def started(self, communicator: Communicator, gpu: str) -> Started:
        """Return the event of the job's start. All ranks call this together."""
        return Started(
            mode=self.config.mode,
            gpu=gpu,
            frontier=self.config.frontier,
            job=self._key(communicator, {}),
            policy=self.config.policy.model_dump(mode="json"),
            engines=list(self.engines) or None,
            micro_batches=self.schedule.micro_batches,
            settings=self.info.settings,
        )

    def profile_key(self, communicator: Communicator) -> str:
        """Return a key of the profile. It differs for other iterations, settings or kinds of measurement.

        All ranks call this together.
        """
        settings = communicator.gather(self.info.settings and self.info.settings.model_dump())
        return self._key(communicator, {"profile": self.config.profile.model_dump(), "settings": settings})

    def _key(self, communicator: Communicator, settings: dict[str, object]) -> str:
        """Return a key of job, simulated GPUs, every rank's share of the model, and settings."""
        simulated = self.config.simulated.model_dump() if self.info.simulated else {}
        info = self.info.model_copy(update={"settings": None}).model_dump(mode="json")
        content = [info, communicator.gather(self.fingerprint), {**settings, "simulated": simulated}]

        def name() -> str:
            return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

        return communicator.computed_on_rank_0(name)


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
class RankContext:
    """This rank of the job: its GPU, and its connection to the other ranks.

    Attributes:
        clocks: Set and read by the agent of this node.
        device: Where the engine's tensors live.
        beside_training: What phases have running beside training.
    """

    communicator: Communicator
    gpu: KnownGpu
    clocks: AgentClocks
    timers: Execution
    device: torch.device
    timebase: Timebase = REAL_TIME
    beside_training: BesideTraining = field(default_factory=BesideTraining)


class FirstOrder:
    """Recognises the order of a job's first iteration, which is that of its schedule."""

    def __init__(self) -> None:
        self._seen: list[Hashable] = []

    def is_first(self, order: Hashable) -> bool:
        """Return True for the first order. The first call must be with it."""
        if not self._seen:
            self._seen.append(order)
        return order == self._seen[0]


@dataclass(frozen=True)
class ModeContext:
    """The job as seen by its mode on one rank.

    Attributes:
        job: The training job, or its iterations of one order or with inputs of one shape.
        orders: Knows the order of the job's schedule, also when its mode begins again.
        order: Number of that order.
        shape: Number of that shape.
        look_ahead: The lengths that the job gives for iterations to come.
        comparisons: Counts the comparisons of plans with default clocks, which share what errors may be spent.
    """

    job: Job
    rank: RankContext
    recorder: Recorder
    control: JobControl
    look_ahead: LookAhead
    orders: FirstOrder = field(default_factory=FirstOrder)
    order: int = 0
    shape: int = 0
    comparisons: Iterator[int] = field(default_factory=itertools.count)
