"""Follows a policy on a frontier: evaluates the reports of all ranks, decides, and assigns plans to pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.rank_report import JobReport, RankReports
from perseus_ds.policy.assignment import Assignment, PlanChoice
from perseus_ds.policy.decisions import decide
from perseus_ds.policy.policies import PolicyConfig
from perseus_ds.policy.run_statistics import RunStatistics
from perseus_ds.policy.signal_values import Signal
from perseus_ds.policy.situation import Decision, Situation
from perseus_ds.policy.stragglers import StragglerWatch
from perseus_ds.policy.timetable import Timetable

# As checkpoints of earlier versions have them.
_OLD_KEYS = {"rooms": "stretch_factors", "pace": "statistics"}


class PlanFollower:
    """Learns on all ranks how iterations go; what pipelines do is known, and decided, on rank 0.

    Attributes:
        idle_power_w: Of all GPUs while they wait [W].

    Args:
        frontier: The plans.
        pipeline_of_rank: On rank 0, for each rank its data-parallel pipeline; elsewhere empty.
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
    """

    def __init__(self, frontier: Frontier, pipeline_of_rank: npt.NDArray[np.int64], gpus_per_rank: int) -> None:
        self._frontier = frontier
        self._pipelines = int(pipeline_of_rank.max(initial=-1)) + 1
        self._gpus_per_rank = gpus_per_rank
        self._stragglers = StragglerWatch(self._pipelines)
        self.idle_power_w = frontier.provenance.blocking_power_w * gpus_per_rank * len(frontier.instructions)
        self._plan: int | None = None
        self.statistics = RunStatistics()

    def decide(
        self,
        policy: PolicyConfig,
        step: int,
        now: datetime,
        *,
        signals: Mapping[str, Signal] | None = None,
        iterations_ahead: int = 1,
        timetable: Timetable | None = None,
    ) -> Decision:
        """Return the plan that a policy asks for now.

        Args:
            policy: The user's.
            step: Steps done.
            now: The time.
            signals: Values of the signals, by file.
            iterations_ahead: Iterations that will have run before the one that is decided on.
            timetable: What a cheapest policy has decided before.
        """
        situation = Situation(
            step=step,
            now=now,
            time_ratio=self.statistics.time_ratio,
            power_ratio=self.statistics.power_ratio,
            stopped_s=self.statistics.stopped_s,
            gpus_per_rank=self._gpus_per_rank,
            running=self._plan,
            iterations_ahead=iterations_ahead,
            idle_power_w=self.idle_power_w,
            signals=signals or {},
            timetable=timetable,
        )
        try:
            return decide(policy, self._frontier, situation)
        except Exception as error:  # whatever an order holds, training goes on
            return Decision(0, f"the policy {policy.name} fails ({error!r}). Running at default clocks", failed=True)

    def expected(self, plan: int) -> tuple[float, float]:
        """Return time [s] and energy of all GPUs [J] of an iteration under a plan, by the profile and as measured."""
        known, by_profile = self.statistics, self._frontier.plans[plan]
        time_s = by_profile.time_s * known.time_ratio
        return time_s, by_profile.energy_j / by_profile.time_s * time_s * known.power_ratio * self._gpus_per_rank

    def assign(self, choice: PlanChoice) -> Assignment:
        """Return the plans of all pipelines by rank 0's decision; on rank 0."""
        return Assignment.of(self._frontier, choice, self._stragglers.stretch_factors)

    def follow(self, plan: int) -> None:
        """Take note of the plan that the policy asks for from now on."""
        self._plan = plan

    def learn(self, reports: JobReport, plan: int) -> None:
        """Evaluate an iteration of the job.

        Args:
            reports: What all ranks have reported of it.
            plan: The plan that the policy asked for.
        """
        promised = self._frontier.plans[plan]
        self.statistics.add_iteration(
            time_s=reports.time_s,
            energy_j=reports.energy_j,
            promised_time_s=promised.time_s,
            promised_energy_j=promised.energy_j * self._gpus_per_rank,
        )

    def learn_pipelines(self, reports: RankReports, ran: Assignment) -> None:
        """Evaluate how the pipelines did in an iteration; on rank 0.

        Args:
            reports: Of all ranks.
            ran: What the iteration ran under.
        """
        computed_s = reports.column("computed_s")
        if self._pipelines > 1 and computed_s.min() > 0:
            # The rank that reduces last waits for no other: its tail is the time that the tail takes by itself.
            tail_s = float(reports.column("tail_s").min())
            self._stragglers.update(
                [
                    (own_s + tail_s) / self._frontier.plans[plan].time_s
                    for own_s, plan in zip(reports.by_pipeline(computed_s).tolist(), ran.plans, strict=True)
                ]
            )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        return {
            "plan": self._plan,
            "stretch_factors": list(self._stragglers.stretch_factors),
            "statistics": self.statistics.state(),
        }

    def state_for_other_plans(self) -> dict[str, Any]:
        """Return the part of :meth:`state` that is as true of the plans of another profile."""
        return {**self.state(), "plan": None, "statistics": self.statistics.state_of_stops()}

    def restore(self, state: Mapping[str, Any]) -> int | None:
        """Restore what :meth:`state` returned; return the plan that the policy asked for then, if it is known.

        Raises:
            Exception: It is damaged; nothing has changed.
        """
        state = {_OLD_KEYS.get(key, key): value for key, value in state.items()}
        plan = None if state["plan"] is None else min(max(0, int(state["plan"])), len(self._frontier.plans) - 1)
        factors = tuple(float(factor) for factor in state["stretch_factors"])
        if not all(1 <= factor < math.inf for factor in factors):
            raise ValueError(f"stretch factors {factors}")
        self.statistics.restore(state["statistics"])
        if len(factors) == self._pipelines:
            self._stragglers.stretch_factors = factors
        self._plan = plan
        return plan
