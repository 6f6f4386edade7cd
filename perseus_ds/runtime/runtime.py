"""Perseus on one rank during training: the contexts of iterations and their operations."""

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
from perseus_ds.errors import ConnectionLostError
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
from perseus_ds.runtime.output_folder import FolderLock, with_own_folder
from perseus_ds.runtime.recorder import Monitor, Recorder
from perseus_ds.runtime.shapes import InputShapes, length_of_inputs, number_of_inputs
from perseus_ds.runtime.supervision import Fallback, Supervision
from perseus_ds.timebase import REAL_TIME, Timebase

T = TypeVar("T")
logger = logging.getLogger("perseus_ds")
NOTHING: AbstractContextManager[None] = nullcontext()
"""No-op context of operations that are not measured and change no clock."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Description of the training on this rank.

    Attributes:
        place: Position of this rank in the job, or a function that determines it with all ranks.
        device: Device of the rank's tensors.
        fingerprint: Text that changes with any property that affects the times of this rank's instructions.
        models: Classes of the models in this process, first the one that trains. Empty for a user's own loop.
        versions: Versions of the packages that train, except torch and Perseus.
        micro_batch_size: Samples per micro-batch, if known.
        monitor: Receives time and energy, like DeepSpeed's monitor.
        steps_per_print: Interval for printing iterations. None for never.
        engine: Engine that determines the notation of layouts. None if layers cannot be moved between stages.
        parts: Parts of the model, by stage of this rank. Empty if unknown.
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
    """Return the rank on this node, from the launcher's environment variables."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))


