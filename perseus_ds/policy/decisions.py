"""Chooses the plan of the next iteration by the goal, the frontier and the progress of the job."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated

from pydantic import Field

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import FileModel
from perseus_ds.policy.goal import Goal

# Relative uncertainty of times and powers. This share of a limit is kept in reserve.
MARGIN = 0.005
# Power of a faster plan below the limit, as a fraction. It doubles if the plan exceeds the limit within this number of
# steps. Later, the power of the job has changed.
_HEADROOM, _SOON = 0.02, 50
# An energy counter is refreshed about every 0.1 s. If a plan draws exactly the limit, the largest of several averages
# of ten iterations may be this much below the real power.
_READING_ERROR = 0.002
_KEPT_ITERATIONS = 10
_LEAST_POWERS = 4
_LARGEST = 10**18
# Iterations under the slower of two plans follow each other: at least this number, and this share of the job so far.
_FEWEST_SLOWER, _SHARE_SLOWER = 20, 1 / 20
_Positive = Annotated[float, Field(gt=0, le=_LARGEST)]


@dataclass(frozen=True)
class PowerCap:
    """A power limit in force, for all GPUs of the job.

    Attributes:
        headroom: A faster plan is chosen only if its power is below the limit by this fraction.
        raised_at: Step at which a faster plan was chosen after a slower one. None if there was none.
    """

    watts: float
    headroom: float = _HEADROOM
    raised_at: int | None = None


@dataclass(frozen=True)
class Decision:
    """A decision on the following iterations.

    Attributes:
        plan: Index of the plan on the frontier.
        problem: Part of the goal that cannot be kept. Empty if all is kept.
        failed: Whether the decision failed, so that the job runs at default clocks.
        cap: The power limit in force. None if there is none.
    """

    plan: int
    problem: str = ""
    failed: bool = False
    cap: PowerCap | None = None


@dataclass(frozen=True)
class Situation:
    """Progress of the job.

    Attributes:
        step: Number of finished steps, including those before a checkpoint.
        iterations_per_step: Number of iterations of a step.
        time_ratio: Measured divided by predicted iteration time.
        power_ratio: Measured divided by predicted power.
        late: Fraction by which plans certainly take longer, relative to default clocks of this job, than predicted.
            Negative if they are faster.
        spare: Sum over iterations of the slowdown that was allowed but not used, as a fraction of an iteration.
        stopped_s: Time between iterations [s].
        relative_time: Time of the iterations that are planned, relative to the mean of all iterations of the job.
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        default_power_w: Power of all GPUs at default clocks [W].
        before: Previous decision. None at the start.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    power_ratio: float = 1.0
    late: float = 0.0
    spare: float = 0.0
    stopped_s: float = 0.0
    relative_time: float = 1.0
    gpus_per_rank: float = 1
    default_power_w: float = 0.0
    before: Decision | None = None
    iterations_per_step: float = 1.0


class RunStatistics(FileModel):
    """Measured relative to predicted values of the last iterations, kept for later starts of the job.

    Attributes:
        stopped_s: Average time between iterations, including evaluations and checkpoints [s].
        stops: Number of iterations in this average.
        times: Iteration times divided by those of the goal's plans.
        powers: Measured power and power of these plans [W].
    """

    stopped_s: float = Field(0.0, ge=0, le=_LARGEST)
    stops: int = Field(0, ge=0, le=_LARGEST)
    times: tuple[_Positive, ...] = ()
    powers: tuple[tuple[Annotated[float, Field(ge=0, le=_LARGEST)], _Positive], ...] = ()

    def add_stop(self, time_s: float) -> None:
        """Add the time between two iterations [s]."""
        self.stops += 1
        self.stopped_s += (max(0.0, time_s) - self.stopped_s) / self.stops

    def add_iteration(
        self, *, time_s: float, energy_j: float, promised_time_s: float, promised_energy_j: float
    ) -> None:
        """Add the measured time [s] and energy [J] of an iteration, and those of the goal's plan."""
        self.times = (*self.times[1 - _KEPT_ITERATIONS :], time_s / promised_time_s)
        if math.isfinite(energy_j):  # NaN: a GPU's counter cannot be read
            power_w = energy_j / time_s, promised_energy_j / promised_time_s
            self.powers = (*self.powers[1 - _KEPT_ITERATIONS :], power_w)

    @property
    def time_ratio(self) -> float:
        """Iteration time ratio, 1 if unknown. It is a median, because single iterations may be delayed."""
        return statistics.median(self.times or [1.0])

    @property
    def power_ratio(self) -> float:
        """Power ratio, 1 if few powers are known.

        It is a ratio of sums, because counters may be refreshed less often than iterations end.
        """
        if len(self.powers) < _LEAST_POWERS:
            return 1.0
        measured_w, promised_w = map(sum, zip(*self.powers, strict=True))
        return float(measured_w / promised_w)


def decide(goal: Goal, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan of least energy that keeps the goal, or the plan that comes nearest to it."""
    in_time = _in_time(goal, frontier, situation)
    limit_w = goal.power_limit_w(situation.default_power_w)
    if limit_w is None:
        return in_time
    below = _below_power(limit_w, frontier, situation)
    if below.plan <= in_time.plan:
        return replace(below, plan=in_time.plan, problem=in_time.problem)
    problem = in_time.problem or below.problem
    if not problem and goal.finish_by is not None:
        problem = (
            f"the deadline {goal.finish_by.isoformat()} cannot be met below the power limit of {limit_w:.0f} W. "
            "Keeping the power limit"
        )
    return replace(below, problem=problem)


def slowdown_of(frontier: Frontier, plan: int) -> float:
    """Return the slowdown of a plan relative to default clocks, from the profile, as a fraction."""
    return frontier.plans[plan].time_s / frontier.baseline.time_s - 1


def _in_time(goal: Goal, frontier: Frontier, situation: Situation) -> Decision:
    """Return the plan of least energy within the allowed slowdown and in time for the deadline."""
    last = len(frontier.plans) - 1
    allowed = last if goal.max_slowdown is None else _within_slowdown(goal.max_slowdown, frontier, situation)
    if goal.finish_by is None or goal.total_steps is None or situation.step >= goal.total_steps:
        return Decision(allowed)
    by_deadline = _by_deadline(goal.finish_by, goal.total_steps, frontier, situation)
    return replace(by_deadline, plan=min(allowed, by_deadline.plan))


def _within_slowdown(max_slowdown: float, frontier: Frontier, situation: Situation) -> int:
    """Return the plan of least energy with which the mean slowdown of iterations under plans is the allowed one.

    It lies between the slowdowns of two plans. The slower one runs when the faster one has saved up the time for it.
    """
    allowed = (1 + max_slowdown) / (1 + situation.late) - 1
    plan = frontier.plans.index(frontier.within(allowed))
    slower = plan + 1
    if slower == len(frontier.plans):
        return plan
    excess = slowdown_of(frontier, slower) - allowed
    is_slower = situation.before is not None and situation.before.plan == slower
    iterations = 1.0 if is_slower else max(_FEWEST_SLOWER, _SHARE_SLOWER * situation.step)
    return slower if situation.spare >= iterations * excess else plan


def _by_deadline(finish_by: datetime, total_steps: int, frontier: Frontier, situation: Situation) -> Decision:
    left = (total_steps - situation.step) * situation.iterations_per_step
    seconds = (finish_by - situation.now).total_seconds()
    # One step is kept in reserve, because the duration of a longer iteration is known only afterwards.
    ratio = situation.time_ratio / situation.relative_time
    allowed_s = (seconds / (left + 1) - situation.stopped_s) / ratio
    fastest_s = frontier.plans[0].time_s
    if allowed_s >= fastest_s:
        most = _slowest(frontier, allowed_s)
        running = most if situation.before is None else situation.before.plan
        # Within this range, choose the plan that is nearest to the current one, so that small fluctuations have no
        # effect.
        return Decision(min(max(running, _slowest(frontier, allowed_s * (1 - MARGIN))), most))
    needed_s = left * (fastest_s * ratio + situation.stopped_s)
    if needed_s <= seconds:
        return Decision(0)
    return Decision(
        0,
        f"the deadline {finish_by.isoformat()} cannot be met: {left:.0f} iterations take at least "
        f"{needed_s:.0f} s, {max(0.0, seconds):.0f} s remain. Running the fastest plan",
    )


def _below_power(watts: float, frontier: Frontier, situation: Situation) -> Decision:
    """Return the fastest plan below a power limit.

    Measured power is noisy. A slower plan is chosen when the power may exceed the limit. A faster one is chosen only if
    it stays below the limit by the headroom, which doubles if this was wrong soon after.
    """
    last = len(frontier.plans) - 1
    scale = situation.gpus_per_rank * situation.power_ratio
    powers_w = [scale * plan.energy_j / plan.time_s for plan in frontier.plans]

    def fastest_below(cap_w: float) -> int:
        return next((n for n, power_w in enumerate(powers_w) if power_w <= cap_w), last)

    cap, plan, before = PowerCap(watts), fastest_below(watts * (1 - MARGIN)), situation.before
    if before is not None and before.cap is not None and before.cap.watts == watts:
        cap, running = before.cap, before.plan
        if powers_w[running] > watts * (1 - _READING_ERROR):
            was_wrong = cap.raised_at is not None and situation.step - cap.raised_at <= _SOON
            headroom = 2 * cap.headroom if was_wrong else _HEADROOM if cap.raised_at is not None else cap.headroom
            cap, plan = replace(cap, headroom=headroom, raised_at=None), max(running, plan)
        elif (faster := fastest_below(watts * (1 - cap.headroom))) < running:
            cap, plan = replace(cap, raised_at=situation.step), faster
        else:
            plan = running
    problem = (
        f"a power limit of {watts:.0f} W cannot be kept: the plan with the lowest power draws {powers_w[last]:.0f} W. "
        "Running it"
        if powers_w[last] > watts
        else ""
    )
    return Decision(plan, problem, cap=cap)


def _slowest(frontier: Frontier, deadline_s: float) -> int:
    return frontier.plans.index(frontier.lookup(max(deadline_s, frontier.plans[0].time_s)))
