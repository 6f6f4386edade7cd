"""One rank's share of a frequency plan, as it is looked up while training."""

from __future__ import annotations

from dataclasses import dataclass

from perseus_ds.errors import PlanError
from perseus_ds.gpu.base import Gpu
from perseus_ds.instruction import Instruction
from perseus_ds.plan import FrequencyPlan


@dataclass(frozen=True)
class Forecast:
    """What one iteration of the whole job takes, by the profile.

    Attributes:
        time_s: Iteration time [s].
        energy_j: Energy of all GPUs [J].
        default_energy_j: The same at default clocks [J].
    """

    time_s: float
    energy_j: float
    default_energy_j: float


@dataclass(frozen=True)
class ClockPlan:
    """One rank's share of a frequency plan, looked up by instruction.

    Attributes:
        plan: The whole plan, None at default clocks or at one clock.
        number: Its place on the frontier.
        first: Clock of the rank's first instruction [MHz].
        clock: Of each instruction [MHz].
        next_clock: Of the instruction after it, round to the next iteration's first [MHz].
        forecast: What the job's iteration takes under it; None where it is not known.
    """

    plan: FrequencyPlan | None
    number: int | None
    first: int | None
    clock: dict[Instruction, int]
    next_clock: dict[Instruction, int]
    forecast: Forecast | None = None

    @classmethod
    def none(cls) -> ClockPlan:
        """Return the absence of a plan."""
        return cls(None, None, None, {}, {})

    @classmethod
    def constant(cls, clock_mhz: int) -> ClockPlan:
        """Return one clock for all of an iteration."""
        return cls(None, None, clock_mhz, {}, {})

    @classmethod
    def of_rank(
        cls, plan: FrequencyPlan, number: int, pipeline_rank: int, forecast: Forecast | None = None
    ) -> ClockPlan:
        """Return the share of one pipeline rank."""
        instructions, clocks = plan.instructions[pipeline_rank], plan.clocks_mhz[pipeline_rank]
        following = clocks[1:] + clocks[:1]
        return cls(
            plan,
            number,
            clocks[0],
            dict(zip(instructions, clocks, strict=True)),
            dict(zip(instructions, following, strict=True)),
            forecast,
        )

    def check(self, gpu: Gpu) -> None:
        """Check that a GPU has these clocks.

        Raises:
            PlanError: It has not.
        """
        for clock_mhz in sorted(set(self.clock.values()) - set(gpu.supported_clocks_mhz())):
            raise PlanError(
                f"Plan does not fit this GPU: {gpu.name} has no {clock_mhz} MHz. Profile on GPUs of this kind."
            )
