"""Which plan every pipeline runs: from the policy, the reports and the user's orders to the plan in force on all ranks.

After every iteration rank 0 decides on an assignment of plans to pipelines. An assignment is in one of two states:

- *decided*: rank 0 has made it, and numbered it if it differs from the ones before. It is sent with rank 0's report of
  the iteration that has just ended. Other ranks do not know it.
- *in force*: all ranks have received it with the reports of that iteration, which arrive during the next one. From the
  following boundary on they run by it, all at once.

When a job begins, or goes on from a checkpoint, the first assignment is broadcast and in force at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_records import Event, Halted, PlanChosen, PolicyChanged, PowerCapChanged, TimetableMade
from perseus_ds.policy.decisions import (
    MARGIN,
    Decision,
    PowerCap,
    RunStatistics,
    Situation,
    decide,
    reduction_of,
    stretched_plan,
)
from perseus_ds.policy.hourly_programme import Timetable
from perseus_ds.policy.job_control import Effect, JobControl, cost_in_words
from perseus_ds.policy.pace import Straggler, StragglerWatch, straggler_of, with_reported
from perseus_ds.policy.policies import (
    CheapestPolicy,
    PolicyConfig,
    PolicyInForce,
    PowerCapPolicy,
    ReducePolicy,
    SchedulePolicy,
    in_force,
    lasting,
)
from perseus_ds.policy.reports import Assigned, JobReport, RankReports
from perseus_ds.policy.signals import Signal
from perseus_ds.ranks import Communicator
from perseus_ds.timebase import Timebase

logger = logging.getLogger("perseus_ds")
_NO_OTHERS: Mapping[int, Frontier] = {}
# A timetable is recorded at each value of the signal, and later ones replace what is far ahead.
_MOST_ENTRIES = 200


@dataclass(frozen=True)
class Forecast:
    """Time and energy of one iteration of the whole job.

    Attributes:
        time_s: Iteration time that the plans promise [s].
        energy_j: Energy of all GPUs that they promise [J].
        default_time_s: Iteration time at default clocks [s].
        default_energy_j: Energy of all GPUs at default clocks [J].
        default_measured: Whether time and energy at default clocks were measured in this job.
    """

    time_s: float
    energy_j: float
    default_time_s: float
    default_energy_j: float
    default_measured: bool = False


@dataclass(frozen=True)
class Assignment(Assigned):
    """What the pipelines run, as rank 0 has decided.

    Attributes:
        stretch_factor: How many times as long as the policy's plan the plan of this rank's pipeline may take.
        stretch_factors: The same of every pipeline, on rank 0; empty elsewhere.
        plans: Each pipeline's plan, on rank 0; empty elsewhere.
    """

    stretch_factor: float = 1.0
    stretch_factors: tuple[float, ...] = ()
    plans: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        frontier: Frontier,
        plan: int,
        stretch_factors: Sequence[float],
        *,
        others: Mapping[int, Frontier] = _NO_OTHERS,
        lateness: float = 0.0,
        **decided: bool,
    ) -> Assignment:
        """Give every pipeline its plan: as slow as it may be without making the others wait.

        Args:
            frontier: The plans.
            plan: The policy's.
            stretch_factors: Of every pipeline.
            others: The plans of pipelines that have others.
            lateness: How much longer than promised plans take in this job, as a fraction: plans are faster by that, to
                keep what the policy's plan promises.
            decided: Whether it is ``paused``, ``halts`` and ``capped``.
        """

        def with_factors(factors: tuple[float, ...]) -> Assignment:
            plans = tuple(
                stretched_plan(frontier, plan, factor, others.get(pipeline)) for pipeline, factor in enumerate(factors)
            )
            return cls(plan=plan, stretch_factor=factors[0], stretch_factors=factors, plans=plans, **decided)

        assignment = with_factors(tuple(stretch_factors))
        promised = assignment.forecast(frontier, 1, others)
        if lateness > 0:
            assignment = with_factors(tuple(factor / (1 + lateness) for factor in stretch_factors))
        return replace(assignment, promised_slowdown=promised.time_s / promised.default_time_s - 1)

    @classmethod
    def of_report(cls, report: JobReport, decided: Assignment) -> Assignment:
        """Return what rank 0 has sent with its report.

        Args:
            report: As all ranks receive it.
            decided: What this rank has decided last; on rank 0 that is what was sent.
        """
        return cls(
            **report.assigned(),
            stretch_factor=report.stretch_factor,
            stretch_factors=decided.stretch_factors,
            plans=decided.plans,
        )

    def forecast(
        self, frontier: Frontier, gpus_per_stage: int, others: Mapping[int, Frontier] = _NO_OTHERS
    ) -> Forecast:
        """Return time and energy of the job's iteration, under these plans and at default clocks; on rank 0.

        A pipeline that takes ``s`` times as long is charged ``s`` times its plan's energy, and the
        others wait for the slowest at blocking power: the accounting of the paper's emulation.

        Args:
            frontier: The plans.
            gpus_per_stage: GPUs of one pipeline that share a stage.
            others: The plans of pipelines that have others.
        """
        own = [others.get(pipeline, frontier) for pipeline in range(len(self.plans))]
        plans = [its.plans[number] for its, number in zip(own, self.plans, strict=True)]
        time_s, energy_j = self._of_job(plans, frontier)
        default_time_s, default_energy_j = self._of_job([its.baseline for its in own], frontier)
        return Forecast(time_s, gpus_per_stage * energy_j, default_time_s, gpus_per_stage * default_energy_j)

    def _of_job(self, plans: Sequence[FrequencyPlan], frontier: Frontier) -> tuple[float, float]:
        """Return time [s] and energy [J], one GPU a stage, of pipelines as slow as they are under these plans."""
        slowness = [max(self.stretch_factors) / factor for factor in self.stretch_factors]
        times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
        energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
        waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
        return max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s


class PlanSelector:
    """Decides on rank 0, and brings what it has decided into force on all ranks at the same boundary.

    Attributes:
        in_force: What the next iteration runs by.
        decided: On rank 0, its last decision; elsewhere what was in force at the beginning.
        statistics: Measured over predicted time and power of the last iterations.
        default_power_w: Of all GPUs at default clocks, as measured in this job; None where it is not known [W].
        unlimited_power_w: The same without the limits that the plans allow for: a reduction is a fraction of that; None
            where there are none [W].
    """

    def __init__(
        self,
        communicator: Communicator,
        frontier: Frontier,
        control: JobControl,
        *,
        others: Mapping[int, Frontier] = _NO_OTHERS,
        timebase: Timebase,
        record: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        """Decide on the first assignment; every rank must do so at once.

        Args:
            communicator: All ranks.
            frontier: The plans; where pipelines have different ones, those of the slowest, on which the policy decides.
            others: The plans of pipelines that have others: they are as slow as the slowest lets them be.
            control: What the user asks for; the progress that a checkpoint kept is taken from it.
            timebase: The time that the rank lives in.
            record: Records an event of the job, on rank 0.
            say: Prints a line for the whole job, on rank 0.
        """
        self._communicator = communicator
        self._frontier = frontier
        self._others = others
        self._control = control
        self._timebase = timebase
        self._record = record
        self._say = say
        self._gpus_per_rank = communicator.world_size // communicator.topology.pipeline_ranks
        self._idle_power_w = frontier.provenance.blocking_power_w * communicator.world_size
        self._stragglers = StragglerWatch(int(communicator.pipeline_of_rank.max(initial=-1)) + 1)
        self.statistics = RunStatistics()
        self.default_power_w: float | None = None
        self.unlimited_power_w: float | None = None
        self._lateness = 0.0
        self._numbers = 0
        self._ordered: PolicyConfig = control.policy
        self._window: PolicyInForce | None = None
        self._problem = ""
        self._decision: Decision | None = None
        self._ended_s = math.nan
        self.in_force = self.decided = Assignment()
        self.resume(after_others=True)

    def resume(self, *, after_others: bool = False) -> bool:
        """Go on from what a checkpoint kept, if anything; what rank 0 decides is in force at once, on all ranks.

        Every rank must do so at once.

        Args:
            after_others: Whether the job has run under no assignment yet, or under those of another selector meanwhile.

        Returns:
            Whether another assignment is in force.
        """
        before = None if after_others else self.in_force
        self._control.effect_of = self.effect_of
        plan = self._restore()

        def decide_first() -> Assignment:
            if plan is None:
                return self._numbered(self._choose(iterations_ahead=0))
            capped = self.would_be_capped()
            return self._numbered(self._assign(plan, paused=self._control.paused, capped=capped))

        decided = self._communicator.computed_on_rank_0(decide_first)
        factor = decided.stretch_factors[self._communicator.topology.data_parallel_rank]
        decided = replace(decided, stretch_factor=factor)
        if not self._communicator.is_rank_0:
            decided = replace(decided, stretch_factors=(), plans=())
        self.in_force = self.decided = decided
        return self._announce(before)

    def advance(self, reports: JobReport | None, ranks: RankReports | None, ran: Assignment | None) -> bool:
        """Take in the reports of the iteration before the one that has just ended; decide on a later one.

        Args:
            reports: Of that iteration; None where they are not known.
            ranks: On rank 0, the reports of which they were made.
            ran: What that iteration ran by; None at default clocks.

        Returns:
            Whether another assignment is in force from the next iteration on.
        """
        before = self.in_force
        if reports is not None:
            if ran is not None and not ran.paused:
                self._learn(reports, ranks, ran)
            self.in_force = Assignment.of_report(reports, self.decided)
        if self._communicator.is_rank_0:
            self._add_cost(reports, ran)
            self.decided = self._numbered(self._choose())
        return self._announce(before)

    def _announce(self, before: Assignment | None) -> bool:
        """Record the assignment in force if it is another than before; return whether it is."""
        is_another = before is None or self.in_force.number != before.number
        if is_another and self._communicator.is_rank_0:
            self._record(PlanChosen.model_validate(self.status()))
        return is_another

    def status(self) -> dict[str, Any]:
        """Return the assignment in force as plain values; on rank 0."""
        now = self.in_force
        straggler = straggler_of(now.stretch_factors)
        if straggler is None and self._others:
            slowest = next(pipeline for pipeline in range(len(now.plans)) if pipeline not in self._others)
            fastest_s = min(frontier.t_min_s for frontier in self._others.values())
            straggler = Straggler(slowest, self._frontier.t_min_s / fastest_s)
        return {
            "plan": now.plan,
            "plans": list(now.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": now.paused,
            "halts": now.halts,
        }

    @property
    def sent_factors(self) -> Sequence[float]:
        """The stretch factors that rank 0 sends with its report; none for 1 throughout, and on other ranks."""
        factors = self.decided.stretch_factors
        return () if all(factor == 1 for factor in factors) else factors

    @property
    def promised_power(self) -> float:
        """Power relative to default clocks with which plans keep both of their promises; 1 but on rank 0."""
        if not self.in_force.plans:
            return 1.0
        forecast = self.in_force.forecast(self._frontier, 1, self._others)
        return forecast.energy_j / forecast.default_energy_j / (1 + self.in_force.promised_slowdown)

    def plan_of_this_rank(self) -> int:
        """Return the plan in force of this rank's pipeline, as a place on the frontier."""
        own = self._others.get(self._communicator.topology.data_parallel_rank)
        return stretched_plan(self._frontier, self.in_force.plan, self.in_force.stretch_factor, own)

    def may_go_on(self) -> bool:
        """Whether training that stands still goes on; on rank 0."""
        return not self._choose(iterations_ahead=0).halts

    def effect_of(self, policy: PolicyConfig) -> Effect:
        """Return what a policy would do now; from any thread."""
        decision = self._decide(policy)
        time_s, energy_j = self._expected(decision.plan)
        time_now_s, _ = self._expected(self.in_force.plan)
        without_s, _ = self._expected(self._decide(lasting(policy)).plan)
        default_w = self.unlimited_power_w or self._power_at_default_clocks_w
        return Effect(time_s, time_now_s, without_s, energy_j / time_s, default_w, decision.problem)

    def _choose(self, iterations_ahead: int = 1) -> Assignment:
        """Return what rank 0 decides on the iteration before which so many will have run, without a number."""
        control = self._control
        policy = in_force(control.policy, self._timebase.date())
        if control.policy != self._ordered:
            self._ordered, self._window, self._problem, self._lateness = control.policy, None, "", 0.0
        control.record_policy(self._record)
        if isinstance(control.policy, SchedulePolicy | ReducePolicy) and policy != self._window:
            self._window, self._problem, self._lateness = policy, "", 0.0
            self._record(PolicyChanged(policy=policy.model_dump(mode="json"), by_schedule=True))
        before, self._decision = self._decision, self._decide(policy, iterations_ahead)
        decision = self._decision
        self._record_cap(policy, decision.cap, before.cap if before is not None else None)
        # Before the first colon a problem has no figures that change at every iteration.
        if decision.problem and decision.problem.partition(":")[0] != self._problem.partition(":")[0]:
            self._problem = decision.problem
            self._record(PolicyChanged(problem=decision.problem))
            self._say(decision.problem)
        if decision.timetable is not None and (before is None or decision.timetable is not before.timetable):
            self._record_timetable(decision.timetable)
        return self._assign(
            decision.plan,
            paused=control.paused or decision.failed,
            halts=decision.halts and not control.paused,
            capped=self._is_capped(decision),
        )

    def _record_cap(self, policy: PolicyConfig, cap: PowerCap | None, before: PowerCap | None) -> None:
        """Record the power cap in force where it is another than before; say what a file's request costs."""
        if (cap and cap.watts) == (before and before.watts):
            return
        if isinstance(policy, ReducePolicy) and cap is not None and cap.signal == policy.signal:
            now = self._timebase.date()
            if (asked := reduction_of(policy, now, self._signals)) is not None:
                duration_s = asked.until_s - now.timestamp()
                cost = cost_in_words(self.effect_of(policy), asked.power_fraction, duration_s, asked.until_s)
                self._say(f"{cap.signal} asks for {cost}")
        self._record(PowerCapChanged(watts=cap and cap.watts, source=(cap.signal or "the policy") if cap else ""))

    def _is_capped(self, decision: Decision) -> bool:
        """Whether default clocks would draw more than the power cap in force."""
        if decision.cap is None:
            return False
        ratio = 1.0 if self.default_power_w else self.statistics.power_ratio
        return ratio * self._power_at_default_clocks_w > decision.cap.watts * (1 - MARGIN)

    @property
    def _power_at_default_clocks_w(self) -> float:
        """Of all GPUs of the job, as measured in it, or else by the profile [W]."""
        return self.default_power_w or self._frontier.baseline.mean_power_w * self._gpus_per_rank

    def would_be_capped(self) -> bool:
        """Whether default clocks would draw more than the cap of the policy that is asked for now; on rank 0."""
        policy = in_force(self._control.policy, self._timebase.date())
        return isinstance(policy, PowerCapPolicy | ReducePolicy) and self._is_capped(self._decide(policy))

    def _decide(self, policy: PolicyConfig, iterations_ahead: int = 1) -> Decision:
        situation = Situation(
            step=self._control.steps,
            now=self._timebase.date(),
            time_ratio=self.statistics.time_ratio,
            power_ratio=self.statistics.power_ratio,
            stopped_s=self.statistics.stopped_s,
            gpus_per_rank=self._gpus_per_rank,
            iterations_ahead=iterations_ahead,
            idle_power_w=self._idle_power_w,
            default_power_w=self.unlimited_power_w or self._power_at_default_clocks_w,
            signals=self._signals,
            before=self._decision,
        )
        try:
            return decide(policy, self._frontier, situation)
        except Exception as error:  # whatever an order holds, training goes on
            return Decision(0, f"the policy {policy.name} fails ({error!r}). Running at default clocks", failed=True)

    def _assign(self, plan: int, **decided: bool) -> Assignment:
        factors = with_reported(self._stragglers.stretch_factors, self._control.straggler())
        return Assignment.of(self._frontier, plan, factors, others=self._others, lateness=self._lateness, **decided)

    def hurry(self, late: float) -> bool:
        """Run faster plans from a later iteration on, since they take longer than promised; on rank 0.

        Args:
            late: How much longer than promised the present ones take, as a fraction.

        Returns:
            Whether there are any.
        """
        now = self.in_force
        hurried = Assignment.of(self._frontier, now.plan, now.stretch_factors, others=self._others, lateness=late)
        if hurried.plans == now.plans:
            return False
        self._lateness = (1 + self._lateness) * (1 + late) - 1
        return True

    def do_not_hurry(self) -> None:
        """Run the policy's own plans again."""
        self._lateness = 0.0

    def _numbered(self, chosen: Assignment) -> Assignment:
        """Give a decision its number: that of the one in force or of the last one, if it is the same."""
        for known in (self.in_force, self.decided):
            if replace(chosen, number=known.number, stretch_factor=known.stretch_factor) == known:
                return known
        self._numbers += 1
        return replace(chosen, number=self._numbers)

    def _learn(self, reports: JobReport, ranks: RankReports | None, ran: Assignment) -> None:
        promised = self._frontier.plans[ran.plan]
        self.statistics.add_iteration(
            time_s=reports.time_s,
            energy_j=reports.energy_j,
            promised_time_s=promised.time_s,
            promised_energy_j=promised.energy_j * self._gpus_per_rank,
        )
        if ranks is None or len(ran.plans) < 2:
            return
        computed_s = ranks.column("computed_s")
        if computed_s.min() > 0:
            # The rank that reduces last waits for no other: its tail is the time that the tail takes by itself.
            tail_s = float(ranks.column("tail_s").min())
            self._stragglers.update(
                [
                    (own_s + tail_s) / self._others.get(pipeline, self._frontier).plans[plan].time_s
                    for pipeline, (own_s, plan) in enumerate(
                        zip(ranks.by_pipeline(computed_s).tolist(), ran.plans, strict=True)
                    )
                ]
            )

    def _expected(self, plan: int) -> tuple[float, float]:
        """Return time [s] and energy of all GPUs [J] of an iteration under a plan, by the profile and as measured."""
        known, by_profile = self.statistics, self._frontier.plans[plan]
        time_s = by_profile.time_s * known.time_ratio
        return time_s, by_profile.energy_j / by_profile.time_s * time_s * known.power_ratio * self._gpus_per_rank

    @property
    def _signals(self) -> Mapping[str, Signal]:
        watch = self._control.signals
        return {} if watch is None else watch.signals

    def _prices(self) -> Signal | None:
        """Return the prices that count now, if a cheapest policy is in force."""
        policy = lasting(self._ordered)
        return self._signals.get(policy.signal) if isinstance(policy, CheapestPolicy) else None

    def _add_cost(self, reports: JobReport | None, ran: Assignment | None) -> None:
        """Add the cost of the iteration before the one that has just ended."""
        ended_s, self._ended_s = self._ended_s, self._timebase.date().timestamp()
        signal = self._prices()
        if reports is None or signal is None or math.isnan(ended_s):
            return
        fastest_time_s, fastest_energy_j = self._expected(0)
        expected_j = fastest_energy_j if ran is None else self._expected(ran.plan)[1]
        self._control.costs.add_iteration(
            signal,
            ended_s=ended_s,
            time_s=reports.time_s,
            energy_j=reports.energy_j if math.isfinite(reports.energy_j) else expected_j,
            fastest_time_s=fastest_time_s + self.statistics.stopped_s,
            fastest_energy_j=fastest_energy_j,
        )

    def add_halt(self, time_s: float, energy_j: float) -> None:
        """Record and add the cost of a time in which training stood still; on rank 0.

        Args:
            time_s: How long [s].
            energy_j: Of all GPUs meanwhile [J]; NaN where it cannot be read.
        """
        end_s = self._timebase.date().timestamp()
        self._record(Halted(time_s=round(time_s, 3), energy_j=round(energy_j, 3)))
        signal = self._prices()
        if signal is not None:
            known_j = energy_j if math.isfinite(energy_j) else self._idle_power_w * time_s
            self._control.costs.add_halt(signal, begin_s=end_s - time_s, end_s=end_s, energy_j=known_j)

    def _record_timetable(self, timetable: Timetable) -> None:
        costs = self._control.costs
        costs.bound = timetable.bound if costs.bound is None else costs.bound
        begins_s = timetable.edges_s[:-1][:_MOST_ENTRIES]
        self._record(
            TimetableMade(
                cost=timetable.cost,
                bound=timetable.bound,
                fastest_cost=timetable.fastest_cost,
                unit=timetable.signal.unit,
                entries=tuple(zip(begins_s.round(1).tolist(), timetable.plans.tolist(), strict=False)),
                ends=round(float(timetable.edges_s[-1]), 1),
                mean_from=timetable.mean_from_s,
            )
        )
        self._record(costs.so_far())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        return {
            "plan": self.in_force.plan,
            "stretch_factors": list(self._stragglers.stretch_factors),
            "statistics": self.statistics.state(),
        }

    def state_for_other_plans(self) -> dict[str, Any]:
        """Return the part of :meth:`state` that is as true of the plans of another profile."""
        return {**self.state(), "plan": None, "statistics": self.statistics.state_of_stops()}

    def _restore(self) -> int | None:
        """Take up what :meth:`state` returned; return the plan that the policy asked for then, if it is known."""
        state: Mapping[str, Any] = self._control.progress
        self._control.progress = {}
        if not state:
            return None
        try:
            plan = None if state["plan"] is None else min(max(0, int(state["plan"])), len(self._frontier.plans) - 1)
            factors = tuple(float(factor) for factor in state["stretch_factors"])
            if not all(1 <= factor < math.inf for factor in factors):
                raise ValueError(f"stretch factors {factors}")
            self.statistics.restore(state["statistics"])
        except Exception as error:  # saved by another version, or damaged
            logger.warning("perseus: the checkpoint's progress under plans cannot be read (%r); it is ignored.", error)
            return None
        if len(factors) == len(self._stragglers.stretch_factors):
            self._stragglers.stretch_factors = factors
        self._decision = None if plan is None else replace(self._decision or Decision(plan), plan=plan)
        return plan
