"""Perseus on one rank while a job trains: what surrounds iterations and their operations."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from perseus_ds.artifacts.layout import EngineName, Layout, Part
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import ClockRefused, Event
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.clocks.timers import Execution, SimulatedExecution
from perseus_ds.errors import ConnectionLostError, PlanError
from perseus_ds.gpu.base import KnownGpu
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.protocol import messages
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.ranks import Communicator, PipelineTopology
from perseus_ds.runtime.captured import CapturedIteration
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.config import PerseusConfig, parse_block
from perseus_ds.runtime.devices import clocks_of, execution_on, open_gpu, with_permission
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, Times
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_driver import ModeDriver
from perseus_ds.runtime.recorder import Monitor, Recorder
from perseus_ds.runtime.shapes import InputShapes, length_of_inputs, number_of_inputs
from perseus_ds.runtime.supervision import Fallback, Supervision
from perseus_ds.timebase import REAL_TIME, Timebase

T = TypeVar("T")
logger = logging.getLogger("perseus_ds")
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
        gpu: KnownGpu,
        clocks: AgentClocks,
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
        self._status_before = clocks.status
        clocks.on_error, clocks.on_refusal = self._fail, self._refused
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

        opened: list[KnownGpu | AgentClocks] = []

        def open_all() -> tuple[KnownGpu, AgentClocks, Execution, Job]:
            check(schedule)
            gpu = open_gpu(config, facts.device, rank=topology.rank, local_rank=local_rank())
            opened.append(gpu)
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
            clocks = clocks_of(gpu, facts.device)
            opened.append(clocks)
            return gpu, clocks, execution_on(gpu, facts.device, config), job

        try:
            gpu, clocks, timers, job = communicator.raise_on_all_ranks(open_all)
            return cls(
                job,
                communicator=communicator,
                gpu=gpu,
                clocks=clocks,
                timers=timers,
                device=facts.device,
                monitor=facts.monitor,
                steps_per_print=facts.steps_per_print,
            )
        except BaseException:
            for each in opened:
                each.close()
            raise

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
        clocks.poll()
        self._has_clocks = self._check()
        self._driver.begin(order, read)
        plan = self.next.clocks if self._has_clocks else ClockPlan()
        self._shapes = InputShapes(self.next.forwards, self.next.tell_shapes)
        aligns_tail = self.next.aligns_tail and self._has_tail
        number = self._hooks.start_iteration(plan, self._driver.times(), aligns_tail=aligns_tail)
        start_s = self.rank.timebase.now_s()
        self._in_iteration = True
        try:
            yield
        except BaseException:
            clocks.end_iteration(number)
            raise
        finally:
            self._in_iteration = False
        # The host is done once all is launched; the device may still be at it, and nobody waits for it here.
        finished = self.rank.timers.finish_iteration()
        clocks.end_iteration(number)
        end_s = self.rank.timebase.now_s()
        seen = IterationMeasurement(
            finished,
            partial(clocks.recorded, number),
            (start_s, end_s),
            self._hooks.plan.clock,
            not self._has_clocks or self._fallback.is_in_force or self._closed,
            shapes=(self._shapes.first, self._shapes.total),
            length=self._shapes.length,
        )
        before, after = self._status_before, clocks.status
        self._status_before = after
        own = {
            "clock_changes": max(0.0, after.changes - before.changes),  # another agent counts from 0
            "clock_skips": max(0.0, after.overtaken - before.overtaken),
            "failed": seen.failed and not self._closed,
            "asked_mhz": after.asked_mhz,
            "reached_mhz": after.reached_mhz,
        }
        self._driver.end_iteration(seen, own, samples, is_last=self._process_ends)

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
            self._add_inputs(inputs)
        return self._hooks.around(operation)

    def _add_inputs(self, inputs: Hashable) -> None:
        """Take in the shapes of a forward's inputs: the first ones select what the iteration runs."""
        shapes = number_of_inputs(inputs)
        if self._shapes.add(shapes, length_of_inputs(inputs)) and self._driver.choose(shapes) and self._has_clocks:
            self._hooks.change_plan(ClockPlan() if self._fallback.is_in_force else self.next.clocks)

    def capture(self) -> CapturedIteration | None:
        """Return what surrounds the operations of an iteration of which a CUDA graph is being captured.

        Returns:
            None if graphs cannot be followed: this is no GPU of NVIDIA, or torch has no external events.
        """
        times = self.rank.timers.graph_times()
        return None if times is None else CapturedIteration(self.rank.clocks, times)

    def replay(self, captured: CapturedIteration, replay: Callable[[], T]) -> T:
        """Execute the passes of the iteration that has begun by replaying the graph of one that was captured."""
        if self._driver.unsent is not None:
            self._driver.send_report_if_known()
        for inputs in captured.inputs:
            self._add_inputs(inputs)
        return self._hooks.replay(captured, replay)

    def instruction(self, instruction: Instruction, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Surround one instruction of an iteration, as :meth:`operation` does."""
        return self.operation(Compute(instruction), inputs)

    def tail_begins(self) -> None:
        """The tail goes on in the user's hands, who may take a while: its clock is kept for 2 s."""
        self.rank.clocks.may_idle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training iterations: it runs at default clocks."""
        self.rank.clocks.pause()
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

    def next_lengths(self, lengths: Sequence[float]) -> None:
        """Give the lengths of the micro-batches of the next iteration for which none were given yet.

        Call it once for each iteration, in the order in which they train, at least one iteration before: as when a
        data loader reads a batch ahead. At least one rank of each pipeline has to give them; if several do,
        the same. It may be called from any thread, and returns at once.

        Args:
            lengths: Of the input of each micro-batch, in their order, such as its number of tokens.

        Raises:
            ValueError: They are no lengths.
        """
        self._driver.look_ahead.give(lengths)

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
            for end in (self._supervision.close, self._recorder.close, self.rank.clocks.close, self._driver.close):
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

    def _refused(self, refusal: messages.ClockRefused) -> None:
        """Record a clock that the GPU does not reach."""
        rank = self.rank.communicator.topology.rank
        self._recorder.own_event(ClockRefused(rank=rank, **msgspec.structs.asdict(refusal)))

    def _fail(self, error: Exception) -> None:
        """Fall back to default clocks; training goes on."""
        if not self._closed:
            self._fallback.begin(error)
            self._hooks.change_plan(ClockPlan())

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
        plan: The clocks of this iteration.
    """

    def __init__(self, timers: Execution, clocks: AgentClocks, communicator: Communicator) -> None:
        self._timers = timers
        self._clocks = clocks
        self._communicator = communicator
        self.plan = ClockPlan()
        self._program = DEFAULT_CLOCKS
        # Positions of instructions in the program, and those of the last iteration in the order in which they ran: most
        # iterations are alike, and to compare objects costs less than to look them up.
        self._positions: dict[Instruction, int] = {}
        self._ran: list[tuple[Instruction, int | None]] = []
        self._next = 0
        self._operation: Operation | None = None
        self._position: int | None = None
        self._aligns_tail = False
        self._times_passes = self.times_all = True

    def start_iteration(self, plan: ClockPlan, times: Times = "all", *, aligns_tail: bool = False) -> int:
        """Begin an iteration of which no operation was issued yet; returns its number.

        Where tails are aligned all ranks begin them at the same time, so that waiting is not counted as work.
        """
        self._next = 0
        self._aligns_tail = aligns_tail
        self._times_passes = times != "none" or self._timers.needs_all
        self.times_all = times == "all" or self._timers.needs_all
        self._choose(plan)
        self._timers.start_iteration()
        return self._clocks.begin_iteration(self._program)

    def change_plan(self, plan: ClockPlan) -> None:
        """Run the rest of the iteration under another plan; may be called from any thread."""
        self._choose(plan)
        self._clocks.change_program(self._program)

    def _choose(self, plan: ClockPlan) -> None:
        if plan is self.plan:
            return
        program = plan.program()
        self._program = self._clocks.program(program)
        self._positions = {each: n for n, each in enumerate(plan.clock)} if program.clocks_mhz else {}
        self._ran = []
        self.plan = plan

    def around(self, operation: Operation) -> AbstractContextManager[None]:
        """Return what surrounds an operation: this, or nothing where it is neither timed nor marked."""
        if type(operation) is not Compute:
            if not self.times_all:
                return NOTHING
            self._operation, self._position = operation, None
            return self
        position: int | None = None
        if self._positions:
            place, ran, instruction = self._next, self._ran, operation.instruction
            self._next = place + 1
            if place < len(ran) and ran[place][0] is instruction:
                position = ran[place][1]
            else:
                position = self._positions.get(instruction)
                ran[place:] = [(instruction, position)]
        if position is None and not (self._times_passes or self._aligns_tail):
            return NOTHING
        self._operation, self._position = operation, position
        return self

    def replay(self, captured: CapturedIteration, replay: Callable[[], T]) -> T:
        """Have a graph execute the passes of this iteration."""
        if list(self._positions) != captured.instructions[: len(self._positions)]:
            self.change_plan(ClockPlan())  # its marks are those of another order
        if captured.times.last is not None:
            captured.times.last.spans()  # this replay overwrites them
        replayed = replay()
        if self._times_passes:
            self._timers.replayed(captured.times)
        return replayed

    def _align_tail(self) -> None:
        """Wait until all ranks begin the tail.

        Within a graph it has begun before, and ranks have waited for each other there, but for the last one.
        """
        self._aligns_tail = False
        self._timers.wait()
        replay = self._timers.replay
        with contextlib.suppress(ConnectionLostError):  # the next report says so
            shortest_s = -self._communicator.all_max(0.0 if replay is None else -replay.tail_s())
            if replay is not None:
                replay.align_tail(shortest_s)

    def __enter__(self) -> None:
        """An operation is about to be issued."""
        operation = self._operation
        if type(operation) is Compute:
            if self._aligns_tail and operation.instruction.kind is Kind.TAIL:
                self._align_tail()
            if self._position is not None:
                self._clocks.mark(2 * self._position)
            if not self._times_passes:
                return
        assert operation is not None, "it is known around what"
        self._timers.begin(operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """An operation was issued."""
        operation = self._operation
        assert operation is not None, "it is known around what"
        if self._times_passes if type(operation) is Compute else self.times_all:
            self._timers.end(operation)
        if self._position is not None:
            self._clocks.mark(2 * self._position + 1)
