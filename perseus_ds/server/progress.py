"""The progress of a job, from its records in order.

Memory and time per record do not grow with the job.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.profile import energy_note
from perseus_ds.artifacts.run_records import (
    CommandGiven,
    Ended,
    Event,
    GoalChanged,
    IterationRecord,
    KindSummary,
    Limits,
    LimitsChanged,
    PlanChosen,
    PlanSummary,
    PowerCapChanged,
    ProfileWritten,
    Record,
    Started,
    WholeSummary,
    goal_in_words,
    is_training_iteration,
)
from perseus_ds.measures import (
    AT_DEFAULT_CLOCKS,
    IterationKind,
    JobMeasures,
    PowerBySecond,
    StableKind,
    Typical,
    WholeJob,
    sums_by_part,
)

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
_LONG_S = 60.0
_LONG_ITERATIONS = 10
_RECENT = 60
"""Number of recent iterations, and of seconds of power."""
_EVENTS = 8


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class PlanFacts(_Facts):
    """The plan in use: its promise and its effect, as fractions of iterations at default clocks."""

    plan: int = Field(description="The plan in use: its index on the frontier, 0 for the fastest.")
    plans: tuple[int, ...] = Field((), description="Plan of each pipeline.")
    baseline: str | None = Field(description="The iterations at default clocks, in words.")
    iterations: int = Field(description="Number of iterations with it on which the figures are based.")
    promised_slowdown: float | None = Field(description="Promised change of time; 0.01 is 1 % longer.")
    promised_saving: float | None = Field(description="Promised saving of energy; 0.1 is 10 % less.")
    slowdown: float | None = Field(description="Change of time of a typical iteration; 0.01 is 1 % longer.")
    slowdown_error: float | None = Field(description="Its standard error.")
    saving: float | None = Field(description="Saving of energy of a typical iteration; 0.1 is 10 % less.")
    saving_error: float | None = Field(description="Its standard error.")


class PipelineFacts(_Facts):
    """Energy of one data-parallel pipeline [J]."""

    pipeline: int
    energy_j: float = Field(description="Energy of all iterations.")
    saved_j: float = Field(description="Its share of the energy saved with plans so far, relative to default clocks.")


class Happened(_Facts):
    """An event."""

    time: float = Field(description="When [Unix seconds].")
    text: str


class JobFacts(_Facts):
    """Facts of a job over all its starts. Metrics have these descriptions too."""

    name: str = Field(description="The name of its output folder.")
    simulated: bool
    mode: str | None
    gpu: str | None
    energy_note: str = Field(description="What energies include besides those of GPUs, or empty.")
    goal: dict[str, Any] | None
    starts: int
    ended: bool = Field(description="Whether it has recorded its end.")
    silent_s: float | None = Field(description="Time since the last record of the job.")
    phase: str | None = Field(description="Phase of the last iteration, or activity outside of iterations.")
    next_phase: str | None
    next_in_s: float | None = Field(description="Estimated time until it begins.")
    step: int | None = Field(description="The last training step.")
    total_steps: int | None = Field(description="Steps of the whole training, if given by the goal.")
    remaining_s: float | None = Field(description="Estimated time until the last step is finished.")
    iterations: int = Field(description="Training iterations.")
    time_s: float = Field(description="Time of all iterations.")
    energy_j: float = Field(description="Energy of all iterations.")
    without_energy: int = Field(description="Iterations with an energy that could not be read.")
    clock_changes: int = Field(description="Clock changes of all GPUs.")
    clock_skips: int = Field(description="Clock changes that were omitted.")
    planned: int = Field(description="Iterations under plans.")
    saved_j: float = Field(description="Energy saved by these, without profiling; negative if they used more.")
    gained_s: float = Field(description="Time gained with plans so far, relative to default clocks; negative if lost.")
    saved: float | None = Field(description="Energy saved by a typical iteration under plans; 0.1 is 10 %.")
    slowdown: float | None = Field(description="Change of its time; 0.01 is 1 % longer than at default clocks.")
    baseline: str | None = Field(description="The iterations at default clocks that this is relative to, in words.")
    undecided: bool = Field(False, description="Whether no comparison of a plan with them is complete.")
    profiling_s: float = Field(description="Additional time for profiling; negative for less.")
    profiling_j: float = Field(description="Additional energy for profiling; negative for less.")
    iteration_s: float | None = Field(description="Median time of the last iterations.")
    power_w: float | None = Field(description="Mean power of all GPUs in the last iterations.")
    present_power_w: float | None = Field(description="Power of all GPUs in the last iteration.")
    highest_power_w: float | None = Field(description="Power of all GPUs in the highest of the last 60 seconds.")
    lowest_power_w: float | None = Field(description="Power of all GPUs in the lowest of them.")
    power_change_w: float | None = Field(description="The largest difference from one of them to the next.")
    power_window_s: float | None = Field(description="Duration of such a second: whole iterations, at least one.")
    cap_w: float | None = Field(description="The power cap in force, of all GPUs.")
    limits: Limits = Field(description="GPUs with lower limits than during profiling.")
    more_limits: int = Field(description="Number of further GPUs.")
    pending: str | None = Field(description="A command that is not in force yet, in words.")
    unfinished: str | None = Field(description="Activity at its end, if it ended before it had a plan or a profile.")
    plan: PlanFacts | None
    whole: WholeSummary | None = Field(
        None, description="What all steps saved, profiling and comparisons included; none before a plan ran."
    )
    plans: tuple[PlanSummary, ...] = Field(description="By plan of the frontier in use.")
    kinds: tuple[KindSummary, ...] = Field((), description="By order of passes; none if all iterations are alike.")
    pipelines: tuple[PipelineFacts, ...]
    waits: tuple[float, ...] = Field(
        (), description="By rank of a pipeline, the share of an iteration in which it waits."
    )
    busy_s: tuple[float, ...] = Field((), description="By rank, the time of its passes, loads and tail in it.")
    powers_w: tuple[float, ...] = Field((), description="By rank, the power of its GPU in the last iterations.")
    clocks_asked_mhz: tuple[int | None, ...]
    clocks_reached_mhz: tuple[int | None, ...]
    straggler: int | None = Field(description="Pipeline for which the others wait.")
    straggler_slowdown: float = Field(description="Time of the slowest pipeline relative to the others.")
    drift: float | None = Field(description="Deviation of instructions from the profile.")
    failed_ranks: tuple[int, ...] = Field(description="Ranks at default clocks after a failure.")
    more_failed_ranks: int
    recent_times_s: tuple[float, ...]
    recent_powers_w: tuple[float | None, ...]
    events: tuple[Happened, ...]

    @property
    def is_silent(self) -> bool:
        """True if the job has been silent for long without recording its end."""
        if self.ended or self.silent_s is None:
            return False
        expected_s = max(_LONG_ITERATIONS * (self.iteration_s or 0.0), self.next_in_s or 0.0, _LONG_S)
        return self.silent_s > expected_s

    @property
    def ranks_below_their_clock(self) -> list[int]:
        """Ranks with a GPU more than 2 % below the requested clock."""
        pairs = zip(self.clocks_asked_mhz, self.clocks_reached_mhz, strict=False)
        return [rank for rank, (asked, reached) in enumerate(pairs) if asked and reached and reached < 0.98 * asked]


@dataclass
class Tally:
    """Sums over iterations. The names are those of the record of a job's end."""

    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = 0
    clock_changes: int = 0
    clock_skips: int = 0

    def add(self, record: IterationRecord) -> None:
        """Add an iteration with valid figures."""
        self.iterations += 1
        self.time_s += record.time_s
        self.clock_changes += record.clock_changes
        self.clock_skips += record.clock_skips
        self.energy_j += record.energy_j or 0.0
        self.without_energy += record.energy_j is None


