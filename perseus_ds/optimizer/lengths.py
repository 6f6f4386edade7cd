"""Quickly computes plans for one iteration with given lengths of micro-batches.

The time and energy of a pass are those of its row, multiplied by the factor that the profile gives for the length of
its input. A plan is the rounded optimum of the relaxed problem at one deadline. Bounds and plans for other deadlines
are not computed, nor are rhythms, which do not exist if all micro-batches differ. This takes about a tenth of the time
of a frontier of two plans, and costs at most 0.02 % more energy (``benchmarks/varying.py``).

A job's server plans in a separate process (:class:`LengthsWorker`), which ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import PerseusError, ProfileError, ScheduleError
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Problem
from perseus_ds.optimizer.solver import plan_within
from perseus_ds.optimizer.worker import PlanningProcess, job_and_connection
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

Lengths = tuple[float, ...]
"""The length of the input of each micro-batch, such as its tokens."""
Spans = tuple[tuple[float, float], ...]
_PARENT_POLL_S = 5.0


@dataclass(frozen=True)
class PipelinePlan:
    """A plan for one pipeline: by rank, the clock, begin and end of each instruction that has a clock to choose.

    ``energy_j`` is that of one GPU for each rank.
    """

    clocks_mhz: tuple[tuple[int, ...], ...]
    spans_s: tuple[Spans, ...]
    time_s: float
    energy_j: float


@dataclass(frozen=True)
class IterationPlan:
    """Plans for one iteration of all pipelines, which end together.

    Attributes:
        relative_time: Time at the highest clocks, relative to an iteration whose inputs all have the profile's length.
        relative_energy: The same for energy.
        saved: Energy saved by the plans, as a fraction of that at the highest clocks.
        slowdown: Additional time, as a fraction of the time at the highest clocks.
    """

    pipelines: tuple[PipelinePlan, ...]
    relative_time: float
    relative_energy: float
    saved: float
    slowdown: float


class LengthsPlanner:
    """Plans iterations of one schedule.

    Raises:
        ProfileError: If the profile does not have the dependence on lengths, or does not cover the schedule.
        ScheduleError: If passes combine several micro-batches.
    """

    def __init__(self, schedule: Schedule, profile: StageProfile, settings: PlanningSettings | None = None) -> None:
        if profile.info.by_length is None:
            raise ProfileError(
                "The profile does not contain times by input length (by_length in profile.json). Measure it again, in "
                "a job that calls next_lengths()."
            )
        if any(kind is Kind.FORWARD_BACKWARD for _, kind in schedule.keys):
            raise ScheduleError(f"{schedule.name} combines passes of two micro-batches, which may differ in length.")
        self.schedule = schedule
        self._profile = profile
        self._by_length = profile.info.by_length
        self._settings = settings or PlanningSettings()
        self._dag = Dag.build(schedule)
        at_length = Problem(self._dag, profile, self._settings).baseline
        self._time_s, self._energy_j = at_length.time_s, at_length.energy_j

    def plan(self, lengths: Sequence[Lengths], slowdown: float = 0.0) -> IterationPlan:
        """Return plans for all pipelines that meet a common deadline, given the lengths of each.

        ``slowdown`` is the allowed additional time, as a fraction of the time at default clocks.
        """
        problems = [self.problem(of_pipeline) for of_pipeline in lengths]
        deadline_s = (1 + slowdown) * max(problem.no_slower_s for problem in problems)
        pipelines = tuple(self._planned(problem, deadline_s) for problem in problems)
        time_s, energy_j = _of_all(pipelines, problems)
        default_s, default_j = _of_all([problem.baseline for problem in problems], problems)
        return IterationPlan(
            pipelines,
            default_s / self._time_s,
            default_j / (len(problems) * self._energy_j),
            1 - energy_j / default_j,
            time_s / default_s - 1,
        )

    def problem(self, lengths: Lengths) -> Problem:
        """Return the optimisation problem of one pipeline."""
        by_micro_batch = [self._by_length.factors(length) for length in lengths]
        factors = {
            work: by_micro_batch[work.micro_batch].get((work.stage, work.kind), 1.0)
            for node in self._dag.nodes
            if isinstance(work := node.work, Instruction)
        }
        return Problem(self._dag, self._profile, self._settings, factors)

    def _planned(self, problem: Problem, deadline_s: float) -> PipelinePlan:
        plan = plan_within(Network(problem), deadline_s)
        time_s, _ = problem.rows(plan.clocks_mhz)
        durations_s = np.zeros(len(self._dag.nodes))
        durations_s[problem.node] = time_s
        ends_s = self._dag.finish_s(durations_s)
        spans_s = []
        for decisions in problem.rank_decisions:
            end_s, own_s = ends_s[problem.node[decisions]], time_s[decisions]
            spans_s.append(tuple(zip((end_s - own_s).tolist(), end_s.tolist(), strict=True)))
        return PipelinePlan(plan.clocks_mhz, tuple(spans_s), plan.time_s, plan.energy_j)


def _of_all(plans: Sequence[FrequencyPlan | PipelinePlan], problems: Sequence[Problem]) -> tuple[float, float]:
    """Return time [s] and energy [J] of pipelines that wait for the slowest one."""
    time_s = max(plan.time_s for plan in plans)
    waiting_j = (
        problem.waiting_power_w * (time_s - plan.time_s) for plan, problem in zip(plans, problems, strict=True)
    )
    return time_s, sum(plan.energy_j for plan in plans) + sum(waiting_j)


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """Profile, schedule and settings of the job to plan."""

    profile: Path
    schedule: Schedule
    settings: PlanningSettings


class LengthsWorker(PlanningProcess):
    """A process that plans one iteration after another."""

    def __init__(self, job: PlannedJob, log_path: Path) -> None:
        super().__init__(__name__, job, log_path)

    @property
    def file(self) -> int:
        """File descriptor that is readable when a plan is available."""
        return self._connection.fileno()

    def request(self, lengths: Sequence[Lengths], slowdown: float) -> None:
        """Request a plan, as :meth:`LengthsPlanner.plan` computes it, if none is being computed."""
        with contextlib.suppress(OSError):  # an end of the process is reported when its answer is awaited
            self._connection.send((tuple(lengths), slowdown))

    def received(self, timeout_s: float) -> IterationPlan | None:
        """Return the requested plan, or None if it is not available within the timeout [s]."""
        answer = self.receive(timeout_s)
        if isinstance(answer, str):
            self.error = answer
            return None
        return answer  # type: ignore[no-any-return]


def main() -> None:
    """Plan until the parent ends."""
    parent = os.getppid()
    job, connection = job_and_connection()
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        try:
            planner = LengthsPlanner(job.schedule, StageProfile.load(job.profile), job.settings)
            while os.getppid() == parent:
                # Processes that the parent has forked keep the connection open after its end.
                if connection.poll(_PARENT_POLL_S):
                    connection.send(planner.plan(*connection.recv()))
        except (PerseusError, ValueError) as error:
            connection.send(str(error))
