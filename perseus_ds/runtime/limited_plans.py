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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.clocks.transitions import ClockPlan
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.decisions import MARGIN
from perseus_ds.policy.plan_proof import Verdict
from perseus_ds.policy.reports import GpuLimit
from perseus_ds.profiler.fixed_durations import PartTimes
from perseus_ds.profiler.limited import StageLimit, felt, limited
from perseus_ds.runtime.default_clocks import (
    DROPPED_FOR,
    BackOff,
    DefaultIterations,
    back_off_for,
    run_at_default_clocks,
)
from perseus_ds.runtime.frontiers import optimise
from perseus_ds.runtime.iterations import IterationMeasurement, NextPhase, Phase
from perseus_ds.runtime.mode_context import ModeContext
from perseus_ds.runtime.under_plans import Outcome, PlanRunner

T = TypeVar("T")
Limits: TypeAlias = tuple[tuple[StageLimit, ...], ...]
"""What is in the way of plans, by pipeline."""
# So many limits are remembered; the first of them are forgotten.
_REMEMBERED = 16


@dataclass
class _Planned:
    """What is known of some limits.

    Attributes:
        runner: Of the plans for them.
        back_off: For how long they are dropped.
        dropped: For how many more iterations they are.
        has_run: Whether other plans may have run since.
    """

    runner: PlanRunner
    back_off: BackOff
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

        Args:
            context: Of the mode.
            frontier: The plans without limits.
            profile: That they were made of; without one, or where it cannot be read, they stay in use under limits.
            counter_period_s: How often energy counters are refreshed [s].
            switch_cost_s: By how much a change of clock delays what follows it [s].
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
        default_s = self._measured(default)
        meanwhile = self._meanwhile(limits, default.sample.time_s)
        frontiers: list[Frontier] = []
        for pipeline, own in enumerate(limits):
            frontier = self._frontiers.get(own) if own else self._frontier
            if frontier is None:
                making = self._frontier_for(own, default_s, pipeline, still)
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
        while len(self._planned) >= _REMEMBERED:
            del self._planned[next(iter(self._planned))]
        planned = self._planned[limits] = _Planned(runner, BackOff(DROPPED_FOR))
        used = {own for known in self._planned for own in known}
        self._frontiers = {own: frontier for own, frontier in self._frontiers.items() if own in used}
        return planned

    def _meanwhile(self, limits: Limits, deadline_s: float) -> ClockPlan | None:
        """Return this rank's clocks while plans are made: without limits, it waits for those that have some anyway.

        None for default clocks.
        """
        topology, frontier = self._rank.communicator.topology, self._frontier
        allowed_s = deadline_s * (1 - MARGIN)
        if limits[topology.data_parallel_rank] or frontier.plans[0].time_s > allowed_s:
            return None
        plan = frontier.lookup(allowed_s)
        return ClockPlan.of_rank(
            plan, topology.pipeline_rank, frontier.instruction_times_s, Dag.build(self._job.schedule)
        )

    def _measured(self, default: DefaultIterations) -> Sequence[Mapping[tuple[int, Kind], float]]:
        """Return what instructions take at default clocks, by pipeline; on rank 0 [s]."""
        topology = self._rank.communicator.topology
        found = self._rank.communicator.gather((topology.data_parallel_rank, default.spans()))
        pipelines = sorted({pipeline for pipeline, _ in found})
        return [PartTimes.of([spans for own, spans in found if own == each]).instructions for each in pipelines]

    def _frontier_for(
        self,
        limits: tuple[StageLimit, ...],
        default_s: Sequence[Mapping[tuple[int, Kind], float]],
        pipeline: int,
        still: Callable[[IterationMeasurement | None], bool],
    ) -> Phase[Frontier | None]:
        """Make plans for a pipeline under limits; None if these have changed meanwhile.

        Where that is not possible, those without limits stay.
        """
        directory = self._job.output_dir / "limits" / str(next(self._folders))
        config = self._job.config.model_copy(update={"output_dir": str(directory)})

        def write() -> bool:
            if self._profile is None:
                return False
            limited(self._profile, limits, default_s[pipeline]).save(directory / "profile.csv")
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
            still, stops = partial(self._are_still, self._seen), runner.would_be_capped
            planned.dropped = yield from back_off_for(planned.dropped, "default", stops, still)
            return
        if planned.has_run:
            runner.take_over(self._seen)
        planned.has_run = True
        result = yield from runner.run_while_kept()
        turns = itertools.count(1)
        while isinstance(result, Verdict) and runner.hurry(result, next(turns)):
            result = yield from runner.run_while_kept()
        if result is Outcome.LIMITS_CHANGED:
            self._seen = runner.limits_seen
        elif isinstance(result, Verdict):
            planned.dropped = planned.back_off.next(self._context.control.steps)
            then = f"under these limits training goes on at default clocks, tried again in {planned.dropped} iterations"
            runner.say_compared(result, then)
            runner.selector.do_not_hurry()
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
