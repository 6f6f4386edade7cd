"""Perseus on one rank while a job trains: what surrounds iterations and their operations."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from perseus_ds.artifacts.layout import EngineName, Layout, Part
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import ClockRefused, Event
from perseus_ds.clocks.controller import ClockController, DriverCall
from perseus_ds.clocks.events import DeviceEvent
from perseus_ds.clocks.readback import LatencyTable, Refusal
from perseus_ds.clocks.timers import Execution, SimulatedExecution
from perseus_ds.clocks.transitions import ClockPlan, ClockTransition, IterationClocks
from perseus_ds.errors import ConnectionLostError, PlanError
from perseus_ds.gpu.base import Gpu
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.ranks import Communicator, PipelineTopology
from perseus_ds.runtime.config import PerseusConfig, parse_block
from perseus_ds.runtime.devices import execution_on, open_gpu, with_permission
from perseus_ds.runtime.iterations import EnergyUse, IterationMeasurement, NextIteration, Times
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_driver import ModeDriver
from perseus_ds.runtime.recorder import Monitor, Recorder
from perseus_ds.runtime.shapes import InputShapes, length_of_inputs, number_of_inputs
from perseus_ds.runtime.supervision import Fallback, Supervision
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_IDLE_S = 2.0
# An iteration that begins so soon after the one before begins at the reading of the energy counter that ended that one.
_TOGETHER_S = 0.001
NOTHING: AbstractContextManager[None] = nullcontext()
"""Surrounds what nobody measures and where no clock changes."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What the runtime needs to know of the code that trains on this rank.

    Attributes:
        place: Of this rank in the job; or what finds it, by asking all ranks.
        device: Where the rank's tensors live.
        fingerprint: Changes with whatever the times of this rank's instructions depend on.
        models: Classes of the models that this process holds, first the one that trains; empty for a loop of the
            user's own.
        versions: Of the packages that train, besides torch and Perseus.
        micro_batch_size: Samples of a micro-batch, where it is known.
        monitor: Receives time and energy, as DeepSpeed's monitor does.
        steps_per_print: How often to print an iteration; None for never.
        engine: Whose spelling of layouts is used; None where layers cannot be moved between stages.
        parts: Of the model, by stage of this rank; none where they are not known.
        tied: Whether the embedding and the head share a weight.
    """

    place: PipelineTopology | Callable[[Communicator], PipelineTopology]
    device: torch.device
    fingerprint: str = ""
    models: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    micro_batch_size: int | None = None
    monitor: Monitor | None = None
    steps_per_print: int | None = None
    engine: EngineName | None = None
    parts: Mapping[int, Sequence[Part]] = field(default_factory=dict)
    tied: bool = False


def local_rank() -> int:
    """Return the rank on this node, as launchers tell it."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))


