"""What each rank reports of an iteration to rank 0, and what all ranks are told of it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self


class _Numbers:
    """A dataclass whose fields are sent as numbers."""

    def as_numbers(self) -> list[float]:
        """Return the fields in their order."""
        return [float(getattr(self, name)) for name, _ in _FIELDS[type(self)]]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Self:
        """Return what :meth:`as_numbers` was made of."""
        return cls(**{name: kind(number) for (name, kind), number in zip(_FIELDS[cls], numbers, strict=True)})


@dataclass(frozen=True)
class RankReport(_Numbers):
    """One rank's report of an iteration to rank 0, as numbers.

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
        shapes: A whole number that differs when the shapes of the inputs of this rank's forwards differ, and from rank
            to rank; below 2^48.
        closed: Whether this rank has been closed, so that all leave the mode.
        vote: Whether this rank asks for something that the phase decides together, such as one more iteration.
        event_bytes: Bytes of the events, of this rank and of those it passes on, that rank 0 has not been told of.
        plan: Rank 0's decision: what the policy asks for, as a place on the frontier.
        paused: Rank 0's decision: whether to run at default clocks.
        halts: Rank 0's decision: whether all ranks wait before that iteration.
        caps_power: Rank 0's decision: whether the policy in force limits power, so that plans are judged by it.
        assignment: Number of rank 0's decision, another one whenever the plan of any pipeline is another.
        promised_slowdown: Of the whole job by that decision, as the profile has it.
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
    event_bytes: int = 0
    plan: int = 0
    paused: bool = False
    halts: bool = False
    caps_power: bool = False
    assignment: int = 0
    promised_slowdown: float = 0.0


@dataclass(frozen=True)
class JobReport(_Numbers):
    """What all ranks are told of an iteration: as many numbers, however many ranks there are.

    Attributes:
        time_s: Of the slowest rank [s].
        energy_j: Of all GPUs [J]; NaN where it cannot be read.
        least_energy_j: Of the GPU that used least, by its counter [J]; NaN where one cannot be read.
        failed: Whether a rank has fallen back to default clocks.
        closed: Whether a rank has been closed, so that all leave the mode.
        vote: Whether a rank has voted.
        rank_0_votes: Whether rank 0 has.
        event_bytes: Bytes of the events that rank 0 has not been told of.
        shapes: A whole number that differs when the shapes of the inputs differ on any rank.
        drift: How far the pipelines are from the profile, by their lower median; NaN where that was not looked at. One
            pipeline alone is a straggler, for which nothing has to be measured again.
        drift_most: The same of the pipeline that is farthest from it.
        pace: Time of instructions divided by the time that the profile says, by the median of all ranks; NaN where that
            was not looked at.
        drift_beside_pace: As ``drift``, where a factor that all instructions have in common is not counted.
        drift_beside_pace_most: The same of the pipeline that is farthest from it.
        plan: As rank 0 has reported it.
        paused: Likewise.
        halts: Likewise.
        caps_power: Likewise.
        assignment: Likewise.
        promised_slowdown: Likewise.
        stretch_factor: How many times as long as the policy's plan the plan of this rank's pipeline may take, by rank
            0's decision.
    """

    time_s: float
    energy_j: float
    least_energy_j: float
    failed: bool = False
    closed: bool = False
    vote: bool = False
    rank_0_votes: bool = False
    event_bytes: int = 0
    shapes: float = 0.0
    drift: float = math.nan
    drift_most: float = math.nan
    pace: float = math.nan
    drift_beside_pace: float = 0.0
    drift_beside_pace_most: float = 0.0
    plan: int = 0
    paused: bool = False
    halts: bool = False
    caps_power: bool = False
    assignment: int = 0
    promised_slowdown: float = 0.0
    stretch_factor: float = 1.0

    @classmethod
    def of(cls, ranks: RankReports) -> JobReport:
        """Return what all ranks are told; their stretch factors are still to be filled in."""
        rank_0 = ranks.of_rank_0
        most, least, total = (dict(zip(_PLACES, row, strict=True)) for row in ranks.extremes_and_sums())
        drift = drift_most = pace = math.nan
        beside = beside_most = 0.0
        if not math.isnan(rank_0.drift):
            drift, drift_most = _typical_and_most(ranks.by_pipeline(ranks.column("drift")))
            pace, beside, beside_most = _pace_and_drift_beside_it(ranks)
        return cls(
            time_s=most["time_s"],
            energy_j=total["energy_j"],
            least_energy_j=least["energy_j"],
            failed=bool(most["failed"]),
            closed=bool(most["closed"]),
            vote=bool(most["vote"]),
            rank_0_votes=rank_0.vote,
            event_bytes=int(total["event_bytes"]),
            shapes=float(int(ranks.column("shapes").astype(np.int64).sum()) % SHAPES),
            drift=drift,
            drift_most=drift_most,
            pace=pace,
            drift_beside_pace=beside,
            drift_beside_pace_most=beside_most,
            plan=rank_0.plan,
            paused=rank_0.paused,
            halts=rank_0.halts,
            caps_power=rank_0.caps_power,
            assignment=rank_0.assignment,
            promised_slowdown=rank_0.promised_slowdown,
        )


