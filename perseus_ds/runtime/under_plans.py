"""Training with plans: iterations according to the selector, and their comparison with default clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_records import Drifted, PlanJudged, changes
from perseus_ds.pipeline.dag import Dag
from perseus_ds.policy.decisions import Assignment, Forecast
from perseus_ds.policy.plan_proof import IterationSample, PlanComparison, PlanProof, Verdict, error_probability
from perseus_ds.policy.reports import Conditions, DriftWatch, JobReport, computed_and_tail_s, reported_drift
from perseus_ds.policy.selector import PlanSelector
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.default_clocks import DefaultIterations
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration, NextPhase, Phase
from perseus_ds.runtime.job import ModeContext
from perseus_ds.runtime.look_ahead import Outlook
from perseus_ds.units import plain

_DRIFT_EVERY = 10
_INCOMPARABLE = 30
# Duration of a plan from elsewhere before a comparison. A shorter job is too short for a comparison.
_TRIAL_ITERATIONS = 8
_TRIAL_S = 20.0
# Number of blocks with a plan that are compared with earlier default clocks, to detect a plan that becomes late.
_WATCHED_BLOCKS = 4
# Number of iterations after which a kept plan is compared again for the first time, and minimum time [s].
_COMPARED_AGAIN_AFTER = 500
_COMPARED_AGAIN_AFTER_S = 120.0
# Maximum number of plans that are tried one after the other.
_MOST_TURNS = 3


class Outcome(Enum):
    """Reason why there is no verdict on a plan, so that something has to be measured again.

    Attributes:
        PROFILE_OUTDATED: Instructions deviate from the profile, and a comparison is not possible.
        DEFAULT_OUTDATED: Since default clocks were measured, shapes of inputs or limits of GPUs have changed.
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
        selector: Decides on the assignment.
        profiles_again: Whether to end, so that the job profiles again, if instructions deviate from the profile and a
            comparison is not possible. Otherwise the deviation is only reported.
        has_drifted: Whether instructions were found to deviate from the profile.
        drifts_by_shape: Whether the reason is another shape of inputs.
    """

    def __init__(
        self,
        context: ModeContext,
        frontier: Frontier,
        *,
        default: DefaultIterations | None = None,
        by_length: bool = False,
    ) -> None:
        """Decide on the first plan; every rank must do so at once.

        Args:
            context: Context of the mode.
            frontier: The plans.
            default: Iterations of this job at default clocks; None where savings are relative to the profile.
            by_length: Whether each iteration runs a plan for the lengths given, or else default clocks.
        """
        self._communicator = context.rank.communicator
        self._topology = self._communicator.topology
        self._is_first = self._communicator.is_rank_0
        self._recorder = context.recorder
        self._control = context.control
        self._frontier = frontier
        self.profiles_again = False
        # Whether the last comparison kept the plan and the next one is not due, and the number of iterations until
        # then.
        self._is_kept, self._again_in = False, _COMPARED_AGAIN_AFTER
        # The limits of GPUs under which default clocks were measured.
        self._conditions: Conditions = () if default is None else default.conditions
        self._drift = DriftWatch(context.job.config.max_drift)
        self.has_drifted = False
        self.drifts_by_shape = False
        self._iterations = 0
        self._default = None if default is None else default.sample
        self._comparisons = context.comparisons
        self._look_ahead, self._by_length = context.look_ahead, by_length
        self._order = context.order
        self._kind = {"order": context.order, "shape": context.shape}
        # With which the comparison that goes on may err at each of its analyses.
        self._probability: float | None = None
        # Whether default clocks have just been measured.
        self._is_fresh = default is not None
        self._incomparable = 0
        self._turns = 0
        # Ratio of iteration times to the profile, because inputs have other shapes.
        self._scale = 1.0
        # Of the last iteration, whose reports are on their way.
        self._ran = _Ran()
        self._dag = Dag.build(context.job.schedule)
        self.selector = PlanSelector(
            self._communicator,
            frontier,
            self._control,
            timebase=context.rank.timebase,
            record=self._recorder.event,
            say=self._recorder.say,
            kind=(context.order, context.shape),
        )
        if default is not None:
            self.selector.default_power_w = default.sample.power_w
        self._planned = self._under_assignment()
        self._reported = self._report()
        beginning = f"running under plan {self.selector.in_force.plan} of the frontier's {len(frontier.plans)}"
        if (forecast := self._planned.forecast) is not None:
            slower, saved = forecast.time_s / forecast.default_time_s, 1 - forecast.energy_j / forecast.default_energy_j
            beginning += f" (promised {changes(slower - 1, saved)}), against default clocks of this job"
        self._recorder.say(plain(beginning))

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan of this rank's pipeline; None while it is paused."""
        return self._planned.clocks.plan

    @property
    def default(self) -> IterationSample:
        """Last measured iterations of this job at default clocks."""
        assert self._default is not None, "default clocks are measured first"
        return self._default

    def compare_with(self, default: DefaultIterations) -> None:
        """Compare iterations from now on with others at default clocks, which have just been measured."""
        self._is_fresh = True
        self._ran, self._incomparable = _Ran(), 0
        self._conditions = default.conditions
        self._set_default(default.sample)

    def _set_default(self, default: IterationSample) -> None:
        self._default, self.selector.default_power_w = default, default.power_w
        self._run_assignment()

    def try_out(self) -> Phase[None]:
        """Train under a plan from elsewhere for about as long as a comparison with default clocks takes.

        The first iterations of a job are slower than later ones, so they cannot be used for a comparison.
        """
        iterations, time_s = 0, 0.0
        while iterations < _TRIAL_ITERATIONS or time_s < _TRIAL_S:
            typical_s = time_s / iterations if iterations else 0.0
            left_s = max(_TRIAL_S - time_s, (_TRIAL_ITERATIONS - iterations) * typical_s)
            seen = yield from self._one_iteration(NextPhase("default", left_s))
            self._outdated(seen)
            self._advance(seen)
            if seen.reports is not None:
                iterations, time_s = iterations + 1, time_s + seen.reports.time_s

    def would_be_capped(self) -> bool:
        """Whether default clocks would draw more than the cap that is asked for now; only rank 0 knows."""
        return self._is_first and self.selector.would_be_capped()

    def becomes_capped(self) -> bool:
        """Bring a cap that default clocks would exceed into force at once, if there is one; the same on all ranks."""
        if not self._communicator.computed_on_rank_0(self.would_be_capped):
            return False
        if self.selector.resume():
            self._run_assignment()
        return self._is_capped

    @property
    def _is_capped(self) -> bool:
        """True if default clocks would exceed the cap in force. Then all iterations run with plans."""
        return self.selector.in_force.capped

    def run_while_kept(self, when_kept: Callable[[], None] = lambda: None) -> Phase[Verdict | Outcome]:
        """Train under the policy's plan for as long as it keeps its promise; default clocks have just been measured.

        If default clocks would exceed a power cap, nothing is compared until the cap has ended.

        Args:
            when_kept: Called each time a comparison keeps the plan.

        Returns:
            The verdict that drops the plan, or the reason why there is none and something has to be measured again.
        """
        while True:
            result: Verdict | Outcome | None
            if self.becomes_capped():
                when_kept()
                self._is_fresh = False
                result = (yield from self._run(math.inf, capped=True)) or Outcome.DEFAULT_OUTDATED
            elif self._is_kept:
                result = yield from self._run(self._again_in)
                self._is_kept = False
                self._again_in *= 2
            else:
                result = yield from self._compare()
                if isinstance(result, Verdict) and result.kept:
                    self._again_in = max(self._again_in, math.ceil(_COMPARED_AGAIN_AFTER_S / self.default.time_s))
                    self.say_compared(result, f"compared again in {self._again_in} iterations")
                    when_kept()
                    self._is_kept = True
                    continue
            if result is not None:
                self._again_in = _COMPARED_AGAIN_AFTER
                return result

    def _compare(self) -> Phase[Verdict | Outcome | None]:
        """Train by turns at default clocks and under the policy's plan until it is known whether it keeps its promise.

        There is no verdict if something has to be measured again, or if default clocks would exceed a cap.
        """
        self._probability = self._probability or error_probability(next(self._comparisons))
        proof = PlanProof(self._probability)
        if self._is_fresh:
            proof.add(self.default)
        self._is_fresh = False
        while not self._is_capped:
            is_planned, assignment = proof.next_is_planned, self.selector.in_force
            block = self._sample_of_plans() if is_planned else IterationSample(self.default.counter_period_s)
            outcome = yield from self._add_block(proof.blocks_to_analysis - 1, block, is_planned=is_planned)
            if outcome is not None:
                return outcome
            if is_planned and self.selector.in_force.number != assignment.number:
                continue  # these iterations ran under several plans
            if self._is_capped:
                return None  # the block is cut short
            is_analysed = proof.blocks_to_analysis == 1
            proof.add(block)
            if is_analysed:  # by rank 0, as others may round differently
                verdict = self._communicator.computed_on_rank_0(lambda: proof.verdict)
                if verdict is not None:
                    self._probability = None
                    self._set_default(IterationSample.joined(proof.blocks[::2]))
                    return verdict
        return None

    def _add_block(self, following: int, block: IterationSample, *, is_planned: bool) -> Phase[Outcome | None]:
        """Run iterations of a block until they are enough, or another assignment is in force.

        The iterations are added to it, the last one while the next block begins; so many blocks follow it until the
        next analysis.
        """
        begun = self.selector.in_force.number
        is_settled, is_over, in_s = False, False, None
        while not (is_over or self._is_capped or (is_planned and self.selector.in_force.number != begun)):
            seen = yield from self._one_iteration(NextPhase("verdict", in_s), at_default=not is_planned)
            if outdated := self._outdated(seen):
                return outdated
            # The first iteration begins at the clocks before.
            self._advance(seen, block if is_settled else None, at_default=not is_planned)
            is_settled = not self.selector.in_force.paused
            if seen.reports is not None:
                whole_s = IterationSample(block.counter_period_s).remaining_s(seen.reports.time_s, more=2)
                in_s = block.remaining_s(seen.reports.time_s, more=1) + following * whole_s
                # The report of the last iteration comes in time for the analysis, unless that is due now.
                is_in_flight = following > 0 and self._ran.block is block
                is_over = block.is_as_long_as(1, in_flight_s=seen.reports.time_s if is_in_flight else 0.0)
            if self._incomparable >= _INCOMPARABLE:
                return Outcome.DEFAULT_OUTDATED
        return None

    def _run(self, iterations: float, *, capped: bool = False) -> Phase[Outcome | None]:
        """Train under the plan that the policy asks for, for so many iterations or until it breaks its promise.

        With a power cap that default clocks would exceed, nothing is compared. It ends when such a cap begins or ends.
        """
        watched, number = self._sample_of_plans(), -1
        while iterations > 0 and self._is_capped is capped:
            seen = yield from self._one_iteration()
            if outdated := self._outdated(seen):
                return outdated
            assignment = self.selector.in_force
            is_settled, number = assignment.number == number, assignment.number
            if not is_settled:
                watched = self._sample_of_plans()
            is_watched = is_settled and not capped and not assignment.paused
            self._advance(seen, watched if is_watched else None)
            iterations -= not assignment.paused
            if watched.is_as_long_as(_WATCHED_BLOCKS):
                comparison = PlanComparison.of_samples(self.default, watched)
                if comparison.is_in_doubt:
                    return None
                watched = self._sample_of_plans()
        return None

    def hurry(self, verdict: Verdict) -> bool:
        """Try a faster plan after one that takes longer than promised. Return True if there is one."""
        self._turns += 1
        if not verdict.is_late or self._turns >= _MOST_TURNS:
            return False
        if not self._communicator.computed_on_rank_0(lambda: self.selector.hurry(verdict.comparison.late)):
            return False
        self.say_compared(verdict, "a faster plan has its turn")
        return True

    def drop(self, verdict: Verdict, then: str) -> None:
        """Drop a plan for some time. It, or another policy's plan, may save energy later."""
        self.say_compared(verdict, then)
        self.selector.do_not_hurry()
        self._turns = 0

    def say_compared(self, verdict: Verdict, then: str) -> None:
        """Say and record how the plan compares with default clocks, and what follows."""
        figures = asdict(verdict.comparison)
        figures["slowdown_error"], figures["saved_error"] = verdict.comparison.stated_errors
        figures = {name: round(value, 5) for name, value in figures.items() if name != "freedom"}
        decided = {"kept": verdict.kept, "reason": verdict.reason, "then": then}
        self._recorder.announce(
            PlanJudged.model_validate({"plan": self._planned.plan, **self._kind, **decided, **figures})
        )

    def _one_iteration(
        self, next_phase: NextPhase | None = None, *, at_default: bool = False
    ) -> Phase[IterationMeasurement]:
        """Run one iteration as it is wanted; a checkpoint that is resumed before it may change what is wanted."""
        while True:
            wanted = {**self._reported, "next_phase": next_phase}
            if at_default and not self.selector.in_force.paused:
                wanted |= {"phase": "default", "clocks": ClockPlan(), "plan": None, "forecast": None, "by_length": None}
            received = yield replace(self._planned, **wanted)
            if isinstance(received, IterationMeasurement):
                return received
            self._control.progress = received
            self._ran = _Ran()
            if self.selector.resume():
                self._planned = self._under_assignment()
            self._reported = self._report()

    def _advance(
        self, seen: IterationMeasurement, block: IterationSample | None = None, *, at_default: bool = False
    ) -> None:
        """Take in an iteration, and the reports of all ranks of the one before; decide on the next one."""
        self._iterations += 1
        ran, self._ran = self._ran, _Ran(None if at_default else self.selector.in_force, block)
        is_planned = seen.reports is None or seen.reports.planned
        if self._by_length and ran.assignment is not None and not is_planned:
            ran = _Ran()  # at least one rank had no plan for these lengths in time
        if ran.assignment is not None:
            self.selector.statistics.add_stop(seen.stopped_s)
        if self.selector.advance(seen.reports, seen.ranks, ran.assignment):
            self._planned = self._under_assignment()
        if seen.reports is not None and self._default is not None:
            has_other_shapes = self._default.has_other_shapes(seen.reports)
            self._incomparable = self._incomparable + 1 if has_other_shapes else 0
            if ran.block is not None and not has_other_shapes:
                ran.block.add_reports(seen.reports)
        self._reported = self._report(seen)

    def _outdated(self, seen: IterationMeasurement) -> Outcome | None:
        """Return why these plans are of no more use, if they are not; say once that instructions have drifted.

        If iterations can be compared with default clocks, the comparison decides instead: a plan that still saves
        energy in time is kept, whatever its instructions take. With inputs of other shapes or a power cap, a comparison
        is not possible.
        """
        reports = seen.reports
        if reports is None:
            return None
        if reports.conditions != self._conditions and not self._is_capped:
            return Outcome.DEFAULT_OUTDATED
        if self._ran.assignment is None or math.isnan(reports.drift):
            return None
        typical, most = self._drift_and_most(reports)
        if not self._drift.has_drifted(typical):
            return None
        self.drifts_by_shape = self._default is not None and self._default.has_shapes_beside(reports)
        is_compared = not (self.drifts_by_shape or self._is_capped)
        is_outdated = self.profiles_again and not is_compared
        if is_outdated or not self.has_drifted:
            no_longer_fits = "the plans no longer fit: profile the job as it is now"
            then = "the plan stays as long as it saves energy in time" if is_compared else no_longer_fits
            self._recorder.announce(Drifted(drift=round(most, 4), then="profiling again" if is_outdated else then))
        self.has_drifted = True
        return Outcome.PROFILE_OUTDATED if is_outdated else None

    def _drift_and_most(self, reports: JobReport) -> tuple[float, float]:
        """Return the typical and the largest deviation of the pipelines from the profile.

        If inputs have other shapes than at default clocks, a factor that all instructions have in common is not drift:
        plans are kept, and their promise is multiplied by this factor.
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
        """Return a sample for iterations with the assignment in force, with its promise."""
        period_s = self._default.counter_period_s if self._default is not None else 0.0
        return IterationSample(
            period_s, self.selector.in_force.promised_slowdown, self.selector.in_force.promised_power
        )

    def _run_assignment(self) -> None:
        """Have the next iteration run by the assignment in force."""
        self._planned = self._under_assignment()
        self._reported = self._report()

    def _under_assignment(self) -> NextIteration:
        """Return an iteration by the assignment in force."""
        selector, frontier, assignment = self.selector, self._frontier, self.selector.in_force
        status: dict[str, Any] = {"plan": assignment.plan}
        if self._is_first:
            status = {**selector.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s}
        if assignment.paused:
            return NextIteration("pause", status=status, progress=selector.state)
        number = selector.plan_of_this_rank()
        if self._by_length and self._is_first:
            fastest = frontier.plans[min(assignment.plans)]
            self._look_ahead.set_slowdown(self._order, fastest.time_s / frontier.t_min_s - 1)
        return NextIteration(
            "run",
            ClockPlan.of_rank(
                frontier.plans[number], self._topology.pipeline_rank, frontier.instruction_times_s, self._dag
            ),
            plan=number,
            forecast=self._forecast(assignment) if self._is_first else None,
            status=status,
            progress=selector.state,
            by_length=self._of_lengths if self._by_length else None,
        )

    def _of_lengths(self, planned: NextIteration, known: Outlook | None) -> NextIteration:
        """Return an iteration under the plan for its lengths; at default clocks without one."""
        if known is None or known.plan is None or known.order != self._order:
            return replace(planned, phase="observe", clocks=ClockPlan(), plan=None, forecast=None)
        found, rank = known.plan.pipelines[self._topology.data_parallel_rank], self._topology.pipeline_rank
        plan = FrequencyPlan(self._frontier.instructions, found.clocks_mhz, found.time_s, found.energy_j)
        clocks = replace(ClockPlan.of_rank(plan, rank), spans_s=found.spans_s[rank])
        forecast = planned.forecast
        if forecast is not None:
            default_s = known.plan.relative_time * forecast.default_time_s
            default_j = known.plan.relative_energy * forecast.default_energy_j
            forecast = Forecast(
                time_s=(1 + known.plan.slowdown) * default_s,
                energy_j=(1 - known.plan.saved) * default_j,
                default_time_s=default_s,
                default_energy_j=default_j,
            )
        return replace(planned, clocks=clocks, forecast=forecast)

    def _forecast(self, assignment: Assignment) -> Forecast:
        """Return what default clocks take, as measured in this job or else by the profile, and what the plans promise.

        Plans promise a slowdown and a power relative to default clocks, which do not depend on the source of the
        latter.
        """
        forecast = assignment.forecast(self._frontier, self._topology.tensor_parallel)
        default_s, default_j = forecast.default_time_s, forecast.default_energy_j
        if self._default is not None:
            default_s, default_j = self._scale * self._default.time_s, self._scale * self._default.energy_j
        time_s = default_s * (1 + assignment.promised_slowdown)
        return Forecast(
            time_s=time_s,
            energy_j=time_s * assignment.promised_power * default_j / default_s,
            default_time_s=default_s,
            default_energy_j=default_j,
            default_measured=self._default is not None and self._scale == 1.0,
        )

    def _report(self, seen: IterationMeasurement | None = None) -> dict[str, Any]:
        """Return what this rank reports of the last iteration and rank 0 of its decision, for the next one to carry."""
        # Passes of different lengths are no stragglers and have not drifted.
        knows_times = bool(self._frontier.instruction_times_s) and not self._by_length
        looks = knows_times and self._iterations % _DRIFT_EVERY == 0
        will_look = knows_times and (self._iterations + 1) % _DRIFT_EVERY == 0
        later = partial(self._own_times, seen, self._ran.assignment, looks) if seen is not None else dict
        return {
            "times": "passes" if will_look or self._compares_pipelines else "none",
            "reported": later,
            "decided": self.selector.decided,
        }

    @property
    def _compares_pipelines(self) -> bool:
        return self._topology.data_parallel > 1 and not self._by_length

    def _own_times(
        self, seen: IterationMeasurement, ran: Assignment | None, looks_for_drift: bool
    ) -> Mapping[str, float]:
        """Return the times that this rank reports of an iteration, where they are asked for."""
        if not (self._compares_pipelines or looks_for_drift):
            return {}
        spans = seen.spans()
        reported = computed_and_tail_s(spans)
        if looks_for_drift:
            follows = not (seen.failed or ran is None or ran.paused)  # else clocks are not the plan's
            reported |= reported_drift(spans, seen.clock_mhz if follows else {}, self._frontier.instruction_times_s)
        return reported
