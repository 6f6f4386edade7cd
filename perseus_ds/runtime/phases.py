"""The phases of a job as generators.

A phase yields a description of the next iteration, and receives what this rank measured of it. All ranks go through
the same phases at the same iterations: what a phase decides by is the same on all ranks, that is, what all
are told of the iteration before, or rank 0's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from perseus_ds.artifacts.rank_report import JobReport, RankReports
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import FinishedIteration, SimulatedExecution, Span
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.policy.assignment import Forecast
from perseus_ds.runtime.halting import Halt
from perseus_ds.runtime.job import Job, Rank

T = TypeVar("T")


@dataclass(frozen=True)
class Outlook:
    """What follows a phase.

    Attributes:
        phase: As in ``run.jsonl``.
        in_s: How long until then, this iteration included, as estimated on rank 0 [s]; None where nobody can say.
    """

    phase: str
    in_s: float | None = None


@dataclass(frozen=True)
class NextIteration:
    """A phase's request for the next iteration.

    Attributes:
        phase: As it is called in ``run.jsonl``.
        clocks: This rank's clocks.
        plan: This pipeline's plan, as a place on the frontier; None without one.
        forecast: Prediction for the whole job; None without a plan.
        keeps_passes: Whether what the passes work on is kept, to repeat them afterwards.
        aligns_tail: Whether all ranks begin the tail together, to tell it from waiting.
        shape: Number of the shape of its inputs, where shapes have plans of their own.
        by_shape: What to run instead, by the number of the shape of the first inputs; an iteration with others runs at
            default clocks. Empty where all shapes run alike.
        tell_shapes: Told the numbers of the shapes of its inputs as soon as they are known; None where nobody asks.
        outlook: What follows; None where the job trains on like this.
        reported: Fields of this rank's report of the iteration that has just ended.
        reported_later: Returns more of them, once the device has done that iteration.
        stretch_factors: Rank 0's decision, which it sends with that report: of each pipeline; none for 1 throughout.
        status: What the next iteration runs, for ``perseus-ds control status``.
        progress: Returns what a checkpoint keeps of the phase, as plain values.
        halt: What all ranks wait for before the iteration; None for nothing.
    """

    phase: str
    clocks: ClockPlan = field(default_factory=ClockPlan.none)
    plan: int | None = None
    forecast: Forecast | None = None
    keeps_passes: bool = False
    aligns_tail: bool = False
    shape: int | None = None
    by_shape: Mapping[float, NextIteration] = field(default_factory=dict)
    tell_shapes: Callable[[float, float], None] | None = None
    outlook: Outlook | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)
    reported_later: Callable[[], Mapping[str, Any]] = dict
    stretch_factors: Sequence[float] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[], dict[str, Any]] = dict
    halt: Halt | None = None


# At default clocks, in a job that runs plans in other iterations.
UNPLANNED = NextIteration("observe", status={"plan": None})


@dataclass(frozen=True)
class IterationMeasurement:
    """This rank's measurement of an iteration, which the device may still be at: asking for a time waits for it.

    Attributes:
        finished: Its times.
        used_j: Returns the energy of this rank's GPU [J]; NaN where it cannot be read.
        is_known: Returns whether times and energy are there without waiting.
        host_s: When it began and ended for the host, in the rank's timebase [s].
        clock_mhz: Clock that was asked for around each instruction; empty without a plan [MHz].
        failed: Whether this rank has fallen back to default clocks.
        shapes: Numbers that tell the inputs' shapes from others: of the first forward, and of all; 0 if not known.
        number: Of the iteration in the job.
        stopped_s: How long before it began the one before had ended; 0 if there was none [s].
        reports: What all ranks have reported of the iteration before; None where there was none, or it was cut off by a
            checkpoint.
        ranks: On rank 0, the reports of which that was made; None elsewhere.
    """

    finished: FinishedIteration
    used_j: Callable[[], float]
    is_known: Callable[[], bool]
    host_s: tuple[float, float]
    clock_mhz: Mapping[Instruction, int]
    failed: bool
    reports: JobReport | None = None
    ranks: RankReports | None = None
    shapes: tuple[float, float] = (0.0, 0.0)
    number: int = 0
    stopped_s: float = 0.0

    @cached_property
    def start_s(self) -> float:
        """When it began, in the rank's timebase [s]."""
        return self.finished.start_s()

    @cached_property
    def time_s(self) -> float:
        """How long it took [s]."""
        return self.finished.time_s()

    @property
    def energy_j(self) -> float:
        """Of this rank's GPU [J]; no ``cached_property``, whose lock all ranks of a process share until Python 3.12."""
        self.finished.end.synchronize()
        return self.used_j()

    def spans(self) -> list[Span]:
        """Return the operations."""
        return self.finished.spans()


@dataclass(frozen=True)
class Resumed:
    """The job goes on from a checkpoint; sent to a phase between two iterations, on all ranks at once.

    Attributes:
        progress: What :attr:`NextIteration.progress` returned when it was saved; empty if it does not fit the config.
    """

    progress: Mapping[str, Any]


Phase: TypeAlias = Generator[NextIteration, "IterationMeasurement | Resumed", T]


def one_iteration(wanted: NextIteration) -> Phase[IterationMeasurement]:
    """Run one iteration in a phase without state for checkpoints."""
    while True:
        received = yield wanted
        if isinstance(received, IterationMeasurement):
            return received


def observe() -> Phase[None]:
    """Train at default clocks for the rest of the job; time and energy are measured."""
    while True:
        yield from one_iteration(NextIteration("observe"))


def calibrate(job: Job, rank: Rank) -> Phase[None]:
    """On simulated GPUs, run one iteration, after which each rank knows how much work its instructions are."""
    if not isinstance(rank.timers, SimulatedExecution):
        return
    following = job.config.mode if job.config.mode in ("observe", "run") else "warm-up"
    yield from one_iteration(NextIteration("calibrate", outlook=Outlook(following)))
    largest = rank.communicator.all_max(rank.timers.largest_flops)
    if largest:
        rank.timers.calibrate(job.config.simulated.longest_instruction_s / largest)
