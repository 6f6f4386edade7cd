"""One rank's share of a frequency plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.errors import PlanError
from perseus_ds.gpu.base import KnownGpu
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.protocol.messages import Program

Spans = Sequence[tuple[float, float]]
"""Begin and end of each instruction of a rank in an iteration [s]."""


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan.

    Without a plan, one clock for the whole iteration, or default clocks.

    Attributes:
        plan: The whole plan. None without one.
        first: Clock of the rank's first instruction [MHz]. None for default clocks.
        clock: Clock of each instruction, in program order [MHz].
        spans_s: Predicted begin and end of each instruction [s]. Empty if unknown.
    """

    plan: FrequencyPlan | None = None
    first: int | None = None
    clock: dict[Instruction, int] = field(default_factory=dict)
    spans_s: Spans = ()

    @classmethod
    def of_rank(
        cls, plan: FrequencyPlan, pipeline_rank: int, times: ClockTimes | None = None, dag: Dag | None = None
    ) -> ClockPlan:
        """Return the share of one pipeline rank. With a DAG, it includes the begins of instructions."""
        instructions, clocks = plan.instructions[pipeline_rank], plan.clocks_mhz[pipeline_rank]
        spans_s = _spans_s(plan, times, dag, pipeline_rank) if times is not None and dag is not None else ()
        return cls(plan, clocks[0], dict(zip(instructions, clocks, strict=True)), spans_s)

    def program(self) -> Program:
        """Return the clocks as a program for the agent."""
        clocks_mhz = tuple(self.clock.values())
        if self.plan is None or len(set(clocks_mhz)) == 1:
            return Program(0, self.first)
        return Program(0, self.first, clocks_mhz, tuple(self.spans_s), self.plan.time_s)

    def check(self, gpu: KnownGpu) -> None:
        """Check that a GPU supports these clocks.

        Raises:
            PlanError: It does not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} lacks {clock_mhz} MHz. Profile on GPUs of this kind."
            )


def _spans_s(plan: FrequencyPlan, times: ClockTimes, dag: Dag, pipeline_rank: int) -> Spans:
    """Return begin and end of a rank's instructions with the times of the profile.

    Empty if a time is unknown.

    Operations without a clock to choose take no time here, except at the end of the iteration.
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
