"""What Perseus does on one rank while a job trains: measure, profile, run under a plan."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from perseus_ds.clocks import ClockController, ExitGuard, Moment
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import GpuError, PerseusError, PlanError
from perseus_ds.execution import Execution, SimulatedExecution, Span
from perseus_ds.frontier import Frontier
from perseus_ds.gpu.base import Gpu
from perseus_ds.guardian import Guardian
from perseus_ds.instruction import Instruction
from perseus_ds.plan import FrequencyPlan, check_instructions
from perseus_ds.profiler.offline import OfflineProfiler, Repeatable, check_sweep
from perseus_ds.profiler.rest import without_gaps
from perseus_ds.profiler.session import measure_profile
from perseus_ds.ranks import Ranks
from perseus_ds.recorder import Iteration, Monitor, Recorder
from perseus_ds.schedule import Compute, Operation, Schedule
from perseus_ds.stage_profile import ProfileInfo

logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan, looked up by instruction.

    Attributes:
        plan: The whole plan, None at default clocks.
        number: Its place on the frontier.
        first: Clock of the rank's first instruction [MHz].
        clock: Of each instruction [MHz].
        next_clock: Of the instruction after it, round to the next iteration's first [MHz].
    """

    plan: FrequencyPlan | None
    number: int | None
    first: int | None
    clock: dict[Instruction, int]
    next_clock: dict[Instruction, int]

    @classmethod
    def none(cls) -> ClockPlan:
        """Return the absence of a plan."""
        return cls(None, None, None, {}, {})

    @classmethod
    def of_rank(cls, plan: FrequencyPlan, number: int, pipeline_rank: int) -> ClockPlan:
        """Return the share of one pipeline rank."""
        instructions, clocks = plan.instructions[pipeline_rank], plan.clocks_mhz[pipeline_rank]
        following = clocks[1:] + clocks[:1]
        return cls(
            plan,
            number,
            clocks[0],
            dict(zip(instructions, clocks, strict=True)),
            dict(zip(instructions, following, strict=True)),
        )

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU has these clocks.

        Raises:
            PlanError: It has not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )


@dataclass(frozen=True)
class Job:
    """What the runtime needs to know of the training job.

    Attributes:
        schedule: What every rank of a pipeline does in one iteration.
        device: Where the tensors live.
        info: Model, parallelism and versions, for the profile.
        monitor: DeepSpeed's monitor.
        steps_per_print: How often to print; None for never.
    """

    schedule: Schedule
    device: torch.device
    info: ProfileInfo
    monitor: Monitor | None = None
    steps_per_print: int | None = None


