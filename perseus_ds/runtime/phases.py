"""What a job does from one iteration boundary to the next: observe, profile, plan, run.

Each phase decides which clocks an iteration runs at and, after it, which phase follows. All ranks
go through the same phases at the same iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.config import PerseusConfig
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.gpu.driver_call import Patience
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Execution, SimulatedExecution, Span
from perseus_ds.distributed import Communicator
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.job_control import Orders
from perseus_ds.profiler.offline import RepeatableInstructions
from perseus_ds.runtime.cache import cache_key
from perseus_ds.runtime.recorder import Monitor, Recorder


@dataclass(frozen=True)
class Job:
    """What Perseus needs to know of the training job.

    Attributes:
        schedule: What every rank of a pipeline does in one iteration.
        device: Where the tensors live.
        info: Model, parallelism and versions, for the profile.
        fingerprint: Of this rank's share of the model: what its times depend on.
        monitor: DeepSpeed's monitor.
        steps_per_print: How often to print; None for never.
    """

    schedule: Schedule
    device: torch.device
    info: ProfileInfo
    fingerprint: str = ""
    monitor: Monitor | None = None
    steps_per_print: int | None = None


@dataclass(frozen=True)
class Tools:
    """What phases work with, on this rank.

    Attributes:
        patience: Makes what calls to the GPU's driver must not stop training.
        orders: What users want of the job.
        fail: Falls back to default clocks, for good.
        work: This rank's instructions to repeat; None where the engine cannot.
        isolated: Keeps what it surrounds out of training.
    """

    config: PerseusConfig
    job: Job
    ranks: Communicator
    gpu: Gpu
    patience: Patience
    clocks: ClockController
    execution: Execution
    recorder: Recorder
    orders: Orders
    fail: Callable[[Exception], None]
    work: RepeatableInstructions | None
    isolated: Callable[[], AbstractContextManager[None]]

    @property
    def profile_path(self) -> Path:
        """Where this job's profile is written."""
        return Path(self.config.output_dir) / "profile.csv"

    def job_key(self) -> str:
        """Return what tells this job from others whose iterations differ; every rank must ask at the same time."""
        return self._key({})

    def profile_key(self) -> str:
        """Return what tells its profile from others, how it is measured included; every rank must ask at once."""
        return self._key({"profile": self.config.profile.model_dump()})

    def _key(self, settings: dict[str, object]) -> str:
        simulated = self.config.simulated.model_dump() if self.gpu.simulated else {}
        fingerprints = self.ranks.all_gather(self.job.fingerprint)
        return cache_key(self.job.info, fingerprints, {**settings, "simulated": simulated})

    def announce(self, text: str) -> None:
        """Say something, once for the whole job."""
        self.recorder.say(text)


@dataclass(frozen=True)
class Seen:
    """What this rank saw of an iteration.

    Attributes:
        spans: Waits for the device and returns the operations.
        start_s: When it began, on ``time.perf_counter`` [s].
        time_s: How long it took [s].
        energy_j: Of this rank's GPU [J].
        clock: Clock that was asked for around each instruction; empty without a plan [MHz].
        failed: Whether this rank has fallen back to default clocks.
    """

    spans: Callable[[], list[Span]]
    start_s: float
    time_s: float
    energy_j: float
    clock: Mapping[Instruction, int]
    failed: bool


class Phase(Protocol):
    """What Perseus does during an iteration."""

    @property
    def name(self) -> str:
        """As it is called in ``run.jsonl``."""

    @property
    def clock_plan(self) -> ClockPlan:
        """The clocks of the next iteration."""

    @property
    def records(self) -> bool:
        """Whether the instructions of the next iteration are to be kept, to be repeated afterwards."""

    @property
    def measures(self) -> bool:
        """Whether the next iteration is measured: its ranks begin the tail together, to tell it from waiting."""

    def after(self, seen: Seen) -> Phase:
        """Return the phase of the next iteration; called on all ranks."""


@runtime_checkable
class Stoppable(Protocol):
    """A phase that has something running beside training."""

    def stop(self) -> None:
        """End it: no iteration of this phase will follow; harmless when called again."""


@dataclass(frozen=True)
class Observe:
    """Default clocks; time and energy are measured."""

    name: str = "observe"
    clock_plan: ClockPlan = field(default_factory=ClockPlan.none)
    records: bool = False
    measures: bool = False

    def after(self, seen: Seen) -> Phase:
        return self


@dataclass(frozen=True)
class Calibrate:
    """The first iteration on simulated GPUs, after which each rank knows how much work its instructions are."""

    tools: Tools
    following: Phase
    name: str = "calibrate"
    clock_plan: ClockPlan = field(default_factory=ClockPlan.none)
    records: bool = False
    measures: bool = False

    def after(self, seen: Seen) -> Phase:
        execution = self.tools.execution
        assert isinstance(execution, SimulatedExecution)
        largest = self.tools.ranks.all_max(execution.largest_flops)
        if largest:
            execution.calibrate(self.tools.config.simulated.longest_instruction_s / largest)
        return self.following
