"""Records of iterations in ``run.jsonl``: of one iteration, or the sums of those of about an hour.

Values that can be computed from a record, such as a saving, are its properties and are not stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.artifacts.validation import UnixTime

MOST_FAILED_RANKS = 16
"""Maximum number of failed ranks that a record lists. The number of further ones is ``more_failed_ranks``."""


class RunRecord(BaseModel):
    """A line of ``run.jsonl``."""

    # Files of later versions may have more keys.
    model_config = ConfigDict(extra="ignore", frozen=True)

    simulated: bool = Field(False, description="Whether GPUs are simulated.")


class OfRanks(NamedTuple):
    """How a figure of a record is made from a figure of the ranks' reports, of which unknown ones do not count."""

    figure: str
    combined: Literal["sum", "highest"]


class IterationRecord(RunRecord):
    """One iteration of the whole job."""

    iteration: int = Field(description="Training step, 1 first.")
    ended: UnixTime | None = Field(None, description="Time at which it ended [Unix seconds].")
    phase: str = Field(
        description="`calibrate` (the first iteration on simulated GPUs), `warm-up`, `profile`, `optimizing` "
        "(plans are computed), `default` (default clocks, to compare plans with), `run`, `pause`, "
        "`observe`."
    )
    next_phase: str | None = Field(None, description="The next phase; `verdict` is the first one on plans.")
    next_in_s: float | None = Field(None, description="Estimated time until it begins [s].")
    plan: int | None = Field(
        None, description="Line of `frontier.csv` with the plan of rank 0's pipeline; null at default clocks."
    )
    order: int | None = Field(
        None,
        description="Number of the order of its passes, if several numbers of micro-batches have their own "
        "plans: `plan` is then a line of `orders/<order>/frontier.csv`. Null for the first order, "
        "255 for all orders without plans.",
    )
    limited: bool = Field(False, description="Whether GPUs are under limits that others set.")
    time_s: float = Field(gt=0, description="Time of the slowest rank [s].")
    energy_j: float | None = Field(None, description="Energy of all GPUs of the job [J]; null if it cannot be read.")
    # Jobs of more than 64 ranks or pipelines list them only in some records, for all iterations since these.
    energy_by_pipeline_j: tuple[float, ...] | None = Field(
        None,
        description="The same energy by data-parallel pipeline. Jobs of more than 64 pipelines have it only in some "
        "records, such as every 10th one with 160 pipelines, for all iterations of the same phase since the previous "
        "one of these.",
    )
    energy_by_rank_j: tuple[float, ...] | None = Field(
        None,
        description="The same energy by rank. Jobs of more than 64 ranks have figures by rank only in some "
        "records, such as every 64th one with 1024 ranks, for all iterations since the previous "
        "one of these.",
    )
    predicted_time_s: float | None = Field(
        None,
        description="Promise of the plans, including stragglers: the time at default clocks, changed by the "
        "slowdown according to the profile [s]; null without a plan.",
    )
    predicted_energy_j: float | None = Field(None, description="The same for the energy [J].")
    default_time_s: float | None = Field(
        None,
        description="Time that default clocks take for an iteration of the same order and size, as soon as it "
        "is known [s]. Null under a plan if it was not measured while passes deviate from the "
        "profile by more than `max_drift`.",
    )
    default_energy_j: float | None = Field(None, description="The same for the energy [J].")
    default_measured: bool = Field(
        False,
        description="Whether these two were measured in this job, without stalls, instead of predicted by the profile.",
    )
    tokens: int | None = Field(None, description="Number of tokens in the inputs, if the engine knows them.")
    trial: TrialState | None = Field(None, description="Under a plan, what the trial of plans knows.")
    drift: float | None = Field(
        None,
        description="Deviation of instruction times from the profile beyond their own variation, as a "
        "fraction, when last computed.",
    )
    clock_changes: Annotated[int, OfRanks("changes", "sum")] = Field(0, description="Clock changes of all GPUs.")
    clock_skips: Annotated[int, OfRanks("skips", "sum")] = Field(
        0, description="Clock changes that were omitted because a later one was due."
    )
    failed_ranks: tuple[int, ...] = Field((), description="The first 16 ranks that have fallen back to default clocks.")
    more_failed_ranks: int = Field(0, description="Number of further ones.")
    clocks_asked_mhz: tuple[int | None, ...] | None = Field(
        None,
        description="By rank, the requested clock of its GPU when it was last read back [MHz]; null at "
        "default clocks. The whole list is null if all ranks are at default clocks or the record "
        "has no figures by rank.",
    )
    clocks_reached_mhz: tuple[int | None, ...] | None = Field(
        None, description="By rank, the clock that was read [MHz]."
    )
    highest_temperature_c: Annotated[float | None, OfRanks("temperature_c", "highest")] = Field(
        None, description="Temperature of the hottest GPU [°C], read every second; null if no GPU reports one."
    )

    @property
    def power_w(self) -> float | None:
        """Mean power of all GPUs [W]."""
        return None if self.energy_j is None else self.energy_j / self.time_s

    @property
    def saved(self) -> float | None:
        """Energy saved compared with default clocks, as a fraction."""
        return _less(self.energy_j, self.default_energy_j)

    @property
    def promised_saving(self) -> float | None:
        """Energy saving that the plan predicts, as a fraction."""
        return _less(self.predicted_energy_j, self.default_energy_j)

    @property
    def promised_slowdown(self) -> float | None:
        """Slowdown that the plan predicts compared with default clocks, as a fraction."""
        less = _less(self.predicted_time_s, self.default_time_s)
        return None if less is None else -less

    @property
    def late(self) -> float | None:
        """Excess of the iteration time over the predicted time, as a fraction."""
        return None if self.predicted_time_s is None else self.time_s / self.predicted_time_s - 1


