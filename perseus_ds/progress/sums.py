"""The sums over a job's records: what it took, and what it saved compared with default clocks.

Everything that is shown of a job is computed from these sums: by the server, ``watch``, metrics, the report and
``compare``. Memory and time per record do not grow with the job.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from perseus_ds.artifacts.run_events import Event, OrderPlanned, PlanJudged, ProfileWritten, Started
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations, Sums
from perseus_ds.artifacts.run_records import Record, is_training
from perseus_ds.artifacts.run_savings import OrderSummary, PlanSummary, SavingSummary, TokenSummary, TrialState
from perseus_ds.progress.history import History
from perseus_ds.progress.present import Present
from perseus_ds.savings import as_in, sums_of, total_of

AT_DEFAULT_CLOCKS = ("observe", "default", "pause", "optimizing", "warm-up")
"""The phases at default clocks. Those in which iterations are least disturbed are first."""


class Conditions(NamedTuple):
    """Conditions under which iterations ran.

    Attributes:
        frontier: Number of the frontier of the plans; numbers of plans are valid for one frontier only.
        plan: None at other clocks than those of plans.
    """

    frontier: int
    phase: str
    order: int
    plan: int | None

    @property
    def is_planned(self) -> bool:
        return self.phase == "run" and self.plan is not None


class MicroBatches(NamedTuple):
    """Micro-batches of a pipeline in the iterations with a known number of them and a known energy.

    Attributes:
        energy_j: Energy of all GPUs in these iterations [J].
    """

    iterations: int
    micro_batches: int
    energy_j: float


class JobSums:
    """The sums over the records of a job so far.

    Attributes:
        since_start: Sums of all iterations since the last start of the job.
        present: The present state of the job.
        history: The job's history for charts and lists.
    """

    def __init__(self) -> None:
        # Sums of all other iterations except those that calibrate a simulated GPU.
        self._before: defaultdict[Conditions, Sums] = defaultdict(Sums)
        self.since_start = Sums()
        self.present = Present()
        self.history = History()
        self._frontier = 0
        self._named_frontier: str | None = None
        self._micro_batches: dict[int, int | None] = {}
        # Sums of the iterations under the plans that are tried at present, as recorded, and the state of their trial.
        self._of_trial: defaultdict[Conditions, Sums] = defaultdict(Sums)
        self._trial = TrialState()
        self._decided: TrialState | None = None
        self._by_profile = False
        # Energy by pipeline [J]: of all iterations, of those at default clocks, and of those under plans.
        self._all_j: list[float] = []
        self._default_j: list[float] = []
        self._planned_j: list[float] = []

    def add(self, record: Record) -> None:
        """Add a record."""
        if isinstance(record, Event):
            self._add_event(record)
            self.history.add_event(record)
        elif isinstance(record, SummedIterations):
            self._add_summed(record)
            self.history.add_summed(record, self._frontier)
        elif is_training(record):
            sums = sums_of(record)
            self._add_iteration(record, sums)
            self.history.add_iteration(record, sums, self._frontier)
        self.present.add(record)

    def _add_event(self, event: Event) -> None:
        if isinstance(event, Started):
            self.since_start = Sums()
            self._micro_batches[event.order] = event.micro_batches
            if event.frontier != self._named_frontier:
                self._named_frontier = event.frontier
                self._frontier += 1
        elif isinstance(event, OrderPlanned) and not event.given_up:
            self._micro_batches[event.order] = event.micro_batches
        elif isinstance(event, ProfileWritten):
            self._frontier += 1
        elif isinstance(event, PlanJudged) and event.trial is not None:
            self._decided = self._trial = event.trial

    def _add_iteration(self, record: IterationRecord, sums: Sums) -> None:
        conditions = Conditions(self._frontier, record.phase, record.order or 0, record.plan)
        if conditions.is_planned:
            trial = record.trial or TrialState()
            self._add_trial(trial.pairs, trial)
            self._by_profile = not record.default_measured
        self._add_sums(conditions, sums)
        parts_j = record.energy_by_pipeline_j or ()
        self._all_j = sums_by_place(self._all_j, parts_j)
        if record.phase in AT_DEFAULT_CLOCKS:
            self._default_j = sums_by_place(self._default_j, parts_j)
        if not conditions.is_planned:
            return
        self._planned_j = sums_by_place(self._planned_j, parts_j)

    def _add_summed(self, record: SummedIterations) -> None:
        if record.trial is not None:
            self._add_trial(record.first_pairs, record.trial)
            self._decided = record.decided or self._decided
            self._by_profile = not record.default_measured
        for part in record.parts:
            self._add_sums(Conditions(self._frontier, part.phase, part.order, part.plan), part.sums)
        self._all_j = sums_by_place(self._all_j, record.energy_by_pipeline_j)
        self._default_j = sums_by_place(self._default_j, record.default_by_pipeline_j)
        self._planned_j = sums_by_place(self._planned_j, record.planned_by_pipeline_j)

    def _add_sums(self, conditions: Conditions, sums: Sums) -> None:
        (self._of_trial if conditions.is_planned else self._before)[conditions].add(sums)
        self.since_start.add(sums)

    def _add_trial(self, first_pairs: int, trial: TrialState) -> None:
        """Add the state of the trial of iterations under plans, and its number of pairs at the first of them."""
        if first_pairs < self._trial.pairs:  # another trial has begun
            for conditions, sums in self._present_trial().items():
                self._before[conditions].add(sums)
            self._of_trial.clear()
        self._trial = trial
        if not trial.is_undecided:
            self._decided = trial

    def total(self, wanted: Callable[[Conditions], bool] = lambda conditions: True) -> Sums:
        """Return the sums over all iterations under some conditions."""
        return total_of(sums for conditions, sums in self.by_conditions().items() if wanted(conditions))

    def by_conditions(self) -> dict[Conditions, Sums]:
        """Return the sums of all iterations except those that calibrate a simulated GPU."""
        found: defaultdict[Conditions, Sums] = defaultdict(Sums)
        for part in (self._before, self._present_trial()):
            for conditions, sums in part.items():
                found[conditions].add(sums)
        return dict(found)

    def _present_trial(self) -> dict[Conditions, Sums]:
        """Return the sums of the present trial with the saving that its pairs show."""
        recorded = total_of(self._of_trial.values())
        shown = as_in(self._trial, recorded)
        time_factor = shown.default_s / recorded.default_s if recorded.default_s else 1.0
        energy_factor = shown.default_j / recorded.default_j if recorded.default_j else 1.0
        found = {}
        for conditions, sums in self._of_trial.items():
            found[conditions] = sums.with_default_clocks_times(time_factor, energy_factor)
        return found

    @property
    def planned(self) -> Sums:
        """Sums of all iterations under plans."""
        return self.total(lambda conditions: conditions.is_planned)

    def _planned_of(self, order: int) -> Sums:
        return self.total(lambda conditions: conditions.is_planned and conditions.order == order)

    @property
    def profiled(self) -> Sums:
        """Sums of the iterations in which the profile was measured."""
        return self.total(lambda conditions: conditions.phase == "profile")

    @property
    def at_default_clocks(self) -> Sums:
        """Sums of the iterations at default clocks."""
        return self.total(lambda conditions: conditions.phase in AT_DEFAULT_CLOCKS)

    @property
    def under_plans(self) -> SavingSummary | None:
        """The saving of all iterations under plans. None if there are none."""
        planned = self.planned
        return self._summary(planned, self._decided or self._trial) if planned.iterations else None

    @property
    def of_trial(self) -> SavingSummary | None:
        """The saving of the iterations under the present plans since their trial began. None if there are none."""
        trial = total_of(self._present_trial().values())
        return self._summary(trial, self._trial) if trial.iterations else None

    def _summary(self, sums: Sums, trial: TrialState) -> SavingSummary:
        return _saving_summary(sums, trial, by_profile=self._by_profile)

    @property
    def whole(self) -> SavingSummary | None:
        """The saving of all iterations, including profiling and comparisons. None before a plan has run.

        Iterations at default clocks save nothing.
        """
        total, planned, profiled = self.total(), self.planned, self.profiled
        if not planned.compared:
            return None
        saved_j, gained_s = planned.saved_j + profiled.saved_j, planned.gained_s + profiled.gained_s
        whole = Sums(
            iterations=total.iterations,
            stalls=planned.stalls,
            compared=total.iterations,
            compared_s=total.time_s,
            known=total.iterations - total.without_energy,
            default_s=total.time_s + gained_s,
            compared_j=total.energy_j,
            default_j=total.energy_j + saved_j,
        )
        return _saving_summary(
            whole,
            self._decided or self._trial,
            by_profile=self._by_profile,
            time_share=planned.default_s / whole.default_s,
            energy_share=planned.default_j / whole.default_j if whole.default_j else 0.0,
        )

    def plans(self) -> tuple[PlanSummary, ...]:
        """Return the savings of the plans of the last frontier that ran, in the order in which they first ran."""
        return tuple(
            PlanSummary(plan=conditions.plan, order=conditions.order, **_figures(sums))
            for conditions, sums in self.of_last_frontier()
            if conditions.plan is not None
        )

    def of_last_frontier(self) -> list[tuple[Conditions, Sums]]:
        """Return the sums under each plan of the last frontier of which plans ran."""
        planned = [(conditions, sums) for conditions, sums in self.by_conditions().items() if conditions.is_planned]
        last = max((conditions.frontier for conditions, _ in planned), default=0)
        return [(conditions, sums) for conditions, sums in planned if conditions.frontier == last]

    @property
    def tokens(self) -> TokenSummary | None:
        """Energy and throughput by token. None if the number of tokens is unknown."""
        planned = self.planned
        sums = planned if planned.tokens else self.at_default_clocks
        if not sums.tokens:
            return None
        return TokenSummary(
            energy_j=sums.tokens_j / sums.tokens,
            per_s=sums.tokens / sums.tokens_s,
            default_energy_j=sums.tokens_default_j / sums.tokens,
            default_per_s=sums.tokens / sums.tokens_default_s,
            under_plans=sums is planned,
        )

    def micro_batches(
        self, wanted: Callable[[Conditions], bool] = lambda conditions: True, *, of_first: int | None = None
    ) -> MicroBatches:
        """Return the micro-batches of the iterations under some conditions, by the number of each order.

        Args:
            wanted: The conditions.
            of_first: Their number in the first order, if its start does not record it.
        """
        iterations, count, energy_j = 0, 0, 0.0
        for conditions, sums in self.by_conditions().items():
            of_order = self._micro_batches.get(conditions.order)
            if of_order is None and not conditions.order:
                of_order = of_first
            if of_order is not None and wanted(conditions):
                known = sums.iterations - sums.without_energy
                iterations, count, energy_j = iterations + known, count + known * of_order, energy_j + sums.energy_j
        return MicroBatches(iterations, count, energy_j)

    def orders(self) -> tuple[OrderSummary, ...]:
        """Return the savings of each order, the most frequent first. Empty if there is only one."""
        iterations: defaultdict[int, int] = defaultdict(int)
        for conditions, sums in self.by_conditions().items():
            iterations[conditions.order] += sums.iterations
        if len(iterations) < 2:
            return ()
        found = []
        for order, count in sorted(iterations.items(), key=operator.itemgetter(1), reverse=True):
            planned = self._planned_of(order)
            summary = OrderSummary(
                order=order,
                micro_batches=self._micro_batches.get(order),
                iterations=count,
                planned=planned.iterations,
                saved_j=planned.saved_j,
                gained_s=planned.gained_s,
            )
            found.append(summary)
        return tuple(found)

    def pipelines_j(self) -> list[tuple[float, float]]:
        """Return the energy of each pipeline and its share of the saving [J].

        The share at default clocks is that of the pipeline's energy in iterations at default clocks.
        """
        planned, pipelines = self.planned, len(self._all_j)
        saved_j = [0.0] * pipelines
        if planned.default_j and any(self._planned_j):
            default_j = self._default_j if any(self._default_j) else [1.0] * pipelines
            saved_j = [
                planned.default_j * theirs_j / sum(default_j) - planned.compared_j * ours_j / sum(self._planned_j)
                for theirs_j, ours_j in itertools.zip_longest(default_j, self._planned_j, fillvalue=0.0)
            ]
        return list(itertools.zip_longest(self._all_j, saved_j, fillvalue=0.0))


def _saving_summary(
    sums: Sums, trial: TrialState, *, by_profile: bool = False, time_share: float = 1.0, energy_share: float = 1.0
) -> SavingSummary:
    """Return how a saving is shown.

    Args:
        sums: The iterations that it covers.
        trial: Verdict and errors of the trial of their plans.
        by_profile: Whether default clocks are predicted by the profile.
        time_share: Share of the iterations under plans in the time at default clocks.
        energy_share: Likewise in the energy.
    """
    is_certain = not trial.is_undecided
    return SavingSummary(
        iterations=sums.iterations,
        stalls=sums.stalls,
        saved_j=sums.saved_j,
        gained_s=sums.gained_s,
        saved=sums.saved if is_certain else None,
        slowdown=sums.slowdown if is_certain else None,
        saved_error=None if trial.saved_error is None else energy_share * trial.saved_error,
        slowdown_error=None if trial.slowdown_error is None else time_share * trial.slowdown_error,
        pairs=trial.pairs,
        verdict=trial.verdict,
        by_profile=by_profile,
    )


def _figures(sums: Sums) -> dict[str, Any]:
    return {"iterations": sums.iterations, "saved_j": sums.saved_j, "gained_s": sums.gained_s}


def sums_by_place(sums: Sequence[float], parts: Sequence[float]) -> list[float]:
    """Return the elementwise sum of two sequences, of which the shorter one is padded with zeros."""
    if len(sums) == len(parts):
        return list(map(operator.add, sums, parts))
    return [total + part for total, part in itertools.zip_longest(sums, parts, fillvalue=0.0)]


class JobsOfFile:
    """The jobs whose records are in one ``run.jsonl``. Thread-safe.

    The *current* job is the one that trained last or, if none has trained, that started last.
    """

    def __init__(self) -> None:
        self._jobs: dict[str | None, JobSums] = {None: JobSums()}
        self._writing = self._current = self._jobs[None]
        self._lock = threading.Lock()

    def add(self, records: Iterable[Record]) -> None:
        """Add records in order."""
        with self._lock:
            for record in records:
                if isinstance(record, Started):
                    self._writing = self._jobs.setdefault(record.job, JobSums())
                self._writing.add(record)
                if is_training(record) or not self._current.by_conditions():
                    self._current = self._writing

    def read(self, of: Callable[[JobSums], Any], job: str | None = None) -> Any:
        """Return a figure of the current job, or of the one with the given key if there is one."""
        with self._lock:
            return of(self._jobs[job] if job in self._jobs and job is not None else self._current)

    @property
    def current(self) -> JobSums:
        """The current job. Not thread-safe."""
        return self._current

    @property
    def left_out(self) -> int:
        """Number of iterations of other jobs."""
        others = [job for job in self._jobs.values() if job is not self._current]
        return sum(job.total().iterations for job in others)


def fold(records: Iterable[Record]) -> JobsOfFile:
    """Return the jobs of a file of records."""
    jobs = JobsOfFile()
    jobs.add(records)
    return jobs
