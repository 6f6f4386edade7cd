"""One rank's share of a frequency plan, as it is looked up while training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.device.clock_transitions import Step, count_changes, plan_steps
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.instruction import Instruction


@dataclass(frozen=True)
class Steps:
    """What to ask of the clock in an iteration.

    Attributes:
        first_mhz: Before it begins; None for the default.
        by_instruction: Around each instruction.
        skipped: Clock changes of the plan that are left out, being too short.
    """

    first_mhz: int | None = None
    by_instruction: dict[Instruction, Step] = field(default_factory=dict)
    skipped: int = 0

    @cached_property
    def clock(self) -> dict[Instruction, int]:
        """Clock of each instruction [MHz]: not below the plan's, and above it where a visit is left out."""
        return {instruction: step.clock_mhz for instruction, step in self.by_instruction.items()}


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan.

    Attributes:
        plan: The whole plan, None at default clocks or at one clock.
        first: Clock of the rank's first instruction [MHz].
        clock: Of each instruction, in program order [MHz].
        times_s: What each instruction takes at it; empty where that is not known [s].
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
            pipeline_rank: Whose share.
            times: What the profile says that instructions take.
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

    def steps(self, latency_s: float) -> Steps:
        """Return what to ask of the clock around each instruction.

        Args:
            latency_s: How late a clock follows its request; 0 if that is not known [s].
        """
        if not self.clock:
            return Steps(self.first)
        clocks = list(self.clock.values())
        steps = plan_steps(clocks, self.times_s, latency_s)
        skipped = count_changes(clocks) - count_changes([step.clock_mhz for step in steps])
        return Steps(steps[0].clock_mhz, dict(zip(self.clock, steps, strict=True)), skipped)

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU has these clocks.

        Raises:
            PlanError: It has not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )
