"""The progress of a job, from its records in their order; memory and time per record do not grow with the job."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from perseus_ds.artifacts.hour_records import TimetableMade
from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_records import (
    Ended,
    IterationRecord,
    PlanChosen,
    PlanTotals,
    PolicyChanged,
    ProfileWritten,
    ProfilingBegun,
    Record,
    Started,
)
from perseus_ds.report.history import trains
from perseus_ds.report.live.facts import Happened, JobFacts, PipelineFacts, PlanFacts, totals_of
from perseus_ds.report.live.tally import Tally
from perseus_ds.report.live.typical import change, kind_of, mean_power_w, saving_of, typical_changes
from perseus_ds.report.words import event_in_words

_RECENT = 60
_TYPICAL = 200
_EVENTS = 8
_AT_DEFAULT_CLOCKS = ("observe", "default", "plan", "warm-up")


class JobProgress:
    """All that a job did so far, added up.

    Attributes:
        total: All iterations but those that calibrate a simulated GPU.
    """

    def __init__(self) -> None:
        self.total = Tally()
        self._by_plan: dict[int, Tally] = {}
        self._pipelines: list[_Pipeline] = []
        self._recent: deque[IterationRecord] = deque(maxlen=_RECENT)
        self._typical: deque[IterationRecord] = deque(maxlen=_TYPICAL)
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._start: Started | None = None
        self._starts = 0
        self._policy: dict[str, Any] | None = None
        self._chosen: PlanChosen | None = None
        self._timetable: TimetableMade | None = None
        self._profiling: ProfilingBegun | None = None
        self._profiling_s = self._profiling_j = 0.0
        self._last: IterationRecord | None = None
        self._last_time = 0.0
        # By rank, what GPUs were asked for and what they reached; large jobs do not record that with every iteration.
        self._clocks: tuple[tuple[int | None, ...], tuple[int | None, ...]] = (), ()
        self._ended = self._simulated = False
        # Iterations since the start or the last change of plan; the first one is like no other.
        self._alike = 0

    @property
    def plans(self) -> tuple[PlanTotals, ...]:
        """Iterations under each plan of the frontier in use, in the order in which they ran."""
        return tuple(tally.of_plan(plan) for plan, tally in self._by_plan.items() if tally.planned)

    def add(self, record: Record) -> None:
        """Add a record."""
        self._simulated |= record.simulated
        if isinstance(record, Event):
            self._last_time = record.time or self._last_time
            self._add_event(record)
        elif trains(record):
            self._last_time = record.ended or self._last_time
            self._add_iteration(record)
        else:
            self._last, self._profiling = record, None

    def _add_event(self, event: Event) -> None:
        self._ended = isinstance(event, Ended)
        if isinstance(event, Started):
            self._starts += 1
            if self._start is not None and self._start.frontier != event.frontier:
                self._by_plan.clear()
            self._start, self._policy, self._alike = event, event.policy, 0
            self._chosen = self._profiling = self._last = self._timetable = None
            self._typical.clear()
        elif isinstance(event, ProfilingBegun):
            self._profiling = event
        elif isinstance(event, ProfileWritten):
            # A plan's number is only valid for its own frontier.
            self._by_plan.clear()
            self._profiling_s += (event.lost_s or 0.0) + (event.spent_s or 0.0)
            self._profiling_j += (event.lost_j or 0.0) + (event.spent_j or 0.0)
        elif isinstance(event, PlanChosen):
            self._chosen = event
        elif isinstance(event, TimetableMade):
            self._timetable = event
        elif isinstance(event, PolicyChanged) and event.policy:
            self._policy, self._timetable = event.policy, None
        if not isinstance(event, Ended):
            self._events.append(event)

    def _add_iteration(self, record: IterationRecord) -> None:
        last, self._last, self._profiling = self._last, record, None
        if last is None or kind_of(last) != kind_of(record):
            self._alike = 0
            self._typical.clear()
        self._alike += 1
        self._ended = False
        if record.clocks_asked_mhz is not None or record.energy_by_rank_j is not None or record.energy_j is None:
            self._clocks = record.clocks_asked_mhz or (), record.clocks_reached_mhz or ()
        self.total.add(record)
        self._recent.append(record)
        if record.phase == "run" and record.plan is not None:
            if not record.shape:  # the plans of other shapes have numbers of their own
                self._by_plan.setdefault(record.plan, Tally()).add(record)
            if self._alike > 1 and not record.failed_ranks:
                self._typical.append(record)
        self._add_to_pipelines(record)

    def _add_to_pipelines(self, record: IterationRecord) -> None:
        energies_j = record.energy_by_pipeline_j or ()
        while len(self._pipelines) < len(energies_j):
            self._pipelines.append(_Pipeline())
        pipelines = self._pipelines[: len(energies_j)]
        known_j = sum(pipeline.at_default_j for pipeline in pipelines)
        for pipeline, energy_j in zip(pipelines, energies_j, strict=True):
            pipeline.energy_j += energy_j
            if record.phase in _AT_DEFAULT_CLOCKS:
                pipeline.at_default_j += energy_j
            elif record.default_energy_j is not None:
                share = pipeline.at_default_j / known_j if known_j else 1 / len(pipelines)
                pipeline.planned_j += energy_j
                pipeline.default_j += share * record.default_energy_j

    def facts(self, name: str, now: float) -> JobFacts:
        """Return the facts.

        Args:
            name: The job's.
            now: The time [Unix seconds].
        """
        start, last, chosen, recent = self._start, self._last, self._chosen, self._recent
        silent_s = max(0.0, now - self._last_time) if self._last_time else None
        powers_w = [record.power_w for record in recent]
        total_steps = (self._policy or {}).get("total_steps")
        return JobFacts(
            name=name,
            simulated=self._simulated,
            mode=start.mode if start else None,
            gpu=start.gpu if start else None,
            policy=self._policy,
            starts=self._starts,
            ended=self._ended,
            silent_s=silent_s,
            **self._phase(now),
            step=last.iteration if last else None,
            total_steps=total_steps,
            remaining_s=self._remaining_s(total_steps, now, silent_s or 0.0),
            **totals_of(self.total),
            profiling_s=self._profiling_s,
            profiling_j=self._profiling_j,
            iteration_s=statistics.median(record.time_s for record in recent) if recent else None,
            power_w=mean_power_w(recent),
            plan=self._plan(),
            plans=self.plans,
            pipelines=tuple(pipeline.facts(number) for number, pipeline in enumerate(self._pipelines)),
            clocks_asked_mhz=self._clocks[0],
            clocks_reached_mhz=self._clocks[1],
            straggler=chosen.straggler if chosen else None,
            straggler_slowdown=chosen.slowdown if chosen else 1.0,
            drift=last.drift if last else None,
            failed_ranks=last.failed_ranks if last else (),
            more_failed_ranks=last.more_failed_ranks if last else 0,
            recent_times_s=tuple(record.time_s for record in recent),
            recent_powers_w=tuple(powers_w),
            events=tuple(Happened(time=event.time, text=event_in_words(event)) for event in self._events),
        )

    def _phase(self, now: float) -> dict[str, Any]:
        profiling, last = self._profiling, self._last
        if self._ended:
            return {"phase": None, "next_phase": None, "next_in_s": None}
        if profiling is not None:
            left_s = profiling.longest_s and max(0.0, profiling.time + profiling.longest_s - now)
            return {"phase": "profile", "next_phase": "observe", "next_in_s": left_s}
        if last is None:
            return {"phase": None, "next_phase": None, "next_in_s": None}
        if self._chosen is not None and self._chosen.halts:
            return {"phase": "halt", "next_phase": "run", "next_in_s": None}
        in_s = last.next_in_s
        if in_s is not None and last.ended is not None:
            in_s = max(0.0, last.ended + in_s - now)
        return {"phase": last.phase, "next_phase": last.next_phase, "next_in_s": in_s}

    def _remaining_s(self, total_steps: int | None, now: float, silent_s: float) -> float | None:
        if total_steps is None or self._last is None or not self._recent:
            return None
        if self._ended:
            return 0.0 if self._last.iteration >= total_steps else None
        if self._timetable is not None:
            return max(0.0, self._timetable.ends - now)
        # From end to end: evaluations and checkpoints between iterations take time, too.
        ends = [record.ended for record in self._recent if record.ended is not None]
        between_s = [later - earlier for earlier, later in itertools.pairwise(ends)]
        pace_s = statistics.mean(between_s) if between_s else self._recent[-1].time_s
        return max(0.0, (total_steps - self._last.iteration) * pace_s - silent_s)

    def _plan(self) -> PlanFacts | None:
        last = self._last
        if last is None or last.plan is None or last.phase != "run":
            return None
        slowdown, saving = typical_changes(self._typical)
        return PlanFacts(
            plan=last.plan,
            plans=self._chosen.plans if self._chosen else (),
            iterations=len(self._typical),
            promised_slowdown=change(last.predicted_time_s, last.default_time_s),
            promised_saving=saving_of(last.predicted_energy_j, last.default_energy_j),
            slowdown=slowdown,
            saving=saving,
        )


class _Pipeline:
    """Energy of one pipeline so far [J].

    Attributes:
        at_default_j: Of the iterations at default clocks, which say what part of the job's energy is this pipeline's.
    """

    def __init__(self) -> None:
        self.energy_j = self.planned_j = self.default_j = self.at_default_j = 0.0

    def facts(self, number: int) -> PipelineFacts:
        return PipelineFacts(
            pipeline=number, energy_j=self.energy_j, planned_j=self.planned_j, default_j=self.default_j
        )


class JobLog:
    """The progress of the jobs that one ``run.jsonl`` records, of which the one that started last is told; thread-safe.

    Args:
        name: The job's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: dict[str | None, JobProgress] = {None: JobProgress()}
        self._current = self._jobs[None]
        self._lock = threading.Lock()

    def add(self, records: Iterable[Record]) -> None:
        """Add records in their order."""
        with self._lock:
            for record in records:
                if isinstance(record, Started):
                    self._current = self._jobs.setdefault(record.job, JobProgress())
                self._current.add(record)

    def facts(self, now: float) -> JobFacts:
        """Return the facts of the job that started last."""
        with self._lock:
            return self._current.facts(self._name, now)
