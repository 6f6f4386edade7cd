"""The report that each rank sends to all others about an iteration."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RankReport:
    """One rank's report of an iteration, as numbers that one collective carries.

    Attributes:
        time_s: Iteration time [s].
        energy_j: Energy of this rank's GPU [J]; NaN where it cannot be read.
        clock_changes: Clock changes of this rank's GPU.
        clock_skips: Clock changes that were left out: too short to be worth it, or a later one was already due.
        failed: Whether this rank has fallen back to default clocks.
        asked_mhz: Clock that its GPU was asked for when it was last read back; NaN at default clocks [MHz].
        reached_mhz: Clock that was read then [MHz].
        computed_s: When this rank had computed its last pass, from the iteration's start; 0 where not known [s].
        tail_s: How long its tail took, waiting included; 0 where not known [s].
        drift: How far its instructions are from the profile, as a fraction; NaN where that was not looked at.
        pace_low: Time of its instructions divided by the time that the profile says, of the kind with the lowest ratio;
            NaN where that was not looked at.
        pace_high: The same of the kind with the highest ratio.
        shapes: A number that differs when the shapes of the inputs of this rank's forwards differ.
        closed: Whether this rank has been closed, so that all leave the mode.
        vote: Whether this rank asks for something that the phase decides together, such as one more iteration.
        events: Events of this rank that rank 0 has not been told of.
        plan: Rank 0's decision: what the policy asks for, as a place on the frontier.
        paused: Rank 0's decision: whether to run at default clocks.
        halts: Rank 0's decision: whether all ranks wait before that iteration.
        straggler: Rank 0's decision: the pipeline reported to be a straggler; -1 for none.
        straggler_slowdown: How many times as long it takes.
    """

    time_s: float
    energy_j: float
    clock_changes: int = 0
    clock_skips: int = 0
    failed: bool = False
    asked_mhz: float = math.nan
    reached_mhz: float = math.nan
    computed_s: float = 0.0
    tail_s: float = 0.0
    drift: float = math.nan
    pace_low: float = math.nan
    pace_high: float = math.nan
    shapes: float = 0.0
    closed: bool = False
    vote: bool = False
    events: int = 0
    plan: int = 0
    paused: bool = False
    halts: bool = False
    straggler: int = -1
    straggler_slowdown: float = 1.0

    def as_numbers(self) -> list[float]:
        """Return the fields in their order."""
        return [float(getattr(self, name)) for name in _REPORT_FIELDS]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> RankReport:
        """Return what :meth:`as_numbers` was made of."""
        return cls(**{name: kind(number) for (name, kind), number in zip(_REPORT_TYPES, numbers, strict=True)})


_REPORT_FIELDS = tuple(field.name for field in dataclasses.fields(RankReport))
_REPORT_TYPES = [(name, typing.get_type_hints(RankReport)[name]) for name in _REPORT_FIELDS]


class RankReports:
    """The reports of all ranks of one iteration.

    Args:
        numbers: Shape (ranks, fields of :class:`RankReport`).
    """

    def __init__(self, numbers: npt.NDArray[np.float64]) -> None:
        self._numbers = numbers

    @classmethod
    def of(cls, reports: Sequence[RankReport]) -> RankReports:
        """Return them, rank 0 first."""
        return cls(np.array([report.as_numbers() for report in reports]))

    def column(self, field: str) -> npt.NDArray[np.float64]:
        """Return one field of all ranks, shape (ranks,)."""
        return self._numbers[:, _REPORT_FIELDS.index(field)]

    @property
    def shapes(self) -> tuple[float, ...]:
        """What tells the shapes of this iteration's inputs from those of others."""
        return tuple(self.column("shapes").tolist())

    @property
    def of_rank_0(self) -> RankReport:
        """The report of rank 0, whose decisions count."""
        return RankReport.from_numbers(self._numbers[0].tolist())
