"""The records of a job: what is known of each iteration and event, with their schema.

Every rank reports each iteration (see :mod:`perseus_ds.artifacts.rank_report`). Rank 0 makes an
:class:`IterationRecord` of all reports and writes it to ``run.jsonl``, one JSON object a line, between the job's
events. What can be computed from a record (a saving, a lateness) is a property of it, and is never stored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.limits import UnixTime
from perseus_ds.artifacts.record_base import Event, RunRecord

SCHEMA_VERSION = 2
MOST_FAILED_RANKS = 16
"""Of a record; the others are counted."""


class IterationRecord(RunRecord):
    """One iteration of the whole job."""

    iteration: int = Field(description="Training step, 1 first.")
    ended: UnixTime | None = Field(None, description="When it ended [Unix seconds].")
    phase: str = Field(description="What Perseus was doing.")
    next_phase: str | None = Field(None, description="The phase after this one, where known.")
    next_in_s: float | None = Field(None, description="When it begins, counted from here, as estimated [s].")
    plan: int | None = Field(None, description="The plan of rank 0's pipeline: its place on the frontier.")
    shape: int | None = Field(None, description="Number of its inputs' shapes, where they have plans of their own.")
    time_s: float = Field(gt=0, description="Iteration time of the slowest rank [s].")
    energy_j: float | None = Field(None, description="Energy of all GPUs of the job [J].")
    energy_by_pipeline_j: tuple[float, ...] | None = Field(None, description="The same by data-parallel pipeline [J].")
    energy_by_rank_j: tuple[float, ...] | None = Field(
        None,
        description="The same by rank [J]. Jobs of more than 64 ranks have figures by rank in some records only; their "
        "energy is then that of all iterations since the last of these.",
    )
    predicted_time_s: float | None = Field(None, description="Iteration time by the plans [s].")
    predicted_energy_j: float | None = Field(None, description="Energy of all GPUs by the plans [J].")
    default_time_s: float | None = Field(None, description="Iteration time at default clocks [s].")
    default_energy_j: float | None = Field(None, description="Energy at default clocks [J].")
    default_measured: bool = Field(False, description="Whether this job measured these; otherwise by the profile.")
    drift: float | None = Field(None, description="How far instructions are from the profile, when last looked at.")
    clock_changes: int = Field(0, description="Clock changes of all GPUs.")
    clock_skips: int = Field(0, description="Clock changes left out.")
    failed_ranks: tuple[int, ...] = Field(
        (), description="Ranks that have fallen back to default clocks, the first 16 of them."
    )
    more_failed_ranks: int = Field(0, description="How many more have.")
    clocks_asked_mhz: tuple[int | None, ...] | None = Field(
        None, description="By rank, the clock that its GPU was asked for when it was last read; null at default clocks."
    )
    clocks_reached_mhz: tuple[int | None, ...] | None = Field(None, description="By rank, the clock that was read.")

    @property
    def power_w(self) -> float | None:
        """Average power of all GPUs [W]."""
        return None if self.energy_j is None else self.energy_j / self.time_s

    @property
    def saved(self) -> float | None:
        """Energy saved against default clocks, as a fraction of theirs."""
        if self.energy_j is None or not self.default_energy_j:
            return None
        return 1 - self.energy_j / self.default_energy_j

    @property
    def late(self) -> float | None:
        """How much longer than predicted it took, as a fraction."""
        return None if self.predicted_time_s is None else self.time_s / self.predicted_time_s - 1


class Started(Event):
    """The job started, or was resumed."""

    event: Literal["start"] = "start"
    schema_version: int = SCHEMA_VERSION
    mode: str | None = None
    gpu: str | None = None
    frontier: str | None = None
    job: str | None = Field(None, description="A fingerprint of the job, which distinguishes it from others.")
    policy: dict[str, Any] | None = None
    engines: list[str] | None = Field(None, description="Models of the process's engines; the first one trains.")


class ProfilingBegun(Event):
    """Training stops for a while: passes are repeated to measure a profile."""

    event: Literal["profiling"] = "profiling"
    clocks: int = Field(0, description="How many clocks are measured, at most.")
    longest_s: float | None = Field(None, description="How long it usually takes at most [s].")


class ProfileWritten(Event):
    """A profile was measured and written."""

    event: Literal["profile"] = "profile"
    path: str | None = None
    resumed_clocks: int = 0
    iterations: int | None = Field(None, description="Iterations that were measured.")
    lost_s: float | None = Field(None, description="By how much they took longer than at default clocks [s].")
    lost_j: float | None = Field(None, description="By how much they used more energy [J].")
    spent_s: float | None = Field(None, description="Time spent outside of training [s].")
    spent_j: float | None = Field(None, description="Energy spent outside of training [J].")


def against_default_clocks(extra_s: float, extra_j: float) -> str:
    """Return how much more or less time and energy iterations took than at default clocks, in words."""
    parts = [(abs(extra_s), "s", extra_s < 0), (abs(extra_j), "J", extra_j < 0)]
    words = " and ".join(f"{amount:.4g} {unit} {'less' if less else 'more'}" for amount, unit, less in parts)
    return f"{words} than at default clocks"


class PlanChosen(Event):
    """Pipelines run under other plans from the next iteration on."""

    event: Literal["plan"] = "plan"
    plan: int | None = None
    plans: tuple[int, ...] = Field((), description="Of each pipeline.")
    straggler: int | None = None
    slowdown: float = 1.0
    paused: bool = False
    halts: bool = Field(False, description="Whether all ranks wait before the next iteration.")


class PlanJudged(Event):
    """Iterations under a plan were compared with iterations at default clocks, both measured in this job."""

    event: Literal["proof"] = "proof"
    plan: int | None = None
    wins: bool = False
    slowdown: float = Field(0.0, description="As a fraction of the time at default clocks.")
    slowdown_error: float = Field(0.0, description="Its standard error.")
    promised_slowdown: float = Field(0.0, description="By the profile.")
    saved: float = Field(0.0, description="As a fraction of the energy at default clocks.")
    saved_error: float = Field(0.0, description="Its standard error.")


class Predicted(Event):
    """Iterations at default clocks differ from what the profile predicts for them."""

    event: Literal["prediction"] = "prediction"
    time_s: float = Field(0.0, description="Iteration time, as measured [s].")
    time_error: float = Field(0.0, description="Its relative standard error.")
    energy_j: float = Field(0.0, description="Energy of all GPUs, as measured [J].")
    energy_error: float = Field(0.0, description="Its relative standard error.")
    predicted_time_s: float = Field(0.0, description="By the profile [s].")
    predicted_energy_j: float = Field(0.0, description="By the profile [J].")
    parts: dict[str, float] = Field({}, description="Parts that differ: how many times as long they take as profiled.")
    corrected: bool = Field(False, description="Whether the profile was corrected and plans are made again.")


class ShapePlanned(Event):
    """Inputs of a shape that comes often get a profile and plans of their own, or lose them."""

    event: Literal["shape"] = "shape"
    shape: int = 0
    given_up: str | None = Field(None, description="Why it runs at default clocks from now on.")


class PolicyChanged(Event):
    """Another policy is followed, or its condition cannot be met."""

    event: Literal["policy"] = "policy"
    policy: dict[str, Any] | None = None
    by_schedule: bool = Field(False, description="Whether it is that of a window of a schedule, or its default.")
    problem: str | None = None


class Drifted(Event):
    """Instructions take longer or shorter than profiled."""

    event: Literal["drift"] = "drift"
    drift: float = 0.0
    profiles_again: bool | None = Field(None, description="Whether the job profiles again; None where not recorded.")


class ClockRefused(Event):
    """A GPU does not reach a clock that its driver has accepted, or, at default clocks, its highest clock."""

    event: Literal["refused"] = "refused"
    rank: int = 0
    clock_mhz: int | None = Field(None, description="As asked for; None for default clocks.")
    reached_mhz: int | None = None
    reasons: tuple[str, ...] = ()


class Failed(Event):
    """A rank has fallen back to default clocks, or a part of Perseus outside training does not work."""

    event: Literal["failure", "cache", "control", "metrics", "signal"] = "failure"
    rank: int = 0
    error: str = ""


class Recovered(Event):
    """A rank that had fallen back to default clocks runs under plans again."""

    event: Literal["recovery"] = "recovery"
    rank: int = 0


class PlanTotals(BaseModel):
    """Iterations under one plan, all of them together; those without a figure at default clocks are not counted."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    plan: int
    iterations: int
    time_s: float
    energy_j: float
    default_s: float = Field(description="What they take at default clocks [s].")
    default_j: float = Field(description="What they take at default clocks [J].")

    @property
    def slowdown(self) -> float:
        """As a fraction of the time at default clocks."""
        return self.time_s / self.default_s - 1

    @property
    def saved(self) -> float:
        """As a fraction of the energy at default clocks."""
        return 1 - self.energy_j / self.default_j


class Ended(Event):
    """The job ended; the totals of its iterations since it started."""

    event: Literal["end"] = "end"
    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = Field(0, description="Iterations whose energy could not be read.")
    clock_changes: int = 0
    clock_skips: int = 0
    planned: int = Field(0, description="Iterations under plans.")
    planned_j: float = Field(0.0, description="Their energy [J].")
    default_j: float = Field(0.0, description="What they take at default clocks [J].")
    planned_s: float = Field(0.0, description="The time of the iterations under plans [s].")
    default_s: float = Field(0.0, description="What they take at default clocks [s].")
    default_measured: bool = Field(False, description="Whether this job measured that; otherwise by the profile.")
    plans: tuple[PlanTotals, ...] = Field((), description="The same by plan, in the order in which they ran.")

    @property
    def saved(self) -> float | None:
        """Energy saved by the iterations under plans, as a fraction."""
        return 1 - self.planned_j / self.default_j if self.default_j else None


Record = IterationRecord | Event
