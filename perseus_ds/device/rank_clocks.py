"""One rank's share of a frequency plan, and the clock requests of an iteration that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.device.clock_transitions import ClockTransition, count_changes, plan_transitions
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.instruction import Instruction


@dataclass(frozen=True)
class IterationClocks:
    """The clocks that one rank requests in an iteration.

    Attributes:
        first_mhz: To request as it begins; None for the default.
        by_instruction: What to request around each instruction.
        skipped: Number of clock changes of the plan that are left out because there is no time for them.
    """

    first_mhz: int | None = None
    by_instruction: dict[Instruction, ClockTransition] = field(default_factory=dict)
    skipped: int = 0

    @cached_property
    def clock(self) -> dict[Instruction, int]:
        """Clock of each instruction [MHz]: not below the plan's, and above it where a visit is left out."""
        return {instruction: around.clock_mhz for instruction, around in self.by_instruction.items()}


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan.

    Attributes:
        plan: The whole plan, None at default clocks or at one clock.
        first: Clock of the rank's first instruction [MHz].
        clock: Clock of each instruction, in program order [MHz].
        times_s: Time of each instruction at its clock [s]; empty where it is not known.
    """

    plan: FrequencyPlan | None
    first: int | None
    clock: dict[Instruction, int]
    times_s: tuple[float, ...] = ()

    @classmethod
    def none(cls) -> ClockPlan:
        """Return the absence of a plan."""
        return cls(None, None, {})

    @classmethod
    def constant(cls, clock_mhz: int) -> ClockPlan:
        """Return one clock for all of an iteration."""
        return cls(None, clock_mhz, {})

    @classmethod
    def of_rank(
        cls,
        plan: FrequencyPlan,
        pipeline_rank: int,
        times: ClockTimes | None = None,
    ) -> ClockPlan:
        """Return the share of one pipeline rank.

        Args:
            plan: The whole plan.
            pipeline_rank: The rank.
            times: Times of instructions, from the profile.
        """
        instructions, clocks = plan.instructions[pipeline_rank], plan.clocks_mhz[pipeline_rank]
        keys = [(i.stage, i.kind, clock) for i, clock in zip(instructions, clocks, strict=True)]
        known = times is not None and all(key in times for key in keys)
        return cls(
            plan,
            clocks[0],
            dict(zip(instructions, clocks, strict=True)),
            tuple(times[key] for key in keys) if times is not None and known else (),
        )

    def transitions(self, latency_s: float) -> IterationClocks:
        """Return the clocks to request in an iteration.

        Args:
            latency_s: How late a clock follows its request; 0 if that is not known [s].
        """
        if not self.clock:
            return IterationClocks(self.first)
        clocks = list(self.clock.values())
        transitions = plan_transitions(clocks, self.times_s, latency_s)
        skipped = count_changes(clocks) - count_changes([around.clock_mhz for around in transitions])
        return IterationClocks(transitions[0].clock_mhz, dict(zip(self.clock, transitions, strict=True)), skipped)

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU supports these clocks.

        Raises:
            PlanError: It does not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )
