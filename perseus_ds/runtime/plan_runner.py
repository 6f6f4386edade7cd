"""This rank under plans: what it wants of the next iteration, what it reports, and what all ranks have learnt."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.rank_report import JobReport, RankReports
from perseus_ds.artifacts.run_records import Drifted, PlanChosen
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.policy.assignment import Assignment, Forecast, PlanChoice
from perseus_ds.policy.decisions import stretched_plan
from perseus_ds.policy.drift import DriftWatch, reported_drift
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.plan_follower import PlanFollower
from perseus_ds.policy.plan_proof import Comparison, IterationSample
from perseus_ds.policy.policies import PowerCapPolicy
from perseus_ds.policy.stragglers import computed_and_tail_s
from perseus_ds.runtime.halting import Halt, Waited
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.job_lines import begin
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration, Resumed
from perseus_ds.runtime.plan_chooser import PlanChooser
from perseus_ds.runtime.plan_orders import InForce, PlanOrders
from perseus_ds.runtime.recorder import Recorder

logger = logging.getLogger("perseus_ds")
_DRIFT_EVERY = 10
_INCOMPARABLE = 30


class PlanRunner:
    """Follows the policy on a frontier, the same on all ranks.

    Attributes:
        wanted: The next iteration.
        drifts_by_shape: Whether instructions have drifted because inputs have other shapes.
        caps_power: Whether the policy in force limits power, as rank 0 has reported it.
    """

    def __init__(
        self,
        job: Job,
        rank: Rank,
        recorder: Recorder,
        control: JobControl,
        *,
        frontier: Frontier,
        default: IterationSample | None = None,
    ) -> None:
        """Decide on the first plan; every rank must do so at once.

        Args:
            job: The job.
            rank: This rank.
            recorder: Of the job.
            control: What the user asks for.
            frontier: The plans.
            default: Iterations of this job at default clocks; None where savings are told by the profile.
        """
        communicator = rank.communicator
        self._topology = topology = communicator.topology
        self._communicator = communicator
        self._recorder = recorder
        self._control = control
        self._frontier = frontier
        gpus_per_rank = communicator.world_size // topology.pipeline_ranks
        self._follower = PlanFollower(frontier, communicator.pipeline_of_rank, gpus_per_rank)
        self._drift = DriftWatch(job.config.max_drift)
        self._has_announced_drift = False
        self.drifts_by_shape = False
        self.caps_power = False
        self._chooser = PlanChooser(rank, recorder, control, frontier, self._follower)
        self._iterations = 0
        self._default = default
        self._sample: IterationSample | None = None
        self._looks = 0
        self._incomparable = 0
        # How many times as long iterations take as profiled, since their inputs have other shapes.
        self._scale = 1.0
        # What the last iteration ran by, of which the reports are on their way.
        self._ran: InForce | None = None
        self._orders = PlanOrders(communicator, frontier, self._follower, self._choice_of(control.progress))
        control.progress = {}
        self._planned = self._under(self._orders.now)
        self.wanted = self._with_report()
        control.problem_of = self._chooser.problem_of
        self._record_assignment()
        recorder.say(begin(self._orders.now.order.plan, len(frontier.plans), self._planned.forecast))

    def resume(self, checkpoint: Resumed) -> None:
        """Go on where a checkpoint was saved; all ranks do so at once."""
        self._ran = self._sample = None
        is_another = self._orders.begin_again(self._choice_of(checkpoint.progress))
        self._control.progress = {}
        if is_another:
            self._change()
        self.wanted = self._with_report()

    def progress_for_other_plans(self) -> dict[str, Any]:
        """Return what stays true of the job when it leaves these plans for those of another profile."""
        return self._follower.state_for_other_plans()

    def _choice_of(self, progress: Mapping[str, Any]) -> Callable[[], PlanChoice]:
        """Take up what a checkpoint kept, on all ranks; return what rank 0 decides by it."""
        plan = None
        try:
            plan = self._follower.restore(progress) if progress else None
        except Exception as error:  # saved by another version, or damaged
            logger.warning("perseus: the checkpoint's progress under plans cannot be read (%r); it is ignored.", error)
        control = self._control
        return lambda: (
            self._chooser.choose(0) if plan is None else PlanChoice(plan, control.paused, control.straggler())
        )

    def advance(self, seen: IterationMeasurement) -> None:
        """Take in an iteration, and what all ranks have reported of the one before; decide on the next one."""
        self._iterations += 1
        ran, self._ran = self._ran, self._orders.now
        if ran is not None:
            self._follower.statistics.add_stop(seen.stopped_s)
        if seen.reports is not None:
            self.caps_power = seen.reports.caps_power
            if ran is not None and not ran.order.paused:
                self._learn(seen.reports, seen.ranks, ran)
            self._add_to_sample(seen.reports, ran)
            if self._orders.take(seen.reports):
                self._change()
        if self._communicator.is_first:
            self._chooser.learn(seen.reports, None if ran is None else ran.order.plan)
            self._orders.decide(self._chooser.choose())
        self.wanted = self._with_report(seen)

    def _learn(self, reports: JobReport, ranks: RankReports | None, ran: InForce) -> None:
        self._follower.learn(reports, ran.order.plan)
        if ranks is not None and ran.assignment is not None:
            self._follower.learn_pipelines(ranks, ran.assignment)

    def has_drifted(self, seen: IterationMeasurement, *, profiles_again: bool) -> bool:
        """Return whether instructions take longer or shorter than profiled, by what all ranks have reported; once."""
        reports = seen.reports
        if reports is None or self._ran is None or math.isnan(reports.drift):
            return False
        typical, most = self._drift_and_most(reports)
        if not self._drift.has_drifted(typical) or self._has_announced_drift:
            return False
        self._has_announced_drift = True
        self.drifts_by_shape = self._default is not None and self._default.has_shapes_beside(reports)
        self._recorder.event(Drifted(drift=round(most, 4), profiles_again=profiles_again))
        remedy = "profiling again" if profiles_again else "the plans no longer fit: profile the job as it is now"
        self._recorder.say(f"instructions take {most:.0%} longer or shorter than profiled; {remedy}")
        return True

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
            self._planned = self._under(self._orders.now)

    @property
    def is_incomparable(self) -> bool:
        """Whether inputs have had other shapes for long than those of the iterations at default clocks."""
        return self._incomparable >= _INCOMPARABLE

    def compare_with(self, default: IterationSample) -> None:
        """Compare iterations from now on with others at default clocks, which have just been measured."""
        self._default = default
        self._sample = self._ran = None
        self._looks = self._incomparable = 0
        self._orders.decided = self._orders.now
        self._planned = self._under(self._orders.now)
        self.wanted = self._with_report()

    def verdict_in_s(self, iteration_s: float) -> float | None:
        """Return about when iterations under the plans can be compared with others at default clocks [s]."""
        return self._sample.remaining_s(iteration_s) if self._sample is not None else None

    def comparison(self, *, until_sure: bool) -> Comparison | None:
        """Return how the iterations under the present plans compare with those at default clocks.

        Args:
            until_sure: Whether to go on with the same iterations as long as the result is within its error.

        Returns:
            None while they are too few, and where no iterations at default clocks were measured.
        """
        sample = self._sample
        if self._default is None or sample is None or sample.looks <= self._looks:
            return None
        self._looks = sample.looks
        comparison = Comparison.of(self._default, sample, self._orders.now.order.promised_slowdown)
        if until_sure and not (comparison.is_sure or comparison.is_late or sample.is_longest):
            return None
        self._sample, self._looks = IterationSample(sample.counter_period_s), 0
        return comparison

    def _add_to_sample(self, reports: JobReport, ran: InForce | None) -> None:
        """Add an iteration to those that are compared with default clocks; all of them run alike, clocks settled."""
        if self._default is None:
            return
        self._incomparable = self._incomparable + 1 if self._default.has_other_shapes(reports) else 0
        if self._incomparable:
            return
        if ran is None or ran.order.number != self._orders.now.order.number or ran.order.paused:
            self._sample = None
        elif self._sample is None:
            self._sample = IterationSample(self._default.counter_period_s)
        else:
            self._sample.add_reports(reports)

    def _change(self) -> None:
        """Run by another assignment from the next iteration on."""
        self._sample = None
        self._looks = 0
        self._planned = self._under(self._orders.now)
        self._record_assignment()

    def _record_assignment(self) -> None:
        if (assignment := self._orders.now.assignment) is not None:
            self._recorder.event(PlanChosen.model_validate(assignment.status()))

    def _under(self, in_force: InForce) -> NextIteration:
        """Return an iteration by an order."""
        frontier, order, assignment = self._frontier, in_force.order, in_force.assignment
        status: dict[str, Any] = {"plan": order.plan}
        if assignment is not None:
            status = {**assignment.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s}
        if order.paused:
            return NextIteration("pause", status=status, progress=self._follower.state)
        number = stretched_plan(frontier, order.plan, order.stretch_factor)
        halt = Halt(self._chooser.lets_go_on, self._add_halt) if order.halts else None
        return NextIteration(
            "run",
            ClockPlan.of_rank(frontier.plans[number], self._topology.pipeline_rank, frontier.instruction_times_s),
            plan=number,
            forecast=self._forecast(assignment) if assignment is not None else None,
            status=status,
            progress=self._follower.state,
            halt=halt,
        )

    def _add_halt(self, waited: Waited) -> None:
        if self._communicator.is_first:
            self._chooser.add_halt(waited)

    def _forecast(self, assignment: Assignment) -> Forecast:
        """Return what these plans take by the profile, and what default clocks took in this job, where measured."""
        forecast = assignment.forecast(self._frontier, self._topology.tensor_parallel)
        if self._default is None:
            return forecast
        return replace(
            forecast,
            time_s=self._scale * forecast.time_s,
            energy_j=self._scale * forecast.energy_j,
            default_time_s=self._scale * self._default.time_s,
            default_energy_j=self._scale * self._default.energy_j,
            default_measured=self._scale == 1.0,
        )

    def _with_report(self, seen: IterationMeasurement | None = None) -> NextIteration:
        """Return the next iteration, with what this rank reports of the last one and rank 0 of its decision."""
        looks = bool(self._frontier.instruction_times_s) and self._iterations % _DRIFT_EVERY == 0
        later = partial(self._own_times, seen, self._ran, looks) if seen is not None else dict
        decided, factors = self._orders.decided.order.as_reported(), self._orders.stretch_factors
        decided = {**decided, "caps_power": isinstance(self._chooser.in_force, PowerCapPolicy)}
        return replace(self._planned, reported=decided, reported_later=later, stretch_factors=factors)

    def _own_times(self, seen: IterationMeasurement, ran: InForce | None, looks_for_drift: bool) -> Mapping[str, float]:
        """Return the times that this rank reports of an iteration, where they are asked for."""
        if self._topology.data_parallel == 1 and not looks_for_drift:
            return {}
        spans = seen.spans()
        reported = computed_and_tail_s(spans)
        if looks_for_drift:
            follows = not (seen.failed or ran is None or ran.order.paused)  # else clocks are not the plan's
            reported |= reported_drift(spans, seen.clock_mhz if follows else {}, self._frontier.instruction_times_s)
        return reported