class PerseusRuntime:
    """Perseus on one rank, driven by whoever executes the schedule.

    ``iteration()`` surrounds a training iteration and ``operation()`` each of its operations;
    outside of an iteration, operations run at default clocks and are not noticed.
    """

    def __init__(
        self,
        config: PerseusConfig,
        job: Job,
        *,
        ranks: Ranks,
        gpu: Gpu,
        execution: Execution,
        work: Repeatable | None = None,
        isolated: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Check everything that can be checked before training starts; every rank must do so at once.

        Args:
            config: The ``perseus`` block.
            job: The training job.
            ranks: All ranks.
            gpu: Of this rank.
            execution: Times operations.
            work: This rank's instructions to repeat, for profiling.
            isolated: Keeps what it surrounds out of training.

        Raises:
            PerseusError: On all ranks, what went wrong on one.
        """
        self.config = config
        self._job = job
        self._ranks = ranks
        self._gpu = gpu
        self._execution = execution
        self._work = work
        self._isolated = isolated
        self._directory = Path(config.output_dir)
        self._clock_plan = ClockPlan.none()
        self._iterations = 0
        self._in_iteration = False
        self._failed = False
        self._spans: list[list[Span]] = []
        self.profiled = False
        self._check(ranks)
        if config.mode == "run":
            self._clock_plan = self._load_plan()
        self._clocks = ClockController(gpu, self._fail)
        self._recorder = Recorder(
            ranks, self._directory, simulated=gpu.simulated, monitor=job.monitor, steps_per_print=job.steps_per_print
        )
        self._recorder.event("start", mode=config.mode, gpu=gpu.name, plan=self._clock_plan.number)
        self._guardian = self._start_guardian()
        self._guard = ExitGuard(self.close)

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan in use, None at default clocks."""
        return self._clock_plan.plan

    @property
    def wants_recording(self) -> bool:
        """Whether the instructions of this iteration are to be kept, to be repeated afterwards."""
        return self.config.mode == "profile" and self._iterations == self.config.profile.warm_up - 1

    @contextmanager
    def iteration(self, samples: int = 0) -> Iterator[None]:
        """Surround one training iteration of this rank.

        Args:
            samples: Samples the job will have seen after it, the x-axis of DeepSpeed's monitor.
        """
        changes = self._clocks.changes
        if self._guardian is not None and not self._guardian.alive:
            self._fail(GpuError("the guardian, which restores the clocks if the job is killed, is gone"))
        self._request(self._clock_plan.first)
        energy_j = self._energy_j()
        self._execution.start_iteration()
        start_s = time.perf_counter()
        self._in_iteration = True
        try:
            yield
        finally:
            self._in_iteration = False
        time_s = time.perf_counter() - start_s
        self._iterations += 1
        self._record(samples, time_s, self._energy_j() - energy_j, self._clocks.changes - changes)
        if self._iterations == 1:
            self._calibrate()
        elif self.config.mode == "profile" and not self.profiled:
            self._spans.append(without_gaps(self._execution.spans(), time_s))
            if self._iterations == self.config.profile.warm_up:
                self._measure_profile()

    def operation(self, operation: Operation) -> AbstractContextManager[None]:
        """Surround one operation of an iteration: the clock is set, and the time taken."""
        return _Operation(self, operation) if self._in_iteration else nullcontext()

    def instruction(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Surround one instruction of an iteration."""
        return self.operation(Compute(instruction))

    def begin(self, operation: Operation) -> None:
        """An operation is about to be issued."""
        if isinstance(operation, Compute):
            self._request(self._clock_plan.clock.get(operation.instruction))
        self._execution.begin(operation)

    def end(self, operation: Operation) -> None:
        """An operation was issued: as soon as it is over, the next instruction's clock is due."""
        moment = self._execution.end(operation)
        if isinstance(operation, Compute):
            self._request(self._clock_plan.next_clock.get(operation.instruction), moment)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training iterations: it runs at default clocks."""
        self._clocks.request(None)
        yield

    def schedule_changed(self) -> None:
        """The engine runs another schedule than it started with: no plan fits any more."""
        if self._clock_plan.plan is not None:
            self._fail(PlanError("the number of micro-batches changed, so the plan does not fit any more"))
        self._clock_plan = ClockPlan.none()

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again."""
        self._guard.release()
        self._clocks.close()
        if self._guardian is not None:
            self._guardian.close()

    def _start_guardian(self) -> Guardian | None:
        """Have somebody restore the clocks should all ranks be killed; a job that changes none needs nobody."""
        if self.config.mode == "observe" or self._gpu.address is None:
            return None
        return Guardian.start([self._gpu.address])

    def _check(self, ranks: Ranks) -> None:
        if self.config.mode != "observe":
            ranks.together(self._gpu.check_lock_permission)
        if self.config.mode == "profile":
            ranks.together(lambda: check_sweep(self._gpu, self.config.profile))

    def _load_plan(self) -> ClockPlan:
        def choose() -> tuple[FrequencyPlan, int]:
            frontier = Frontier.load(str(self.config.frontier))
            if frontier.provenance.simulated and not self._gpu.simulated:
                raise PlanError(
                    f"{self.config.frontier} was measured on simulated GPUs, this job runs on {self._gpu.name}. "
                    'Measure a profile here: "mode": "profile".'
                )
            plan = frontier.within(self.config.max_slowdown)
            check_instructions(plan.instructions, self._job.schedule.instructions)
            return plan, frontier.plans.index(plan)

        plan, number = self._ranks.from_first(choose)
        clock_plan = ClockPlan.of_rank(plan, number, self._ranks.place.pipeline_rank)
        self._ranks.together(lambda: clock_plan.check(self._gpu))
        return clock_plan

    def _request(self, clock_mhz: int | None, after: Moment | None = None) -> None:
        if clock_mhz is not None and not self._failed:
            self._clocks.request(clock_mhz, after)

    def _energy_j(self) -> float:
        try:
            return self._gpu.energy_j()
        except GpuError as error:
            self._fail(error)
            return math.nan

    def _record(self, samples: int, time_s: float, energy_j: float, clock_changes: int) -> None:
        plan = self._clock_plan.plan
        place = self._ranks.place
        self._recorder.add(
            Iteration(
                number=self._iterations,
                samples=samples,
                phase=self._phase,
                time_s=time_s,
                energy_j=energy_j,
                clock_changes=clock_changes,
                failed=self._failed,
                plan=self._clock_plan.number,
                predicted_time_s=plan.time_s if plan else None,
                predicted_energy_j=plan.energy_j * place.data_parallel * place.tensor_parallel if plan else None,
            )
        )

    @property
    def _phase(self) -> str:
        if self._iterations == 1 and self._gpu.simulated:
            return "calibrate"
        if self.config.mode == "profile" and not self.profiled:
            return "warm-up"
        return "run" if self._clock_plan.plan is not None else "observe"

    def _calibrate(self) -> None:
        """Agree on how fast the simulated GPUs are, now that each rank knows its instructions' work."""
        if isinstance(self._execution, SimulatedExecution):
            largest = self._ranks.all_max(self._execution.largest_flops)
            if largest:
                self._execution.calibrate(self.config.simulated.longest_instruction_s / largest)

    def _measure_profile(self) -> None:
        assert self._work is not None
        path = self._directory / "profile.csv"
        profiler = OfflineProfiler(
            gpu=self._gpu,
            clocks=self._clocks,
            execution=self._execution,
            work=self._work,
            ranks=self._ranks,
            config=self.config.profile,
        )
        self.profiled = True
        try:
            with self._isolated():
                measure_profile(
                    profiler,
                    gpu=self._gpu,
                    ranks=self._ranks,
                    device=self._job.device,
                    spans=self._spans,
                    window_s=self.config.profile.window_s,
                    info=self._job.info,
                    path=path,
                )
        except (PerseusError, OSError) as error:
            self._fail(error)
        else:
            self._recorder.event("profile", path=str(path))
            if self._ranks.is_first:
                print(f"perseus: wrote {path}" + (", simulated GPUs" if self._gpu.simulated else ""), flush=True)

    def _fail(self, error: Exception) -> None:
        """Fall back to default clocks, warn once and record it; training goes on."""
        if self._failed:
            return
        self._failed = True
        self._clocks.request(None)
        logger.warning("perseus: %s. Training goes on at default clocks.", str(error).rstrip("."))
        self._recorder.event("failure", rank=self._ranks.place.rank, error=str(error))


class _Operation:
    """A context manager without a generator: it runs twice per instruction."""

    __slots__ = ("_operation", "_runtime")

    def __init__(self, runtime: PerseusRuntime, operation: Operation) -> None:
        self._runtime = runtime
        self._operation = operation

    def __enter__(self) -> None:
        self._runtime.begin(self._operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runtime.end(self._operation)
