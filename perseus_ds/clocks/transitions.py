"""One rank's share of a frequency plan, and when to request which clock.

A clock follows its request only some 10 ms later or more, and only one request can be under way. So a request is made
earlier than the clock is due, by the latency of that clock. A higher one is due when the instruction before ends, and
its latency is the 90th percentile, as it would otherwise make the next instruction slower than planned. A lower one is
due when the next instruction has begun, after the transfers in between, which a change of clock may delay; its latency
is the 10th percentile, so that it does not come sooner. Plans hold clocks for long enough that every request fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.clocks.readback import LatencyTable
from perseus_ds.errors import PlanError
from perseus_ds.gpu.base import Gpu
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction

_BEGUN_S = 0.001
"""A transfer that neither side waits for is launched within so long after an instruction."""

Spans = Sequence[tuple[float, float]]
"""When each instruction of a rank begins and ends, in an iteration [s]."""


@dataclass(frozen=True, slots=True)
class ClockTransition:
    """The clocks to request around one instruction.

    Attributes:
        clock_mhz: The one requested as it begins: its own, or the next one where that is requested still earlier.
        next_clock_mhz: To request when it ends.
        early_s: When to request that earlier, from its beginning [s]; None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(
    clocks_mhz: Sequence[int], spans_s: Spans, length_s: float, latencies: LatencyTable
) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank, which every iteration repeats.

    Where the times of instructions are not known, there are no spans.
    """
    requested = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(requested)

    def span_s(number: int) -> tuple[float, float]:
        """Below 0, of an instruction of the iteration before."""
        begin_s, end_s = spans_s[number]
        return (begin_s - length_s, end_s - length_s) if number < 0 else (begin_s, end_s)

    for position, clock_mhz in enumerate(clocks_mhz if spans_s and latencies.is_known else ()):
        before = position - 1
        if clock_mhz == clocks_mhz[before]:
            continue
        rises = clock_mhz > clocks_mhz[before]
        due_s = over_s = span_s(before)[1]
        if not rises:
            due_s = max(span_s(position)[0], over_s + _BEGUN_S)
        due_s = min(due_s - latencies.lead_s(clock_mhz, rises=rises), over_s)
        # Where the instruction before is shorter than the latency, the request falls into an earlier one. A lower clock
        # is not requested in the iteration before: its energy would be read only when the driver has set the clock.
        while (rises or before > 0) and span_s(before)[0] > due_s and clocks_mhz[before - 1] == clocks_mhz[before]:
            requested[before] = clock_mhz
            before -= 1
        begin_s, end_s = span_s(before)
        if due_s <= end_s:
            early_s[before] = max(0.0, due_s - begin_s)
        elif not rises:  # due while the rank waits: a lower clock must not come sooner, a higher one may
            requested[before + 1] = clocks_mhz[before]
            early_s[before + 1] = 0.0
    following = requested[1:] + requested[:1]
    return [ClockTransition(*values) for values in zip(requested, following, early_s, strict=True)]


@dataclass(frozen=True)
class IterationClocks:
    """The clocks of one rank in an iteration.

    Attributes:
        first_mhz: To request as it begins; None for the default.
        by_instruction: What to request around each instruction.
        ran: The instructions of the last iteration in order, with what was requested around them: most iterations are
            alike, and to compare objects costs less than to look them up.
        clock: The plan's clock of each instruction [MHz].
    """

    first_mhz: int | None = None
    by_instruction: dict[Instruction, ClockTransition] = field(default_factory=dict)
    ran: list[tuple[Instruction, ClockTransition | None]] = field(default_factory=list)
    clock: dict[Instruction, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan; without one, one clock for all of an iteration, or default clocks.

    Attributes:
        plan: The whole plan; None without one.
        first: Clock of the rank's first instruction [MHz]; None for the default.
        clock: Clock of each instruction, in program order [MHz].
        spans_s: When each instruction begins and ends by the plan [s]; empty where that is not known.
    """

    plan: FrequencyPlan | None = None
    first: int | None = None
    clock: dict[Instruction, int] = field(default_factory=dict)
    spans_s: Spans = ()

    @classmethod
    def of_rank(
        cls, plan: FrequencyPlan, pipeline_rank: int, times: ClockTimes | None = None, dag: Dag | None = None
    ) -> ClockPlan:
        """Return the share of one pipeline rank; with the DAG, times of instructions say when each of them begins."""
        instructions, clocks = plan.instructions[pipeline_rank], plan.clocks_mhz[pipeline_rank]
        spans_s = _spans_s(plan, times, dag, pipeline_rank) if times is not None and dag is not None else ()
        return cls(plan, clocks[0], dict(zip(instructions, clocks, strict=True)), spans_s)

    def transitions(self, latencies: LatencyTable) -> IterationClocks:
        """Return the clocks to request in an iteration."""
        if self.plan is None:
            return IterationClocks(self.first)
        clocks = list(self.clock.values())
        transitions = plan_transitions(clocks, self.spans_s, self.plan.time_s, latencies)
        around = dict(zip(self.clock, transitions, strict=True))
        return IterationClocks(transitions[0].clock_mhz, around, clock=self.clock)

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU supports these clocks.

        Raises:
            PlanError: It does not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )


def _spans_s(plan: FrequencyPlan, times: ClockTimes, dag: Dag, pipeline_rank: int) -> Spans:
    """Return when the instructions of a rank begin and end if they take the times of the profile, none if one has none.

    What has no clock to choose takes no time here, but at the end of the iteration.
    """
    node_of = {node.work: number for number, node in enumerate(dag.nodes)}
    duration_s = np.zeros(len(dag.nodes))
    for instructions, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        for instruction, clock_mhz in zip(instructions, clocks, strict=True):
            time_s = times.get((instruction.stage, instruction.kind, clock_mhz))
            if time_s is None or instruction not in node_of:
                return ()
            duration_s[node_of[instruction]] = time_s
    own = [node_of[instruction] for instruction in plan.instructions[pipeline_rank]]
    ends_s = dag.finish_s(duration_s)[own]
    return list(zip((ends_s - duration_s[own]).tolist(), ends_s.tolist(), strict=True))
