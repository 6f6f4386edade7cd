"""Plans for GPUs that may do less than when the profile was measured, because somebody else has limited them.

Where a limit is in the way of the plans in use, iterations at default clocks are measured under it, and plans are made
of the rows of the profile that are within it, for each pipeline whose GPUs are limited. The slowest pipeline decides on
the time of an iteration; the others run their own plans, as slow as it lets them be, from the first iteration on. A
plan under limits is compared with default clocks under the same limits like any other, and dropped if it saves nothing.

All of that is remembered: when the same limits come again, or none are left, training goes on where it was.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.clocks.transitions import ClockPlan
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.decisions import MARGIN
from perseus_ds.policy.plan_proof import Verdict
from perseus_ds.policy.reports import GpuLimit
from perseus_ds.profiler.fixed_durations import Iterations
from perseus_ds.runtime.default_clocks import (
    DROPPED_FOR,
    BackOff,
    DefaultIterations,
    back_off_for,
    run_at_default_clocks,
)
from perseus_ds.runtime.frontiers import optimise
from perseus_ds.runtime.iterations import IterationMeasurement, NextPhase, Phase
from perseus_ds.runtime.job import ModeContext
from perseus_ds.runtime.prediction import PartTimes
from perseus_ds.runtime.under_plans import Outcome, PlanRunner

T = TypeVar("T")
# So many limits are remembered; the first of them are forgotten.
_REMEMBERED = 16
# The end of heat is seen by a higher clock only. So what needs about the clock that heat allows asks for the highest.
_SLOWED = 0.97


class StageLimit(NamedTuple):
    """What a stage's GPUs may do; infinite where that is not limited.

    Attributes:
        power_w: The lowest of their power limits [W].
        clock_mhz: The lowest of the highest clocks that they reach [MHz].
    """

    stage: int
    power_w: float
    clock_mhz: float

    def allows(self, row: Measurement) -> bool:
        """Return whether a row keeps within this limit."""
        return row.energy_j <= self.power_w * row.time_s and row.clock_mhz <= _SLOWED * self.clock_mhz


Limits: TypeAlias = tuple[tuple[StageLimit, ...], ...]
"""What is in the way of plans, by pipeline."""


def felt(profile: StageProfile, limits: Sequence[StageLimit]) -> tuple[StageLimit, ...]:
    """Return the limits that some row of a profile exceeds."""
    rows = profile.measurements
    return tuple(limit for limit in limits if any(row.stage == limit.stage and not limit.allows(row) for row in rows))


def limited(
    profile: StageProfile, limits: Sequence[StageLimit], default_s: Mapping[tuple[int, Kind], float]
) -> StageProfile:
    """Return the profile under limits.

    Args:
        profile: As it was measured.
        limits: Of stages.
        default_s: What instructions take at default clocks under these limits, as far as it was measured [s].
    """
    limit_of = {limit.stage: limit for limit in limits}
    waiting_w = profile.info.blocking_power_w or 0.0
    kept: list[Measurement] = []
    for (stage, kind), group in groupby(profile.measurements, lambda row: (row.stage, row.kind)):
        rows = list(group)
        limit = limit_of.get(stage)
        if limit is not None and not all(map(limit.allows, rows)):
            within = [row for row in rows[:-1] if limit.allows(row)] or rows[:1]
            fastest_s = max(default_s.get((stage, kind), within[-1].time_s), rows[-1].time_s)
            by_time = sorted(rows, key=lambda row: row.time_s)
            energy_j = np.interp(fastest_s, [row.time_s for row in by_time], [row.energy_j for row in by_time])
            last_s = min(fastest_s, by_time[-1].time_s)
            highest = replace(rows[-1], time_s=last_s, energy_j=float(energy_j))
            rows = [_no_faster(row, fastest_s, waiting_w) for row in (*within, highest)]
        kept += rows
    known = {(row.stage, row.kind, row.clock_mhz) for row in kept}
    quality = [row for row in profile.info.rows if (row.stage, row.kind, row.clock_mhz) in known]
    return StageProfile(kept, profile.info.model_copy(update={"rows": quality}))


def _no_faster(row: Measurement, time_s: float, waiting_w: float) -> Measurement:
    """Return a row that takes at least so long [s]; what it takes more costs as much as waiting."""
    more_s = max(0.0, time_s - row.time_s)
    return replace(row, time_s=row.time_s + more_s, energy_j=row.energy_j + waiting_w * more_s)


@dataclass
class _Planned:
    """The plans for some limits.

    Attributes:
        dropped: For how many more iterations they are.
        has_run: Whether other plans may have run since.
    """

    runner: PlanRunner
    back_off: BackOff = field(default_factory=lambda: BackOff(DROPPED_FOR))
    dropped: int = 0
    has_run: bool = False


class LimitedPlans:
    """Trains while limits are in the way of a job's plans.

    Attributes:
        has_run: Whether it has trained, so that default clocks measured before that may have been limited, too.
    """

    def __init__(
        self,
        context: ModeContext,
        frontier: Frontier,
        profile: Path | None,
        counter_period_s: float,
        switch_cost_s: float = 0.0,
    ) -> None:
        """Begin with no plans; every rank must do so at once.

        Where the profile of the frontier, the plans without limits, cannot be read, these stay in use under limits. A
        change of clock delays what follows it by the switch cost.
        """
        self._context = context
        self._job, self._rank = context.job, context.rank
        self._frontier = frontier
        self._counter_period_s, self._switch_cost_s = counter_period_s, switch_cost_s
        communicator, topology = self._rank.communicator, self._rank.communicator.topology
        # On rank 0 only: pipeline and stages of each rank, and the profile.
        stages = {instruction.stage for instruction in self._job.schedule.instructions[topology.pipeline_rank]}
        self._places = communicator.gather((topology.data_parallel_rank, stages))
        self._profile: StageProfile | None = None
        if communicator.is_rank_0 and profile is not None:
            with suppress(PerseusError, OSError):
                self._profile = StageProfile.load(profile)
        self.has_run = False
        self._seen: tuple[GpuLimit, ...] = ()
        self._planned: dict[Limits, _Planned] = {}
        self._frontiers: dict[tuple[StageLimit, ...], Frontier] = {}
        self._folders = itertools.count()

    def run_while_kept(
        self, unlimited: PlanRunner, when_kept: Callable[[], None] = lambda: None
    ) -> Phase[Verdict | Outcome]:
        """As :meth:`PlanRunner.run_while_kept` of the plans without limits, and under others while limits are there."""
        while (result := (yield from unlimited.run_while_kept(when_kept))) is Outcome.LIMITS_CHANGED:
            progress = unlimited.selector.state_for_other_plans
            yield from _with(self._run_limited(unlimited), limited=True, progress=progress)
        return result

    def _run_limited(self, unlimited: PlanRunner) -> Phase[None]:
        """Train until nothing is in the way of the plans without limits."""
        self._seen, self.has_run = unlimited.limits_seen, True
        while any(limits := self._in_the_way()) and not unlimited.becomes_capped():
            planned = self._planned.get(limits)
            if planned is None:
                planned = yield from self._plan_for(limits, unlimited)
            if planned is not None:
                yield from self._run(limits, planned)
        unlimited.take_over(() if any(limits) else self._seen)

    def _in_the_way(self) -> Limits:
        """Return which of the limits seen last are in the way of plans, on all ranks."""

        def find() -> Limits:
            lowest: dict[int, dict[int, list[GpuLimit]]] = defaultdict(lambda: defaultdict(list))
            for limit in self._seen:
                pipeline, stages = self._places[limit.rank]
                for stage in stages:
                    lowest[pipeline][stage].append(limit)
            found = [
                tuple(
                    StageLimit(stage, min(gpu.power_w for gpu in gpus), min(gpu.clock_mhz for gpu in gpus))
                    for stage, gpus in sorted(lowest[pipeline].items())
                )
                for pipeline in range(1 + max(pipeline for pipeline, _ in self._places))
            ]
            profile = self._profile
            return tuple(found if profile is None else (felt(profile, limits) for limits in found))

        return self._rank.communicator.computed_on_rank_0(find)

    def _plan_for(self, limits: Limits, unlimited: PlanRunner) -> Phase[_Planned | None]:
        """Measure default clocks under limits, and make plans for them; None if these, or a power cap, have changed."""
        still = partial(self._are_still, self._seen)
        default = DefaultIterations(self._counter_period_s)
        yield from run_at_default_clocks(
            "default",
            default,
            goes_on=lambda measured: still(measured) and not default.sample.is_enough,
            next_phase=lambda: NextPhase("optimizing", default.remaining_s()),
            stops=unlimited.would_be_capped,
        )
        if not (still(None) and default.sample.is_enough):
            return None
        topology = self._rank.communicator.topology
        spans = self._rank.communicator.gather((topology.data_parallel_rank, default.spans()))
        meanwhile = self._meanwhile(limits, default.sample.time_s)
        frontiers: list[Frontier] = []
        for pipeline, own in enumerate(limits):
            frontier = self._frontiers.get(own) if own else self._frontier
            if frontier is None:
                making = self._frontier_for(own, [found for place, found in spans if place == pipeline], still)
                frontier = yield from (making if meanwhile is None else _with(making, clocks=meanwhile))
            if frontier is None:
                return None
            frontiers.append(frontier)
        slowest = max(frontiers, key=lambda frontier: frontier.t_min_s)
        runner = PlanRunner(
            self._context,
            slowest,
            others={pipeline: own for pipeline, own in enumerate(frontiers) if own is not slowest},
            default=default.sample,
            limits=self._seen,
            unlimited_power_w=unlimited.selector.default_power_w,
        )
        memory: list[dict[Any, Any]] = [self._planned, self._frontiers]
        for remembered in memory:
            while len(remembered) > _REMEMBERED:
                del remembered[next(iter(remembered))]
        self._planned[limits] = _Planned(runner)
        return self._planned[limits]

    def _meanwhile(self, limits: Limits, deadline_s: float) -> ClockPlan | None:
        """Return this rank's clocks while plans are made: without limits, it waits for those that have some anyway.

        None for default clocks.
        """
        topology, frontier = self._rank.communicator.topology, self._frontier
        allowed_s = deadline_s * (1 - MARGIN)
        if limits[topology.data_parallel_rank] or frontier.plans[0].time_s > allowed_s:
            return None
        times_s, dag = frontier.instruction_times_s, Dag.build(self._job.schedule)
        return ClockPlan.of_rank(frontier.lookup(allowed_s), topology.pipeline_rank, times_s, dag)

    def _frontier_for(
        self,
        limits: tuple[StageLimit, ...],
        default: Sequence[Iterations],
        still: Callable[[IterationMeasurement | None], bool],
    ) -> Phase[Frontier | None]:
        """Make plans for a pipeline under limits, given its ranks' iterations at default clocks, on rank 0.

        None if the limits have changed meanwhile. Where plans cannot be made, those without limits stay.
        """
        directory = self._job.output_dir / "limits" / str(next(self._folders))
        config = self._job.config.model_copy(update={"output_dir": str(directory)})

        def write() -> bool:
            if self._profile is None:
                return False
            limited(self._profile, limits, PartTimes.of(default).instructions).save(directory / "profile.csv")
            return True

        found: Frontier | None = self._frontier
        try:
            if self._rank.communicator.computed_on_rank_0(write):
                own = replace(self._context, job=replace(self._job, config=config))
                meanwhile = DefaultIterations(self._counter_period_s)
                found = yield from optimise(own, meanwhile, self._switch_cost_s, still)
        except (PerseusError, OSError) as error:  # the same on all ranks
            self._context.recorder.say(f"plans for these limits cannot be made ({error}); the former ones stay")
        if found is not None:
            self._frontiers[limits] = found
        return found

    def _run(self, limits: Limits, planned: _Planned) -> Phase[None]:
        """Train under plans for some limits, or at default clocks where these were dropped, until limits change."""
        runner = planned.runner
        if planned.dropped:
            still = partial(self._are_still, self._seen)
            planned.dropped = yield from back_off_for(planned.dropped, runner.would_be_capped, still)
            return
        if planned.has_run:
            runner.take_over(self._seen)
        planned.has_run = True
        result = yield from runner.run_while_kept()
        while isinstance(result, Verdict) and runner.hurry(result):
            result = yield from runner.run_while_kept()
        if result is Outcome.LIMITS_CHANGED:
            self._seen = runner.limits_seen
        elif isinstance(result, Verdict):
            planned.dropped = planned.back_off.next(self._context.control.steps)
            then = f"under these limits training goes on at default clocks, tried again in {planned.dropped} iterations"
            runner.drop(result, then)
        else:  # inputs have other shapes than those with which default clocks were measured
            del self._planned[limits]

    def _are_still(self, limits: tuple[GpuLimit, ...], measured: IterationMeasurement | None) -> bool:
        """Take in the limits that reports of an iteration name, if there are any; return whether they are these."""
        if measured is not None and measured.reports is not None:
            self._seen = measured.reports.limits
        return self._seen == limits


def _with(phase: Phase[T], **changes: Any) -> Phase[T]:
    """Go through a phase; its iterations differ in some fields.

    Under limits they are marked as such, and checkpoints keep of them what is true without.
    """
    try:
        wanted = next(phase)
        while True:
            received = yield replace(wanted, **changes)
            wanted = phase.send(received)
    except StopIteration as ended:
        return cast("T", ended.value)
    finally:
        phase.close()
