"""Training with plans: iterations according to the selector, and their comparison with default clocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_records import Drifted, PlanJudged, changes
from perseus_ds.measures import STALL
from perseus_ds.pipeline.dag import Dag
from perseus_ds.policy.decisions import Forecast
from perseus_ds.policy.plan_proof import IterationSample, PlanComparison, PlanProof, Verdict, error_probability
from perseus_ds.policy.reports import Conditions, JobDrift, rank_drift
from perseus_ds.server.frontiers import keep_for_later_runs
from perseus_ds.server.iterations import NextPhase, Plans, Run, Seen, iteration
from perseus_ds.server.job import Job
from perseus_ds.server.phases import DefaultIterations, ModeContext
from perseus_ds.server.selector import PlanSelector
from perseus_ds.units import plain

_DRIFT_EVERY = 10
_DRIFTS_IN_A_ROW = 2
# Duration of a plan from a file before a comparison. A shorter job is too short for a comparison.
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
    """Reason why there is no verdict on a plan, so that something has to be measured again."""

    PROFILE_OUTDATED = "instructions deviate from the profile, and a comparison is not possible"
    DEFAULT_OUTDATED = "limits of GPUs have changed since default clocks were measured"


def drift_of(job: Job, seen: Seen) -> JobDrift | None:
    """Compare the instructions of an iteration under plans with the profile. None if they were not measured."""
    plans = None if seen.run is None else seen.run.plans
    if plans is None or not plans.frontier.instruction_times_s:
        return None
    pipelines, drifts = [], []
    for rank in job.profiled:
        place, has_failed = job.places[rank], seen.messages[rank].has_failed
        plan = plans.of_pipeline(place.pipeline)
        instructions, clocks_mhz = plan.instructions[place.pipeline_rank], plan.clocks_mhz[place.pipeline_rank]
        if has_failed:
            drift = 0.0
        elif spans := seen.spans(rank):
            clocks = dict(zip(instructions, clocks_mhz, strict=True))
            drift = rank_drift(spans, clocks, plans.frontier.instruction_times_s)
        else:
            continue
        pipelines.append(place.pipeline)
        drifts.append(drift)
    return JobDrift.of(pipelines, drifts) if drifts else None


class PlanRunner:
    """Runs the assignment in force, and compares it with default clocks.

    Attributes:
        has_drifted: Whether instructions were found to deviate from the profile.
    """

    def __init__(
        self,
        context: ModeContext,
        frontier: Frontier,
        *,
        default: DefaultIterations | None = None,
    ) -> None:
        """Decide on the first plan. Without ``default``, savings are relative to the profile."""
        self._context = context
        self._job = context.job
        self._recorder = context.recorder
        self.frontier = frontier
        self.has_drifted = self._profiles_again = False
        # Whether the last comparison kept the plan and the next one is not due, and the number of iterations until
        # then.
        self._is_kept, self._again_in = False, _COMPARED_AGAIN_AFTER
        # The limits of GPUs under which default clocks were measured.
        self._conditions: Conditions = ()
        # Number of consecutive iterations that deviated too far from the profile.
        self._drifted = 0
        self._default: IterationSample | None = None
        # Error probability of each analysis of the current comparison.
        self._probability: float | None = None
        # Whether default clocks have just been measured.
        self._is_fresh = False
        self._turns = 0
        # The block without its first iteration, which begins at the previous clocks.
        self._begun: IterationSample | None = None
        self._compared_plan: int | None = None
        self._dag = Dag.build(context.job.schedule)
        self.selector = PlanSelector(context, frontier)
        if default is not None:
            self.compare_with(default)
        beginning = f"running under plan {self.selector.in_force.plan} of the frontier's {len(frontier.plans)}"
        if (forecast := self._planned().forecast) is not None:
            slower, saved = forecast.time_s / forecast.default_time_s, 1 - forecast.energy_j / forecast.default_energy_j
            beginning += f" (promised {changes(slower - 1, saved)}), against default clocks of this job"
        self._recorder.say(plain(beginning))

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan of the first pipeline, or None while the job is paused."""
        assignment = self.selector.in_force
        return None if assignment.paused else self.frontier.plans[assignment.plans[0]]

    @property
    def default(self) -> IterationSample:
        """The last measured iterations of this job at default clocks."""
        assert self._default is not None, "default clocks are measured first"
        return self._default

    def keep(self, kept: Mapping[str, Any]) -> None:
        """Run the plan that an earlier start of the job has kept, until it is compared again."""
        self._is_kept, self._is_fresh = True, False
        self._again_in = int(kept.get("again_in", _COMPARED_AGAIN_AFTER))

    def _progress(self) -> dict[str, Any]:
        progress = self.selector.state()
        if self._is_kept and self._default is not None:
            sample = self._default
            progress["kept"] = {
                "times_s": [round(time_s, 6) for time_s in sample.times_s],
                "energies_j": [round(energy_j, 6) for energy_j in sample.energies_j],
                "again_in": self._again_in,
            }
        return progress

    def compare_with(self, default: DefaultIterations) -> None:
        self._is_fresh = True
        self._conditions = default.conditions
        self._set_default(default.sample)

    def _set_default(self, default: IterationSample) -> None:
        self._default, self.selector.default_power_w = default, default.power_w

    async def try_out(self) -> None:
        """Train under a plan from a file for about as long as a comparison with default clocks takes.

        The first iterations of a job are slower than later ones, so they cannot be used for a comparison.
        """
        iterations, time_s = 0, 0.0
        while iterations < _TRIAL_ITERATIONS or time_s < _TRIAL_S:
            typical_s = time_s / iterations if iterations else 0.0
            left_s = max(_TRIAL_S - time_s, (_TRIAL_ITERATIONS - iterations) * typical_s)
            seen = await iteration(self._planned(NextPhase("default", left_s)))
            self._add_iteration(seen)
            iterations, time_s = iterations + 1, time_s + seen.time_s

    def apply_cap(self) -> bool:
        """Apply a cap that default clocks would exceed, if there is one. Return whether one is in force."""
        if self.selector.default_clocks_exceed_cap():
            self.selector.decide()
        return self._is_capped

    @property
    def _is_capped(self) -> bool:
        return self.selector.in_force.capped

    async def run_while_kept(self, *, profiles_again: bool = False) -> Verdict | Outcome:
        """Train under the policy's plan until it breaks its promise, and return the verdict that drops it.

        Default clocks must be measured before. If they would exceed a power cap, nothing is compared until the cap has
        ended. If instructions deviate from the profile and a comparison is not possible, this is only reported unless
        the job profiles again.
        """
        self._profiles_again = profiles_again
        while True:
            result: Verdict | Outcome | None
            if self.apply_cap():
                keep_for_later_runs(self._context)
                self._is_fresh = False
                result = (await self._run(math.inf, capped=True)) or Outcome.DEFAULT_OUTDATED
            elif self._is_kept:
                result = await self._run(self._again_in)
                self._is_kept = False
                self._again_in *= 2
            else:
                result = await self._compare()
                if isinstance(result, Verdict) and result.kept:
                    self._again_in = max(self._again_in, math.ceil(_COMPARED_AGAIN_AFTER_S / self.default.time_s))
                    self.say_compared(result, f"compared again in {self._again_in} iterations")
                    keep_for_later_runs(self._context)
                    self._is_kept = True
                    continue
            if result is not None:
                self._again_in = _COMPARED_AGAIN_AFTER
                return result

    async def _compare(self) -> Verdict | Outcome | None:
        """Alternate between default clocks and the policy's plan until there is a verdict.

        There is no verdict if something has to be measured again, or if default clocks would exceed a cap.
        """
        self._probability = self._probability or error_probability(next(self._context.comparisons))
        proof = PlanProof(self._probability)
        if self._is_fresh:
            proof.add(self.default)
        self._is_fresh = False
        while not self._is_capped:
            is_planned, assignment = proof.next_is_planned, self.selector.in_force
            block = self._sample_of_plans() if is_planned else IterationSample(self.default.counter_period_s)
            outcome = await self._add_block(proof.blocks_to_analysis - 1, block, is_planned=is_planned)
            if outcome is not None:
                return outcome
            if is_planned and self.selector.in_force.number != assignment.number:
                continue  # these iterations ran under several plans
            if self._is_capped:
                return None  # the block is cut short
            proof.add(block)
            if proof.verdict is not None:
                self._probability = None
                self._set_default(IterationSample.joined(proof.blocks[::2]))
                return proof.verdict
        return None

    async def _add_block(self, following: int, block: IterationSample, *, is_planned: bool) -> Outcome | None:
        """Run iterations of a block until it is long enough, or until another assignment is in force.

        The last iteration is added while the next block begins. ``following`` is the number of blocks after this one
        until the next analysis.
        """
        begun = self.selector.in_force.number
        is_over, in_s = False, None
        while not (is_over or self._is_capped or (is_planned and self.selector.in_force.number != begun)):
            next_phase = NextPhase("verdict", in_s)
            if is_planned or self.selector.in_force.paused:
                run = self._planned(next_phase, block)
            else:
                run = self._without_plans("default", next_phase, block)
            seen = await iteration(run)
            if outcome := self._add_iteration(seen):
                return outcome
            whole_s = IterationSample(block.counter_period_s).remaining_s(seen.time_s, more=2)
            in_s = block.remaining_s(seen.time_s, more=1) + following * whole_s
            # The last iteration is in progress when the next block begins, unless an analysis is due now.
            is_in_flight = following > 0 and self._begun is block
            is_over = block.is_as_long_as(1, in_flight_s=seen.time_s if is_in_flight else 0.0)
        return None

    async def _run(self, iterations: float, *, capped: bool = False) -> Outcome | None:
        """Train under the policy's plan for a number of iterations, or until it breaks its promise.

        With a power cap that default clocks would exceed, nothing is compared. Returns when such a cap begins or ends.
        """
        watched, number = self._sample_of_plans(), self.selector.in_force.number
        while iterations > 0 and self._is_capped is capped:
            assignment = self.selector.in_force
            if assignment.number != number:
                watched, number = self._sample_of_plans(), assignment.number
            is_watched = not capped and not assignment.paused
            seen = await iteration(self._planned(block=watched if is_watched else None))
            if outdated := self._add_iteration(seen):
                return outdated
            iterations -= not assignment.paused
            if watched.is_as_long_as(_WATCHED_BLOCKS):
                comparison = PlanComparison.of_samples(self.default, watched)
                if comparison.is_in_doubt:
                    return None
                watched = self._sample_of_plans()
        return None

    def speed_up(self, verdict: Verdict) -> bool:
        """Try a faster plan after one that takes longer than promised. Return True if there is one."""
        self._turns += 1
        if not verdict.is_late or self._turns >= _MOST_TURNS:
            return False
        if not self.selector.speed_up(verdict.comparison.late):
            return False
        self.selector.decide()
        self.say_compared(verdict, "a faster plan is tried next")
        return True

    def drop(self, verdict: Verdict, then: str) -> None:
        """Drop a plan for some time. It, or another policy's plan, may save energy later."""
        self.say_compared(verdict, then)
        self.selector.return_to_policy()
        self._turns = 0

    def say_compared(self, verdict: Verdict, then: str) -> None:
        """Print and record how the plan compares with default clocks, and what follows."""
        figures = asdict(verdict.comparison)
        figures["slowdown_error"], figures["saved_error"] = verdict.comparison.stated_errors
        figures = {name: round(value, 5) for name, value in figures.items() if name != "freedom"}
        decided = {"kept": verdict.kept, "reason": verdict.reason, "then": then}
        plan = self._compared_plan if self._compared_plan is not None else self.selector.in_force.plan
        self._recorder.announce(
            PlanJudged.model_validate({"plan": plan, "order": self._job.order, **decided, **figures})
        )

    def _add_iteration(self, seen: Seen) -> Outcome | None:
        """Process an iteration, decide on the following ones, and return why plans are outdated, if they are."""
        run = seen.run
        self.selector.learn(seen)
        outcome = self._outdated(seen)
        self.selector.decide()
        if self._default is not None:
            block = run.block if run is not None else None
            if block is not None and block is not self._begun:
                self._begun = block  # the first iteration begins at the previous clocks
            elif block is not None:
                block.add_reports(seen.reports)
                if run is not None and run.plan is not None:
                    self._compared_plan = run.plan
        return outcome

    def _outdated(self, seen: Seen) -> Outcome | None:
        """Return why these plans are outdated, if they are. Print once that instructions have drifted.

        If iterations can be compared with default clocks, the comparison decides instead: a plan that still saves
        energy and is in time is kept, regardless of its instruction times. With a power cap, a comparison is not
        possible.
        """
        if seen.conditions != self._conditions and not self._is_capped:
            return Outcome.DEFAULT_OUTDATED
        drift = seen.drift
        if drift is None:
            return None
        self._drifted = self._drifted + 1 if drift.typical > self._job.config.max_drift else 0
        if self._drifted < _DRIFTS_IN_A_ROW:
            return None
        is_compared = not self._is_capped
        is_outdated = self._profiles_again and not is_compared
        if is_outdated or not self.has_drifted:
            if is_outdated:
                then = "profiling again"
            elif is_compared:
                then = "the plan is kept unless a comparison with default clocks drops it"
            else:
                then = "the plans no longer fit: profile the job as it is now"
            self._recorder.announce(Drifted(drift=round(drift.most, 4), then=then))
        self.has_drifted = True
        return Outcome.PROFILE_OUTDATED if is_outdated else None

    def _sample_of_plans(self) -> IterationSample:
        period_s = self._default.counter_period_s if self._default is not None else 0.0
        return IterationSample(
            period_s, self.selector.in_force.promised_slowdown, self.selector.in_force.promised_power
        )

    def _without_plans(self, phase: str, next_phase: NextPhase | None, block: IterationSample | None) -> Run:
        frontier = self.frontier
        detects_stragglers = (self._job.info.data_parallel or 1) > 1
        return Run(
            phase,
            times="ends" if detects_stragglers else "none",
            next_phase=next_phase,
            status={**self.selector.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s},
            progress=self._progress,
            block=block,
        )

    def _planned(self, next_phase: NextPhase | None = None, block: IterationSample | None = None) -> Run:
        assignment = self.selector.in_force
        if assignment.paused:
            return self._without_plans("pause", next_phase, block)
        run = self._without_plans("run", next_phase, block)
        return replace(
            run,
            plans=Plans(self.frontier, assignment, self._dag),
            plan=assignment.plans[self._job.places[0].pipeline],
            forecast=self._forecast(),
            times="passes",
            every=_DRIFT_EVERY,
            otherwise=run.times,
        )

    def _forecast(self) -> Forecast:
        """Return time and energy at default clocks, and those that the plans promise.

        Default clocks are measured in this job or predicted from the profile. The slowdown and power that plans promise
        relative to them do not depend on this.
        """
        assignment = self.selector.in_force
        forecast = assignment.forecast(self.frontier, self._job.info.tensor_parallel or 1)
        default_s, default_j = forecast.default_time_s, forecast.default_energy_j
        typical_s = default_s
        if self._default is not None:
            mean, typical_s = self._default.mean, self._default.time_s
            default_s, default_j = mean.time_s, mean.energy_j or 0.0
        time_s = default_s * (1 + assignment.promised_slowdown)
        return Forecast(
            time_s=time_s,
            energy_j=time_s * assignment.promised_power * default_j / default_s,
            default_time_s=default_s,
            default_energy_j=default_j,
            stall_s=STALL * typical_s * (1 + assignment.promised_slowdown),
            default_measured=self._default is not None,
            is_refuted=self._default is None and self._drifted > 0,
        )
