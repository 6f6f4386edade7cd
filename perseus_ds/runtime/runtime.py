"""Perseus on one rank while a job trains: what surrounds iterations and their operations."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from perseus_ds.artifacts.rank_report import RankReport
from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_records import ClockRefused
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.clock_readback import Refusal
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.gpu.driver_call import Answer, DriverCall
from perseus_ds.device.moments import Moment
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.profiler.offline import RepeatableInstructions
from perseus_ds.runtime.build import loop_parts
from perseus_ds.runtime.energy_use import EnergyUse, energy_at
from perseus_ds.runtime.fallback import Fallback
from perseus_ds.runtime.input_shapes import InputShapes
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.mode_driver import ModeDriver
from perseus_ds.runtime.operation_hooks import OperationHooks, OperationScope
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration
from perseus_ds.runtime.recorder import Monitor, Recorder
from perseus_ds.runtime.supervision import DRIVER_HANGS_S, Supervision
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_IDLE_S = 2.0


class PerseusRuntime:
    """Perseus on one rank, called by the code that executes the schedule.

    ``iteration()`` surrounds a training iteration and ``operation()`` each of its operations. Between two iterations
    of a plan the clock is its first; it is the default after 2 s, within ``paused()``, and from ``close()`` on.
    """

    def __init__(
        self,
        job: Job,
        *,
        communicator: Communicator,
        gpu: Gpu,
        timers: Execution,
        device: torch.device,
        passes: RepeatableInstructions | None = None,
        monitor: Monitor | None = None,
        steps_per_print: int | None = None,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Check everything that can be checked before training starts; every rank must do so at once.

        Args:
            job: The training job.
            communicator: All ranks.
            gpu: Of this rank.
            timers: Times operations.
            device: Where the rank's tensors live.
            passes: This rank's passes, to be repeated for profiling; None where they cannot be.
            monitor: DeepSpeed's monitor.
            steps_per_print: How often to print an iteration; None for never.
            timebase: The time that the rank lives in.

        Raises:
            PerseusError: On all ranks, what went wrong on one.
        """
        config = job.config
        self._job = job
        self._communicator = communicator
        self._timers = timers
        self._in_iteration = False
        # Ranks without a tail do not take part in its barrier.
        self._has_tail = all(any(i.kind is Kind.TAIL for i in rank) for rank in job.schedule.instructions)
        self._forwards = job.forwards_of(communicator.topology.pipeline_rank)
        self._closed = False
        if config.mode != "observe":
            communicator.together(gpu.check_lock_permission)
        clocks = ClockController(gpu, self._fail, self._refused, timers.use_device, timebase)
        driver = DriverCall(DRIVER_HANGS_S, timebase, timers.use_device)
        self._fallback = Fallback(communicator.topology.rank, clocks, timebase, self._tell)
        self._rank = Rank(communicator, gpu, driver, clocks, timers, device, timebase)
        self._hooks = OperationHooks(timers, clocks, communicator)
        self._recorder = Recorder(
            communicator, job.output_dir, simulated=gpu.simulated, monitor=monitor, steps_per_print=steps_per_print
        )
        self._control = JobControl(config.policy, job.info.data_parallel or 1, self._status)
        self._driver = ModeDriver(job, self._rank, self._recorder, self._control, passes=passes, on_error=self._fail)
        self._recorder.start(job.started(communicator, gpu.name))
        self._supervision = Supervision(job, self._rank, self._recorder, self._control, self.close)

    @classmethod
    def for_loop(
        cls,
        block: Mapping[str, Any],
        schedule: Schedule,
        *,
        pipeline: Sequence[int],
        data_parallel_rank: int = 0,
        data_parallel: int = 1,
        device: torch.device | str = "cpu",
    ) -> PerseusRuntime:
        """Make the runtime of a rank for a training loop on ``torch.distributed``, without an engine.

        Surround each iteration with :meth:`iteration` and each forward and backward in it with
        :meth:`instruction`; call :meth:`close` at the end. The modes ``observe``, ``run`` and ``auto``
        work; ``profile`` needs an engine whose passes it can repeat.

        Args:
            block: A ``perseus`` block.
            schedule: The operations of every rank of a pipeline in one iteration, such as
                ``read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=8)``.
            pipeline: Global ranks of this rank's pipeline, first stage first.
            data_parallel_rank: Which pipeline.
            data_parallel: Number of pipelines.
            device: Where the rank's tensors live.

        Raises:
            ConfigError: The block is wrong, or its mode needs an engine.
            PerseusError: On all ranks, what went wrong on one.
        """
        parts = partial(loop_parts, block, schedule, pipeline=pipeline, data_parallel=data_parallel)
        return cls(**parts(data_parallel_rank=data_parallel_rank, device=torch.device(device)))

    @property
    def next(self) -> NextIteration:
        """What the next iteration is like: its phase, plan and clocks."""
        return self._driver.next

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.next.phase in ("observe", "run", "pause")

    @contextmanager
    def iteration(self, samples: int = 0) -> Iterator[None]:
        """Surround one training iteration, after which the job has seen so many samples."""
        self._driver.halt()
        clocks = self._rank.clocks
        changes, overtaken = clocks.changes, clocks.overtaken
        self._has_clocks = self._check()
        plan = self.next.clocks if self._has_clocks else ClockPlan.none()
        self._shapes = InputShapes(self._forwards, self.next.tell_shapes)
        aligns_tail = self.next.aligns_tail and self._has_tail
        begun = self._energy_at(self._hooks.start_iteration(plan, aligns_tail=aligns_tail))
        start_s = self._rank.timebase.now_s()
        self._in_iteration = True
        try:
            yield
        except BaseException:
            clocks.reset_when_idle(_IDLE_S)
            raise
        finally:
            self._in_iteration = False
        # The host is done once all is launched; the device may still be at it, and nobody waits for it here.
        finished = self._timers.finish_iteration()
        energy = EnergyUse(begun, self._energy_at(finished.end), self._fail)
        seen = IterationMeasurement(
            finished,
            energy.used_j,
            lambda: finished.is_over() and energy.is_known(),
            (start_s, self._rank.timebase.now_s()),
            self._hooks.requested.clock,
            not self._has_clocks or self._fallback.is_in_force or self._closed,
            shapes=(self._shapes.first, self._shapes.total),
        )
        skips = clocks.overtaken - overtaken + self._hooks.requested.skipped
        failed = seen.failed and not self._closed
        counts = (clocks.changes - changes, skips, failed, *clocks.readback.reading)
        self._driver.end_iteration(seen, RankReport(math.nan, math.nan, *counts), samples)
        clocks.reset_when_idle(_IDLE_S)

    def operation(self, operation: Operation, inputs: float = 0.0) -> AbstractContextManager[None]:
        """Surround one operation of an iteration; of a forward, ``inputs`` is a number above 0 for their shapes."""
        if not self._in_iteration:
            return nullcontext()
        if self._driver.holds_report:
            self._driver.send_report_if_known()
        if inputs and self._shapes.add(inputs) and self._driver.choose(inputs) and self._has_clocks:
            self._hooks.change_plan(ClockPlan.none() if self._fallback.is_in_force else self.next.clocks)
        return OperationScope(self._hooks, operation)

    def instruction(self, instruction: Instruction, inputs: float = 0.0) -> AbstractContextManager[None]:
        """Surround one instruction of an iteration, as :meth:`operation` does."""
        return self.operation(Compute(instruction), inputs)

    def tail_begins(self) -> None:
        """The tail goes on in the user's hands, who may take a while: its clock is kept for 2 s."""
        self._rank.clocks.reset_when_idle(_IDLE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training iterations: it runs at default clocks."""
        self._rank.clocks.request(None)
        yield

    def schedule_changed(self) -> None:
        """The engine runs another schedule than it started with: no plan fits any more."""
        if self.next.phase != "observe":
            self._fail(PlanError("the number of micro-batches changed, so no plan fits any more"))
        self._driver.observe()

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Run under another policy, such as ``{"name": "energy_optimal"}``, from now on; rank 0's counts.

        Raises:
            ConfigError: It is no policy; the message names the key.
        """
        self._control.carry_out(parse_order({"command": "policy", "policy": policy}))

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Expect a pipeline to take longer: the others then run no faster than is of use; rank 0's counts.

        Args:
            pipeline: Which, 0 first.
            slowdown: How many times as long it takes; 1 when it has recovered.
            after_iterations: From when on.

        Raises:
            ValueError: There is no such pipeline, or the slowdown is below 1.
        """
        self._control.set_straggler(pipeline, slowdown, after_iterations)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of Perseus: policy, reported stragglers, steps done, the plan in use."""
        return {**self._control.state(), "progress": self.next.progress() or self._control.progress}

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Restore what a checkpoint kept, before the next iteration; every rank must do so at once.

        Args:
            state: What :meth:`state` returned; empty where the checkpoint was saved without Perseus. A
                policy that the config has changed since is the config's.
            steps: Steps done, where somebody else counts them.
        """
        progress = state.get("progress") if self._control.restore(state, steps) else None
        self._driver.resume(progress or {})

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again, or in a forked process.

        Iterations may follow, as in a job that catches SIGTERM and goes on: at default clocks, without energies.
        """
        if self._supervision.is_forked:
            return  # the clock is its parent's
        unfinished = not self._closed and self._job.config.mode == "profile" and not self.profiled
        self._closed = True
        with ExitStack() as steps:  # all of them, whatever fails; the last one first
            ends = self._supervision.close, self._recorder.close, self._driver.close, self._rank.driver.close
            for end in (*ends, self._rank.clocks.close, self._supervision.release):
                steps.callback(end)
        if unfinished and self._communicator.is_first:
            logger.warning("perseus: training ended before the profile was finished. Train for more steps.")

    def _check(self) -> bool:
        """Return whether clocks can be set; fall back if whatever they rely on does not work."""
        if (problem := None if self._closed else self._supervision.problem()) is not None:
            self._fail(problem)
        self._fallback.end_if_over(may_try=problem is None)
        return not (self._fallback.is_in_force or self._closed)

    def _status(self) -> dict[str, Any]:
        """Return the facts of the job, what it runs next, and what its last iteration took."""
        facts, last, following = self._recorder.facts().model_dump(mode="json"), self._recorder.last, self._driver.next
        now = {"phase": following.phase, "next": dict(following.status), "last": last.model_dump() if last else {}}
        return facts | now

    def _refused(self, refusal: Refusal) -> None:
        """Record a clock that the GPU does not reach."""
        self._recorder.own_event(ClockRefused(rank=self._communicator.topology.rank, **asdict(refusal)))

    def _energy_at(self, moment: Moment) -> Answer | None:
        """Have the energy counter read when the device passes a moment; None once this is closed."""
        return None if self._closed else energy_at(moment, self._rank.gpu, self._rank.driver)

    def _fail(self, error: Exception) -> None:
        """Fall back to default clocks; training goes on."""
        if not self._closed:
            self._fallback.begin(error)
            self._hooks.drop_plan()

    def _tell(self, message: str, event: Event) -> None:
        logger.warning(message)
        self._recorder.own_event(event)
