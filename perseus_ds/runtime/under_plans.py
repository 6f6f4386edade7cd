"""Training under plans: iterations as the selector decides, and how they compare with default clocks in this job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_records import Drifted
from perseus_ds.clocks.transitions import ClockPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.pace import DriftWatch, computed_and_tail_s, reported_drift
from perseus_ds.policy.plan_proof import ANALYSES, IterationSample, PlanComparison, Verdict, certainty
from perseus_ds.policy.reports import JobReport
from perseus_ds.policy.selector import Assignment, Forecast, PlanSelector
from perseus_ds.runtime.iterations import Halt, IterationMeasurement, NextIteration, NextPhase, Phase, Waited
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.words import begin

_DRIFT_EVERY = 10
_INCOMPARABLE = 30
# A plan from elsewhere runs for so long before it is compared; a job that ends earlier is too short for a comparison.
_TRIAL_ITERATIONS = 8
_TRIAL_S = 20.0
# After so many blocks under a plan they are compared with default clocks of long ago, to notice when it becomes late.
_WATCHED_BLOCKS = 4


class Outcome(Enum):
    """Why there is no verdict on a plan, and something has to be measured again.

    Attributes:
        PROFILE_OUTDATED: Instructions take longer or shorter than profiled, and no comparison can tell what that means.
        DEFAULT_OUTDATED: Inputs have other shapes than those with which default clocks were measured.
    """

    PROFILE_OUTDATED = "profile outdated"
    DEFAULT_OUTDATED = "default outdated"


@dataclass(frozen=True)
class _Ran:
    """What an iteration ran, until its reports are there.

    Attributes:
        assignment: What it ran by; None at default clocks.
        block: The iterations that it is compared with others among, if it is.
    """

    assignment: Assignment | None = None
    block: IterationSample | None = None


class PlanRunner:
    """Runs the assignment in force on this rank, and compares it with default clocks; the same on all ranks.

    Attributes:
        wanted: The next iteration.
        has_drifted: Whether instructions were found to take longer or shorter than profiled.
        drifts_by_shape: Whether that is because inputs have other shapes.
    """

    def __init__(
        self,
        job: Job,
        rank: RankContext,
        recorder: Recorder,
        control: JobControl,
        *,
        frontier: Frontier,
        comparisons: Iterator[int],
        default: IterationSample | None = None,
    ) -> None:
        """Decide on the first plan; every rank must do so at once.

        Args:
            job: The job.
            rank: This rank.
            recorder: Of the job.
            control: What the user asks for.
            frontier: The plans.
            comparisons: Counts the comparisons of the job.
            default: Iterations of this job at default clocks; None where savings are relative to the profile.
        """
        self._communicator = rank.communicator
        self._topology = rank.communicator.topology
        self._is_first = rank.communicator.is_rank_0
        self._recorder = recorder
        self._control = control
        self._frontier = frontier
        self._drift = DriftWatch(job.config.max_drift)
        self.has_drifted = False
        self.drifts_by_shape = False
        self._iterations = 0
        self._default = default
        self._comparisons = comparisons
        # Whether default clocks have just been measured.
        self._is_fresh = default is not None
        self._incomparable = 0
        # How many times as long iterations take as profiled, since their inputs have other shapes.
        self._scale = 1.0
        # Of the last iteration, whose reports are on their way.
        self._ran = _Ran()
        self._dag = Dag.build(job.schedule)
        self._selector = PlanSelector(
            rank.communicator, frontier, control, timebase=rank.timebase, record=recorder.event, say=recorder.say
        )
        if default is not None:
            self._selector.default_power_w = default.power_w
        self._planned = self._under_assignment()
        self.wanted = self._with_report()
        recorder.say(begin(self._selector.in_force.plan, len(frontier.plans), self._planned.forecast))

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan of this rank's pipeline; None while it is paused."""
        return self.wanted.clocks.plan

    @property
    def plan_number(self) -> int | None:
        """Its place on the frontier."""
        return self.wanted.plan

    @property
    def default(self) -> IterationSample:
        """Iterations at default clocks, as measured in this job last."""
        assert self._default is not None, "default clocks are measured first"
        return self._default

    def progress_for_other_plans(self) -> dict[str, Any]:
        """Return what stays true of the job when it drops these plans for those of another profile."""
        return self._selector.state_for_other_plans()

    def compare_with(self, default: IterationSample) -> None:
        """Compare iterations from now on with others at default clocks, which have just been measured."""
        self._is_fresh = True
        self._ran, self._incomparable = _Ran(), 0
        self._set_default(default)

    def _set_default(self, default: IterationSample) -> None:
        self._default, self._selector.default_power_w = default, default.power_w
        self._planned = self._under_assignment()
        self.wanted = self._with_report()

    def try_out(self) -> Phase[None]:
        """Train under a plan from elsewhere for about as long as a comparison with default clocks takes.

        The first iterations of a job are slower than those after them, so no comparison may use them.
        """
        iterations, time_s = 0, 0.0
        while iterations < _TRIAL_ITERATIONS or time_s < _TRIAL_S:
            typical_s = time_s / iterations if iterations else 0.0
            left_s = max(_TRIAL_S - time_s, (_TRIAL_ITERATIONS - iterations) * typical_s)
            seen = yield from self._one_iteration(NextPhase("default", left_s))
            self._is_outdated(seen, profiles_again=False)
            self._advance(seen)
            if seen.reports is not None:
                iterations, time_s = iterations + 1, time_s + seen.reports.time_s

    @property
    def is_capped(self) -> bool:
        """Whether default clocks would draw more than the power cap in force: then all iterations run under plans."""
        return self._selector.in_force.capped

    def would_be_capped(self) -> bool:
        """Whether they would draw more than the cap that is asked for now; only rank 0 knows."""
        return self._is_first and self._selector.would_be_capped()

    def becomes_capped(self) -> bool:
        """Bring a cap that default clocks would exceed into force at once, if there is one; the same on all ranks."""
        if not self._communicator.computed_on_rank_0(self.would_be_capped):
            return False
        if self._selector.resume():
            self._planned = self._under_assignment()
            self.wanted = self._with_report()
        return self.is_capped

    def run_under_cap(self, *, profiles_again: bool) -> Phase[Outcome | None]:
        """Train under plans for as long as default clocks would draw more than the power cap: nothing is compared."""
        self._is_fresh = False
        while self.is_capped:
            seen = yield from self._one_iteration()
            if self._is_outdated(seen, profiles_again=profiles_again):
                return Outcome.PROFILE_OUTDATED
            self._advance(seen)
        return None

    def compare(self, *, profiles_again: bool) -> Phase[Verdict | Outcome | None]:
        """Train by turns at default clocks and under the policy's plan until it is known whether it keeps its promise.

        Args:
            profiles_again: Whether to return where instructions take longer or shorter than profiled, and no comparison
                tells what that means.

        Returns:
            The verdict; or why there is none, and something has to be measured again; None where default clocks would
            draw more than the power cap.
        """
        sure = certainty(next(self._comparisons))
        blocks = [self.default] if self._is_fresh else []
        self._is_fresh = False
        while not self.is_capped:
            is_planned, assignment = len(blocks) % 2 == 1, self._selector.in_force
            block = self._sample_of_plans() if is_planned else IterationSample(self.default.counter_period_s)
            outcome = yield from self._add_block(blocks, block, is_planned=is_planned, profiles_again=profiles_again)
            if outcome is not None:
                return outcome
            if is_planned and self._selector.in_force.number != assignment.number:
                continue  # these iterations ran under several plans
            blocks.append(block)
            if not is_planned and len(blocks) // 2 in ANALYSES:
                verdict = self._verdict(blocks, sure)
                if verdict is not None:
                    return verdict
        return None

    def _verdict(self, blocks: Sequence[IterationSample], sure: float) -> Verdict | None:
        """Return what rank 0 decides by an interim analysis, on all ranks."""

        def decide() -> Verdict | None:
            comparison = PlanComparison.of_blocks(blocks)
            is_last = len(blocks) // 2 == ANALYSES[-1]
            return Verdict.of(comparison, sure, is_last=is_last)

        verdict = self._communicator.computed_on_rank_0(decide)
        if verdict is not None:
            self._set_default(IterationSample.joined(blocks[::2]))
        return verdict

    def _add_block(
        self, blocks: Sequence[IterationSample], block: IterationSample, *, is_planned: bool, profiles_again: bool
    ) -> Phase[Outcome | None]:
        """Run iterations of a block until they are enough, or another assignment is in force.

        Args:
            blocks: Those before.
            block: The iterations are added to it, the last one while the next block begins.
            is_planned: Whether they run under the plan.
            profiles_again: Whether to return where instructions take longer or shorter than profiled, and no comparison
                tells what that means.
        """
        begun = self._selector.in_force.number
        analysis = next((pairs for pairs in ANALYSES if pairs > (len(blocks) - 1) // 2), ANALYSES[-1])
        following = 2 * analysis - len(blocks)
        is_settled, is_over, in_s = False, False, None
        while not (is_over or self.is_capped or (is_planned and self._selector.in_force.number != begun)):
            seen = yield from self._one_iteration(NextPhase("verdict", in_s), at_default=not is_planned)
            if self._is_outdated(seen, profiles_again=profiles_again):
                return Outcome.PROFILE_OUTDATED
            # The first iteration begins at the clocks before.
            self._advance(seen, block if is_settled else None, at_default=not is_planned)
            is_settled = not self._selector.in_force.paused
            if seen.reports is not None:
                whole_s = IterationSample(block.counter_period_s).remaining_s(seen.reports.time_s, more=2)
                in_s = block.remaining_s(seen.reports.time_s, more=1) + following * whole_s
                # The report of the last iteration comes in time for the analysis, unless that is due now.
                is_in_flight = following > 0 and self._ran.block is block
                is_over = block.is_block_with(seen.reports.time_s) if is_in_flight else block.is_block
            if self._incomparable >= _INCOMPARABLE:
                return Outcome.DEFAULT_OUTDATED
        return None

    def run(self, iterations: int, *, profiles_again: bool) -> Phase[Outcome | None]:
        """Train under the plan that the policy asks for, until it should be compared with default clocks again.

        Args:
            iterations: After how many that is, unless it no longer keeps its promise.
            profiles_again: Whether to return, to profile again, when instructions of inputs of other shapes do not all
                take longer or shorter by one factor; otherwise the job trains on and only says so.
        """
        assert self._default is not None, "default clocks are measured first"
        watched, number = self._sample_of_plans(), -1
        while iterations > 0 and not self.is_capped:
            seen = yield from self._one_iteration()
            if self._is_outdated(seen, profiles_again=profiles_again):
                return Outcome.PROFILE_OUTDATED
            assignment = self._selector.in_force
            is_settled, number = assignment.number == number, assignment.number
            if not is_settled:
                watched = self._sample_of_plans()
            self._advance(seen, watched if is_settled and not assignment.paused else None)
            iterations -= not assignment.paused
            if watched.is_as_long_as(_WATCHED_BLOCKS):
                comparison = PlanComparison.of_samples(self._default, watched)
                if comparison.is_in_doubt:
                    return None
                watched = self._sample_of_plans()
        return None

    def hurry(self, verdict: Verdict) -> bool:
        """Run a faster plan after one that takes longer than promised; return whether there is one, on all ranks."""
        return self._communicator.computed_on_rank_0(lambda: self._selector.hurry(verdict.comparison.late))

    def do_not_hurry(self) -> None:
        """Run the policy's own plan again."""
        self._selector.do_not_hurry()

    def _one_iteration(
        self, next_phase: NextPhase | None = None, *, at_default: bool = False
    ) -> Phase[IterationMeasurement]:
        """Run one iteration as it is wanted; a checkpoint that is resumed before it may change what is wanted."""
        while True:
            wanted = replace(self.wanted, next_phase=next_phase)
            if at_default and not self._selector.in_force.paused:
                wanted = replace(wanted, phase="default", clocks=ClockPlan.none(), plan=None, forecast=None)
            received = yield wanted
            if isinstance(received, IterationMeasurement):
                return received
            self._control.progress = received.progress
            self._ran = _Ran()
            if self._selector.resume():
                self._planned = self._under_assignment()
            self.wanted = self._with_report()

    def _advance(
        self, seen: IterationMeasurement, block: IterationSample | None = None, *, at_default: bool = False
    ) -> None:
        """Take in an iteration, and the reports of all ranks of the one before; decide on the next one."""
        self._iterations += 1
        ran, self._ran = self._ran, _Ran(None if at_default else self._selector.in_force, block)
        if ran.assignment is not None:
            self._selector.statistics.add_stop(seen.stopped_s)
        if self._selector.advance(seen.reports, seen.ranks, ran.assignment):
            self._planned = self._under_assignment()
        if seen.reports is not None and self._default is not None:
            has_other_shapes = self._default.has_other_shapes(seen.reports)
            self._incomparable = self._incomparable + 1 if has_other_shapes else 0
            if ran.block is not None and not has_other_shapes:
                ran.block.add_reports(seen.reports)
        self.wanted = self._with_report(seen)

    def _is_outdated(self, seen: IterationMeasurement, *, profiles_again: bool) -> bool:
        """Return whether to profile again, since instructions take longer or shorter than profiled; that is said once.

        Where iterations can be compared with default clocks, they decide instead: a plan that still saves energy in
        time stays, whatever its instructions take. Inputs of other shapes and a power cap allow no comparison.
        """
        reports = seen.reports
        if reports is None or self._ran.assignment is None or math.isnan(reports.drift):
            return False
        typical, most = self._drift_and_most(reports)
        if not self._drift.has_drifted(typical):
            return False
        self.drifts_by_shape = self._default is not None and self._default.has_shapes_beside(reports)
        is_compared = not (self.drifts_by_shape or self.is_capped)
        is_outdated = profiles_again and not is_compared
        if is_outdated or not self.has_drifted:
            self._recorder.event(Drifted(drift=round(most, 4), profiles_again=is_outdated))
            no_longer_fits = "the plans no longer fit: profile the job as it is now"
            remedy = "the plan stays as long as it saves energy in time" if is_compared else no_longer_fits
            remedy = "profiling again" if is_outdated else remedy
            self._recorder.say(f"instructions take {most:.0%} longer or shorter than profiled; {remedy}")
        self.has_drifted = True
        return is_outdated

    def _drift_and_most(self, reports: JobReport) -> tuple[float, float]:
        """Return how far the pipelines are from the profile: typically, and the one that is farthest.

        Where inputs have other shapes than they had at default clocks, a factor that all instructions have in common
        is not drift: plans stay as good as they were, and what they promise is scaled by it.
        """
        default = self._default
        if default is None or not default.has_shapes_beside(reports):
            self._scale_forecast(1.0)
            return reports.drift, reports.drift_most
        if not math.isnan(reports.pace):
            self._scale_forecast(1.0 if default.varies_in_shape else reports.pace)
        return reports.drift_beside_pace, reports.drift_beside_pace_most

    def _scale_forecast(self, factor: float) -> None:
        """Promise so many times the time and energy of the profile, from the next iteration on."""
        if factor != self._scale:
            self._scale = factor
            self._planned = self._under_assignment()

    def _sample_of_plans(self) -> IterationSample:
        """Return a sample for iterations under the assignment in force, with what it promises."""
        period_s = self._default.counter_period_s if self._default is not None else 0.0
        return IterationSample(period_s, self._selector.in_force.promised_slowdown, self._selector.promised_power)

    def _under_assignment(self) -> NextIteration:
        """Return an iteration by the assignment in force."""
        selector, frontier, assignment = self._selector, self._frontier, self._selector.in_force
        status: dict[str, Any] = {"plan": assignment.plan}
        if self._is_first:
            status = {**assignment.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s}
        if assignment.paused:
            return NextIteration("pause", status=status, progress=selector.state)
        number = selector.plan_of_this_rank()
        return NextIteration(
            "run",
            ClockPlan.of_rank(
                frontier.plans[number], self._topology.pipeline_rank, frontier.instruction_times_s, self._dag
            ),
            plan=number,
            forecast=self._forecast(assignment) if self._is_first else None,
            status=status,
            progress=selector.state,
            halt=Halt(selector.may_go_on, self._add_halt) if assignment.halts else None,
        )

    def _add_halt(self, waited: Waited) -> None:
        if self._is_first:
            self._selector.add_halt(waited.time_s, waited.energy_j)

    def _forecast(self, assignment: Assignment) -> Forecast:
        """Return what default clocks take, as measured in this job or else by the profile, and what the plans promise.

        They promise a slowdown and a power relative to default clocks; that is the same whether these were measured.
        """
        forecast = assignment.forecast(self._frontier, self._topology.tensor_parallel)
        default_s, default_j = forecast.default_time_s, forecast.default_energy_j
        if self._default is not None:
            default_s, default_j = self._scale * self._default.time_s, self._scale * self._default.energy_j
        time_s = default_s * (1 + assignment.promised_slowdown)
        return Forecast(
            time_s=time_s,
            energy_j=time_s * self._selector.promised_power * default_j / default_s,
            default_time_s=default_s,
            default_energy_j=default_j,
            default_measured=self._default is not None and self._scale == 1.0,
        )

    def _with_report(self, seen: IterationMeasurement | None = None) -> NextIteration:
        """Return the next iteration, with what this rank reports of the last one and rank 0 of its decision."""
        knows_times = bool(self._frontier.instruction_times_s)
        looks = knows_times and self._iterations % _DRIFT_EVERY == 0
        will_look = knows_times and (self._iterations + 1) % _DRIFT_EVERY == 0
        later = partial(self._own_times, seen, self._ran.assignment, looks) if seen is not None else dict
        return replace(
            self._planned,
            times="passes" if will_look or self._topology.data_parallel > 1 else "none",
            reported=self._selector.decided.assigned(),
            reported_later=later,
            stretch_factors=self._selector.sent_factors,
        )

    def _own_times(
        self, seen: IterationMeasurement, ran: Assignment | None, looks_for_drift: bool
    ) -> Mapping[str, float]:
        """Return the times that this rank reports of an iteration, where they are asked for."""
        if self._topology.data_parallel == 1 and not looks_for_drift:
            return {}
        spans = seen.spans()
        reported = computed_and_tail_s(spans)
        if looks_for_drift:
            follows = not (seen.failed or ran is None or ran.paused)  # else clocks are not the plan's
            reported |= reported_drift(spans, seen.clock_mhz if follows else {}, self._frontier.instruction_times_s)
        return reported
