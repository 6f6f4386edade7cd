"""One iteration of a job: the request of a phase, and this rank's measurement.

A phase is a generator. It yields a description of the next iteration and receives this rank's measurement of it, or,
when the job continues from a checkpoint, on all ranks together, its stored progress (empty if that does not fit). All
ranks go through the same phases at the same iterations, because decisions depend only on values that are the same on
all ranks: the reports of the previous iteration, or rank 0's decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from perseus_ds.clocks.timers import FinishedIteration, Span
from perseus_ds.optimizer.lengths import Lengths
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.decisions import Assignment, Forecast
from perseus_ds.policy.reports import JobReport, RankReports
from perseus_ds.protocol.layout import IterationEnergy
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.look_ahead import Outlook

T = TypeVar("T")
Times: TypeAlias = Literal["all", "passes", "none"]


@dataclass(frozen=True)
class NextPhase:
    """The phase that follows, with an estimate of the time left until then.

    Attributes:
        phase: Name of the phase, as in ``run.jsonl``.
        in_s: Time left, including this iteration, as estimated on rank 0 [s]. None if unknown.
    """

    phase: str
    in_s: float | None = None


@dataclass(frozen=True)
class NextIteration:
    """A phase's request for the next iteration.

    Attributes:
        phase: Name of the phase, as in ``run.jsonl``.
        clocks: This rank's clocks.
        plan: This pipeline's plan, as a place on the frontier; None without one.
        forecast: Prediction for the whole job; None without a plan.
        aligns_tail: Whether all ranks begin the tail together, to tell it from waiting.
        times: Which operations are timed: what nobody asks for costs training nothing.
        order: Number of its order, where orders have plans of their own.
        of_order: Returns what to run instead, by the order of the iteration that begins, of which the schedule of this
            rank can be read; None where all orders run alike.
        by_length: Returns this request for an iteration of which the lengths given tell something, or nothing; None if
            it does not depend on them.
        new_orders: Orders that get phases of their own when they come next, for which all ranks meet.
        shape: Number of the shape of its inputs, where shapes have plans of their own.
        by_shape: What to run instead, by the number of the shape of the first inputs; an iteration with others runs at
            default clocks. Empty where all shapes run alike.
        tell_shapes: Told the numbers of the shapes of its inputs as soon as they are known; None where nobody asks.
        forwards: Of this rank, after which these are known; 0 where nobody asks.
        next_phase: The phase that follows; None where the job trains on like this.
        reported: Returns fields of this rank's report of the iteration that has just ended; called once that is done.
        decided: Rank 0's decision, which it sends with that report; None in phases without plans.
        status: What the next iteration runs, for ``perseus-ds control status``.
        progress: Returns what a checkpoint keeps of the phase, as plain values.
    """

    phase: str
    clocks: ClockPlan = field(default_factory=ClockPlan)
    plan: int | None = None
    forecast: Forecast | None = None
    aligns_tail: bool = False
    times: Times = "all"
    order: int | None = None
    of_order: Callable[[Hashable, Callable[[], Schedule] | None], NextIteration] | None = None
    by_length: Callable[[NextIteration, Outlook | None], NextIteration] | None = None
    new_orders: frozenset[Hashable] = frozenset()
    shape: int | None = None
    by_shape: Mapping[float, NextIteration] = field(default_factory=dict)
    tell_shapes: Callable[[float, float], None] | None = None
    forwards: int = 0
    next_phase: NextPhase | None = None
    reported: Callable[[], Mapping[str, Any]] = dict
    decided: Assignment | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[], dict[str, Any]] = dict

    @property
    def follows_operations(self) -> bool:
        """True if its operations need clocks, times, or the shapes of inputs."""
        return not (self.phase == "observe" and self.times == "none") or bool(self.by_shape or self.tell_shapes)


# An iteration at default clocks in a job that runs plans in other iterations.
UNPLANNED = NextIteration("observe", times="none", status={"plan": None})


@dataclass
class IterationMeasurement:
    """This rank's measurement of an iteration, which the device may not have finished.

    Reading a time waits for it.

    Attributes:
        finished: Its times.
        recorded: Returns what the agent has recorded of it; see ``AgentClocks.recorded``.
        host_s: When it began and ended for the host, in the rank's timebase [s].
        clock_mhz: Clock that was asked for around each instruction; empty without a plan [MHz].
        failed: Whether this rank has fallen back to default clocks.
        order: What the engine runs, equal for equal schedules.
        shapes: Numbers that tell the inputs' shapes from others: of the first forward, and of all; 0 if not known.
        length: The mean length of the inputs of a forward, in proportion to their tokens; NaN if not known.
        lengths: Returns the lengths of this pipeline's micro-batches that the job has given; None if not known.
        number: Of the iteration in the job.
        stopped_s: How long before it began the one before had ended [s].
        reports: What all ranks have reported of the iteration before; None where there was none, or it was cut off by a
            checkpoint.
        ranks: On rank 0, the reports of which that was made; None elsewhere.
    """

    finished: FinishedIteration
    recorded: Callable[..., IterationEnergy | None]
    host_s: tuple[float, float]
    clock_mhz: Mapping[Instruction, int]
    failed: bool
    reports: JobReport | None = None
    ranks: RankReports | None = None
    order: Hashable = None
    shapes: tuple[float, float] = (0.0, 0.0)
    length: float = math.nan
    lengths: Callable[[], Lengths | None] = lambda: None
    number: int = 0
    stopped_s: float = 0.0
    _recorded: IterationEnergy | None = None

    # No ``cached_property``, whose lock all ranks of a process share until Python 3.12.
    def is_known(self) -> bool:
        """Return True if times and energy are known without waiting."""
        return self.finished.is_over() and self._record() is not None

    def _record(self, *, waits: bool = False) -> IterationEnergy | None:
        if self._recorded is None:  # the agent's memory contains only the last iterations
            self._recorded = self.recorded(waits=waits)
        return self._recorded

    @property
    def start_s(self) -> float:
        """Begin of the iteration in the rank's timebase [s]. Waits until the device has finished it."""
        self.finished.end.synchronize()
        recorded = self._record(waits=True)
        return self.host_s[0] if recorded is None or math.isnan(recorded.begun_s) else recorded.begun_s

    @property
    def time_s(self) -> float:
        """Duration of the iteration [s]."""
        return self.finished.time_s()

    @property
    def energy_j(self) -> float:
        """Energy of this rank's GPU [J]. NaN if it cannot be read."""
        self.finished.end.synchronize()
        recorded = self._record(waits=True)
        return math.nan if recorded is None else recorded.energy_j

    def spans(self) -> list[Span]:
        """Return the timed operations."""
        return self.finished.spans()


Phase: TypeAlias = Generator[NextIteration, "IterationMeasurement | Mapping[str, Any]", T]


def one_iteration(wanted: NextIteration) -> Phase[IterationMeasurement]:
    """Run one iteration in a phase without state for checkpoints."""
    while True:
        received = yield wanted
        if isinstance(received, IterationMeasurement):
            return received
