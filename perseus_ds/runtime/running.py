"""Trains under plans that have proved themselves on this job: against its own iterations at default clocks."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.errors import ConfigError, PlanError
from perseus_ds.policy.plan_proof import Comparison, is_in_doubt
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.phases import IterationMeasurement, Outlook, Phase
from perseus_ds.runtime.plan_runner import PlanRunner

# A plan from elsewhere runs for so long before it is compared; a job that ends earlier is too short for a comparison.
_TRIAL_ITERATIONS = 8
_TRIAL_S = 20.0


class Outcome(Enum):
    """Why a job leaves its plans.

    Attributes:
        DRIFTED: Instructions take longer or shorter than profiled.
        IN_DOUBT: What was measured at default clocks may no longer hold, or the plan no longer wins.
        LOST: The plan does not win against default clocks.
        REPRICED: Changes of the clock delay this job more than its plans allow for.
    """

    DRIFTED = "drifted"
    IN_DOUBT = "in doubt"
    LOST = "lost"
    REPRICED = "repriced"


def load_frontier(job: Job, rank: Rank, path: Path) -> Frontier:
    """Return the frontier that rank 0 reads, on all ranks.

    Raises:
        PerseusError: On all ranks: the file is wrong, or its plans do not fit this schedule or GPU.
    """

    def read() -> Frontier:
        if not path.exists():
            raise ConfigError(
                f'"frontier": {path} does not exist on rank 0\'s node. Write it with "perseus-ds optimize".'
            )
        frontier = Frontier.load(path)
        if frontier.provenance.simulated and not rank.gpu.simulated:
            raise PlanError(
                f"{path} was measured on simulated GPUs, this job runs on {rank.gpu.name}. "
                'Measure a profile here: "mode": "profile".'
            )
        check_instructions(frontier.instructions, job.schedule.instructions)
        return frontier

    frontier = rank.communicator.from_first(read)
    pipeline_rank = rank.communicator.topology.pipeline_rank

    def check() -> None:
        for plan in frontier.plans:
            ClockPlan.of_rank(plan, pipeline_rank).check(rank.gpu)

    rank.communicator.together(check)
    return frontier


def try_out(runner: PlanRunner) -> Phase[None]:
    """Train under a plan from elsewhere for about as long as a comparison with default clocks takes.

    The first iterations of a job are slower than those after them, so no comparison may use them.
    """
    iterations, time_s = 0, 0.0
    while iterations < _TRIAL_ITERATIONS or time_s < _TRIAL_S:
        typical_s = time_s / iterations if iterations else 0.0
        left_s = max(_TRIAL_S - time_s, (_TRIAL_ITERATIONS - iterations) * typical_s)
        seen = yield from _one_under_plan(runner, Outlook("default", left_s))
        runner.has_drifted(seen, profiles_again=False)
        runner.advance(seen)
        if seen.reports is not None:
            iterations, time_s = iterations + 1, time_s + seen.reports.time_s


def prove(runner: PlanRunner, *, profiles_again: bool) -> Phase[Comparison | Outcome]:
    """Train under the policy's plan until it is known how it compares with default clocks.

    Args:
        runner: Follows the policy.
        profiles_again: Whether to return where instructions take longer or shorter than profiled.

    Returns:
        The comparison; or why there is none, and something has to be measured again.
    """
    in_s: float | None = None
    while True:
        seen = yield from _one_under_plan(runner, Outlook("verdict", in_s))
        if runner.has_drifted(seen, profiles_again=profiles_again) and profiles_again:
            return Outcome.DRIFTED
        runner.advance(seen)
        if seen.reports is not None:
            in_s = runner.verdict_in_s(seen.reports.time_s)
        comparison = runner.comparison(until_sure=True)
        if comparison is not None:
            return comparison
        if runner.is_incomparable:
            return Outcome.IN_DOUBT


def run(runner: PlanRunner, *, profiles_again: bool) -> Phase[Outcome]:
    """Train under the plan that the policy asks for.

    Rank 0 decides after each iteration and reports it with the iteration; all ranks act on it after the next one, so
    that they change plans at the same boundary.

    Args:
        runner: Follows the policy.
        profiles_again: Whether to return, to profile again, when instructions take longer or shorter than profiled;
            otherwise the job trains on and only says so.
    """
    while True:
        seen = yield from _one_under_plan(runner)
        if runner.has_drifted(seen, profiles_again=profiles_again) and profiles_again:
            return Outcome.DRIFTED
        runner.advance(seen)
        comparison = runner.comparison(until_sure=False)
        if comparison is not None and is_in_doubt(comparison, caps_power=runner.caps_power):
            return Outcome.IN_DOUBT


def _one_under_plan(runner: PlanRunner, outlook: Outlook | None = None) -> Phase[IterationMeasurement]:
    """Run one iteration as the runner wants it; a checkpoint that is resumed before it may change what it wants."""
    while True:
        received = yield replace(runner.wanted, outlook=outlook)
        if isinstance(received, IterationMeasurement):
            return received
        runner.resume(received)