def _less(value: float | None, default: float | None) -> float | None:
    return None if value is None or not default else 1 - value / default


@dataclass
class Sums:
    """Sums over iterations. ``savings.py`` defines which of them are compared with default clocks."""

    iterations: Annotated[int, Field(description="Number of iterations.")] = 0
    time_s: Annotated[float, Field(description="Their time [s].")] = 0.0
    energy_j: Annotated[float, Field(description="Their energy [J], as far as it is known.")] = 0.0
    without_energy: Annotated[int, Field(description="Number of iterations with an energy that could not be read.")] = 0
    clock_changes: Annotated[int, Field(description="Clock changes of all GPUs.")] = 0
    clock_skips: Annotated[int, Field(description="Clock changes that were omitted.")] = 0
    stalls: Annotated[int, Field(description="Number of iterations that contain a stall.")] = 0
    compared: Annotated[int, Field(description="Number of iterations that are compared with default clocks.")] = 0
    compared_s: Annotated[float, Field(description="Their time [s].")] = 0.0
    known: Annotated[int, Field(description="Number of compared iterations with a known energy.")] = 0
    compared_j: Annotated[float, Field(description="Energy of these [J].")] = 0.0
    default_s: Annotated[float, Field(description="Time that default clocks take for the compared ones [s].")] = 0.0
    default_j: Annotated[float, Field(description="Energy that they take for those of known energy [J].")] = 0.0
    tokens: Annotated[int, Field(description="Number of tokens in those of these with a known number of tokens.")] = 0
    tokens_s: Annotated[float, Field(description="Time of the iterations with these tokens [s].")] = 0.0
    tokens_j: Annotated[float, Field(description="Their energy [J].")] = 0.0
    tokens_default_s: Annotated[float, Field(description="Time that default clocks take for them [s].")] = 0.0
    tokens_default_j: Annotated[float, Field(description="Energy that default clocks take for them [J].")] = 0.0

    def add(self, other: Sums) -> None:
        """Add the sums over other iterations."""
        own = vars(self)
        for name, value in vars(other).items():
            own[name] += value

    def with_default_clocks_times(self, time_factor: float, energy_factor: float) -> Sums:
        """Return the sums with what default clocks take multiplied by factors."""
        return replace(
            self,
            default_s=self.default_s * time_factor,
            default_j=self.default_j * energy_factor,
            tokens_default_s=self.tokens_default_s * time_factor,
            tokens_default_j=self.tokens_default_j * energy_factor,
        )

    def mean(self) -> MeanIteration:
        """Return the mean of the compared iterations, of which there must be some."""
        known = self.known or math.nan
        return MeanIteration(
            self.compared_s / self.compared,
            self.compared_j / known,
            self.default_s / self.compared,
            self.default_j / known,
        )

    @property
    def saved_j(self) -> float:
        """Energy saved compared with default clocks [J]."""
        return self.default_j - self.compared_j

    @property
    def gained_s(self) -> float:
        """Time saved compared with default clocks [s], negative if the iterations took longer."""
        return self.default_s - self.compared_s

    @property
    def saved(self) -> float | None:
        """Energy saved, as a fraction of the energy at default clocks. None if it is unknown."""
        return self.saved_j / self.default_j if self.default_j else None

    @property
    def slowdown(self) -> float | None:
        """Increase of the time, as a fraction of the time at default clocks. None if it is unknown."""
        return -self.gained_s / self.default_s if self.default_s else None


