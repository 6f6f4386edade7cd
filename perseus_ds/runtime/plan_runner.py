"""This rank under plans: what it wants of the next iteration, what it reports, and what all ranks have learnt."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.rank_report import RankReports
from perseus_ds.artifacts.run_records import Drifted, PlanChosen
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.policy.assignment import Assignment, Forecast, PlanChoice
from perseus_ds.policy.drift import DriftWatch, reported_drift
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.plan_follower import PlanFollower
from perseus_ds.policy.plan_proof import Comparison, IterationSample
from perseus_ds.policy.policies import PolicyConfig
from perseus_ds.policy.stragglers import computed_and_tail_s
from perseus_ds.runtime.halting import Halt, Waited
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.job_lines import begin
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration, Resumed
from perseus_ds.runtime.plan_chooser import PlanChooser
from perseus_ds.runtime.recorder import Recorder

logger = logging.getLogger("perseus_ds")
_DRIFT_EVERY = 10
_INCOMPARABLE = 30


class PlanRunner:
    """Follows the policy on a frontier, the same on all ranks.

    Attributes:
        wanted: The next iteration.
        drifts_by_shape: Whether instructions have drifted because inputs have other shapes.
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
        topology = communicator.topology
        self._topology = topology
        self._communicator = communicator
        self._recorder = recorder
        self._control = control
        self._frontier = frontier
        gpus_per_rank = communicator.world_size // topology.pipeline_ranks
        self._follower = PlanFollower(frontier, communicator.all_gather(topology.data_parallel_rank), gpus_per_rank)
        self._drift = DriftWatch(job.config.max_drift)
        self._has_announced_drift = False
        self.drifts_by_shape = False
        self._chooser = PlanChooser(rank, recorder, control, frontier, self._follower)
        self._iterations = 0
        self._default = default
        self._sample: IterationSample | None = None
        self._looks = 0
        self._incomparable = 0
        # How many times as long iterations take as profiled, since their inputs have other shapes.
        self._scale = 1.0
        # The last iteration's assignment, of which the reports are on their way.
        self._ran: Assignment | None = None
        choice = communicator.from_first(self._choice_of(control.progress))
        control.progress = {}
        self._assignment = self._follower.assign(choice)
        self._planned = self._under(self._assignment)
        self.wanted = self._with_report(choice)
        control.problem_of = self._chooser.problem_of
        recorder.event(PlanChosen.model_validate(self._assignment.status()))
        recorder.say(begin(choice.plan, len(frontier.plans), self._planned.forecast))

    def resume(self, checkpoint: Resumed) -> None:
        """Go on where a checkpoint was saved; all ranks do so at once."""
        self._ran = self._sample = None
        choice = self._communicator.from_first(self._choice_of(checkpoint.progress))
        self._control.progress = {}
        self._change(choice)
        self.wanted = self._with_report(choice)

    def progress_for_other_plans(self) -> dict[str, Any]:
        """Return what stays true of the job when it leaves these plans for those of another profile."""
        return self._follower.state_for_other_plans()

    def _choice_of(self, progress: Mapping[str, Any]) -> Callable[[], PlanChoice]:
        """Take up what a checkpoint kept, on all ranks; return what rank 0 decides by it."""
        plan = None
        try:
            plan = self._follower.restore(progress) if progress else None
        except (KeyError, TypeError, ValueError) as error:  # saved by another version
            logger.warning("perseus: the checkpoint's progress under plans cannot be read (%r); it is ignored.", error)
        control = self._control
        return lambda: (
            self._chooser.choose(0) if plan is None else PlanChoice(plan, control.paused, control.straggler())
        )

    def advance(self, seen: IterationMeasurement) -> None:
        """Take in an iteration, and what all ranks have reported of the one before; decide on the next one."""
        self._iterations += 1
        ran, self._ran = self._ran, self._assignment
        if ran is not None:
            self._follower.statistics.add_stop(seen.stopped_s)
        if seen.reports is not None:
            if ran is not None:
                self._follower.learn(seen.reports, ran)
            self._add_to_sample(seen.reports, ran)
            self._change(PlanChoice.from_report(seen.reports.of_rank_0))
        choice = PlanChoice(0)
        if self._communicator.is_first:
            self._chooser.learn(seen.reports, ran)
            choice = self._chooser.choose()
        self.wanted = self._with_report(choice, seen)

    def has_drifted(self, seen: IterationMeasurement, *, profiles_again: bool) -> bool:
        """Return whether instructions take longer or shorter than profiled, by what all ranks have reported; once."""
        if seen.reports is None or self._ran is None or math.isnan(seen.reports.of_rank_0.drift):
            return False
        pipelines = self._drift_by_pipeline(seen.reports)
        if not self._drift.has_drifted(pipelines) or self._has_announced_drift:
            return False
        self._has_announced_drift = True
        self.drifts_by_shape = self._default is not None and self._default.has_shapes_beside(seen.reports)
        drift = max(pipelines)
        self._recorder.event(Drifted(drift=round(drift, 4), profiles_again=profiles_again))
        remedy = "profiling again" if profiles_again else "the plans no longer fit: profile the job as it is now"
        self._recorder.say(f"instructions take {drift:.0%} longer or shorter than profiled; {remedy}")
        return True

    def _drift_by_pipeline(self, reports: RankReports) -> list[float]:
        """Return how far the pipelines are from the profile.

        Where inputs have other shapes than they had at default clocks, a factor that all instructions have in common
        is not drift: plans stay as good as they were, and what they promise is scaled by it.
        """
        default = self._default
        if default is None or not default.has_shapes_beside(reports):
            self._scale_forecast(1.0)
            return self._follower.by_pipeline(reports.column("drift"))
        low, high = reports.column("pace_low"), reports.column("pace_high")
        known = low > 0
        if not known.any():
            return self._follower.by_pipeline(np.zeros_like(low))
        common = float(np.median(np.sqrt(low[known] * high[known])))
        self._scale_forecast(1.0 if default.varies_in_shape else common)
        far = np.where(known, np.maximum(high / common - 1, 1 - low / common), 0.0)
        return self._follower.by_pipeline(far)

    def _scale_forecast(self, factor: float) -> None:
        """Promise so many times the time and energy of the profile, from the next iteration on."""
        if factor != self._scale:
            self._scale = factor
            self._planned = self._under(self._assignment)

    @property
    def is_incomparable(self) -> bool:
        """Whether inputs have had other shapes for long than those of the iterations at default clocks."""
        return self._incomparable >= _INCOMPARABLE

    def compare_with(self, default: IterationSample) -> None:
        """Compare iterations from now on with others at default clocks, which have just been measured."""
        self._default = default
        self._sample = self._ran = None
        self._looks = self._incomparable = 0
        self._planned = self._under(self._assignment)
        self.wanted = self._with_report(self._assignment.choice)

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
        by_profile = self._assignment.forecast(self._frontier, self._topology.tensor_parallel)
        comparison = Comparison.of(self._default, sample, by_profile.time_s / by_profile.default_time_s - 1)
        if until_sure and not (comparison.is_sure or comparison.is_late or sample.is_longest):
            return None
        self._sample, self._looks = IterationSample(sample.counter_period_s), 0
        return comparison

    def of_policy(self, decide: Callable[[PolicyConfig], bool]) -> bool:
        """Return what rank 0's policy decides; every rank must ask at once."""
        return self._communicator.from_first(lambda: decide(self._chooser.in_force))

    def _add_to_sample(self, reports: RankReports, ran: Assignment | None) -> None:
        """Add an iteration to those that are compared with default clocks; all of them run alike, clocks settled."""
        if self._default is None:
            return
        self._incomparable = self._incomparable + 1 if self._default.has_other_shapes(reports) else 0
        if self._incomparable:
            return
        if ran is None or ran != self._assignment or ran.choice.paused:
            self._sample = None
        elif self._sample is None:
            self._sample = IterationSample(self._default.counter_period_s)
        else:
            self._sample.add_reports(reports)

    def _change(self, choice: PlanChoice) -> None:
        """Give every pipeline its plan, from the next iteration on."""
        assignment = self._follower.assign(choice)
        if assignment != self._assignment:
            self._assignment = assignment
            self._sample = None
            self._looks = 0
            self._planned = self._under(assignment)
            self._recorder.event(PlanChosen.model_validate(assignment.status()))

    def _under(self, assignment: Assignment) -> NextIteration:
        """Return an iteration under these plans."""
        frontier = self._frontier
        status = {**assignment.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s}
        if assignment.choice.paused:
            return NextIteration("pause", status=status, progress=self._follower.state)
        number = assignment.plans[self._topology.data_parallel_rank]
        halt = Halt(self._chooser.lets_go_on, self._add_halt) if assignment.choice.halts else None
        return NextIteration(
            "run",
            ClockPlan.of_rank(frontier.plans[number], self._topology.pipeline_rank, frontier.instruction_times_s),
            plan=number,
            forecast=self._forecast(assignment),
            status=status,
            progress=self._follower.state,
            halt=halt,
        )

    def _add_halt(self, waited: Waited) -> None:
        self._ended_s = None  # what it took is no time between iterations
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

    def _with_report(self, choice: PlanChoice, seen: IterationMeasurement | None = None) -> NextIteration:
        """Return the next iteration, with what this rank reports of the last one and rank 0 of its decision."""
        looks = bool(self._frontier.instruction_times_s) and self._iterations % _DRIFT_EVERY == 0
        later = partial(self._own_times, seen, self._ran, looks) if seen is not None else dict
        return replace(self._planned, reported=choice.as_reported(), reported_later=later)

    def _own_times(
        self, seen: IterationMeasurement, ran: Assignment | None, looks_for_drift: bool
    ) -> Mapping[str, float]:
        """Return the times that this rank reports of an iteration, where they are asked for."""
        if self._topology.data_parallel == 1 and not looks_for_drift:
            return {}
        spans = seen.spans()
        reported = computed_and_tail_s(spans)
        if looks_for_drift:
            follows = not (seen.failed or ran is None or ran.choice.paused)  # else clocks are not the plan's
            reported |= reported_drift(spans, seen.clock_mhz if follows else {}, self._frontier.instruction_times_s)
        return reported
