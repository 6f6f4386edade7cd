"""The present state of a job, from its last records."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from perseus_ds.artifacts.run_events import (
    CommandGiven,
    Ended,
    Event,
    GoalChanged,
    ProfileWritten,
    Started,
    goal_in_words,
)
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations
from perseus_ds.artifacts.run_records import Record, is_training
from perseus_ds.progress.series import RecentPower
from perseus_ds.savings import sums_of, total_of

PHASES: Mapping[str, str] = {
    "calibrate": "calibrating the simulated GPU",
    "warm-up": "warming up",
    "profile": "measuring the profile",
    "optimizing": "computing plans",
    "default": "measuring iterations at default clocks to compare plans with",
    "verdict": "comparing plan and default clocks",
    "run": "running under plans",
    "pause": "paused: default clocks",
    "observe": "default clocks",
}
"""Description of each phase. A verdict is not a phase, but may follow while plans run."""
_STEPS_TO_A_PLAN = ("warm-up", "profile", "optimizing", "default")
RECENT = 60
"""Number of recent iterations, and of seconds of power."""
_EVENTS = 8
_Kind = TypeVar("_Kind", bound=Event)


class Present:
    """The present state of a job.

    Attributes:
        last: The last iteration since the last start.
        recent: The last iterations.
        events: The last events.
        powers_w: By rank, the power of GPUs in the last record with it.
        clocks_asked_mhz, clocks_reached_mhz: By rank, requested and reached clocks. Large jobs do not record them with
            every iteration.
    """

    def __init__(self) -> None:
        self.last: IterationRecord | None = None
        self.recent: deque[IterationRecord] = deque(maxlen=RECENT)
        self.power = RecentPower(RECENT)
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        self.goal: dict[str, Any] | None = None
        self.powers_w: tuple[float, ...] = ()
        self.clocks_asked_mhz: tuple[int | None, ...] = ()
        self.clocks_reached_mhz: tuple[int | None, ...] = ()
        self.has_ended = self.is_simulated = False
        # Last event of each kind since the last start of the job.
        self._latest: dict[type[Event], Event] = {}
        self._next_goal: dict[str, Any] | None = None
        self._next_pause: bool | None = None
        self._last_time = 0.0
        self._unrecorded_s = 0.0
        # Last iteration before a plan ran, or before the profile was complete.
        self._on_the_way: IterationRecord | None = None
        self._has_run_plan = False

    def add(self, record: Record) -> None:
        """Add a record."""
        self.is_simulated |= record.simulated
        if isinstance(record, Event):
            self._last_time = record.time or self._last_time
            self._add_event(record)
        elif isinstance(record, SummedIterations):
            self._last_time = record.ended or self._last_time
            self._unrecorded_s += record.unlisted_s
            self.has_ended = False
            self._has_run_plan |= any(part.phase == "run" and part.plan is not None for part in record.parts)
        elif isinstance(record, IterationRecord):
            self.last = record
            if is_training(record):
                self._add_iteration(record)

    def _add_event(self, event: Event) -> None:
        self.has_ended = isinstance(event, Ended)
        if isinstance(event, Started):
            self._latest.clear()
            self._unrecorded_s = 0.0
            self.goal = event.goal
            self.last = self._next_goal = self._next_pause = self._on_the_way = None
        elif isinstance(event, CommandGiven):
            self._next_goal = self._next_goal if event.goal is None else event.goal
            self._next_pause = self._next_pause if event.paused is None else event.paused
        elif isinstance(event, GoalChanged) and event.goal is not None:
            self.goal = event.goal
            if event.goal == self._next_goal:  # it is in force, even if it is replaced later
                self._next_goal = None
        self._latest[type(event)] = event
        if not self.has_ended:
            self.events.append(event)

    def _add_iteration(self, record: IterationRecord) -> None:
        self._last_time = record.ended or self._last_time
        self.has_ended = False
        self._has_run_plan |= record.phase == "run" and record.plan is not None
        if record.phase in _STEPS_TO_A_PLAN:
            self._on_the_way = record
        if record.clocks_asked_mhz is not None or record.energy_by_rank_j is not None or record.energy_j is None:
            self.clocks_asked_mhz = record.clocks_asked_mhz or ()
            self.clocks_reached_mhz = record.clocks_reached_mhz or ()
        self._unrecorded_s += 0.0 if record.energy_j is None else record.time_s
        if record.energy_by_rank_j is not None and self._unrecorded_s:
            self.powers_w = tuple(energy_j / self._unrecorded_s for energy_j in record.energy_by_rank_j)
            self._unrecorded_s = 0.0
        self.recent.append(record)
        self.power.add(record.time_s, record.energy_j, record.ended)

    def latest(self, empty: _Kind) -> _Kind:
        """Return the last event of a kind since the last start, or an empty one, which is given."""
        found = self._latest.get(type(empty))
        return found if isinstance(found, type(empty)) else empty

    def silent_s(self, now: float) -> float | None:
        """Return the time since the last record [s]."""
        return max(0.0, now - self._last_time) if self._last_time else None

    @property
    def iteration_s(self) -> float | None:
        """Median time of the last iterations [s], because single iterations may be delayed."""
        return statistics.median(record.time_s for record in self.recent) if self.recent else None

    @property
    def power_w(self) -> float | None:
        """Mean power of all GPUs in the last iterations [W]."""
        found = total_of(sums_of(record) for record in self.recent if record.energy_j is not None)
        return found.energy_j / found.time_s if found.iterations else None

    def next_in_s(self, now: float) -> float | None:
        """Return the estimated time until the next phase begins [s]."""
        last = self.last
        if last is None or last.next_in_s is None or last.ended is None:
            return None if last is None else last.next_in_s
        return max(0.0, last.ended + last.next_in_s - now)

    @property
    def total_steps(self) -> int | None:
        return (self.goal or {}).get("total_steps")

    def remaining_s(self, now: float) -> float | None:
        """Return the estimated time until the last step is finished [s]."""
        if self.total_steps is None or self.last is None or not self.recent:
            return None
        if self.has_ended:
            return 0.0 if self.last.iteration >= self.total_steps else None
        # From end to end, to include evaluations and checkpoints between iterations.
        ends = [record.ended for record in self.recent if record.ended is not None]
        between_s = [later - earlier for earlier, later in itertools.pairwise(ends)]
        pace_s = statistics.mean(between_s) if between_s else self.recent[-1].time_s
        return max(0.0, (self.total_steps - self.last.iteration) * pace_s - (self.silent_s(now) or 0.0))

    @property
    def was_killed(self) -> bool:
        """True if the job has ended, and a rank of it without closing Perseus."""
        return self.has_ended and self.latest(Ended()).killed

    @property
    def unfinished(self) -> str | None:
        """The activity and what was missing, if the job ended without a plan or profile."""
        mode, last = self.latest(Started()).mode, self._on_the_way
        is_done = {"auto": self._has_run_plan, "profile": ProfileWritten in self._latest}
        if last is None or is_done.get(mode or "", True):
            return None
        steps = _STEPS_TO_A_PLAN if mode == "auto" else _STEPS_TO_A_PLAN[:2]
        text = f"training ended before {'a plan ran' if mode == 'auto' else 'the profile was complete'}, while "
        text += PHASES[last.phase]
        if last.next_in_s is not None:
            left = max(1, round(last.next_in_s / last.time_s))
            text += f" (about {left} more iteration{'s' if left > 1 else ''})"
        following = [PHASES[step] for step in steps[steps.index(last.phase) + 1 :]] if last.phase in steps else []
        text += f"; then comes {', then '.join(following)}" if following else ""
        return f"{text}. Train for more steps"

    @property
    def pending(self) -> str | None:
        """The commands that are not in force yet, in words."""
        if self.has_ended or self.last is None:
            return None
        waiting = []
        if self._next_goal is not None:
            waiting.append(goal_in_words(self._next_goal))
        if self._next_pause is not None and self._next_pause != (self.last.phase == "pause"):
            waiting.append("pause" if self._next_pause else "resume")
        return "; ".join(waiting) or None