class RankReports:
    """The reports of all ranks of one iteration, on rank 0.

    Args:
        numbers: Shape (ranks, fields of :class:`RankReport`).
        pipeline_of_rank: The data-parallel pipeline of each rank; None if there is only one.
    """

    def __init__(self, numbers: npt.NDArray[np.float64], pipeline_of_rank: npt.NDArray[np.int64] | None = None) -> None:
        self._numbers = numbers
        self.pipeline_of_rank = np.zeros(len(numbers), np.int64) if pipeline_of_rank is None else pipeline_of_rank

    def column(self, field: str) -> npt.NDArray[np.float64]:
        """Return one field of all ranks, shape (ranks,)."""
        return self._numbers[:, _PLACES[field]]

    def by_pipeline(self, of_ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the largest value among the ranks of each pipeline, shape (pipelines,)."""
        largest = np.full(self.pipeline_of_rank.max() + 1, -np.inf)
        np.fmax.at(largest, self.pipeline_of_rank, of_ranks)
        return largest

    def extremes_and_sums(self) -> list[list[float]]:
        """Return of every field the largest, the least and the sum over all ranks; NaN where one is."""
        return [reduced(self._numbers, axis=0).tolist() for reduced in (np.max, np.min, np.sum)]

    @property
    def of_rank_0(self) -> RankReport:
        """The report of rank 0, whose decisions count."""
        return RankReport.from_numbers(self._numbers[0].tolist())


def _fields_of(kind: type[RankReport] | type[JobReport]) -> tuple[tuple[str, Callable[[float], Any]], ...]:
    types = typing.get_type_hints(kind)
    return tuple((field.name, types[field.name]) for field in dataclasses.fields(kind))


_FIELDS: dict[type[_Numbers], tuple[tuple[str, Callable[[float], Any]], ...]] = {
    kind: _fields_of(kind) for kind in (RankReport, JobReport)
}
_PLACES = {name: place for place, (name, _) in enumerate(_FIELDS[RankReport])}
ALIKE = len(_FIELDS[JobReport]) - 1
"""How many numbers of a :class:`JobReport` are the same for all ranks: all but the last one, the stretch factor."""
# Of the number that a rank reports of its shapes.
SHAPES = 2**48


def shapes_number(rank: int, shapes: float) -> int:
    """Return what a rank reports of the shapes of its inputs: the sum over all ranks tells those of the job."""
    content = struct.pack("<qd", rank, shapes)
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little") if shapes else 0


def _typical_and_most(pipelines: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the lower median and the largest."""
    return float(np.sort(pipelines)[(len(pipelines) - 1) // 2]), float(pipelines.max())


def _pace_and_drift_beside_it(ranks: RankReports) -> tuple[float, float, float]:
    """Return the pace, and how far the typical pipeline is from it and the one that is farthest."""
    low, high = ranks.column("pace_low"), ranks.column("pace_high")
    known = low > 0
    if not known.any():
        return math.nan, 0.0, 0.0
    pace = float(np.median(np.sqrt(low[known] * high[known])))
    beside = ranks.by_pipeline(np.where(known, np.maximum(high / pace - 1, 1 - low / pace), 0.0))
    return pace, *_typical_and_most(beside)
