"""User control of a running job: its goal, reported stragglers and pauses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.run_events import CommandGiven, Event, GoalChanged, goal_in_words
from perseus_ds.artifacts.validation import explain
from perseus_ds.policy.commands import AnyCommand, ClearGoal, GetStatus, Pause, Resume, SetGoal, SetStraggler
from perseus_ds.policy.goal import LIMITS, Goal, check_deadline
from perseus_ds.policy.stragglers import Straggler
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import duration, percent, plain, watts

logger = logging.getLogger("perseus_ds")


def cost_in_words(slowdown: float, saved: float) -> str:
    """Return a description of the slowdown of a plan and the energy that it saves, as fractions."""
    return f"about {percent(slowdown).lstrip('+')} slower, {percent(-saved)} energy"


@dataclass(frozen=True)
class Effect:
    """Predicted effect of a goal, using measurements of the job.

    Attributes:
        plan: The plan that it selects now.
        slowdown: Slowdown of the plan relative to default clocks, as a fraction.
        saved: Energy that it saves relative to default clocks, as a fraction.
        power_w: Power of all GPUs under it [W].
        later: Additional time of iterations because of the power limit, as a fraction.
        begins_in_s: Longest time until it is in effect [s].
        limit_w: The power limit [W]. None if there is none.
        problem: A part of the goal that no plan keeps.
    """

    plan: int
    slowdown: float
    saved: float
    power_w: float
    later: float
    begins_in_s: float
    limit_w: float | None = None
    problem: str = ""

    @property
    def in_words(self) -> str:
        """Description of the figures that matter for the goal."""
        words = cost_in_words(self.slowdown, self.saved)
        if self.limit_w is None:
            return words
        return f"{words}, {watts(self.power_w, like=self.limit_w)} of {watts(self.limit_w)}"

    def delay_in_words(self, duration_s: float) -> str:
        """Describe the time that a power limit costs during some time [s]. Empty if it costs none."""
        if self.later <= 0:
            return ""
        return f", which makes the job {duration(duration_s * self.later / (1 + self.later))} later"


class JobControl:
    """The settings that users may change while the job trains.

    Attributes:
        goal: The goal in force: that of the configuration, with the changes by control.
        change_in_words: The last change of the goal and its cause.
        steps: Completed steps, including those of earlier starts of the job.
        own_steps: Iterations since the server started.
        record: Records an event of the job.
        announce: Records an event and prints it.
        effect_of: Returns the predicted effect of a goal, or None until plans run.
    """

    def __init__(
        self,
        configured: Goal,
        pipelines: int,
        job_status: Callable[[], Mapping[str, Any]] = dict,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Start with the configured goal. ``job_status`` returns the job's phase, and the run that comes ``next``."""
        self.goal = self._configured = self._recorded = configured
        self._changes: dict[str, Any] = {}  # values of keys of the goal that commands have set
        self.change_in_words = ""
        self.paused = False
        self.steps = self.own_steps = 0
        self._shared = 0  # iterations that belong to the step of the next one
        self.record: Callable[[Event], None] = lambda event: None
        self.announce: Callable[[Event], None] = lambda event: None
        self.effect_of: Callable[[Goal], Effect | None] = lambda goal: None
        self._pipelines = pipelines
        self._job_status = job_status
        self._timebase = timebase
        self._reported: dict[int, tuple[int, float]] = {}  # step and slowdown by pipeline

    def goal_now(self) -> Goal:
        """Return the goal in force. When the power limit of a command ends, that of the configuration is in force."""
        now = self._timebase.date()
        if self.goal.until is not None and self.goal.until <= now:
            for key in LIMITS["power"]:
                self._changes.pop(key, None)
            self.change_in_words = "the power limit has ended"
        self.goal = self._configured.changed(self._changes).at(now)
        return self.goal

    def record_goal(self) -> None:
        """Record the goal if it differs from the last recorded one."""
        if self.goal != self._recorded:
            self._recorded = self.goal
            self.record(GoalChanged(goal=self.goal.given()))

    def count_step(self, step: int) -> None:
        """Count a completed step."""
        self.steps = step
        self.own_steps += 1

    def add_steps(self, steps: int) -> None:
        """Count steps without an iteration, or, if negative, iterations that belong to the step of the next one.

        The host, which reports them, may be ahead of the iterations that have been counted.
        """
        self.steps = max(0, self.steps + steps)
        self._shared += max(0, -steps)

    @property
    def iterations_per_step(self) -> float:
        """Number of iterations of a training step, which is above 1 if gradients are accumulated over several."""
        return self.own_steps / max(1, self.own_steps - self._shared) if self.own_steps else 1.0

    def straggler(self) -> Straggler | None:
        """Return the slowest reported straggler that is in effect, if any."""
        due = [Straggler(p, slowdown) for p, (step, slowdown) in self._reported.items() if self.steps >= step]
        return max(due, key=lambda straggler: straggler.slowdown, default=None)

    def carry_out(self, command: AnyCommand) -> dict[str, Any]:
        """Carry out a command and return the answer.

        Raises:
            ValueError: The command cannot be carried out. Nothing has changed.
        """
        job = self._job_status()
        if isinstance(command, GetStatus):
            return {"status": {"paused": self.paused, "goal": self.goal.given(), **job}}
        done = self._done(command, job)
        if isinstance(command, SetGoal | ClearGoal):
            # Once plans run, its effect is printed when it is in force.
            record = self.announce if self.effect_of(self.goal) is None else self.record
            record(CommandGiven(goal=self.goal.given()))
        elif isinstance(command, Pause | Resume):
            self.record(CommandGiven(paused=self.paused))
        return {"done": done + (". However, this job runs no plans now" if _runs_no_plans(job) else "")}

    def _done(self, command: SetGoal | ClearGoal | SetStraggler | Pause | Resume, job: Mapping[str, Any]) -> str:
        if isinstance(command, SetGoal):
            until, now = command.goal.until, self._timebase.date()
            if until is not None and until <= now:
                raise ValueError(f"goal.until: {until.isoformat()} has passed. Set a time in the future.")
            return self._change_goal(self._with_limits_of(command.goal))
        if isinstance(command, ClearGoal):
            limits = LIMITS if command.limit is None else {command.limit: LIMITS[command.limit]}
            cleared = {key for limit in limits.values() for key in limit}
            return self._change_goal({key: value for key, value in self._changes.items() if key not in cleared})
        if isinstance(command, SetStraggler):
            pipeline, slowdown = command.pipeline, command.slowdown
            if pipeline >= self._pipelines:
                raise ValueError(f"pipeline: there is no pipeline {pipeline}, expected 0 to {self._pipelines - 1}.")
            if slowdown == 1:
                self._reported.pop(pipeline, None)
                return f"pipeline {pipeline} is treated as recovered"
            self._reported[pipeline] = (self.steps + command.after_iterations, slowdown)
            return f"pipeline {pipeline} is expected to take {slowdown:g} times as long"
        self.paused = isinstance(command, Pause)
        if not self.paused:
            return "under plans again"
        at_once = bool(job.get("next")) or _runs_no_plans(job)
        return "at default clocks" if at_once else "at default clocks, once the job has profiled itself"

    def _with_limits_of(self, goal: Goal) -> dict[str, Any]:
        """Return the changes with the limits of another goal."""
        given = goal.model_dump(mode="json", exclude_unset=True)
        kept = dict(self._changes)
        for limit in LIMITS.values():
            if not given.keys().isdisjoint(limit):
                kept = {key: value for key, value in kept.items() if key not in limit}
        return {**kept, **given}

    def _change_goal(self, changes: dict[str, Any]) -> str:
        """Put other changes of the goal in force, and return a description of the new goal and its effect."""
        now = self._timebase.date()
        try:
            goal = self._configured.changed(changes).at(now)
        except ValidationError as error:
            raise ValueError(explain(error, Goal, "goal.")) from None
        check_deadline(goal, now)
        self._changes, self.goal = changes, goal
        words = goal_in_words(goal.given())
        self.change_in_words = f"{words} by control"
        return words + self._effect_in_words(goal, now)

    def _effect_in_words(self, goal: Goal, now: datetime) -> str:
        effect = self.effect_of(goal)
        if effect is None:
            return ", once the job runs under plans"
        cost = "" if goal.until is None else effect.delay_in_words((goal.until - now).total_seconds())
        words = f": plan {effect.plan} in at most {duration(effect.begins_in_s)}, {effect.in_words}{cost}"
        words += f". However, {effect.problem}" if effect.problem else ""
        words += ". However, the job is paused, and runs at default clocks until it is resumed" if self.paused else ""
        return plain(words)

    def state(self) -> dict[str, Any]:
        """Return the state to keep for later starts of the job, as plain values."""
        return _Kept(
            configured=self._configured,
            changes=self._changes,
            paused=self.paused,
            steps=self.steps,
            stragglers=self._reported,
        ).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the state kept by an earlier start, and return whether the goal is the one of that start.

        If the goal has changed in the configuration since then, it is taken from the configuration.
        """
        try:
            kept = _Kept.model_validate(state)
            goal = kept.configured.changed(kept.changes)
        except ValueError as error:  # saved by another version, or damaged
            logger.warning("perseus: what an earlier start kept cannot be read (%r); it is ignored.", error)
            return False
        self._reported = {p: entry for p, entry in kept.stragglers.items() if p < self._pipelines}
        self.paused, self.steps = kept.paused, kept.steps
        if kept.configured != self._configured:
            return False
        self._changes, self.goal = dict(kept.changes), goal
        return True


class _Kept(FileModel):
    """State kept for later starts of the job. A straggler is in effect from a given step."""

    model_config = ConfigDict(extra="ignore")
    configured: Goal
    changes: dict[str, Any]
    paused: bool
    steps: int = Field(ge=0, le=10**12)
    stragglers: dict[int, tuple[int, Annotated[float, Field(ge=1)]]]


def _runs_no_plans(job: Mapping[str, Any]) -> bool:
    return job.get("phase") == "observe" and not job.get("next")