class PerseusRuntime:
    """Perseus on one rank, called by the code that executes the schedule.

    ``iteration()`` surrounds a training iteration and ``operation()`` each of its operations. Between two iterations
    of a plan the clock is its first; it is the default after 2 s, within ``paused()``, and from ``close()`` on.

    Attributes:
        job: The training job.
        rank: This rank: its GPU, clocks, timers, and its connection to the other ranks.
    """

    def __init__(
        self,
        job: Job,
        *,
        communicator: Communicator,
        gpu: Gpu,
        timers: Execution,
        device: torch.device,
        monitor: Monitor | None = None,
        steps_per_print: int | None = None,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Check everything that can be checked before training starts; every rank must do so at once.

        What is given is described by :class:`Job`, :class:`RankContext` and :class:`RankFacts`.

        Raises:
            PerseusError: On all ranks, what went wrong on one.
        """
        job = with_permission(job, gpu, communicator)
        config = job.config
        self.job = job
        self._in_iteration = False
        # Ranks without a tail do not take part in its barrier.
        self._has_tail = all(any(i.kind is Kind.TAIL for i in rank) for rank in job.schedule.instructions)
        self._closed = self._process_ends = False
        self._ended: tuple[DriverCall | None, float] = None, -math.inf
        clocks = ClockController(gpu, self._fail, self._refused, timers.use_device, timebase)
        self._fallback = Fallback(communicator.topology.rank, clocks, timebase, self._tell)
        self.rank = RankContext(communicator, gpu, clocks, timers, device, timebase)
        self._hooks = OperationHooks(timers, clocks, communicator)
        self._simulated = timers if isinstance(timers, SimulatedExecution) else None
        self._recorder = Recorder(
            communicator, job.output_dir, simulated=gpu.simulated, monitor=monitor, steps_per_print=steps_per_print
        )
        self._control = JobControl(config.policy, job.info.data_parallel or 1, self._status, timebase)
        self._control.on_order = self._recorder.event
        self._driver = ModeDriver(job, self.rank, self._recorder, self._control, on_error=self._fail)
        self._recorder.start(job.started(communicator, gpu.name))
        self._supervision = Supervision(job, self.rank, self._recorder, self._control)
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        config: PerseusConfig,
        facts: RankFacts,
        read: Callable[[], Schedule],
        check: Callable[[Schedule], object] = lambda schedule: None,
    ) -> PerseusRuntime:
        """Make the runtime of a rank that is about to train; every rank must do so at once.

        Args:
            config: The ``perseus`` block.
            facts: What trains on this rank.
            read: Returns what this rank executes in an iteration, as a schedule of one rank.
            check: Called on every rank with the schedule of all ranks of its pipeline; raises if that is no schedule
                to plan.

        Raises:
            PerseusError: On all ranks, what went wrong on one.
        """
        communicator = Communicator(facts.place)
        topology = communicator.topology
        own = communicator.raise_on_all_ranks(read)
        schedule = replace(own, ranks=tuple(communicator.pipeline_gather(own.ranks[0])))
        parts = communicator.pipeline_gather(facts.parts)
        layout = None if facts.engine is None else Layout.of_ranks(facts.engine, parts, tied=facts.tied)

        def open_all() -> tuple[Gpu, Execution, Job]:
            check(schedule)
            gpu = open_gpu(config, facts.device, rank=topology.rank, local_rank=local_rank())
            info = ProfileInfo(
                simulated=gpu.simulated,
                gpu=gpu.name,
                driver=gpu.driver,
                settings=gpu.settings,
                schedule=schedule.name,
                layout=layout,
                stages=schedule.num_stages,
                pipeline_ranks=topology.pipeline_ranks,
                data_parallel=topology.data_parallel,
                tensor_parallel=topology.tensor_parallel,
                micro_batches=schedule.micro_batches,
                micro_batch_size=facts.micro_batch_size,
                model=facts.models[0] if facts.models else None,
                versions={**facts.versions, **own_versions()},
            )
            job = Job(config, schedule, info, facts.fingerprint, facts.models)
            return gpu, execution_on(gpu, facts.device, config), job

        gpu, timers, job = communicator.raise_on_all_ranks(open_all)
        return cls(
            job,
            communicator=communicator,
            gpu=gpu,
            timers=timers,
            device=facts.device,
            monitor=facts.monitor,
            steps_per_print=facts.steps_per_print,
        )

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
        """Make the runtime of a rank for a training loop of the user's own on ``torch.distributed``.

        Surround each iteration with :meth:`iteration` and each forward and backward in it with
        :meth:`instruction`; call :meth:`close` at the end.

        Args:
            block: A ``perseus`` block.
            schedule: The operations of every rank of a pipeline in one iteration, such as
                ``read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=8)``.
            pipeline: Global ranks of this rank's pipeline, first stage first.
            data_parallel_rank: Which pipeline.
            data_parallel: Number of pipelines.
            device: Where the rank's tensors live.

        Raises:
            ConfigError: The block is wrong.
            PerseusError: On all ranks, what went wrong on one.
        """
        config = parse_block(block)
        place = PipelineTopology(dist.get_rank(), tuple(pipeline), data_parallel_rank, data_parallel)
        facts = RankFacts(place=place, device=torch.device(device))
        return cls.start(config, facts, lambda: replace(schedule, ranks=(schedule.ranks[place.pipeline_rank],)))

    @property
    def next(self) -> NextIteration:
        """What the next iteration is like: its phase, plan and clocks."""
        return self._driver.next

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.next.phase in ("observe", "run", "pause")

    @property
    def has_fallen_back(self) -> bool:
        """Whether this rank runs at default clocks because something has failed."""
        return self._fallback.is_in_force

    @contextmanager
    def iteration(
        self, samples: int = 0, order: Hashable = None, read: Callable[[], Schedule] | None = None
    ) -> Iterator[None]:
        """Surround one training iteration.

        Args:
            samples: Samples that the job has seen after it.
            order: Equal for equal schedules, on all ranks.
            read: Returns what this rank executes in it, as a schedule of one rank; called if the order is another one
                than the first, and comes often.
        """
        clocks = self.rank.clocks
        changes, overtaken = clocks.changes, clocks.overtaken
        self._has_clocks = self._check()
        self._driver.begin(order, read)
        plan = self.next.clocks if self._has_clocks else ClockPlan()
        self._shapes = InputShapes(self.next.forwards, self.next.tell_shapes)
        aligns_tail = self.next.aligns_tail and self._has_tail
        # Before the clock is set, which takes a while.
        begins = self._hooks.start_iteration(self._driver.times())
        start_s = self.rank.timebase.now_s()
        ended, ended_s = self._ended
        begun = ended if start_s - ended_s < _TOGETHER_S else self._energy_at(begins)
        self._hooks.change_plan(plan, aligns_tail=aligns_tail)
        self._in_iteration = True
        if clocks.lease is not None:
            clocks.lease.begin_iteration()
        try:
            yield
        except BaseException:
            clocks.reset_when_idle(_IDLE_S)
            raise
        finally:
            self._in_iteration = False
            if clocks.lease is not None:
                clocks.lease.end_iteration()
        # The host is done once all is launched; the device may still be at it, and nobody waits for it here.
        finished = self.rank.timers.finish_iteration()
        ended = self._energy_at(finished.end, with_limits=True)
        end_s = self.rank.timebase.now_s()
        self._ended = ended, end_s
        energy = EnergyUse(begun, ended, self._fail)
        seen = IterationMeasurement(
            finished,
            energy.used_j,
            lambda: finished.is_over() and energy.is_known(),
            (start_s, end_s),
            self._hooks.requested.clock,
            not self._has_clocks or self._fallback.is_in_force or self._closed,
            shapes=(self._shapes.first, self._shapes.total),
            length=self._shapes.length,
        )
        asked_mhz, reached_mhz = clocks.readback.reading
        own = {
            "clock_changes": clocks.changes - changes,
            "clock_skips": clocks.overtaken - overtaken,
            "failed": seen.failed and not self._closed,
            "asked_mhz": asked_mhz,
            "reached_mhz": reached_mhz,
        }
        self._driver.end_iteration(seen, own, samples, is_last=self._process_ends)
        clocks.reset_when_idle(_IDLE_S)

    @property
    def follows_operations(self) -> bool:
        """Whether :meth:`operation` has to surround the operations of the iteration that has begun."""
        return self._hooks.times_all or self.next.follows_operations or self._driver.unsent is not None

    @property
    def follows_transfers(self) -> bool:
        """Whether these include what is no instruction."""
        return self._hooks.times_all

    def operation(self, operation: Operation, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Surround one operation of an iteration.

        Args:
            operation: The operation.
            inputs: The shapes of a forward's inputs, or whatever tells them from others; nothing where they are not
                known, and of other operations.
        """
        if not self._in_iteration:
            return NOTHING
        if self._driver.unsent is not None:
            self._driver.send_report_if_known()
        if self._simulated is not None:
            self._simulated.input_shapes = inputs
        if inputs and isinstance(operation, Compute) and operation.instruction.kind is Kind.FORWARD:
            shapes = number_of_inputs(inputs)
            # The first ones tell what iterations that begin so run.
            if self._shapes.add(shapes, length_of_inputs(inputs)) and self._driver.choose(shapes) and self._has_clocks:
                self._hooks.change_plan(ClockPlan() if self._fallback.is_in_force else self.next.clocks)
        return self._hooks.around(operation)

    def instruction(self, instruction: Instruction, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Surround one instruction of an iteration, as :meth:`operation` does."""
        return self.operation(Compute(instruction), inputs)

    def tail_begins(self) -> None:
        """The tail goes on in the user's hands, who may take a while: its clock is kept for 2 s."""
        self.rank.clocks.reset_when_idle(_IDLE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training iterations: it runs at default clocks."""
        self._hooks.pause()
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
        self.carry_out({"command": "policy", "policy": policy})

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

    def carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order as ``perseus-ds control`` sends it, such as ``{"command": "pause"}``; rank 0's counts.

        Returns:
            The answer: what was ``done``, or the ``status``, once all records up to now are written.

        Raises:
            ConfigError: It is no order; the message names the key.
        """
        return self._control.carry_out(parse_order(order))

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
        self._control.record_policy(self._recorder.event)
        self._driver.resume(progress or {})

    def process_ends(self) -> None:
        """The iteration that is open is the last one: it is recorded if the other ranks end it within seconds."""
        self._process_ends = True

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again, or in a forked process.

        Iterations may follow: at default clocks, without energies.
        """
        if self._supervision.is_forked:
            return  # the clock is its parent's
        self._closed = True
        atexit.unregister(self.close)
        with ExitStack() as steps:  # all of them, whatever fails; the last one first
            ends = self._supervision.close, self._recorder.close, self._driver.close
            for end in (*ends, self.rank.clocks.close):
                steps.callback(end)

    def _check(self) -> bool:
        """Return whether clocks can be set; fall back if whatever they rely on does not work."""
        if (problem := None if self._closed else self._supervision.problem()) is not None:
            self._fail(problem)
        self._fallback.end_if_over(may_probe=problem is None)
        return not (self._fallback.is_in_force or self._closed)

    def _status(self) -> dict[str, Any]:
        """Return the facts of the job, what it runs next, and what its last iteration took."""
        last, following = self._recorder.last, self._driver.next  # the last record first: facts are of all records
        facts = self._recorder.facts().model_dump(mode="json")
        now = {"phase": following.phase, "next": dict(following.status), "last": last.model_dump() if last else {}}
        return facts | now

    def _refused(self, refusal: Refusal) -> None:
        """Record a clock that the GPU does not reach."""
        self._recorder.own_event(ClockRefused(rank=self.rank.communicator.topology.rank, **asdict(refusal)))

    def _energy_at(self, event: DeviceEvent, *, with_limits: bool = False) -> DriverCall | None:
        """Have the energy counter read when the device passes an event, and limits; None once this is closed."""
        read = self._read_energy_and_limits if with_limits else self.rank.gpu.energy_j
        return None if self._closed else self.rank.clocks.call(read, event)

    def _read_energy_and_limits(self) -> float:
        energy_j = self.rank.gpu.energy_j()
        self.rank.clocks.readback.limits.read()
        return energy_j

    def _fail(self, error: Exception) -> None:
        """Fall back to default clocks; training goes on."""
        if not self._closed:
            self._fallback.begin(error)
            self._hooks.drop_plan()

    def _tell(self, message: str, event: Event) -> None:
        logger.warning(message)
        self._recorder.own_event(event)


def own_versions() -> dict[str, str]:
    """Return the versions of torch and Perseus; what lies in Python's path and was not installed has none."""
    installed = {}
    for package in ("torch", "perseus-ds"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


class OperationHooks:
    """One context manager for all operations, which do not overlap: making one for each would take time.

    Attributes:
        times_all: Whether all operations of this iteration are timed, transfers included.
        requested: The clocks that are requested for this iteration.
    """

    def __init__(self, timers: Execution, clocks: ClockController, communicator: Communicator) -> None:
        self._timers = timers
        self._clocks = clocks
        self._communicator = communicator
        self.requested = IterationClocks()
        self._requested_for: tuple[ClockPlan, LatencyTable | None] = ClockPlan(), None
        self._position = 0
        self._operation: Operation | None = None
        self._transition: ClockTransition | None = None
        self._clock_mhz: int | None = None
        self._aligns_tail = False
        self._times_passes = self.times_all = True
        self._begun: DeviceEvent | None = None

    def start_iteration(self, times: Times = "all") -> DeviceEvent:
        """Begin an iteration whose clocks are chosen next; returns when the device begins it."""
        self._position = 0
        self._times_passes = times != "none" or self._timers.needs_all
        self.times_all = times == "all" or self._timers.needs_all
        self._begun = self._timers.start_iteration()
        return self._begun

    def change_plan(self, plan: ClockPlan, *, aligns_tail: bool = False) -> None:
        """Request the first clock of an iteration of which no operation was issued yet, and plan the others.

        Where tails are aligned all ranks begin them at the same time, so that waiting is not counted as work.
        """
        self._aligns_tail = aligns_tail
        latencies = self._clocks.readback.latencies
        planned, planned_latencies = self._requested_for
        # Those of the iteration before are kept unless the plan or a latency has changed.
        if plan is not planned or latencies is not planned_latencies:
            self.requested = plan.transitions(latencies)
            self._requested_for = plan, latencies
        self._clock_mhz = self.requested.first_mhz
        # The device may still be at the iteration before, which keeps its clocks.
        self._clocks.request(self._clock_mhz, self._begun)

    def pause(self) -> None:
        """Run what follows at default clocks, until the next instruction."""
        self._clock_mhz = None
        self._clocks.request(None)

    def drop_plan(self) -> None:
        """Continue at default clocks; may be called from any thread."""
        self.requested, self._transition = IterationClocks(), None
        self._clocks.request(None)

    def around(self, operation: Operation) -> AbstractContextManager[None]:
        """Return what surrounds an operation: this, or nothing where it is not timed and its clock stays."""
        if type(operation) is not Compute:
            if not self.times_all:
                return NOTHING
            self._operation, self._transition = operation, None
            return self
        requested, transition = self.requested, None
        if requested.by_instruction:
            position, ran, instruction = self._position, requested.ran, operation.instruction
            self._position = position + 1
            if position < len(ran) and ran[position][0] is instruction:
                transition = ran[position][1]
            else:
                transition = requested.by_instruction.get(instruction)
                ran[position:] = [(instruction, transition)]
        if transition is not None:
            stays = transition.clock_mhz == transition.next_clock_mhz == self._clock_mhz and transition.early_s is None
            self._clock_mhz = transition.next_clock_mhz
            transition = None if stays else transition
        if transition is None and not (self._times_passes or self._aligns_tail):
            return NOTHING
        self._operation, self._transition = operation, transition
        return self

    def __enter__(self) -> None:
        """An operation is about to be issued: its clock is due, and the next one's may have to be asked for early."""
        operation, transition = self._operation, self._transition
        assert operation is not None, "it is known around what"
        if type(operation) is not Compute:
            self._timers.begin(operation)
            return
        if self._aligns_tail and operation.instruction.kind is Kind.TAIL:
            self._aligns_tail = False
            self._timers.wait()
            with contextlib.suppress(ConnectionLostError):  # the next report says so
                self._communicator.barrier()
        if transition is not None:
            self._clocks.request(transition.clock_mhz)
        begun = self._timers.begin(operation) if self._times_passes else None
        if transition is not None and transition.early_s is not None:
            begun = self._timers.event() if begun is None else begun
            self._clocks.request_early(transition.next_clock_mhz, begun, transition.early_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """An operation was issued: as soon as it is over, the next instruction's clock is due."""
        operation, transition = self._operation, self._transition  # another thread may drop it
        assert operation is not None, "it is known around what"
        is_timed = self._times_passes if type(operation) is Compute else self.times_all
        ended = self._timers.end(operation) if is_timed else None
        if transition is not None and transition.next_clock_mhz != transition.clock_mhz:
            self._clocks.request(transition.next_clock_mhz, self._timers.event() if ended is None else ended)
