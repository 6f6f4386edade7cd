"""Perseus on one rank during training: marks, measurements, and messages of the job's server.

Except for the calibration of a simulated GPU, this module does not wait during training, and it makes no decisions. The
server sends programs for the iterations of an order (:class:`~perseus_ds.protocol.job_messages.Follow`), and receives a
report of every iteration.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client.at_exit import AtExit
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.devices import peak_memory_bytes
from perseus_ds.client.meeting import Monitor, Opened, Training, key_of, measure_counter, measure_gpu, meet
from perseus_ds.client.operations import NOTHING, CapturedIteration, OperationHooks, Work, times_of
from perseus_ds.client.timers import DeviceEvent, Execution, FinishedIteration
from perseus_ds.config import PerseusConfig, parse_block
from perseus_ds.errors import GpuError, PerseusError, ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule, Span, encode_spans
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol import places
from perseus_ds.protocol.job_messages import Follow, Follows, Program, RankFacts, Report, decode_welcome
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.protocol.messages import Connect
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import log_printable, printable

T = TypeVar("T")
logger = logging.getLogger("perseus_ds")
logger.addFilter(log_printable)
UNPLANNED = Follow(Program(DEFAULT_CLOCKS), 0, 0, 0, "observe")
"""Message that applies to iterations for which the server has sent none."""
_FIRST_S, _LAST_REPORTS_S, _SUMMARY_S, _POLL_S = 10.0, 2.0, 2.0, 0.002
_MOST_SPANS_BYTES = 40_000
_MOST_SCHEDULE_BYTES = 60_000
_MOST_UNSENT = 64
_FIRST_WITH_MEMORY, _MEMORY_EVERY = 4, 16
_PROFILED = ("observe", "run", "pause")


class _Ran(NamedTuple):
    """An iteration with a pending report, which is sent after the device has finished it."""

    finished: FinishedIteration
    follow: Follow
    stream: tuple[Operation, ...]
    report: Report  # without what the device knows


class PerseusRuntime:
    """Perseus on one rank, called by the code that executes the schedule.

    Use ``iteration()`` as the context of a training iteration, and ``operation()`` as that of each operation. The GPU
    keeps the plan's first clock for 5 ms after an iteration. If no other one has begun by then, it runs at the default
    clock, as within ``paused()`` and after ``close()``.

    Attributes:
        follow: Message that applies to the last iteration that has begun, or to the first one before it begins.
        clocks: Clocks of the rank's GPU.
        timers: Timers of operations on the device.
        simulated: Work of the simulated GPU. None on a real one.
        schedule: Operations of this rank in the order that the job starts with, as a schedule of one rank.
    """

    def __init__(
        self,
        clocks: AgentClocks,
        timers: Execution,
        schedule: Schedule,
        *,
        key: int = 0,
        simulated: Work | None = None,
        is_rank_0: bool = True,
        monitor: Monitor | None = None,
        memory_bytes: Callable[[], int | None] = lambda: None,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self.follow = UNPLANNED
        self.clocks = clocks
        self.timers = timers
        self.simulated = simulated
        self._time = timebase
        self._is_rank_0 = is_rank_0
        self._monitor = monitor
        self._memory_bytes = memory_bytes
        self._hooks = OperationHooks(timers, clocks)
        self._process = os.getpid()
        self._closed = self._in_iteration = self._has_summary = False
        self._follows = Follows()
        self.schedule = schedule
        self._first_key = key
        self._streams = {self._first_key: schedule.ranks[0]}
        self._numbers: dict[int, int] = {}  # of orders, by their keys
        self._others = DEFAULT_CLOCKS
        self._unread: set[int] = set()
        self._number = DEFAULT_CLOCKS
        self._key = 0
        self._tokens = 0
        self._unsent: deque[_Ran] = deque(maxlen=_MOST_UNSENT)
        self._last_end: DeviceEvent | None = None  # of the last iteration with a report
        # Iterations from which messages about the first order are shown, and whether no measurements are left then.
        self._shown: list[tuple[int, bool]] = []
        self._worked = 0
        self._at_exit = AtExit(self.close)

    @classmethod
    def start(
        cls,
        config: PerseusConfig,
        training: Training,
    ) -> PerseusRuntime:
        """Start Perseus on a rank that is about to train. All ranks call this together.

        Raises:
            PerseusError: On all ranks, the error of the first rank that has one.
        """
        opened, rank = Opened(), dist.get_rank()
        try:
            answer = meet(config, training, opened)
            facts, device = opened.facts, opened.device
            clocks, welcome = opened.clocks, decode_welcome(answer.answer)
            assert clocks is not None
            runtime = cls(
                clocks,
                opened.timers,
                opened.schedule,
                key=facts.key,
                simulated=opened.simulated,
                is_rank_0=rank == 0,
                monitor=opened.monitor,
                memory_bytes=lambda: peak_memory_bytes(device),
            )
            address = places.from_this_node(answer.address)
            clocks.follow(Connect(rank, address, answer.server_key, answer.public_key, answer.secret_key))
            if welcome.measures_power:
                place, ranks = facts.pipeline.index(rank), len(facts.pipeline)
                assert opened.gpu is not None, "it was opened"
                load = functools.partial(opened.gpu.compute, device)
                clocks.send(measure_gpu(clocks, load, device, pipeline_rank=place, pipeline_ranks=ranks))
            elif welcome.measures_counter:
                with suppress(GpuError):
                    clocks.send(measure_counter(clocks))
            runtime._await(lambda: runtime._first_follow() is not None)
        except BaseException:
            opened.close()
            raise
        return runtime

    @classmethod
    def for_loop(
        cls,
        block: Mapping[str, Any],
        schedule: Schedule,
        *,
        pipeline: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> PerseusRuntime:
        """Start Perseus on a rank for a user's own training loop on ``torch.distributed``.

        Execute each iteration within the context :meth:`iteration`, and each forward and backward in it within
        :meth:`instruction`. Call :meth:`close` at the end.

        Args:
            block: A ``perseus`` block.
            schedule: The operations of every rank of a pipeline in one iteration, such as
                ``read_schedule(schedule_class("1f1b"), ranks=4, micro_batches=8)``.
            pipeline: Global ranks of this rank's pipeline, first stage first.
            device: Device of the rank's tensors.

        Raises:
            ConfigError: The block is invalid.
            PerseusError: On all ranks, the error of the first rank that has one.
        """
        facts = RankFacts(pipeline=tuple(pipeline), copies=None, key=key_of(schedule))
        own = replace(schedule, ranks=(schedule.ranks[facts.pipeline.index(dist.get_rank())],))
        loop = Training(facts=lambda: facts, device=lambda: torch.device(device), read=lambda: own)
        return cls.start(parse_block(block), loop)

    @property
    def profiled(self) -> bool:
        """True if no measurements are left. It becomes true at the same iteration on all ranks."""
        if not self._in_iteration and not self._closed:
            self._receive()
        iteration = self.clocks.memory.iteration
        return next((is_profiled for begin, is_profiled in reversed(self._shown) if begin <= iteration), False)

    @property
    def phase(self) -> str:
        """Phase of the last iteration that has begun, or of the first one before it begins."""
        return self.follow.phase

    @contextmanager
    def iteration(
        self, samples: int = 0, order: Hashable = None, read: Callable[[], Schedule] | None = None
    ) -> Iterator[None]:
        """Context manager for one training iteration.

        Args:
            samples: Number of samples that the job has processed after it.
            order: Value that is equal for equal schedules, on all ranks. By default, it is that of the schedule with
                which Perseus was started.
            read: Returns the operations of this rank in it, as a schedule of one rank. Called if the server plans it
                and it is another one.
        """
        if self._closed:
            yield
            return
        self._receive()
        self._send_reports()
        if self._worked and not self._is_calibrated:
            self._await(lambda: self._is_calibrated)
            self._time.sleep(10 * _POLL_S)
            self._receive()  # messages about the iterations after the calibration
        self._key = self._first_key if order is None else key_of(order)
        if self._key in self._unread and read is not None:
            self._send_schedule(read)
        iteration = self.clocks.memory.iteration + 1
        self._number = self._numbers.get(self._key, self._others)
        self.follow = self._following(iteration)
        self._hooks.start_iteration(self.follow, iteration, self._stream)
        self._tokens = 0
        self._in_iteration = True
        try:
            yield
        except BaseException:
            if not self._closed:  # by the finaliser of an engine that was dropped
                self.clocks.end_iteration(iteration)
            raise
        finally:
            self._in_iteration = False
        if self._closed:  # within the iteration
            return
        # The host has launched everything. The device may not have finished, and is not waited for.
        finished = self.timers.finish_iteration()
        self.clocks.end_iteration(iteration)
        report = Report(
            iteration,
            self._number,
            self.follow.serial,
            self._key,
            time_s=0.0,
            stopped_s=0.0,
            ended=time.time(),
            samples=samples,
            tokens=self._tokens,
            is_calibrated=self._is_calibrated,
        )
        self._unsent.append(_Ran(finished, self.follow, self._stream, report))
        self._send_reports()

    @property
    def _is_calibrated(self) -> bool:
        return self.simulated is None or self.simulated.is_calibrated

    @property
    def _stream(self) -> tuple[Operation, ...]:
        return self._streams.get(self._key, ())

    def operation(self, operation: Operation, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Return the context manager for one operation of an iteration.

        Args:
            operation: The operation.
            inputs: Shapes of a forward's inputs, or another value that identifies them. The work of a simulated GPU
                depends on them. None if they are unknown, and for other operations.
        """
        if not self._in_iteration:
            return NOTHING
        if self._unsent:
            self._send_reports()
        around = self._hooks.around(operation)
        return around if self.simulated is None else self.simulated.within(around, operation, inputs)

    def add_tokens(self, count: int) -> None:
        """Count tokens in the inputs of the current iteration, which only ranks with the first stage know."""
        self._tokens += count

    def capture(self) -> CapturedIteration | None:
        """Return the recorder for an iteration that is being captured into a CUDA graph.

        None if graphs are not supported, because the GPU is not NVIDIA's or torch has no external events.
        """
        times = self.timers.graph_times()
        return None if times is None else CapturedIteration(self.clocks, times)

    def replay(self, captured: CapturedIteration, replay: Callable[[], T]) -> T:
        """Execute the passes of the current iteration by replaying the graph of a captured one."""
        self._send_reports()
        self.add_tokens(captured.tokens)
        return self._hooks.replay(captured, replay)

    def instruction(self, instruction: Instruction, inputs: Hashable = None) -> AbstractContextManager[None]:
        """Return the context manager for one instruction of an iteration. See :meth:`operation`."""
        return self.operation(Compute(instruction), inputs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for work outside of training iterations. It runs at default clocks."""
        self.clocks.pause()
        yield

    def command(self, command: Mapping[str, Any]) -> None:
        """Send a command as ``perseus-ds control`` does, such as ``{"command": "pause"}``, without waiting."""
        if self._is_rank_0 and not self._closed:
            self.clocks.send(msg.Command(json.dumps(command, default=str).encode()))

    def set_steps(self, steps: int) -> None:
        """Report the number of training steps of the engine, for example after loading a checkpoint."""
        if self._is_rank_0 and not self._closed:
            self.clocks.send(msg.Steps(self.clocks.memory.iteration, steps))

    def add_steps(self, steps: int) -> None:
        """Count steps without an iteration, or, if negative, iterations that belong to the step of the next one."""
        if self._is_rank_0 and not self._closed:
            self.clocks.send(msg.MoreSteps(self.clocks.memory.iteration - self._in_iteration, steps))

    def close(self) -> None:
        """Restore the default clock and stop Perseus.

        Has no effect when called again, or in a forked process. Later iterations run at default clocks without
        Perseus. Rank 0 waits for the summary for at most 2 s.
        """
        if self._closed or os.getpid() != self._process:
            return  # in a forked process, the clock belongs to the parent
        self._closed = True
        self._at_exit.cancel()
        try:
            end_s = self._time.now_s() + _LAST_REPORTS_S
            while self._unsent and not self._send_reports() and self._time.now_s() < end_s:
                self._time.sleep(_POLL_S)
            self.clocks.send(msg.Left())
            if self._is_rank_0:
                self._await(lambda: self._has_summary, _SUMMARY_S)
        finally:
            self.clocks.close()

    # Messages from the server.

    def _await(self, is_over: Callable[[], bool], timeout_s: float = _FIRST_S) -> None:
        """Wait for messages until a condition holds, or until the timeout."""
        end_s = self._time.now_s() + timeout_s
        while not is_over() and self._time.now_s() < end_s:
            self.clocks.wait(_POLL_S)
            self._receive()

    def _receive(self) -> None:
        for message in self.clocks.received():
            match message:
                case Follow():
                    self._follows.add(message)
                    if message.program.number == self._numbers.get(self._first_key):
                        self._shown.append((message.shown_from, message.phase in _PROFILED))
                case msg.OrderNumbers():
                    self._numbers = dict(message.numbers)
                    self._others = message.others
                case msg.ReadSchedule():
                    self._unread.add(message.key)
                case msg.Calibrate() if self.simulated is not None:
                    flops = dict(zip(self.simulated.flops, message.flops, strict=False))
                    self.simulated.calibrate(message.seconds_per_flop, flops)
                case msg.Say():
                    self._print(message)
                case msg.Observed():
                    self._write_to_monitor(message)
                case msg.Summarised():
                    self._has_summary = True
        if self.clocks.memory.iteration == 0:
            self.follow = self._first_follow() or UNPLANNED
        while len(self._shown) > 1 and self._shown[1][0] <= self.clocks.memory.iteration:
            del self._shown[0]

    def _first_follow(self) -> Follow | None:
        """Return the last message about the order that the job starts with. None if there is none yet."""
        return self._follows.latest(self._numbers.get(self._first_key, DEFAULT_CLOCKS))

    def _following(self, iteration: int) -> Follow:
        follow = self._follows.select(self._number, iteration)
        if follow is None or (follow.program.clocks_mhz and not self._stream):  # the positions are not known
            return UNPLANNED
        return follow

    def _send_schedule(self, read: Callable[[], Schedule]) -> None:
        self._unread.discard(self._key)
        try:
            schedule = read()
            content = zlib.compress(ScheduleStreams.of(schedule).model_dump_json().encode())
            if len(content) > _MOST_SCHEDULE_BYTES:
                raise ScheduleError("its schedule is too long for a message")
        except PerseusError as error:
            self.clocks.send(msg.ScheduleRead(self._key, error=str(error)))
            return
        self._streams[self._key] = schedule.ranks[0]
        self.clocks.send(msg.ScheduleRead(self._key, content))

    def _print(self, message: msg.Say) -> None:
        if message.warns:
            logger.warning("%s", message.text)
            return
        with suppress(Exception):  # for example a closed terminal, an unsupported character, or a full disk
            print(printable(message.text), flush=True)

    def _write_to_monitor(self, observed: msg.Observed) -> None:
        if self._monitor is None or not dist.is_initialized():  # DeepSpeed's monitor reads its rank
            return
        try:
            self._monitor.write_events([(tag, value, observed.samples) for tag, value in observed.figures])
        except Exception as error:  # the monitor may write to files, networks or services
            self._monitor = None
            logger.warning("perseus: DeepSpeed's monitor failed (%s); Perseus no longer writes to it.", error)

    # Messages to the server.

    def _send_reports(self) -> bool:
        """Send the reports of iterations that the device has finished. Returns True if none is pending."""
        while self._unsent and self._unsent[0].finished.is_over():
            self._send(self._unsent.popleft())
        return not self._unsent

    def _send(self, ran: _Ran) -> None:
        iteration, simulated = ran.report.iteration, self.simulated
        if simulated is not None and not self._is_calibrated and len(simulated.flops) > self._worked:
            self._worked = len(simulated.flops)
            self.clocks.send(msg.Worked(tuple((repr(key), count) for key, count in simulated.flops.items())))
        computed_s = tail_s = 0.0
        if (times := times_of(ran.follow, iteration)) != "none":
            spans = ran.finished.spans()
            computed_s, tail_s = computed_and_tail_s(spans)
            if times != "ends":
                self._send_spans(iteration, spans, ran.stream)
        last_end, self._last_end = self._last_end, ran.finished.end
        # Peak memory hardly changes, and reading it is slow.
        reads_memory = iteration <= _FIRST_WITH_MEMORY or iteration % _MEMORY_EVERY == 0
        report = msgspec.structs.replace(
            ran.report,
            time_s=ran.finished.time_s(),
            stopped_s=0.0 if last_end is None else ran.finished.after_s(last_end),
            issued=self.clocks.memory.iteration,
            computed_s=computed_s,
            tail_s=tail_s,
            memory_bytes=(self._memory_bytes() or 0) if reads_memory else 0,
        )
        self.clocks.send(report)

    def _send_spans(self, iteration: int, spans: Sequence[Span], stream: tuple[Operation, ...]) -> None:
        content = encode_spans(spans, self._hooks.places_of(stream))
        for begin in range(0, len(content), _MOST_SPANS_BYTES // 18 * 18):
            self.clocks.send(msg.Spans(iteration, content[begin : begin + _MOST_SPANS_BYTES // 18 * 18]))


def computed_and_tail_s(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the end of the last pass of an iteration, and the time from then to the tail's end [s]."""
    ends_s = {True: 0.0, False: 0.0}  # of the tail, and of passes
    for span in spans:
        if isinstance(span.operation, Compute):
            is_tail = span.operation.instruction.kind is Kind.TAIL
            ends_s[is_tail] = max(ends_s[is_tail], span.end_s)
    return ends_s[False], max(0.0, ends_s[True] - ends_s[False])
