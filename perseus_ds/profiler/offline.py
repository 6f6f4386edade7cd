"""Measures each (stage, kind) of this rank at a clock by repeating it, outside of training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.timers import Execution, Span
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.profiler.profile_config import ProfileConfig
from perseus_ds.profiler.repetition import Repetition
from perseus_ds.profiler.rows import MeasuredRow
from perseus_ds.timebase import REAL_TIME, Timebase

_REFRESHES_AT_A_TIME = 5
_FEWEST_CYCLES = 4
# The error of a mean of fewer values is too uncertain to be of use.
_FEWEST_VALUES = 4
# What is of no use yet is measured for up to this many of the longest times.
_MOST_WINDOWS = 10
_SETTLED = 0.03
_MOST_TO_SETTLE = 10
_LONGEST_TO_SETTLE_S = 1.0
# Answers that ranks sharing a stage exchange; the largest one applies to all.
_DONE, _GO_ON, _GIVE_UP = 0.0, 1.0, math.inf
_PEER_FAILED = "a rank that has this rank's stage could not measure it; see its own message"


class RepeatableInstructions(Protocol):
    """This rank's instructions, which can be run any number of times."""

    def obstacle(self, agree: Callable[[str | None], str | None]) -> str | None:
        """Return why they cannot be run again without changing training; None if they can.

        Args:
            agree: Returns the first reason of all ranks; every rank calls it at the same time.
        """

    def isolated(self) -> AbstractContextManager[None]:
        """Keep what is run inside out of training."""

    @property
    def instructions(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that can be run, a forward before its backward."""

    def prepare(self, stage: int, kind: Kind) -> None:
        """Make ready for the next run, which training does not do within the pass; not timed."""

    def run(self, stage: int, kind: Kind) -> None:
        """Run a forward, or the backward of the last forward run, each after :meth:`prepare`."""


class StagePeers(Protocol):
    """Ranks that have the same stage, in this pipeline or another.

    Their passes may exchange tensors (tensor and sequence parallelism, experts, batch norms over all ranks), so they
    must repeat instructions equally often.
    """

    def stage_max(self, value: float) -> float:
        """Return the largest value of all of them."""


class ClockLock(Protocol):
    """Sets this rank's clock."""

    def set_and_wait(self, clock_mhz: int | None) -> None:
        """Lock a clock, or reset to default clocks; return when the driver has accepted it."""

    def has_settled(self) -> bool:
        """Return whether the GPU runs at it, or is known not to reach it."""


class OfflineProfiler:
    """Measures one clock after the other while this rank repeats its own instructions.

    Forwards are repeated alone. A backward needs a forward before it, so pairs are repeated and the
    forward's energy is subtracted. Instructions are repeated until the standard errors of time and
    energy are small enough; this is checked every few refreshes of the energy counter.

    Args:
        gpu: This rank's GPU.
        clocks: Sets its clock.
        execution: Times instructions.
        work: The instructions.
        peers: Ranks that share the stage.
        config: Required accuracy and longest time.
        blocking_power_w: Power of the GPU between instructions [W].
        counter_period_s: Refresh period of the energy counter [s].
        timebase: The time in which the GPU's energy counter is read.
    """

    def __init__(
        self,
        *,
        gpu: Gpu,
        clocks: ClockLock,
        execution: Execution,
        work: RepeatableInstructions,
        peers: StagePeers,
        config: ProfileConfig,
        blocking_power_w: float,
        counter_period_s: float,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self._gpu = gpu
        self._clocks = clocks
        self._execution = execution
        self._work = work
        self._peers = peers
        self._config = config
        self._blocking_power_w = blocking_power_w
        self._portion_s = _REFRESHES_AT_A_TIME * counter_period_s
        self._time = timebase

    def measure(self, clock_mhz: int) -> list[MeasuredRow]:
        """Return one row for each (stage, kind) at a clock, which stays set.

        Raises:
            GpuError: The GPU refused.
            TimeoutError: The driver did not answer.
            ProfileError: A measured energy is not positive, or a rank that shares the stage could not measure.
        """
        self._lock(clock_mhz)
        rows = []
        problem: ProfileError | None = None
        forward: dict[int, Repetition] = {}
        for stage, kind in self._work.instructions:
            cycle = [Kind.FORWARD] if kind is Kind.FORWARD else [Kind.FORWARD, Kind.BACKWARD]
            self._settle(stage, cycle)
            repeated = self._repeat(stage, cycle, None if kind is Kind.FORWARD else forward[stage])
            if kind is Kind.FORWARD:
                forward[stage] = repeated
            try:
                rows.append(repeated.row(stage, kind, clock_mhz))
            except ProfileError as error:  # peers continue with the next kind and need this rank for it
                problem = problem or error
        if problem is not None:
            raise problem
        return rows

    def _lock(self, clock_mhz: int) -> None:
        with self._together():
            self._clocks.set_and_wait(clock_mhz)
        self._agree(_DONE)

    def _settle(self, stage: int, cycle: Sequence[Kind]) -> None:
        """Repeat until times are steady and the clock is read back as locked: caches and clock have settled."""
        begin_s, before_s = self._time.now_s(), math.inf
        for runs in itertools.count(1):
            with self._together():
                time_s = sum(span.time_s for span in self._run(stage, cycle))
                is_steady = abs(time_s / before_s - 1) < _SETTLED or runs >= _MOST_TO_SETTLE
                # Equal times alone may be those at the clock before.
                has_clock = self._clocks.has_settled() or self._time.now_s() - begin_s > _LONGEST_TO_SETTLE_S
            before_s = time_s
            if self._agree(_DONE if is_steady and has_clock else _GO_ON) == _DONE:
                break

    def _repeat(self, stage: int, cycle: Sequence[Kind], forward: Repetition | None) -> Repetition:
        """Repeat a cycle until time and energy are accurate enough, or the longest time is over; longer if need be.

        Args:
            stage: Whose instructions are repeated.
            cycle: A forward, or a forward and its backward.
            forward: In the second case, what the forward alone takes.
        """
        spans: list[Span] = []
        count = 0
        with CounterLog(self._gpu, self._time) as log:
            begin_s = self._time.now_s()
            while True:
                count += self._repeat_for(self._portion_s, lambda: spans.extend(self._run(stage, cycle)))
                end_s = self._time.now_s()
                with self._together():
                    found = self._evaluate(log, begin_s, end_s, count=count, spans=spans, forward=forward)
                windows = (end_s - begin_s) / self._config.max_window_s
                go_on = (
                    found is None
                    or count < _FEWEST_CYCLES
                    or (windows < 1 and found.relative_error > self._config.relative_error)
                    or (windows < _MOST_WINDOWS and not found.is_told_from_waiting(self._blocking_power_w))
                )
                if self._agree(_GO_ON if go_on else _DONE) == _DONE:
                    assert found is not None
                    return found

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Surround what may fail, between two exchanges: the other ranks of the stage give up with this one."""
        try:
            yield
        except Exception:
            self._peers.stage_max(_GIVE_UP)
            raise

    def _agree(self, value: float) -> float:
        """Return the largest value of the stage's ranks.

        Raises:
            ProfileError: One of them has given up.
        """
        largest = self._peers.stage_max(value)
        if largest == _GIVE_UP:
            raise ProfileError(_PEER_FAILED)
        return largest

    def _evaluate(
        self,
        log: CounterLog,
        begin_s: float,
        end_s: float,
        *,
        count: int,
        spans: Sequence[Span],
        forward: Repetition | None,
    ) -> Repetition | None:
        cycle_s = (end_s - begin_s) / count
        has_time = end_s - begin_s <= _MOST_WINDOWS * self._config.max_window_s
        if has_time and len(log.readings(begin_s, end_s)) < _REFRESHES_AT_A_TIME - 1:
            return None
        power = log.power(begin_s, end_s, at_least_s=cycle_s)
        if has_time and (math.isinf(power.relative_error) or power.values < _FEWEST_VALUES):
            return None
        times_s = [span.time_s for span in spans if _kind(span) is _kind(spans[-1])]
        busy_s = sum(span.time_s for span in spans) / count
        return Repetition(
            times_s=times_s,
            cycle_j=power.watts * cycle_s - self._blocking_power_w * (cycle_s - busy_s),
            error_j=power.relative_error * power.watts * cycle_s,
            values=power.values,
            clock_mhz=power.clock_mhz,
            state=log.state,
            forward_s=busy_s - sum(times_s) / count,
            forward=forward,
        )

    def _repeat_for(self, portion_s: float, run: Callable[[], object]) -> int:
        """Run for about this time, as often as the peers of the stage; return how often."""
        begin_s = self._time.now_s()
        with self._together():
            run()
        once_s = max(self._time.now_s() - begin_s, 1e-6)
        count = int(self._agree(math.ceil(portion_s / once_s)))
        with self._together():
            for _ in range(count - 1):
                run()
        return count

    def _run(self, stage: int, cycle: Sequence[Kind]) -> list[Span]:
        self._execution.start_iteration()
        for kind in cycle:
            operation = Compute(Instruction(stage, kind, 0))
            self._work.prepare(stage, kind)
            self._execution.begin(operation)
            self._work.run(stage, kind)
            self._execution.end(operation)
        return self._execution.finish_iteration().spans()


def _kind(span: Span) -> Kind | None:
    return span.operation.instruction.kind if isinstance(span.operation, Compute) else None