class PerseusRuntime:
    """Perseus on one rank, called by the code that executes the schedule.

    ``iteration()`` is the context of a training iteration and ``operation()`` that of each of its operations. Between
    two iterations with a plan, the clock is the plan's first one. It is the default after 2 s, within ``paused()``, and
    after ``close()``.

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
        """Make all checks that are possible before training starts. All ranks call this together.

        The arguments are described by :class:`Job`, :class:`RankContext` and :class:`RankFacts`.

        Raises:
            PerseusError: On all ranks, if a check fails on one.
        """
        self._folder = FolderLock()
        job = with_own_folder(with_permission(job, gpu, communicator), communicator, self._folder)
        config = job.config
        self.job = job
        self._in_iteration = False
        # The barrier of the tail is not used if a rank has no tail.
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
        """Create the runtime of a rank that is about to train. All ranks call this together.

        Args:
            config: The ``perseus`` block.
            facts: Description of the training on this rank.
            read: Returns the operations of this rank in an iteration, as a schedule of one rank.
            check: Called on every rank with the schedule of all ranks of its pipeline. Raises an error if it cannot be
                planned.

        Raises:
            PerseusError: On all ranks, if a check fails on one.
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
        """Create the runtime of a rank for a user's own training loop on ``torch.distributed``.

        Use :meth:`iteration` as the context of each iteration, :meth:`instruction` as that of each forward and backward
        in it, and call :meth:`close` at the end.

        Args:
            block: A ``perseus`` block.
            schedule: Operations of every rank of a pipeline in one iteration, such as
                ``read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=8)``.
            pipeline: Global ranks of this rank's pipeline, first stage first.
            data_parallel_rank: Number of the pipeline.
            data_parallel: Number of pipelines.
            device: Device of the rank's tensors.

        Raises:
            ConfigError: The block is invalid.
            PerseusError: On all ranks, if a check fails on one.
        """
        config = parse_block(block)
        place = PipelineTopology(dist.get_rank(), tuple(pipeline), data_parallel_rank, data_parallel)
        facts = RankFacts(place=place, device=torch.device(device))
        return cls.start(config, facts, lambda: replace(schedule, ranks=(schedule.ranks[place.pipeline_rank],)))

    @property
    def next(self) -> NextIteration:
        """Request for the next iteration: its phase, plan and clocks."""
        return self._driver.next

    @property
    def profiled(self) -> bool:
        """True if the profile is complete."""
        return self.next.phase in ("observe", "run", "pause")

    @property
    def has_fallen_back(self) -> bool:
        """True if this rank runs at default clocks after a failure."""
        return self._fallback.is_in_force

    @contextmanager
    def iteration(
        self, samples: int = 0, order: Hashable = None, read: Callable[[], Schedule] | None = None
    ) -> Iterator[None]:
        """Context of one training iteration.

        Args:
            samples: Number of samples that the job has seen after it.
            order: Key of the schedule, equal on all ranks for equal schedules.
            read: Returns the operations of this rank in it, as a schedule of one rank. Called if the order is another
                one than the first, and frequent.
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
        # The host has launched everything. The device may not have finished, and is not waited for.
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
            "clock_changes": max(0.0, after.changes - before.changes),  # a new agent counts from 0
            "clock_skips": max(0.0, after.overtaken - before.overtaken),
            "failed": seen.failed and not self._closed,
            "asked_mhz": after.asked_mhz,
            "reached_mhz": after.reached_mhz,
        }
        self._driver.end_iteration(seen, own, samples, is_last=self._process_ends)

    @property
    def follows_operations(self) -> bool:
        """True if the operations of the current iteration must be reported to :meth:`operation`."""
        return self._hooks.times_all or self.next.follows_operations or self._driver.unsent is not None

    @property
    def follows_transfers(self) -> bool:
        """True if operations that are not instructions must be reported too."""
        return self._hooks.times_all

    def operation(self, operation: Operation, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Context of one operation of an iteration.

        Args:
            operation: The operation.
            inputs: Shapes of a forward's inputs, or a value that identifies them. None if unknown, and for other
                operations.
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
        """Add the shapes of a forward's inputs.

        Those of the first forward select the request of the iteration.
        """
        shapes = number_of_inputs(inputs)
        if self._shapes.add(shapes, length_of_inputs(inputs)) and self._driver.choose(shapes) and self._has_clocks:
            self._hooks.change_plan(ClockPlan() if self._fallback.is_in_force else self.next.clocks)

    def capture(self) -> CapturedIteration | None:
        """Return the context of operations for the capture of an iteration into a CUDA graph.

        Returns:
            None if graphs are not supported: this is not an NVIDIA GPU, or torch has no external events.
        """
        times = self.rank.timers.graph_times()
        return None if times is None else CapturedIteration(self.rank.clocks, times)

    def replay(self, captured: CapturedIteration, replay: Callable[[], T]) -> T:
        """Execute the passes of the current iteration by replaying a captured graph."""
        if self._driver.unsent is not None:
            self._driver.send_report_if_known()
        for inputs in captured.inputs:
            self._add_inputs(inputs)
        return self._hooks.replay(captured, replay)

    def instruction(self, instruction: Instruction, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Context of one instruction of an iteration. See :meth:`operation`."""
        return self.operation(Compute(instruction), inputs)

    def tail_begins(self) -> None:
        """Report that the tail continues in user code. Its clock is kept for at most 2 s."""
        self.rank.clocks.may_idle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of work outside of training iterations, which runs at default clocks."""
        self.rank.clocks.pause()
        yield

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Change the policy, for example to ``{"name": "energy_optimal"}``.

        Only the call on rank 0 has an effect.

        Raises:
            ConfigError: The policy is invalid. The message names the key.
        """
        self.carry_out({"command": "policy", "policy": policy})

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Report that a pipeline takes longer, so that the others may be slower.

        Only the call on rank 0 has an effect.

        Args:
            pipeline: Number of the pipeline, starting with 0.
            slowdown: Time relative to the usual one. 1 ends the report.
            after_iterations: Number of iterations until the report takes effect.

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
        """Carry out an order of ``perseus-ds control``, such as ``{"command": "pause"}``. Only on rank 0.

        Returns:
            The answer: what was ``done``, or the ``status`` after all records up to now have been written.

        Raises:
            ConfigError: The order is invalid. The message names the key.
        """
        return self._control.carry_out(parse_order(order))

    def state(self) -> dict[str, Any]:
        """Return the state of Perseus for a checkpoint: policy, reported stragglers, steps, the plan in use."""
        return {**self._control.state(), "progress": self.next.progress() or self._control.progress}

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Restore the state from a checkpoint before the next iteration. All ranks call this together.

        Args:
            state: Return value of :meth:`state`. Empty if the checkpoint was saved without Perseus. Its policy is not
                used if the configuration has changed since.
            steps: Number of finished steps, if counted elsewhere.
        """
        progress = state.get("progress") if self._control.restore(state, steps) else None
        self._control.record_policy(self._recorder.event)
        self._driver.resume(progress or {})

    def process_ends(self) -> None:
        """Report that the current iteration is the last one.

        It is recorded if all ranks end it within seconds.
        """
        self._process_ends = True

    def close(self) -> None:
        """Reset the clock and stop. May be called repeatedly, and in forked processes.

        Iterations may follow, at default clocks and without energies.
        """
        if self._supervision.is_forked:
            return  # the clock belongs to its parent
        self._closed = True
        atexit.unregister(self.close)
        with ExitStack() as steps:  # all of them, whatever fails; the last one first
            steps.callback(self._folder.release)
            for end in (self._supervision.close, self._recorder.close, self.rank.clocks.close, self._driver.close):
                steps.callback(end)

    def _check(self) -> bool:
        """Return True if clocks can be set. Otherwise return to default clocks."""
        if (problem := None if self._closed else self._supervision.problem()) is not None:
            self._fail(problem)
        self._fallback.end_if_over(may_probe=problem is None)
        return not (self._fallback.is_in_force or self._closed)

    def _status(self) -> dict[str, Any]:
        """Return the facts of the job, its next request, and its last iteration."""
        # The last record first, because facts include all records.
        last, following = self._recorder.last, self._driver.next
        facts = self._recorder.facts().model_dump(mode="json")
        now = {"phase": following.phase, "next": dict(following.status), "last": last.model_dump() if last else {}}
        return facts | now

    def _refused(self, refusal: messages.ClockRefused) -> None:
        """Record a clock that the GPU does not reach."""
        rank = self.rank.communicator.topology.rank
        self._recorder.own_event(ClockRefused(rank=rank, **msgspec.structs.asdict(refusal)))

    def _fail(self, error: Exception) -> None:
        """Return to default clocks. Training continues."""
        if not self._closed:
            self._fallback.begin(error)
            self._hooks.change_plan(ClockPlan())

    def _tell(self, message: str, event: Event) -> None:
        logger.warning(message)
        self._recorder.own_event(event)


def own_versions() -> dict[str, str]:
    """Return the versions of torch and Perseus. A package that is only in Python's path has none."""
    installed = {}
    for package in ("torch", "perseus-ds"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


class OperationHooks:
    """One context manager for all operations, which do not overlap. Creating one for each would take time.

    Attributes:
        times_all: Whether all operations of this iteration are timed, including transfers.
        plan: The clocks of this iteration.
    """

    def __init__(self, timers: Execution, clocks: AgentClocks, communicator: Communicator) -> None:
        self._timers = timers
        self._clocks = clocks
        self._communicator = communicator
        self.plan = ClockPlan()
        self._program = DEFAULT_CLOCKS
        # Positions of instructions in the program, and those of the last iteration in execution order. Most iterations
        # are alike, and comparing objects is cheaper than looking them up.
        self._positions: dict[Instruction, int] = {}
        self._ran: list[tuple[Instruction, int | None]] = []
        self._next = 0
        self._operation: Operation | None = None
        self._position: int | None = None
        self._aligns_tail = False
        self._times_passes = self.times_all = True

    def start_iteration(self, plan: ClockPlan, times: Times = "all", *, aligns_tail: bool = False) -> int:
        """Begin an iteration before any of its operations is issued, and return its number.

        With aligned tails, all ranks begin them together, so that waiting is not counted as work.
        """
        self._next = 0
        self._aligns_tail = aligns_tail
        self._times_passes = times != "none" or self._timers.needs_all
        self.times_all = times == "all" or self._timers.needs_all
        self._choose(plan)
        self._timers.start_iteration()
        return self._clocks.begin_iteration(self._program)

    def change_plan(self, plan: ClockPlan) -> None:
        """Run the rest of the iteration with another plan. Thread-safe."""
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
        """Return the context of an operation: this object, or a no-op if it is neither timed nor marked."""
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
        """Execute the passes of this iteration by a graph."""
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

        In a graph it has already begun, and all ranks but the last one have waited there.
        """
        self._aligns_tail = False
        self._timers.wait()
        replay = self._timers.replay
        with contextlib.suppress(ConnectionLostError):  # reported with the next report
            shortest_s = -self._communicator.all_max(0.0 if replay is None else -replay.tail_s())
            if replay is not None:
                replay.align_tail(shortest_s)

    def __enter__(self) -> None:
        """Called before an operation is issued."""
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
        """Called after an operation was issued."""
        operation = self._operation
        assert operation is not None, "it is known around what"
        if self._times_passes if type(operation) is Compute else self.times_all:
            self._timers.end(operation)
        if self._position is not None:
            self._clocks.mark(2 * self._position + 1)
