"""Perseus on one rank while a job trains: what surrounds iterations and their operations."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.config import PerseusConfig, parse_block
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.clock_readback import Refusal
from perseus_ds.device.exit_guard import ExitGuard
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.gpu.driver_call import Patience
from perseus_ds.device.guardian_client import Guardian
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.errors import ConfigError, GpuError, PlanError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.policy.control_socket import ControlServer, parse_order
from perseus_ds.policy.job_control import Orders
from perseus_ds.profiler.offline import RepeatableInstructions
from perseus_ds.runtime.devices import execution_on, open_gpu
from perseus_ds.runtime.modes import first_phase
from perseus_ds.runtime.operation_hooks import Operations, Surround
from perseus_ds.runtime.phases import Job, Observe, Phase, Seen, Stoppable, Tools
from perseus_ds.runtime.recorder import Iteration, Recorder
from perseus_ds.runtime.running import Running
from perseus_ds.runtime.timeline_log import Ran, TimelineLog

logger = logging.getLogger("perseus_ds")
_DRIVER_HANGS_S = 3.0
_IDLE_S = 2.0


class PerseusRuntime:
    """Perseus on one rank, driven by whoever executes the schedule.

    ``iteration()`` surrounds a training iteration and ``operation()`` each of its operations; outside of
    an iteration, operations are not noticed. Between two iterations the clock is the next one's first
    already; it is the default after two seconds, within ``paused()``, and from ``close()`` on.
    """

    def __init__(
        self,
        config: PerseusConfig,
        job: Job,
        *,
        ranks: Communicator,
        gpu: Gpu,
        execution: Execution,
        work: RepeatableInstructions | None = None,
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
        self._ranks = ranks
        self._gpu = gpu
        self._patience = Patience(_DRIVER_HANGS_S)
        self._execution = execution
        self._in_iteration = False
        # Ranks that have no tail to begin together must not be waited for.
        self._has_tail = all(any(i.kind is Kind.TAIL for i in rank) for rank in job.schedule.instructions)
        self._closed = False
        self._failed = False
        if config.mode != "observe":
            ranks.together(gpu.check_lock_permission)
        self._clocks = ClockController(gpu, self._fail, self._refused, execution.use_device)
        self._operations = Operations(execution, self._clocks, ranks)
        self._recorder = Recorder(
            ranks,
            Path(config.output_dir),
            simulated=gpu.simulated,
            monitor=job.monitor,
            steps_per_print=job.steps_per_print,
        )
        self._timelines = TimelineLog(ranks, Path(config.output_dir), gpu=gpu.name, simulated=gpu.simulated)
        self._orders = Orders(config.policy, job.info.data_parallel or 1)
        tools = Tools(
            config=config,
            job=job,
            ranks=ranks,
            gpu=gpu,
            patience=self._patience,
            clocks=self._clocks,
            execution=execution,
            recorder=self._recorder,
            orders=self._orders,
            fail=self._fail,
            work=work,
            isolated=isolated,
        )
        self._phase: Phase = first_phase(tools)
        started = {"job": tools.job_key(), "policy": config.policy.model_dump(mode="json")}
        self._recorder.event("start", mode=config.mode, gpu=gpu.name, frontier=config.frontier, **started)
        self._guardian = self._start_guardian()
        self._control = self._listen()
        self._guard = ExitGuard(self.close)

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
        """Make the runtime of a rank for a training loop of one's own, on ``torch.distributed``.

        Surround each iteration with :meth:`iteration` and each forward and backward in it with
        :meth:`instruction`; call :meth:`close` at the end. The modes ``observe``, ``run`` and ``auto``
        work; ``profile`` needs an engine whose instructions it can repeat.

        Args:
            block: A ``perseus`` block.
            schedule: What every rank of a pipeline does in one iteration, such as
                ``read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=8)``.
            pipeline: Global ranks of this rank's pipeline, first stage first.
            data_parallel_rank: Which pipeline.
            data_parallel: Number of pipelines.
            device: Where the rank's tensors live.

        Raises:
            ConfigError: The block is wrong, or its mode needs an engine.
            PerseusError: On all ranks, what went wrong on one.
        """
        config = parse_block(block)
        if config.mode == "profile":
            raise ConfigError('perseus.mode: a loop of one\'s own cannot "profile"; "auto" profiles while it trains.')
        rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        device = torch.device(device)
        gpu = open_gpu(config, device, rank=rank, local_rank=local_rank)
        info = ProfileInfo(
            simulated=gpu.simulated,
            gpu=gpu.name,
            driver=gpu.driver,
            schedule=schedule.name,
            stages=schedule.num_stages,
            pipeline_ranks=len(pipeline),
            data_parallel=data_parallel,
            micro_batches=schedule.micro_batches,
        )
        return cls(
            config,
            Job(schedule, device, info),
            ranks=Communicator(PipelineTopology(rank, tuple(pipeline), data_parallel_rank, data_parallel)),
            gpu=gpu,
            execution=execution_on(gpu, device, config),
        )

    @property
    def phase(self) -> str:
        """What Perseus is doing."""
        return self._phase.name

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan in use, None at default clocks."""
        return self._operations.plan.plan

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return isinstance(self._phase, Observe | Running)

    @property
    def wants_recording(self) -> bool:
        """Whether the instructions of this iteration are to be kept, to be repeated afterwards."""
        return self._phase.records

    @contextmanager
    def iteration(self, samples: int = 0) -> Iterator[None]:
        """Surround one training iteration of this rank.

        Args:
            samples: Samples the job will have seen after it, the x-axis of DeepSpeed's monitor.
        """
        changes, skips = self._clocks.changes, self._clocks.overtaken
        self._check()
        plan = ClockPlan.none() if self._failed or self._closed else self._phase.clock_plan
        self._operations.prepare(plan, align_tail=self._phase.measures and self._has_tail)
        energy_j = self._energy_j()
        self._execution.start_iteration()
        start_s = time.perf_counter()
        self._in_iteration = True
        try:
            yield
        finally:
            self._in_iteration = False
        # The host is done once all is launched. What the GPU is still doing belongs to this iteration, whatever the
        # phase: else it would be counted in none, or where the host happens to wait next.
        self._execution.wait()
        time_s = time.perf_counter() - start_s
        self._orders.steps += 1
        energy_j = self._energy_j() - energy_j
        steps = self._operations.steps
        counts = self._clocks.changes - changes, self._clocks.overtaken - skips + steps.skipped
        self._record(samples, time_s, energy_j, *counts)
        seen = Seen(self._execution.spans, start_s, time_s, energy_j, steps.clock, self._failed or self._closed)
        self._phase = self._phase.after(seen)
        self._clocks.reset_when_idle(_IDLE_S)

    def operation(self, operation: Operation) -> AbstractContextManager[None]:
        """Surround one operation of an iteration: the clock is set, and the time taken."""
        return Surround(self._operations, operation) if self._in_iteration else nullcontext()

    def instruction(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Surround one instruction of an iteration."""
        return self.operation(Compute(instruction))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training iterations: it runs at default clocks."""
        self._clocks.request(None)
        yield

    def schedule_changed(self) -> None:
        """The engine runs another schedule than it started with: no plan fits any more."""
        if not isinstance(self._phase, Observe):
            self._fail(PlanError("the number of micro-batches changed, so no plan fits any more"))
        self._stop_phase()
        self._phase = Observe()

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Run under another policy from the next iterations on.

        What counts is what rank 0 is told.

        Args:
            policy: As in the ``perseus`` block, such as ``{"name": "energy_optimal"}``.

        Raises:
            ConfigError: It is no policy; the message names the key.
        """
        self._orders.carry_out(parse_order({"command": "policy", "policy": policy}))

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Expect a data-parallel pipeline to take longer; the others then run no faster than is of use.

        What counts is what rank 0 is told.

        Args:
            pipeline: Which, 0 first.
            slowdown: How many times as long it takes; 1 when it has recovered.
            after_iterations: From when on.

        Raises:
            ValueError: There is no such pipeline, or the slowdown is below 1.
        """
        self._orders.set_straggler(pipeline, slowdown, after_iterations)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of Perseus: policy, stragglers told of, steps done."""
        return self._orders.state()

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Take up what a checkpoint kept, before the next iteration; every rank must do so at once.

        Args:
            state: What :meth:`state` returned; empty where the checkpoint was saved without Perseus. A
                policy that the config has changed since is the config's.
            steps: Steps done, where somebody else counts them.
        """
        self._orders.restore(state, steps)

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again, or in a forked process.

        Iterations may follow, as in a job that catches SIGTERM and goes on: at default clocks, without energies.
        """
        if self._guard.is_forked:  # a copy of an engine may be collected there; clock and sockets are its parent's
            return
        self._guard.release()
        self._stop_phase()
        self._clocks.close()
        self._patience.close()
        if not self._closed:
            self._closed = True
            self._recorder.summarise()
            if self.config.mode == "profile" and not self.profiled and self._ranks.is_first:
                logger.warning("perseus: training ended before the profile was finished. Train for more steps.")
        if self._control is not None:
            self._control.close()
        if self._guardian is not None:
            self._guardian.close()

    def _stop_phase(self) -> None:
        if isinstance(self._phase, Stoppable):
            self._phase.stop()

    def _check(self) -> None:
        """Fail if whom we rely on is gone; after the end, that is as it should be."""
        if self._closed:
            return
        if self._guardian is not None and not self._guardian.alive:
            self._fail(GpuError("the guardian, which restores the clocks if the job is killed, is gone"))
        if self._clocks.waiting_s > _DRIVER_HANGS_S:
            self._fail(GpuError(f"the driver has not answered for {self._clocks.waiting_s:.0f} s"))

    def _start_guardian(self) -> Guardian | None:
        """Have somebody restore the clocks should all ranks be killed; a job that changes none needs nobody."""
        if self.config.mode == "observe" or self._gpu.address is None:
            return None
        return Guardian.start([self._gpu.address])

    def _listen(self) -> ControlServer | None:
        """Take orders from outside, on rank 0; a job that runs no plans needs none."""
        if self.config.mode not in ("auto", "run") or not self._ranks.is_first:
            return None
        try:
            return ControlServer(Path(self.config.output_dir), self._orders.carry_out)
        except OSError as error:
            logger.warning("perseus: `perseus-ds control` will not reach this job: %s.", error)
            self._recorder.event("control", error=str(error))
            return None

    def _refused(self, refusal: Refusal) -> None:
        """Record a clock that the GPU does not reach."""
        self._recorder.own_event("refused", **dataclasses.asdict(refusal))

    def _energy_j(self) -> float:
        if self._closed:
            return math.nan
        try:
            return self._patience.call(self._gpu.energy_j)
        except GpuError as error:
            self._fail(error)
            return math.nan

    def _record(self, samples: int, time_s: float, energy_j: float, clock_changes: int, clock_skips: int) -> None:
        plan = self._operations.plan
        self._orders.last = self._recorder.add(
            Iteration(
                number=self._orders.steps,
                samples=samples,
                phase=self._phase.name,
                time_s=time_s,
                energy_j=energy_j,
                clock_changes=clock_changes,
                clock_skips=clock_skips,
                failed=self._failed,
                plan=plan.number,
                forecast=plan.forecast,
                wants_timeline=self._timelines.wants(self._phase.name, plan.number),
            )
        )
        if self._recorder.timeline_wanted:
            ran = Ran(self._orders.steps, self._phase.name, plan.number, plan.clock)
            self._timelines.keep(ran, self._execution)

    def _fail(self, error: Exception) -> None:
        """Fall back to default clocks, warn once and record it; training goes on."""
        if self._failed or self._closed:
            return
        self._failed = True
        self._operations.drop_plan()
        logger.warning("perseus: %s. Training goes on at default clocks.", str(error).rstrip("."))
        self._recorder.own_event("failure", error=str(error))
