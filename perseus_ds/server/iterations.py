"""An iteration of the whole job: the run that a mode requests, and the reports of all ranks.

A mode is a coroutine. It awaits the iterations of its kind one by one, and each time specifies what the following
iterations run::

    seen = await iteration(Run("default", times="all"))

This takes effect one or two iterations later. Therefore ``seen.run`` is what the iteration actually ran, or None if
not all ranks ran the same from its start to its end. Iterations without a known run are not used as evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import coroutine
from typing import Any, TypeAlias

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.schedule import Span, decode_spans
from perseus_ds.policy.decisions import Assignment, Forecast
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.policy.reports import Conditions, JobDrift, JobReport, RankReports
from perseus_ds.protocol.job_messages import RankReport, Times


@dataclass(frozen=True)
class NextPhase:
    """The next phase, with an estimate of the time until it begins [s], or None if unknown."""

    phase: str
    in_s: float | None = None


@dataclass(frozen=True)
class Plans:
    """Frequency plans for all pipelines, and the DAG of their schedule."""

    frontier: Frontier
    assignment: Assignment
    dag: Dag

    def of_pipeline(self, pipeline: int) -> FrequencyPlan:
        return self.frontier.plans[self.assignment.plans[pipeline]]


@dataclass(frozen=True, eq=False)
class Run:
    """Specification of the clocks and measurements of iterations.

    Attributes:
        phase: Name of the phase, as in ``run.jsonl``.
        clock_mhz: One clock for all instructions of all ranks [MHz]; None for default clocks or plans.
        plan: Index on the frontier of the plan of rank 0's pipeline; None without one.
        forecast: Prediction for the whole job; None without a plan.
        times: Times that ranks measure in iterations whose number is a multiple of ``every``.
        otherwise: Times that they measure in all other iterations.
        logs_energy: Whether ranks report each refresh of their energy counters.
        next_phase: None if no other phase is expected.
        status: Values for ``perseus-ds control status``.
        progress: Returns the progress under plans, to be kept for a later start of the job.
        block: Sample for a comparison, to which these iterations are added; None if they are not compared.
    """

    phase: str
    clock_mhz: int | None = None
    plans: Plans | None = None
    plan: int | None = None
    forecast: Forecast | None = None
    times: Times = "none"
    every: int = 1
    otherwise: Times = "none"
    logs_energy: bool = False
    next_phase: NextPhase | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[], dict[str, Any]] | None = None
    block: IterationSample | None = None

    @cached_property
    def clocks(self) -> tuple[Any, ...]:
        """Key that identifies its clocks."""
        plans = self.plans
        return self.clock_mhz, plans and (id(plans.frontier), plans.assignment.number)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key that identifies everything that ranks or records need to distinguish."""
        measured = self.times, self.every, self.otherwise, self.logs_energy
        return self.phase, self.clocks, self.plan, measured, id(self.block)


@dataclass(eq=False)
class Seen:
    """An iteration that all ranks have reported.

    Attributes:
        number: Training step, starting at 1.
        iteration: Number of the iteration since the job started.
        run: What all ranks ran from its start to its end; None if they differ.
        messages: The reports as received, by rank.
        contents: Its operations as received, by rank.
        streams: The operations of its order, by rank. Empty if unknown.
        ended: Time of its end [Unix seconds].
        conditions: Limits of GPUs. Iterations with equal conditions may be compared.
        drift: Deviation from the profile under plans; None if it was not measured in this iteration.
    """

    number: int
    iteration: int
    run: Run | None
    ranks: RankReports
    messages: Sequence[RankReport]
    contents: Mapping[int, bytes]
    streams: Sequence[Sequence[Any]]
    ended: float
    conditions: Conditions = ()
    drift: JobDrift | None = None

    @cached_property
    def reports(self) -> JobReport:
        return JobReport.of(self.ranks)

    @property
    def time_s(self) -> float:
        return self.reports.time_s

    def spans(self, rank: int) -> list[Span]:
        """Return the operations of a rank, relative to the iteration's start. Empty if not measured."""
        if not self.streams:
            return []
        return decode_spans(self.contents.get(rank, b""), self.streams[rank])


@coroutine
def iteration(run: Run) -> Generator[Run, Seen, Seen]:
    """Request what the following iterations run, and wait for the next one, whatever it runs."""
    return (yield run)


async def iteration_of(run: Run) -> Seen:
    """Wait for the next iteration in which all ranks run ``run``."""
    while True:
        seen = await iteration(run)
        if seen.run is not None and seen.run.key == run.key:
            return seen


Mode: TypeAlias = Coroutine[Run, Seen, None]
"""A coroutine that awaits iterations."""
