"""An iteration of the whole job: the run that a mode requests, and the reports of all ranks.

A mode is a coroutine. It awaits the iterations of its kind one by one, and each time specifies what the following
iterations run::

    seen = await iteration(Run("default", times="all"))

This takes effect one or two iterations later. Therefore ``seen.run`` is what the iteration actually ran, or None if
not all ranks ran the same from its start to its end. Iterations without a known run are not used as evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import coroutine
from typing import Any, TypeAlias

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.optimizer.lengths import IterationPlan, PipelinePlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Schedule, Span, decode_spans
from perseus_ds.policy.decisions import Assignment, Forecast
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.policy.reports import Conditions, JobDrift, JobReport, RankReports
from perseus_ds.protocol.job_messages import Program, RankReport, Times


@dataclass(frozen=True)
class NextPhase:
    """The next phase, with an estimate of the time until it begins [s]; None if unknown."""

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
        by_length: Whether each iteration runs a plan for its own lengths, or default clocks without one.
        lengths: The plan for the lengths of a single iteration.
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
    by_length: bool = False
    lengths: IterationPlan | None = None

    @cached_property
    def clocks(self) -> tuple[Any, ...]:
        """Key that identifies its clocks."""
        plans = self.plans
        return self.clock_mhz, plans and (id(plans.frontier), plans.assignment.number), self.by_length, id(self.lengths)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key that identifies everything that ranks or records need to distinguish."""
        measured = self.times, self.every, self.otherwise, self.logs_energy
        return self.phase, self.clocks, self.plan, measured, id(self.block)

    def program(self, number: int, pipeline: int, rank: int, schedule: Schedule) -> Program:
        """Return the clocks of a pipeline's rank in iterations of an order.

        Instructions of the schedule that have no clock in the plan keep the clock of the previous instruction. At the
        end of an iteration, they have the clock that the next one starts with.
        """
        if self.plans is None or (self.by_length and self.lengths is None):
            return Program(number, self.clock_mhz)
        plan = self.plans.of_pipeline(pipeline) if self.lengths is None else self.lengths.pipelines[pipeline]
        instructions = self.plans.frontier.instructions[rank]
        own_mhz, stream = plan.clocks_mhz[rank], schedule.instructions[rank]
        if len(set(own_mhz)) == 1:
            return Program(number, own_mhz[0])
        clock_of = dict(zip(instructions, own_mhz, strict=True))
        clocks_mhz = _filled([clock_of.get(instruction) for instruction in stream])
        if isinstance(plan, PipelinePlan):
            spans_s = _spans_by_length_s(dict(zip(instructions, plan.spans_s[rank], strict=True)), stream)
        else:
            spans_s = _spans_s(plan, self.plans, stream)
        return Program(number, own_mhz[0], clocks_mhz, tuple(spans_s), plan.time_s)

    def with_lengths(self, plan: IterationPlan) -> Run:
        """Return the run of a single iteration under the plan for its lengths."""
        forecast = self.forecast
        if forecast is not None:
            default_s = plan.relative_time * forecast.default_time_s
            default_j = plan.relative_energy * forecast.default_energy_j
            forecast = Forecast(
                time_s=(1 + plan.slowdown) * default_s,
                energy_j=(1 - plan.saved) * default_j,
                default_time_s=default_s,
                default_energy_j=default_j,
                default_measured=forecast.default_measured,
            )
        return replace(self, lengths=plan, forecast=forecast)


def _filled(clocks_mhz: Sequence[int | None]) -> tuple[int, ...]:
    known = [clock_mhz for clock_mhz in clocks_mhz if clock_mhz is not None]
    last = max(position for position, clock_mhz in enumerate(clocks_mhz) if clock_mhz is not None)
    found, latest_mhz = [], known[0]
    for clock_mhz in clocks_mhz[: last + 1]:
        latest_mhz = latest_mhz if clock_mhz is None else clock_mhz
        found.append(latest_mhz)
    return (*found, *[known[0]] * (len(clocks_mhz) - last - 1))


def _spans_by_length_s(
    span_of: Mapping[Instruction, tuple[float, float]], stream: Sequence[Instruction]
) -> list[tuple[float, float]]:
    """Return start and end of each instruction of a rank [s]. Those without a span take no time."""
    spans_s, end_s = [], 0.0
    for instruction in stream:
        start_s, end_s = span_of.get(instruction, (end_s, end_s))
        spans_s.append((start_s, end_s))
    return spans_s


def _spans_s(plan: FrequencyPlan, plans: Plans, stream: Sequence[Instruction]) -> list[tuple[float, float]]:
    """Return start and end of each instruction of a rank, predicted from the profile [s].

    The list is empty if the profile lacks a time. Operations without a choice of clock have no duration here; their
    time is at the end of the iteration.
    """
    times_s, dag = plans.frontier.instruction_times_s, plans.dag
    node_of = {node.work: number for number, node in enumerate(dag.nodes)}
    duration_s = np.zeros(len(dag.nodes))
    for instructions, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        for instruction, clock_mhz in zip(instructions, clocks, strict=True):
            time_s = times_s.get((instruction.stage, instruction.kind, clock_mhz))
            if time_s is None or instruction not in node_of:
                return []
            duration_s[node_of[instruction]] = time_s
    own = [node_of[instruction] for instruction in stream]
    ends_s = dag.finish_s(duration_s)[own]
    return list(zip((ends_s - duration_s[own]).tolist(), ends_s.tolist(), strict=True))


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
        relative: Time and energy at default clocks predicted for the lengths of its micro-batches, relative to an
            iteration of the profile's length. 1 if iterations are not planned by length, NaN if this one has no plan.
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
    relative: tuple[float, float] = (1.0, 1.0)
    drift: JobDrift | None = None

    @cached_property
    def reports(self) -> JobReport:
        return JobReport.of(self.ranks, self.relative)

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