class MeanIteration(NamedTuple):
    """Mean time [s] and energy [J] of compared iterations, and what default clocks take. Unknown energies are NaN."""

    time_s: float
    energy_j: float
    default_s: float
    default_j: float


class PowerSums(BaseModel):
    """Seconds of a series of iterations, each of whole iterations (``progress/series.py``)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    seconds: int = Field(description="Their number.")
    time_s: float = Field(description="Their time [s].")
    energy_j: float = Field(description="Their energy [J].")
    lowest_w: float = Field(description="Power in the lowest [W].")
    highest_w: float = Field(description="Power in the highest [W].")
    change_w: float = Field(description="Largest difference from one to the next [W].")


class PhaseSums(BaseModel):
    """Sums over iterations of one phase, order and plan."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    phase: str = Field(description="Their phase.")
    order: int = Field(0, description="Number of their order.")
    plan: int | None = Field(None, description="Their plan; null at default clocks.")
    sums: Sums = Field(description="Sums over them.")


class SummedIterations(RunRecord):
    """Consecutive iterations of the whole job, of at most about an hour, between two events."""

    first: int = Field(description="Number of the first iteration.")
    last: int = Field(description="Number of the last one.")
    ended: UnixTime | None = Field(None, description="Time at which it ended [Unix seconds].")
    parts: tuple[PhaseSums, ...] = Field(
        description="By phase, order and plan, in the order in which they first ran, without `calibrate`."
    )
    plan: int | None = Field(None, description="The last plan of the first order.")
    power: PowerSums | None = Field(None, description="Power over a second.")
    planned_power: PowerSums | None = Field(None, description="The same under plans of the first order.")
    first_pairs: int = Field(0, description="Under plans, number of pairs of the trial at the first iteration.")
    trial: TrialState | None = Field(None, description="Under plans, the trial at the last iteration.")
    decided: TrialState | None = Field(None, description="The last one that was not undecided.")
    default_measured: bool = Field(True, description="As in the last iteration under plans.")
    # Only the last sums of a start have these figures, for all iterations of the start that are summed.
    energy_by_pipeline_j: tuple[float, ...] = Field((), description="Energy by pipeline of all iterations [J].")
    default_by_pipeline_j: tuple[float, ...] = Field((), description="The same at default clocks.")
    planned_by_pipeline_j: tuple[float, ...] = Field((), description="The same under plans.")
    energy_by_rank_j: tuple[float, ...] = Field((), description="Energy by rank [J].")
    by_rank_s: float = Field(0.0, description="Time of the iterations in these energies [s].")
    unlisted_s: float = Field(0.0, description="Time of the iterations after these, which the next list contains [s].")

    @property
    def total(self) -> Sums:
        """Sums over all iterations."""
        total = Sums()
        for part in self.parts:
            total.add(part.sums)
        return total
