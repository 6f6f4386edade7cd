"""One rank's share of a frequency plan, and when to request which clock.

A clock follows its request only some 10 to 20 ms later, and only one request can be under way. A lower clock is
requested when the instruction before it ends: that costs some energy and no time. A higher clock requested so late
would make the next instruction slower than planned, so it is requested earlier by the latency. Plans hold clocks for
long enough that both fits; where a plan does not, a request is overtaken by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan
from perseus_ds.errors import PlanError
from perseus_ds.gpu.base import Gpu
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute


@dataclass(frozen=True, slots=True)
class ClockTransition:
    """The clocks to request around one instruction.

    Attributes:
        clock_mhz: The instruction's own.
        next_clock_mhz: To request when it ends.
        early_s: When to request that earlier, from its beginning [s]; None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(clocks_mhz: Sequence[int], times_s: Sequence[float], latency_s: float) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank; every iteration repeats them.

    Args:
        clocks_mhz: The plan's clocks [MHz].
        times_s: Times of the instructions at them [s]; empty if they are not known.
        latency_s: How late a clock follows its request [s]; 0 if that is not known.
    """
    clocks = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(clocks)
    if times_s and latency_s > 0:
        for position, clock_mhz in enumerate(clocks_mhz):
            if clock_mhz > clocks_mhz[position - 1]:
                lead_s, before = latency_s, position - 1
                # Where the instruction before is shorter than the latency, the request falls into an earlier one.
                while times_s[before] < lead_s and clocks_mhz[before - 1] == clocks_mhz[before]:
                    clocks[before] = clock_mhz
                    lead_s -= times_s[before]
                    before -= 1
                early_s[before] = max(0.0, times_s[before] - lead_s)
    following = clocks[1:] + clocks[:1]
    return [ClockTransition(*values) for values in zip(clocks, following, early_s, strict=True)]


def count_changes(clocks_mhz: Sequence[int]) -> int:
    """Return how often the clock changes from one instruction to the next, the last to the first included."""
    return sum(clock != clocks_mhz[position - 1] for position, clock in enumerate(clocks_mhz))


@dataclass(frozen=True)
class IterationClocks:
    """The clocks that one rank requests in an iteration.

    Attributes:
        first_mhz: To request as it begins; None for the default.
        by_instruction: What to request around each instruction.
        ran: The operations of the last iteration in order, with what was requested around them: most iterations are
            alike, and to compare objects costs less than to look them up.
    """

    first_mhz: int | None = None
    by_instruction: dict[Instruction, ClockTransition] = field(default_factory=dict)
    ran: list[tuple[Compute, ClockTransition | None]] = field(default_factory=list)

    @cached_property
    def clock(self) -> dict[Instruction, int]:
        """Clock of each instruction [MHz]: the plan's, or the next higher one where that is requested early."""
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
        return IterationClocks(transitions[0].clock_mhz, dict(zip(self.clock, transitions, strict=True)))

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU supports these clocks.

        Raises:
            PlanError: It does not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )
