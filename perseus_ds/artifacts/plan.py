"""A frequency plan: the clock of every instruction of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

from perseus_ds.artifacts.validation import Power
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.instruction import Instruction, Kind

InstructionStreams = tuple[tuple[Instruction, ...], ...]
ClockTimes = Mapping[tuple[int, Kind, int], float]
"""Duration of an instruction, by stage, kind and clock [s]."""


class PowerSwing(NamedTuple):
    """Extremes of a pipeline's power over one second, and its largest change between two.

    There is one GPU per rank.
    """

    highest_w: Power
    lowest_w: Power
    change_w: Power


@dataclass(frozen=True)
class FrequencyPlan:
    """A clock for each instruction, with the predicted time and energy of the iteration.

    Attributes:
        instructions: The instructions of each rank in program order.
        clocks_mhz: One clock per instruction, shaped like ``instructions``.
        energy_j: Energy of one iteration of one pipeline, with one GPU per rank [J].
        lower_bound_j: Lower bound on the energy of any plan that is as fast [J], or None if it was not computed.
        power: Extremes of power over one second, or None if they were not computed.
    """

    instructions: InstructionStreams
    clocks_mhz: tuple[tuple[int, ...], ...]
    time_s: float
    energy_j: float
    lower_bound_j: float | None = None
    power: PowerSwing | None = None

    @property
    def mean_power_w(self) -> float:
        """Mean power of one pipeline with one GPU per rank [W]."""
        return self.energy_j / self.time_s

    @property
    def gap(self) -> float | None:
        """Distance of the plan's energy from its lower bound, as a fraction of the bound."""
        return None if self.lower_bound_j is None else self.energy_j / self.lower_bound_j - 1

    @property
    def clock_of_mhz(self) -> dict[Instruction, int]:
        return dict(zip(chain(*self.instructions), chain(*self.clocks_mhz), strict=True))

    @property
    def changes_by_rank(self) -> list[int]:
        """Number of clock changes of each rank, including the one to the next iteration."""
        return [_changes(own_mhz) for own_mhz in self.clocks_mhz]

    @property
    def clock_changes(self) -> int:
        return sum(self.changes_by_rank)


def _changes(clocks_mhz: Sequence[int]) -> int:
    """Return the number of clock changes in a sequence of clocks that is repeated."""
    return sum(clock_mhz != clocks_mhz[number - 1] for number, clock_mhz in enumerate(clocks_mhz))


def check_ranks(planned: int, expected: int, remedy: str = "") -> None:
    """Raise a PlanError with the remedy if a plan has another number of ranks than a pipeline."""
    if planned != expected:
        remedy = remedy or f'Run "perseus-ds optimize" again for {expected} ranks.'
        raise PlanError(
            f"Plan does not fit this schedule: it is for {planned} ranks, the schedule has {expected}. {remedy}"
        )


def check_instructions(planned: Sequence[Sequence[Instruction]], expected: Sequence[Sequence[Instruction]]) -> None:
    """Raise an error that names rank and position if a plan's instruction streams are not those of a schedule.

    A plan that was made from a profile without a stage's tail has no clock for it, which is not an error.
    """
    tails = {i.stage for stream in planned for i in stream if i.kind is Kind.TAIL}
    expected = [[i for i in stream if i.kind is not Kind.TAIL or i.stage in tails] for stream in expected]
    micro_batches = 1 + max((i.micro_batch for stream in expected for i in stream), default=-1)
    remedy = f'Run "perseus-ds optimize" again for {len(expected)} ranks and {micro_batches} micro-batches.'
    check_ranks(len(planned), len(expected), remedy)
    for rank, (ours, theirs) in enumerate(zip(planned, expected, strict=True)):
        for position, (plan_has, schedule_has) in enumerate(zip_longest(ours, theirs, fillvalue="nothing")):
            if plan_has != schedule_has:
                raise PlanError(
                    f"Plan does not fit this schedule: rank {rank}, instruction {position}: "
                    f"expected {schedule_has}, the plan has {plan_has}. {remedy}"
                )
