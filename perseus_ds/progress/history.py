"""The history of a job for charts and lists, in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from perseus_ds.artifacts.run_events import ClockNotReached, Event, PlanJudged, Started
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations, Sums
from perseus_ds.progress.series import EveryNth, PowerExtremes, PowerFigures, SeriesPart, SeriesParts

MOST_POINTS = 1500
"""Maximum number of points that are kept of each phase."""
MOST_EVENTS = 200
"""Maximum number of events that are kept."""
_MOST_PARTS = 40


class HistoryPoint(NamedTuple):
    """An iteration in a chart.

    Attributes:
        place: Number of iterations up to and including this one.
    """

    place: int
    iteration: int
    plan: int | None
    time_s: float
    energy_j: float | None


class NumberedEvent(NamedTuple):
    """An event, and the number of iterations before it."""

    after: int
    event: Event


class History:
    """The history of a job.

    Attributes:
        first_start, last_start: The first and the last recorded start, or empty ones.
        starts: Number of starts.
        iterations: Number of iterations except those that calibrate a simulated GPU.
        points: Some iterations of each phase.
        events: The first events.
        event_count: Number of all events.
        plan: The last plan that ran of the first order and the last frontier.
        planned: Iterations under plans of the last frontier, in parts.
        refused: Clocks that GPUs did not reach.
    """

    def __init__(self) -> None:
        self.first_start = self.last_start = Started()
        self.starts = self.iterations = self.event_count = 0
        self.frontier: str | None = None
        self.points: defaultdict[str, EveryNth[HistoryPoint]] = defaultdict(lambda: EveryNth(MOST_POINTS))
        self.events: list[NumberedEvent] = []
        self.plan: int | None = None
        self.planned = SeriesParts(_MOST_PARTS)
        self.refused: dict[tuple[int | None, tuple[str, ...]], ClockNotReached] = {}
        self.has_verdict = False
        self._frontier: int | None = None
        self._power, self._planned_power = PowerExtremes(), PowerExtremes()
        # Energy by rank [J], its period [s], and the time since the last record with energies by rank [s].
        self._by_rank_j: list[float] = []
        self._by_rank_s = self._since_s = 0.0
        self._ranks: set[int] = set()
        self._pipelines: set[int] = set()

    def add_event(self, event: Event) -> None:
        """Add an event."""
        self.event_count += 1
        if len(self.events) < MOST_EVENTS:
            self.events.append(NumberedEvent(self.iterations, event))
        if isinstance(event, Started):
            self.first_start = event if not self.starts else self.first_start
            if event.order != self.order:
                self.plan = None
            self.last_start = event
            self.starts += 1
            self._since_s = 0.0
            if event.mode in ("auto", "run"):
                self.frontier = event.frontier
            if event.ranks is not None and event.pipelines is not None:
                self._ranks.add(event.ranks)
                self._pipelines.add(event.pipelines)
        elif isinstance(event, ClockNotReached):
            self.refused[event.clock_mhz, event.reasons] = event
        elif isinstance(event, PlanJudged):
            self.has_verdict = True

    def add_iteration(self, record: IterationRecord, sums: Sums, frontier: int) -> None:
        """Add an iteration, its sums, and the number of the frontier that is valid for it."""
        self.iterations += 1
        plan = record.plan if (record.order or 0) == self.order else None
        point = HistoryPoint(self.iterations, record.iteration, plan, record.time_s, record.energy_j)
        self.points[record.phase].add(point)
        self._power.add(record.time_s, record.energy_j, record.ended)
        if record.phase == "run" and plan is not None:
            part = SeriesPart(record.iteration, record.iteration, record.ended, frozenset({plan}), sums)
            self._add_planned(part, plan, frontier)
            self._planned_power.add(record.time_s, record.energy_j, record.ended)
        if record.energy_j is not None:
            self._since_s += record.time_s
        if record.energy_by_pipeline_j is not None:
            self._pipelines.add(len(record.energy_by_pipeline_j))
        if record.energy_by_rank_j is not None:
            self._by_rank_s, self._since_s = self._by_rank_s + self._since_s, 0.0
            self._ranks.add(len(record.energy_by_rank_j))
            self._add_by_rank(record.energy_by_rank_j)

    def add_summed(self, record: SummedIterations, frontier: int) -> None:
        """Add iterations that are summed up, and the number of the frontier that is valid for them."""
        planned, plans = Sums(), []
        for part in record.parts:
            sums = part.sums
            self.iterations += sums.iterations
            known, plan = sums.iterations - sums.without_energy, part.plan if part.order == self.order else None
            time_s, energy_j = sums.time_s / sums.iterations, sums.energy_j / known if known else None
            point = HistoryPoint(self.iterations, record.last, plan, time_s, energy_j)
            self.points[part.phase].add(point, sums.iterations)
            if part.phase == "run" and plan is not None:
                planned.add(sums)
                plans.append(plan)
        if record.power is not None:
            self._power.add_sums(record.power)
        if record.plan is not None:
            part_of_series = SeriesPart(record.first, record.last, record.ended, frozenset(plans), planned)
            self._add_planned(part_of_series, record.plan, frontier)
            if record.planned_power is not None:
                self._planned_power.add_sums(record.planned_power)
        if record.energy_by_pipeline_j:
            self._pipelines.add(len(record.energy_by_pipeline_j))
        self._since_s += record.unlisted_s
        if record.energy_by_rank_j:
            self._by_rank_s += record.by_rank_s
            self._ranks.add(len(record.energy_by_rank_j))
            self._add_by_rank(record.energy_by_rank_j)

    def _add_planned(self, part: SeriesPart, plan: int, frontier: int) -> None:
        if frontier != self._frontier:
            self._frontier = frontier
            self.planned, self._planned_power = SeriesParts(_MOST_PARTS), PowerExtremes()
        self.plan = plan
        self.planned.add(part)

    def _add_by_rank(self, energies_j: tuple[float, ...]) -> None:
        if len(energies_j) != len(self._by_rank_j):
            self._by_rank_j = [0.0] * len(energies_j)
        self._by_rank_j = [total_j + energy_j for total_j, energy_j in zip(self._by_rank_j, energies_j, strict=True)]

    @property
    def order(self) -> int:
        """The order that was declared at the last start, to which the frontier in the job's folder belongs."""
        return self.last_start.order

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of the job. None if it is not recorded, or has changed."""
        return next(iter(self._ranks)) if len(self._ranks) == 1 else None

    @property
    def pipelines(self) -> int | None:
        """Number of data-parallel pipelines. None if it is not recorded, or has changed."""
        return next(iter(self._pipelines)) if len(self._pipelines) == 1 else None

    @property
    def by_rank(self) -> list[tuple[float, float]]:
        """Energy [J] and mean power [W] by rank. Empty if unknown, or if the number of ranks has changed."""
        if len(self._ranks) > 1 or not self._by_rank_s:
            return []
        return [(energy_j, energy_j / self._by_rank_s) for energy_j in self._by_rank_j]

    @property
    def power(self) -> PowerFigures | None:
        """Power over a second under plans of the last frontier, or of the whole job if no plan ran."""
        return (self._power if self.plan is None else self._planned_power).figures