_Kind = TypeVar("_Kind", bound=Event)


class JobProgress:
    """Sums over all iterations of a job so far.

    Attributes:
        total: All iterations except those that calibrate a simulated GPU.
        since_start: The same since the last start of the job.
        measures: Typical iterations.
        profiling_s: Additional time for profiling relative to default clocks [s].
        profiling_j: Additional energy for profiling relative to default clocks [J].
    """

    def __init__(self) -> None:
        self.total, self.since_start = Tally(), Tally()
        self.measures = JobMeasures()
        self._whole = WholeJob()
        # Energy by pipeline [J]: of all iterations, of those at default clocks, and of those under plans.
        self._all_j: list[float] = []
        self._default_j: list[float] = []
        self._planned_j: list[float] = []
        self._of_kind: Counter[StableKind] = Counter()
        self._recent: deque[IterationRecord] = deque(maxlen=_RECENT)
        self._power = PowerBySecond(_RECENT)
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._starts = 0
        # Last event of each kind since the last start of the job.
        self._latest: dict[type[Event], Event] = {}
        self._goal: dict[str, Any] | None = None
        self._next_goal: dict[str, Any] | None = None
        self._next_pause: bool | None = None
        self.profiling_s = self.profiling_j = 0.0
        self._last: IterationRecord | None = None
        self._last_time = 0.0
        # By rank, the power of GPUs in the last record with it, and the time of iterations since that record.
        self._powers_w: tuple[float, ...] = ()
        self._unrecorded_s = 0.0
        # By rank, requested and reached clocks. Large jobs do not record them with every iteration.
        self._clocks: tuple[tuple[int | None, ...], tuple[int | None, ...]] = (), ()
        self._ended = self.simulated = False
        # Last iteration before a plan ran, or before the profile was complete.
        self._on_the_way: IterationRecord | None = None

    def add(self, record: Record) -> bool:
        """Add a record. Return True if it is a counted iteration."""
        self.simulated |= record.simulated
        if isinstance(record, Event):
            self._last_time = record.time or self._last_time
            self._add_event(record)
        elif is_training_iteration(record):
            self._last_time = record.ended or self._last_time
            self._add_iteration(record)
        else:
            self._last = record
        return self.measures.add(record)

    def _add_event(self, event: Event) -> None:
        self._ended = isinstance(event, Ended)
        if isinstance(event, Started):
            self._starts += 1
            self.since_start = Tally()
            self._latest.clear()
            self._goal = event.goal
            self._last = self._next_goal = self._next_pause = self._on_the_way = None
        elif isinstance(event, ProfileWritten):
            self.profiling_s += event.lost_s or 0.0
            self.profiling_j += event.lost_j or 0.0
        elif isinstance(event, CommandGiven):
            self._next_goal = self._next_goal if event.goal is None else event.goal
            self._next_pause = self._next_pause if event.paused is None else event.paused
        elif isinstance(event, GoalChanged) and event.goal is not None:
            self._goal = event.goal
            if event.goal == self._next_goal:  # it is in force, even if it is replaced later
                self._next_goal = None
        self._latest[type(event)] = event
        if not self._ended:
            self._events.append(event)

    def _add_iteration(self, record: IterationRecord) -> None:
        self._last = record
        self._ended = False
        if record.phase in _STEPS_TO_A_PLAN:
            self._on_the_way = record
        if record.clocks_asked_mhz is not None or record.energy_by_rank_j is not None or record.energy_j is None:
            self._clocks = record.clocks_asked_mhz or (), record.clocks_reached_mhz or ()
        self._unrecorded_s += 0.0 if record.energy_j is None else record.time_s
        if record.energy_by_rank_j is not None and self._unrecorded_s:
            self._powers_w = tuple(energy_j / self._unrecorded_s for energy_j in record.energy_by_rank_j)
            self._unrecorded_s = 0.0
        self._of_kind[self.measures.stable_kind(IterationKind.of(record))] += 1
        self._whole.add(record)
        self.total.add(record)
        self.since_start.add(record)
        self._recent.append(record)
        self._power.add(record.time_s, record.energy_j, record.ended)
        parts_j = record.energy_by_pipeline_j or ()
        self._all_j = sums_by_part(self._all_j, parts_j)
        if record.phase in AT_DEFAULT_CLOCKS:
            self._default_j = sums_by_part(self._default_j, parts_j)
        elif record.phase == "run":
            self._planned_j = sums_by_part(self._planned_j, parts_j)

    @property
    def whole(self) -> WholeSummary | None:
        """The saving of the whole job. None before an iteration could be compared."""
        return self._whole.saving

    def facts(self, name: str, now: float) -> JobFacts:
        """Return the facts."""
        start, chosen = self._of(Started) or Started(), self._of(PlanChosen) or PlanChosen()
        cap, limits = self._of(PowerCapChanged) or PowerCapChanged(), self._of(LimitsChanged) or LimitsChanged()
        last, recent, power = self._last, self._recent, self._power.figures
        silent_s = max(0.0, now - self._last_time) if self._last_time else None
        total_steps = (self._goal or {}).get("total_steps")
        typical = Typical.of([one.time_s for one in recent], [one.energy_j for one in recent])
        return JobFacts(
            name=name,
            simulated=self.simulated,
            mode=start.mode,
            gpu=start.gpu,
            energy_note=energy_note(start.settings),
            goal=self._goal,
            starts=self._starts,
            ended=self._ended,
            silent_s=silent_s,
            **self._phase(now),
            step=last.iteration if last else None,
            total_steps=total_steps,
            remaining_s=self._remaining_s(total_steps, now, silent_s or 0.0),
            **asdict(self.total),
            **self.savings(),
            profiling_s=self.profiling_s,
            profiling_j=self.profiling_j,
            iteration_s=typical and typical.time_s,
            power_w=typical and typical.power_w,
            present_power_w=last.power_w if last else None,
            highest_power_w=power and power.highest_w,
            lowest_power_w=power and power.lowest_w,
            power_change_w=power and power.change_w,
            power_window_s=power and power.window_s,
            cap_w=cap.watts,
            limits=limits.limits,
            more_limits=limits.more,
            pending=self._pending(),
            unfinished=self._unfinished(start.mode),
            plan=self._plan(chosen),
            pipelines=self._pipelines(),
            powers_w=self._powers_w,
            clocks_asked_mhz=self._clocks[0],
            clocks_reached_mhz=self._clocks[1],
            straggler=chosen.straggler,
            straggler_slowdown=chosen.slowdown,
            drift=last.drift if last else None,
            failed_ranks=last.failed_ranks if last else (),
            more_failed_ranks=last.more_failed_ranks if last else 0,
            recent_times_s=tuple(record.time_s for record in recent),
            recent_powers_w=tuple(record.power_w for record in recent),
            events=tuple(Happened(time=event.time, text=event.in_words()) for event in self._events),
        )

    def _of(self, kind: type[_Kind]) -> _Kind | None:
        found = self._latest.get(kind)
        return found if isinstance(found, kind) else None

    def _phase(self, now: float) -> dict[str, Any]:
        last = self._last
        if self._ended or last is None:
            return {"phase": None, "next_phase": None, "next_in_s": None}
        in_s = last.next_in_s
        if in_s is not None and last.ended is not None:
            in_s = max(0.0, last.ended + in_s - now)
        return {"phase": last.phase, "next_phase": last.next_phase, "next_in_s": in_s}

    def _remaining_s(self, total_steps: int | None, now: float, silent_s: float) -> float | None:
        if total_steps is None or self._last is None or not self._recent:
            return None
        if self._ended:
            return 0.0 if self._last.iteration >= total_steps else None
        # From end to end, to include evaluations and checkpoints between iterations.
        ends = [record.ended for record in self._recent if record.ended is not None]
        between_s = [later - earlier for earlier, later in itertools.pairwise(ends)]
        pace_s = statistics.mean(between_s) if between_s else self._recent[-1].time_s
        return max(0.0, (total_steps - self._last.iteration) * pace_s - silent_s)

    def _unfinished(self, mode: str | None) -> str | None:
        """Return the activity and what was missing, if the job ended without a plan or profile."""
        last = self._on_the_way
        is_done = {"auto": self.measures.planned > 0, "profile": ProfileWritten in self._latest}
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

    def _pending(self) -> str | None:
        """Describe the commands that are not in force yet."""
        if self._ended or self._last is None:
            return None
        waiting = []
        if self._next_goal is not None:
            waiting.append(goal_in_words(self._next_goal))
        if self._next_pause is not None and self._next_pause != (self._last.phase == "pause"):
            waiting.append("pause" if self._next_pause else "resume")
        return "; ".join(waiting) or None

    def savings(self) -> dict[str, Any]:
        """Return the savings of plans so far, by the names used in facts and in the record of a job's end."""
        saving, plans = self.measures.saving(), self.measures.plans()
        return {
            "planned": self.measures.planned,
            "saved_j": saving.saved_j if saving else 0.0,
            "gained_s": saving.gained_s if saving else 0.0,
            "saved": saving.saved if saving else None,
            "slowdown": saving.slowdown if saving else None,
            "baseline": str(plans[-1].baseline) if plans else None,
            "undecided": bool(plans) and self.measures.is_undecided(plans[-1].baseline),
            "whole": self.whole,
            "plans": tuple(
                PlanSummary(plan=one.plan, iterations=one.ran, slowdown=one.slowdown, saved=one.saved)
                for one in plans
                if one.plan is not None
            ),
            "kinds": tuple(self._kinds()) if len(self._of_kind) > 1 else (),
        }

    def _kinds(self) -> Iterator[KindSummary]:
        """Yield the savings of each kind of iterations with plans, the most frequent first."""
        planned, savings = self.measures.planned_by_kind(), self.measures.saving_by_kind()
        for kind, iterations in self._of_kind.most_common():
            saving = savings.get(kind)
            yield KindSummary(
                micro_batches=kind.micro_batches,
                order=kind.order,
                iterations=iterations,
                planned=planned.get(kind, 0),
                slowdown=saving and saving.slowdown,
                saved=saving and saving.saved,
            )

    def _plan(self, chosen: PlanChosen) -> PlanFacts | None:
        last = self._last
        if last is None or last.plan is None or last.phase != "run":
            return None
        measured, baseline = self.measures.of(last)
        return PlanFacts(
            plan=last.plan,
            plans=chosen.plans,
            baseline=None if baseline is None else str(baseline),
            iterations=measured.typical.iterations if measured else 0,
            promised_slowdown=last.promised_slowdown,
            promised_saving=last.promised_saving,
            slowdown=measured and measured.slowdown,
            slowdown_error=measured and measured.slowdown_error,
            saving=measured and measured.saved,
            saving_error=measured and measured.saved_error,
        )

    def _pipelines(self) -> tuple[PipelineFacts, ...]:
        """Return the energy of each pipeline and its share of the saving."""
        saving, pipelines = self.measures.saving(), len(self._all_j)
        saved_j = [0.0] * pipelines
        if saving is not None and any(self._planned_j):
            default_j = self._default_j if any(self._default_j) else [1.0] * pipelines
            saved_j = [
                saving.default_j * theirs_j / sum(default_j) - saving.energy_j * ours_j / sum(self._planned_j)
                for theirs_j, ours_j in itertools.zip_longest(default_j, self._planned_j, fillvalue=0.0)
            ]
        return tuple(
            PipelineFacts(pipeline=number, energy_j=energy_j, saved_j=part_j)
            for number, (energy_j, part_j) in enumerate(itertools.zip_longest(self._all_j, saved_j, fillvalue=0.0))
        )


class JobLog:
    """Progress of the jobs in one ``run.jsonl``. The last started one is reported. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: dict[str | None, JobProgress] = {None: JobProgress()}
        self._current = self._jobs[None]
        self._lock = threading.Lock()

    def add(self, records: Iterable[Record]) -> None:
        """Add records in order."""
        with self._lock:
            for record in records:
                if isinstance(record, Started):
                    self._current = self._jobs.setdefault(record.job, JobProgress())
                self._current.add(record)

    def facts(self, now: float) -> JobFacts:
        """Return the facts of the last started job."""
        with self._lock:
            return self._current.facts(self._name, now)

    def at_end(self) -> Ended:
        """Return the record of the end of the last started job, if it ends now."""
        with self._lock:
            return Ended(**asdict(self._current.since_start), **self._current.savings())
