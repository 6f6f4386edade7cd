"""Training at default clocks: permanently, for comparisons, or after a fault or a dropped plan."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from perseus_ds.clocks.timers import SimulatedExecution, Span
from perseus_ds.policy.plan_proof import MOST_BLOCKS, IterationSample
from perseus_ds.policy.reports import Conditions
from perseus_ds.profiler.fixed_durations import without_gaps
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase, Phase, one_iteration
from perseus_ds.runtime.job import ModeContext

SETTLED = 2
"""Number of iterations after a clock change that are ignored. The first one begins at the previous clocks."""
DROPPED_FOR = 200
"""Number of iterations after which a dropped plan is compared again for the first time."""
_KEPT = 4
_LONGER = 4
_LONG_AGO = 20
# The reports of the iteration after a fault are the first that include the ranks with failures.
_UNTIL_TOLD = 2


class DefaultIterations:
    """Consecutive iterations at default clocks.

    Their times are those reported by all ranks, one iteration later. Reading the time of the last one would wait for
    the device, which iterations with a plan do not do.

    Attributes:
        sample: Time and energy of the whole job, under the limits that its GPUs have now.
        conditions: Under which limits of GPUs they run, by the reports received last.
        last_s: Time of the last one that all ranks have reported [s].
    """

    def __init__(self, counter_period_s: float) -> None:
        self.sample = IterationSample(counter_period_s)
        self.conditions: Conditions = ()
        self._latest: deque[IterationMeasurement] = deque(maxlen=_KEPT)
        self._iterations = 0
        self.last_s: float | None = None

    def remaining_s(self, blocks: int = 1) -> float | None:
        """Return the estimated time until they fill the given number of blocks [s].

        None before the first report.
        """
        if self.last_s is None:
            return None
        return self.sample.remaining_s(self.last_s, max(0, SETTLED + 1 - self._iterations), blocks)

    def spans(self) -> list[list[Span]]:
        """Return the operations of this rank in the last of them. Waits until the device has finished them."""
        return [without_gaps(seen.spans(), seen.time_s) for seen in self._latest]

    def add(self, seen: IterationMeasurement) -> None:
        """Add an iteration, and the reports of the one before it; those under other limits of GPUs count no more."""
        if seen.reports is not None and seen.reports.conditions != self.conditions:
            self.conditions = seen.reports.conditions
            self.sample = IterationSample(self.sample.counter_period_s)
            self._iterations = 0
            self._latest.clear()
        self._iterations += 1
        if self._iterations >= SETTLED:
            self._latest.append(seen)
        if seen.reports is not None and self._iterations > 1:
            self.last_s = seen.reports.time_s
        if seen.reports is not None and self._iterations > SETTLED:
            self.sample.add_reports(seen.reports)


def measure_default(
    default: DefaultIterations, say: Callable[[str], None], stops: Callable[[], bool] = lambda: False
) -> Phase[None]:
    """Run iterations at default clocks until time and energy are accurate enough for comparisons.

    They are added to ``default``. Their expected number is printed after the first one. Rank 0 may stop earlier.
    """
    is_announced = False

    def next_phase() -> NextPhase:
        nonlocal is_announced
        if default.last_s and not is_announced:
            is_announced = True
            left_s = [default.remaining_s(blocks) or 0.0 for blocks in (1, MOST_BLOCKS)]
            least, most = (max(1, math.ceil(time_s / default.last_s)) for time_s in left_s)
            say(f"measuring iterations at default clocks, to compare plans with: about {least} to {most}")
        return NextPhase("run", default.remaining_s())

    return run_at_default_clocks(
        "default", default, goes_on=lambda: not default.sample.is_enough, next_phase=next_phase, stops=stops
    )


def run_at_default_clocks(
    phase: str,
    default: DefaultIterations,
    *,
    goes_on: Callable[[], bool],
    next_phase: Callable[[], NextPhase],
    stops: Callable[[], bool],
) -> Phase[None]:
    """Run iterations at default clocks.

    Args:
        phase: Name of the phase in ``run.jsonl``.
        default: The iterations are added to it.
        goes_on: Returns whether to run another one. The same on all ranks.
        next_phase: Returns the phase that follows.
        stops: Returns whether to stop earlier. Only rank 0's value is used.
    """
    seen: IterationMeasurement | None = None
    while goes_on() and not _is_stopped(seen):
        seen = yield from _one_iteration(NextIteration(phase, next_phase=next_phase()), stops=stops())
        default.add(seen)


def _one_iteration(wanted: NextIteration, *, stops: bool) -> Phase[IterationMeasurement]:
    """Run one iteration, with whose report rank 0 may end the phase."""
    return one_iteration(replace(wanted, reported=lambda: {"stops": stops}))


def _is_stopped(seen: IterationMeasurement | None) -> bool:
    """Return True if rank 0 has ended the phase, according to the reports of an iteration.

    The same on all ranks.
    """
    return seen is not None and seen.reports is not None and seen.reports.stops


def observe() -> Phase[None]:
    """Train at default clocks for the rest of the job. Time and energy are measured."""
    while True:
        yield from one_iteration(NextIteration("observe", times="none"))


def calibrate(context: ModeContext) -> Phase[None]:
    """On simulated GPUs, run one iteration, after which each rank knows the work of its instructions."""
    job, rank = context.job, context.rank
    if not isinstance(rank.timers, SimulatedExecution):
        return
    following = job.config.mode if job.config.mode in ("observe", "run") else "warm-up"
    yield from one_iteration(NextIteration("calibrate", next_phase=NextPhase(following)))
    communicator = rank.communicator
    flops = communicator.gather(rank.timers.flops)
    by_pipeline = communicator.computed_on_rank_0(lambda: most_in_step(communicator.pipeline_of_rank.tolist(), flops))
    if largest := max((count for most in by_pipeline.values() for count in most.values()), default=0):
        own = by_pipeline[communicator.topology.data_parallel_rank]
        simulated = job.config.simulated
        per_s = simulated.flops_per_s
        rank.timers.calibrate(simulated.longest_instruction_s / largest if per_s is None else 1 / per_s, own)


def most_in_step(
    pipeline_of_rank: Sequence[int], flops: Sequence[Mapping[Hashable, int]]
) -> dict[int, dict[Hashable, int]]:
    """Return, by pipeline, the largest work of each pass over its ranks, given the work of each rank.

    Ranks that share a stage exchange partial results within a pass, so they finish it together: experts with few tokens
    wait for those with many.
    """
    most: dict[int, dict[Hashable, int]] = defaultdict(dict)
    for pipeline, own in zip(pipeline_of_rank, flops, strict=True):
        most[pipeline].update({key: max(count, most[pipeline].get(key, 0)) for key, count in own.items()})
    return dict(most)


class BackOff:
    """Number of iterations for which a job trains at default clocks before it tries again.

    The same on all ranks.

    It is multiplied by four each time, unless the last time is long ago.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._last = 0
        self._until = 0

    def next(self, step: int) -> int:
        """Return the number of iterations to back off after a step of the job."""
        is_long_ago = step - self._until > _LONG_AGO * self._last
        self._last = self._first if is_long_ago else _LONGER * self._last
        self._until = step + self._last
        return self._last


def back_off_for(iterations: int, stops: Callable[[], bool]) -> Phase[None]:
    """Train at default clocks for so many iterations, unless these stop as above or the limits of GPUs change."""
    conditions: Conditions | None = None
    for _ in range(iterations):
        wanted = NextIteration("observe", times="none", next_phase=NextPhase("default"))
        seen = yield from _one_iteration(wanted, stops=stops())
        if seen.reports is not None:
            if _is_stopped(seen) or conditions not in (None, seen.reports.conditions):
                break
            conditions = seen.reports.conditions


def after_a_fault(start: Callable[[], Phase[None]], iterations: int) -> Phase[None]:
    """Train at default clocks for some iterations and until no rank has a failure, then restart a mode."""
    for done in itertools.count(1):
        seen = yield from one_iteration(NextIteration("observe", times="none"))
        is_told = done >= max(iterations, _UNTIL_TOLD)
        if is_told and seen.reports is not None and not seen.reports.failed:
            break
    yield from start()
