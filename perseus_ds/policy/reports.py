"""What each rank reports of an iteration to rank 0, and what rank 0 answers all ranks, while the next one runs."""

from __future__ import annotations

import hashlib
import math
import struct
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.errors import ConnectionLostError
from perseus_ds.ranks import Communicator, Pending


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """What rank 0 assigns to all ranks for the next iteration; it counts in its own report, and all ranks get it back.

    Attributes:
        plan: What the policy asks for, as a place on the frontier.
        paused: Whether to run at default clocks.
        halts: Whether all ranks wait before that iteration.
        capped: Whether default clocks would draw more than the power cap in force: then all iterations run under plans.
        number: Another one whenever the plan of any pipeline is another.
        promised_slowdown: Of the whole job against default clocks, by the profile.
    """

    plan: int = 0
    paused: bool = False
    halts: bool = False
    capped: bool = False
    number: int = 0
    promised_slowdown: float = 0.0

    def assigned(self) -> dict[str, Any]:
        """Return these fields alone."""
        return {field.name: getattr(self, field.name) for field in fields(Assigned)}


@dataclass(frozen=True)
class RankReport(Assigned):
    """One rank's report of an iteration to rank 0, as numbers, with rank 0's assignment.

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
        drift: How much farther its instructions are from the profile than they vary, as a fraction; NaN where that was
            not looked at.
        pace_low: Time of its instructions divided by the time that the profile says, of the kind with the lowest ratio:
            what that is at most; NaN where that was not looked at.
        pace_high: The same of the kind with the highest ratio: what that is at least. Below ``pace_low`` where all
            kinds may have one pace.
        limit_w: Power limit of its GPU; infinite where that is no lower than when the profile was measured [W].
        limit_mhz: Highest clock that its GPU reaches where something else slows it down, such as heat; infinite where
            nothing does [MHz].
        shapes: A whole number that differs when the shapes of the inputs of this rank's forwards differ, and from rank
            to rank; below 2^48.
        closed: Whether this rank has been closed, so that all leave the mode.
        stops: Whether the phase ends, which runs at default clocks until rank 0 says so.
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
    limit_w: float = math.inf
    limit_mhz: float = math.inf
    shapes: float = 0.0
    closed: bool = False
    stops: bool = False

    def as_numbers(self) -> list[float]:
        """Return the fields in their order."""
        return [float(getattr(self, name)) for name in _PLACES]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> RankReport:
        """Return what :meth:`as_numbers` was made of."""
        return cls(**{name: kind(number) for (name, kind), number in zip(_KINDS.items(), numbers, strict=True)})


class GpuLimit(NamedTuple):
    """What the GPU of a rank may do, where that is less than when the profile was measured.

    Attributes:
        power_w: Its power limit; infinite where that is no lower [W].
        clock_mhz: The highest clock that it reaches; infinite where only the power limit is in the way [MHz].
    """

    rank: int
    power_w: float
    clock_mhz: float


@dataclass(frozen=True)
class JobReport(Assigned):
    """Rank 0's answer to the reports of an iteration, with its decision.

    Attributes:
        time_s: Of the slowest rank [s].
        energy_j: Of all GPUs [J]; NaN where it cannot be read.
        least_energy_j: Of the GPU that used least, by its counter [J]; NaN where one cannot be read.
        failed: Whether a rank has fallen back to default clocks.
        closed: Whether a rank has been closed, so that all leave the mode.
        stops: Whether the phase ends, by rank 0.
        shapes: A whole number that differs when the shapes of the inputs differ on any rank.
        drift: How far the pipelines are from the profile, by their lower median; NaN where that was not looked at. One
            pipeline alone is a straggler, for which nothing has to be measured again.
        drift_most: The same of the pipeline that is farthest from it.
        pace: Time of instructions divided by the time that the profile says, by the median of all ranks; NaN where that
            was not looked at.
        drift_beside_pace: As ``drift``, where a factor that all instructions have in common is not counted.
        drift_beside_pace_most: The same of the pipeline that is farthest from it.
        limits: Of each GPU that may do less than when the profile was measured.
        stretch_factor: How many times as long as the policy's plan the plan of this rank's pipeline may take, by rank
            0's decision.
    """

    time_s: float
    energy_j: float
    least_energy_j: float
    failed: bool = False
    closed: bool = False
    stops: bool = False
    shapes: float = 0.0
    drift: float = math.nan
    drift_most: float = math.nan
    pace: float = math.nan
    drift_beside_pace: float = 0.0
    drift_beside_pace_most: float = 0.0
    limits: tuple[GpuLimit, ...] = ()
    stretch_factor: float = 1.0

    @classmethod
    def of(cls, ranks: RankReports) -> JobReport:
        """Return the answer to the reports of all ranks; stretch factors are still to be filled in."""
        rank_0, energies_j = ranks.of_rank_0, ranks.column("energy_j")
        drift = drift_most = pace = math.nan
        beside = beside_most = 0.0
        if not math.isnan(rank_0.drift):
            drift, drift_most = _typical_and_most(ranks.by_pipeline(ranks.column("drift")))
            pace, beside, beside_most = _pace_and_drift_beside_it(ranks)
        return cls(
            time_s=float(ranks.column("time_s").max()),
            energy_j=float(energies_j.sum()),
            least_energy_j=float(energies_j.min()),
            failed=bool(ranks.column("failed").any()),
            closed=bool(ranks.column("closed").any()),
            stops=rank_0.stops,
            shapes=float(int(ranks.column("shapes").astype(np.int64).sum()) % SHAPES),
            drift=drift,
            drift_most=drift_most,
            pace=pace,
            drift_beside_pace=beside,
            drift_beside_pace_most=beside_most,
            limits=ranks.limits,
            **rank_0.assigned(),
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

    @property
    def limits(self) -> tuple[GpuLimit, ...]:
        """Each GPU that may do less than when the profile was measured."""
        power_w, clock_mhz = self.column("limit_w"), self.column("limit_mhz")
        ranks = np.flatnonzero(np.isfinite(np.minimum(power_w, clock_mhz))).tolist()
        return tuple(GpuLimit(rank, float(power_w[rank]), float(clock_mhz[rank])) for rank in ranks)

    @property
    def of_rank_0(self) -> RankReport:
        """The report of rank 0, whose decisions count."""
        return RankReport.from_numbers(self._numbers[0].tolist())


class ReportExchange:
    """Sends this rank's report of one iteration after the other; every rank does so at the same boundaries.

    Attributes:
        ranks: On rank 0, the reports of all ranks that were received last; None elsewhere.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.ranks: RankReports | None = None
        self._communicator = communicator
        self._pending: Pending[tuple[JobReport, Sequence[float]] | None] | None = None
        self._arrived: RankReports | None = None

    def send(self, report: RankReport, stretch_factors: Sequence[float] = ()) -> None:
        """Begin to send this rank's report, and its events; returns at once.

        Args:
            report: Of this rank.
            stretch_factors: Rank 0's decision: of each pipeline; none for 1 throughout.
        """
        answer = partial(self._answer, tuple(stretch_factors))
        self._pending = self._communicator.start_exchange(report.as_numbers(), answer)

    def received(self) -> JobReport | None:
        """Return rank 0's answer to the reports sent last; None if there is none, or it was returned already.

        All ranks sent them an iteration ago, so this hardly waits.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else self._answered(pending)

    def received_within(self, timeout_s: float) -> JobReport | None:
        """Return the same without taking it; None too where a rank is gone before it has sent its own."""
        try:
            if self._pending is None or not self._pending.is_over_within(timeout_s):
                return None
            return self._answered(self._pending)
        except ConnectionLostError:
            return None

    def _answered(self, pending: Pending[tuple[JobReport, Sequence[float]] | None]) -> JobReport | None:
        answer = pending.result()
        self.ranks = self._arrived
        if answer is None:
            return None
        report, factors = answer
        return replace(
            report, stretch_factor=factors[self._communicator.topology.data_parallel_rank] if factors else 1.0
        )

    def _answer(
        self, stretch_factors: Sequence[float], numbers: npt.NDArray[np.float64]
    ) -> tuple[JobReport, Sequence[float]]:
        self._arrived = RankReports(numbers, self._communicator.pipeline_of_rank)
        return JobReport.of(self._arrived), stretch_factors


_KINDS: dict[str, Callable[[float], Any]] = typing.get_type_hints(RankReport)
_PLACES = {name: place for place, name in enumerate(_KINDS)}
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
