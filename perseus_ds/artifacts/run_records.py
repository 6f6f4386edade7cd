"""``run.jsonl``: records of a job's iterations and events.

The job's server writes an :class:`IterationRecord` for each iteration, and the job's events, as one JSON object per
line. The first iterations of a long job are replaced by their :class:`SummedIterations`. The file is read while it
grows. Values that can be computed from a record, such as a saving, are its properties and are not stored.
The keys are described in ``docs/files.md``. An event also has a description in words.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.io import open_bounded, parse_json
from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.validation import (
    MOST_RECORD_BYTES,
    MOST_RECORD_LINE_BYTES,
    UnixTime,
)
from perseus_ds.errors import ConfigError
from perseus_ds.units import bounded, duration, joules, number, percent, plain, watt_hours, watts

logger = logging.getLogger("perseus_ds")
SCHEMA_VERSION = 1
FILE_NAME = "run.jsonl"
MOST_FAILED_RANKS = 16
"""Maximum number of failed ranks that a record lists. The number of further ones is ``more_failed_ranks``."""
_MOST_IN_WORDS = 5
# Descriptions of NVML's reasons for a low clock.
_REASONS = {
    "sw_power_cap": "power limit",
    "hw_power_brake_slowdown": "power brake of the machine",
    "sw_thermal_slowdown": "too hot",
    "hw_thermal_slowdown": "too hot",
}
NO_ORDER = 255
"""The number of all orders without plans, which run at default clocks."""

Limits = tuple[tuple[int, float | None, float | None], ...]
"""Limited GPUs: rank, power limit [W], and clock limit due to heat or the machine [MHz]."""


class RunRecord(BaseModel):
    """A line of ``run.jsonl``."""

    # Files of later versions may have more keys.
    model_config = ConfigDict(extra="ignore", frozen=True)

    simulated: bool = Field(False, description="Whether GPUs are simulated.")


class TrialState(BaseModel):
    """What the trial of the present plans knows (``policy/trial.py``)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pairs: int = Field(0, description="Number of pairs of blocks that were compared.")
    verdict: str = Field("unknown", description="`good`, `late`, `costs energy`, `saves nothing` or `unknown`.")
    slowdown: float | None = Field(
        None,
        description="Change of time as a fraction of that at default clocks; null if there are fewer than three pairs.",
    )
    slowdown_error: float | None = Field(None, description="Its error, which is exceeded in at most 5 % of the cases.")
    saved: float | None = Field(
        None,
        description="Saving of energy as a fraction of that at default clocks; null if there are fewer than "
        "three pairs.",
    )
    saved_error: float | None = Field(None, description="Its error, which is exceeded in at most 5 % of the cases.")

    @property
    def word(self) -> str:
        """Whether the saving is certain, in one word."""
        return VERDICTS.get(self.verdict, "undecided")

    @property
    def is_undecided(self) -> bool:
        """True if it is not known whether the plans are good."""
        return self.word == "undecided"

    @property
    def certainty(self) -> str:
        """Whether the saving is certain, with the number of pairs or the reason."""
        if self.is_undecided:
            return f"undecided after {self._pairs_in_words} of blocks"
        return self.word if self.word == "certain" else f"{self.word} ({self.verdict})"

    @property
    def energy(self) -> str:
        """The change of energy with its error. Only the number of pairs while it is undecided."""
        if self.saved is None or self.is_undecided:
            return self._pairs_in_words
        return with_error(-self.saved, self.saved_error)

    @property
    def time(self) -> str:
        """The change of time with its error. Only the number of pairs while it is undecided."""
        if self.slowdown is None or self.is_undecided:
            return self._pairs_in_words
        return with_error(self.slowdown, self.slowdown_error)

    @property
    def _pairs_in_words(self) -> str:
        return f"{self.pairs} pair{'' if self.pairs == 1 else 's'}"


VERDICTS: Mapping[str, str] = {
    "good": "certain",
    "unknown": "undecided",
    "late": "harmful",
    "costs energy": "harmful",
    "saves nothing": "useless",
}
"""Verdicts of a trial, with the word that describes a saving of such plans."""


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


class SavingSummary(TrialState):
    """A saving compared with default clocks, as all outputs show it.

    Errors are exceeded in at most 5 % of the cases.
    """

    iterations: int = Field(description="Iterations that it covers.")
    stalls: int = Field(0, description="Iterations of these that are not compared, because they contain a stall.")
    saved_j: float = Field(description="Energy saved compared with default clocks [J]; negative if more was used.")
    gained_s: float = Field(description="Time saved [s]; negative if the iterations took longer.")
    saved: float | None = Field(
        None, description="Energy saved, as a fraction of that at default clocks; none as long as plans are undecided."
    )
    slowdown: float | None = Field(
        None, description="Change of time as a fraction; 0.01 is 1 % longer; none as long as plans are undecided."
    )
    by_profile: bool = Field(False, description="Whether default clocks are predicted by the profile, not measured.")

    @property
    def baseline(self) -> str:
        """Default clocks, with which the iterations are compared, in words."""
        return "default clocks by the profile" if self.by_profile else "default clocks of this job"

    def in_words(self) -> str:
        """Return a description in one line."""
        energy = f"{joules(abs(self.saved_j))} {'less' if self.saved_j >= 0 else 'more'} energy"
        time = f"{duration(abs(self.gained_s))} {'less' if self.gained_s >= 0 else 'more'} time"
        energy += "" if self.saved is None else f" ({self.energy})"
        time += "" if self.slowdown is None else f" ({self.time})"
        stalls = f", {self.stalls} with stalls not compared" if self.stalls else ""
        return plain(f"{energy}, {time} than {self.baseline}{stalls}: {self.certainty}")


class TokenSummary(BaseModel):
    """Energy and throughput by token, of iterations under plans or otherwise of those at default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    energy_j: float = Field(description="Energy of a token [J].")
    per_s: float = Field(description="Tokens per second.")
    default_energy_j: float = Field(description="Energy of a token at default clocks [J].")
    default_per_s: float = Field(description="Tokens per second at default clocks.")
    under_plans: bool = Field(description="Whether these are iterations under plans.")

    def in_words(self) -> str:
        """Return a description in one line."""
        default = f"{number(self.default_energy_j)} J a token, {number(self.default_per_s)} tokens/s at default clocks"
        if not self.under_plans:
            return plain(default)
        return plain(f"{number(self.energy_j)} J a token, {number(self.per_s)} tokens/s under plans; {default}")


class PlanSummary(BaseModel):
    """Iterations under one plan, compared with default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    plan: int = Field(description="Line of `frontier.csv`.")
    order: int = Field(0, description="Number of its order.")
    iterations: int = Field(description="Iterations under it.")
    saved_j: float = Field(description="Energy saved compared with default clocks [J].")
    gained_s: float = Field(description="Time saved [s].")


class OrderSummary(BaseModel):
    """Iterations of one order of passes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    order: int = Field(0, description="Number of the order; 0 for the first.")
    micro_batches: int | None = Field(None, description="Number of micro-batches; null if unknown.")
    iterations: int = Field(0, description="Its iterations.")
    planned: int = Field(0, description="Number of these that ran under plans.")
    saved_j: float = Field(0.0, description="Energy saved by these compared with default clocks [J].")
    gained_s: float = Field(0.0, description="Time saved by these [s].")

    @property
    def name(self) -> str:
        if self.order == NO_ORDER:
            return "other orders"
        return f"{self.micro_batches} micro-batches" if self.micro_batches is not None else f"order {self.order}"

    def in_words(self) -> str:
        text = f"{self.name}: {self.planned} of {self.iterations} iterations under plans"
        return f"{text}, {against_default_clocks(-self.gained_s, -self.saved_j)}" if self.planned else text


class Event(RunRecord):
    """An event between iterations, also of a kind that this version does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event: str = Field(description="Its kind.")
    time: UnixTime = Field(0.0, description="When [Unix seconds].")

    def in_words(self) -> str:
        """Return a description in one line."""
        return self.event


class Started(Event):
    """The job started or was resumed."""

    event: Literal["start"] = "start"
    schema_version: int = Field(SCHEMA_VERSION, description="Version of the file's format.")
    mode: str | None = Field(None, description="The mode.")
    gpu: str | None = Field(None, description="Name of the GPU.")
    frontier: str | None = Field(None, description="Path from which plans were read.")
    job: str | None = Field(None, description="A fingerprint of model, schedule, parallelism, GPU and versions.")
    goal: dict[str, Any] | None = Field(None, description="Keys of the goal that differ from the defaults.")
    engines: list[str] | None = Field(None, description="Models of the process's engines, first the one that trains.")
    order: int = Field(0, description="The order that was declared at this start.")
    micro_batches: int | None = Field(None, description="Its number of micro-batches.")
    ranks: int | None = Field(None, description="Number of ranks.")
    pipelines: int | None = Field(None, description="Number of data-parallel pipelines.")
    settings: GpuSettings | None = Field(None, description="Settings of rank 0's GPU, as in `profile.json`.")

    def in_words(self) -> str:
        goal = f", {goal_in_words(self.goal)}" if self.goal is not None and self.mode in ("auto", "run") else ""
        return f"start in {self.mode} mode{goal}"


class ProfileWritten(Event):
    """A profile was measured and written."""

    event: Literal["profile"] = "profile"
    path: str | None = Field(None, description="Its path.")
    resumed_clocks: int = Field(0, description="Number of clocks that an earlier start had measured.")
    iterations: int | None = Field(None, description="Number of profiled iterations.")
    lost_s: float | None = Field(
        None, description="Additional time relative to training at default clocks [s]; negative for less."
    )
    lost_j: float | None = Field(None, description="Additional energy [J]; negative for less.")
    waiting: str | None = Field(
        None, description="If two measurements of the power of waiting GPUs differ, which one plans are made for."
    )

    def in_words(self) -> str:
        cost = against_default_clocks(self.lost_s or 0.0, self.lost_j or 0.0)
        earlier = f" ({self.resumed_clocks} clocks were already measured)" if self.resumed_clocks else ""
        return f"wrote {self.path} after {self.iterations} profiled iterations{earlier}, which took {cost}"


class PlanChosen(Event):
    """Pipelines run under other plans from the next iteration on."""

    event: Literal["plan"] = "plan"
    plan: int | None = Field(None, description="Plan of rank 0's pipeline; null at default clocks.")
    plans: tuple[int, ...] = Field((), description="Plan of each pipeline.")
    straggler: int | None = Field(None, description="Pipeline for which the others wait.")
    slowdown: float = Field(1.0, description="Its time relative to the others.")
    paused: bool = Field(False, description="Whether plans are paused.")

    def in_words(self) -> str:
        if self.paused:
            return "paused"
        late = f", pipeline {self.straggler} is {self.slowdown:g} times as slow" if self.straggler is not None else ""
        others = f", pipelines run {', '.join(map(str, self.plans))}" if len(set(self.plans)) > 1 else ""
        return f"plan {self.plan}{late}{others}"


class PlanJudged(Event):
    """A plan was compared with default clocks, both measured in this job."""

    event: Literal["proof"] = "proof"
    plan: int | None = Field(None, description="The plan.")
    kept: bool = Field(False, description="Whether it is kept.")
    reason: str = Field("", description="Why not.")
    then: str = Field("", description="The consequence.")
    trial: TrialState | None = Field(None, description="What its trial has shown, as for an iteration.")
    promised_slowdown: float = Field(0.0, description="Promised change of time as a fraction.")
    promised_saved: float = Field(0.0, description="Promised saving of energy as a fraction.")

    def in_words(self) -> str:
        text = f"plan {self.plan} is kept" if self.kept else f"plan {self.plan} is dropped, since {self.reason}"
        if (trial := self.trial) is not None:
            found = changes(trial.slowdown, trial.saved, trial.slowdown_error, trial.saved_error)
            text += f": {found} ({trial.certainty}; promised {changes(self.promised_slowdown, self.promised_saved)})"
        return f"{text}; {self.then}" if self.then else text


class OrderPlanned(Event):
    """A number of micro-batches has its own plans, or cannot be planned."""

    event: Literal["schedule"] = "schedule"
    order: int = Field(0, description="Number of the order.")
    micro_batches: int | None = Field(None, description="Its number of micro-batches.")
    given_up: str | None = Field(None, description="The reason if it has no plans; otherwise null.")

    def in_words(self) -> str:
        if self.given_up:
            return f"order {self.order} cannot be planned ({self.given_up}): it runs at default clocks"
        return f"iterations with {self.micro_batches} micro-batches have their own plans, as order {self.order}"


class GoalChanged(Event):
    """Another goal is in force, or a part of the present one cannot be kept."""

    event: Literal["goal"] = "goal"
    goal: dict[str, Any] | None = Field(None, description="Keys of the goal that differ from the defaults.")
    problem: str | None = Field(None, description="What cannot be kept of the present one.")

    def in_words(self) -> str:
        return f"goal: {self.problem if self.goal is None else goal_in_words(self.goal)}"


class CommandGiven(Event):
    """A user has given another goal, a pause or a resumption, which is pending until it is in force."""

    event: Literal["command"] = "command"
    goal: dict[str, Any] | None = Field(None, description="Keys of the goal that differ from the defaults.")
    paused: bool | None = Field(None, description="Whether it is a pause, or its end.")

    def in_words(self) -> str:
        if self.goal is not None:
            return f"goal by control: {goal_in_words(self.goal)}"
        return f"{'pause' if self.paused else 'resume'} by control"


class PowerCapChanged(Event):
    """Another power cap is in force."""

    event: Literal["cap"] = "cap"
    watts: float | None = Field(None, description="The cap [W]; null for none.")

    def in_words(self) -> str:
        return "no power cap" if self.watts is None else f"power cap {watts(self.watts)}"


class LimitsChanged(Event):
    """The GPUs with stricter limits than in the profile, or these limits, have changed."""

    event: Literal["limits"] = "limits"
    limits: Limits = Field(
        (),
        description="For at most 16 GPUs: rank, power limit [W], and the clock that heat or a power brake "
        "allows [MHz], null if not limited. Heat that comes and goes within 30 s is one limit.",
    )
    more: int = Field(0, description="Number of further GPUs.")

    def in_words(self) -> str:
        text = limits_in_words(self.limits, self.more)
        return f"limited more than during profiling: {text}" if text else "no GPU is limited more than during profiling"


class Drifted(Event):
    """Instruction times differ from the profile."""

    event: Literal["drift"] = "drift"
    drift: float = Field(0.0, description="The deviation as a fraction.")
    then: str = Field("", description="The consequence.")

    def in_words(self) -> str:
        return f"instruction times differ from the profile by up to {self.drift:.0%}; {self.then}"


class ClockNotReached(Event):
    """A GPU does not reach the requested clock or, at default clocks, its highest clock."""

    event: Literal["refused"] = "refused"
    rank: int = Field(0, description="The rank.")
    clock_mhz: int | None = Field(
        None, description="The requested clock [MHz]; null for the highest one, at default clocks."
    )
    reached_mhz: int | None = Field(None, description="The clock that was read [MHz].")
    reasons: tuple[str, ...] = Field(
        (),
        description="Reasons as named by NVML, such as `sw_power_cap` (the board is at its power limit). None "
        "if the driver reports no limit, for example if somebody else has locked the clock.",
    )

    def in_words(self) -> str:
        reasons = [f"{_REASONS[name]}, {name}" if name in _REASONS else name for name in self.reasons]
        why = f" ({'; '.join(reasons)})" if reasons else ""
        if self.clock_mhz is None:
            locked = ", though the driver reports no limit: its clock may be locked (nvidia-smi -q -d CLOCK)"
            return f"rank {self.rank}'s GPU at default clocks is kept at {self.reached_mhz} MHz{why or locked}"
        return f"rank {self.rank}'s GPU was set to {self.clock_mhz} MHz and runs at {self.reached_mhz} MHz{why}"


class Failed(Event):
    """A rank fell back to default clocks, or a part of Perseus other than training does not work."""

    event: Literal["failure", "cache", "control", "metrics"] = "failure"
    rank: int = Field(0, description="The rank.")
    error: str = Field("", description="What failed.")

    def in_words(self) -> str:
        where = f" on rank {self.rank}" if self.event == "failure" else ""
        return f"{self.event}{where}: {self.error}"


class Recovered(Event):
    """A rank that fell back to default clocks runs under plans again."""

    event: Literal["recovery"] = "recovery"
    rank: int = Field(0, description="The rank.")

    def in_words(self) -> str:
        return f"rank {self.rank} runs under plans again"


class Ended(Event):
    """The job ended: totals since it started, and savings over all its starts."""

    event: Literal["end"] = "end"
    iterations: int = Field(0, description="Training iterations since the start.")
    time_s: float = Field(0.0, description="Their time [s].")
    energy_j: float = Field(0.0, description="Their energy [J].")
    without_energy: int = Field(0, description="Iterations with unknown energy.")
    clock_changes: int = Field(0, description="Clock changes of all GPUs.")
    clock_skips: int = Field(0, description="Clock changes that were omitted.")
    under_plans: SavingSummary | None = Field(
        None, description="Saving of the iterations under plans, over all starts; null before a plan ran."
    )
    whole: SavingSummary | None = Field(
        None, description="Saving of all iterations, over all starts; null before a plan ran."
    )
    tokens: TokenSummary | None = Field(
        None, description="Energy and throughput by token, if the number of tokens is known."
    )
    plans: tuple[PlanSummary, ...] = Field((), description="By plan of the last frontier.")
    orders: tuple[OrderSummary, ...] = Field((), description="By order, if iterations differ in it.")

    def in_words(self) -> str:
        text = f"{self.iterations} iterations, {duration(self.time_s)}, {joules(self.energy_j)}"
        text += f" ({watt_hours(self.energy_j)})"
        if self.without_energy:
            text += f" (not counting {self.without_energy} iterations with unknown energy)"
        if self.under_plans is not None:
            text += f"; {self.under_plans.iterations} iterations under plans: {self.under_plans.in_words()}"
        if self.whole is not None:
            text += f"; {self.whole.iterations} iterations in all, profiling counted: {self.whole.in_words()}"
        if self.tokens is not None:
            text += f"; {self.tokens.in_words()}"
        if self.orders:
            text += f"; {'; '.join(order.in_words() for order in self.orders[:_MOST_IN_WORDS])}"
        return plain(text)


Record = IterationRecord | SummedIterations | Event
_KNOWN: dict[str, type[Event]] = {
    name: kind for kind in Event.__subclasses__() for name in typing.get_args(kind.model_fields["event"].annotation)
}


def is_training(record: Record) -> bool:
    """Return whether a record is about iterations with valid time and energy."""
    # During the calibration of a simulated GPU, instructions are not yet delayed to simulated speed.
    return isinstance(record, SummedIterations) or (isinstance(record, IterationRecord) and record.phase != "calibrate")


def of_order(order: int | None) -> str:
    """Return a description of an order, empty if it is None or 0."""
    return f" of order {order}" if order else ""


def limits_in_words(limits: Limits, more: int) -> str:
    """Return a description of the GPUs that are limited, empty if there are none."""
    each = []
    for rank, power_w, clock_mhz in limits[:_MOST_IN_WORDS]:
        parts = [f"to {watts(power_w)}"] if power_w is not None else []
        parts += [f"to {clock_mhz:.0f} MHz by heat or the machine"] if clock_mhz is not None else []
        each.append(f"rank {rank}'s GPU {' and '.join(parts)}")
    rest = max(0, len(limits) - _MOST_IN_WORDS) + more
    return ", ".join(each) + (f" and {rest} more" if rest else "")


def goal_in_words(goal: Mapping[str, Any]) -> str:
    """Return a description of a goal, given its keys that differ from the defaults."""
    words = [f"{key} {value}" for key, value in goal.items() if value is not None]
    if "finish_by" not in goal:
        if "max_slowdown" not in goal:
            words.insert(0, "no slower than default clocks")
        elif goal["max_slowdown"] is None:
            words.insert(0, "least energy")
    return ", ".join(words)


def changes(
    slowdown: float | None, saved: float | None, slowdown_error: float | None = None, saved_error: float | None = None
) -> str:
    """Return a description of changes compared with default clocks, with errors. What is None is unknown."""
    time = "time unknown" if slowdown is None else f"{with_error(slowdown, slowdown_error)} time"
    energy = "energy unknown" if saved is None else f"{with_error(-saved, saved_error)} energy"
    return f"{time}, {energy}"


def with_error(change: float, error: float | None) -> str:
    """Return a relative change with its error."""
    if error is None:
        return percent(change)
    value, unit = percent(change).split()
    return f"{value} \N{PLUS-MINUS SIGN} {100 * error:.1f}\N{NARROW NO-BREAK SPACE}{unit}"


def against_default_clocks(extra_s: float, extra_j: float) -> str:
    """Return a description of additional time and energy compared with default clocks."""
    parts = [(duration(abs(extra_s)), extra_s < 0), (joules(abs(extra_j)), extra_j < 0)]
    words = " and ".join(f"{amount} {'less' if less else 'more'}" for amount, less in parts)
    return plain(f"{words} than at default clocks")


def to_line(record: Record) -> str:
    """Return a record as its line of ``run.jsonl``."""
    # Characters that UTF-8 lacks become question marks: error messages may quote paths that are not valid UTF-8.
    texts = {name: value.encode(errors="replace").decode() for name, value in record if isinstance(value, str)}
    is_short = isinstance(record, SummedIterations)
    return record.model_copy(update=texts).model_dump_json(exclude_defaults=is_short) + "\n"


def from_line(line: str | bytes) -> Record:
    """Return the record of a line of ``run.jsonl``. A ValueError is raised if it is not one."""
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if "event" in raw:
        raw = bounded(raw)
        return _KNOWN.get(str(raw["event"]), Event).model_validate(raw)
    if "parts" in raw:
        return SummedIterations.model_validate(bounded(raw))
    known = IterationRecord.model_fields
    return IterationRecord.model_validate({key: value and bounded(value) for key, value in raw.items() if key in known})


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ``run.jsonl``, given its path or its folder.

    Lines that are not records are skipped with a warning, such as one that the crash of a node has cut off. A last line
    may still be being written, so it is skipped without a warning.

    Raises:
        ConfigError: If the file is missing or too large, or no line is a record.
    """
    path = path / FILE_NAME if path.is_dir() else path
    records = skipped = 0  # skipped ones are followed by another line
    first_skipped: tuple[int, bytes] | None = None
    is_skipped = False
    with open_bounded(path, ConfigError, "run.jsonl of a training run", MOST_RECORD_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_RECORD_LINE_BYTES), b""), start=1):
            skipped += is_skipped
            record: Record | None = None
            try:
                record = from_line(line)
            except ValueError:
                first_skipped = first_skipped or (number, line[:80])
            is_skipped = record is None
            if record is not None:
                records += 1
                yield record
    if first_skipped is None:
        return
    if not records:
        raise ConfigError(f"{path}, line 1: not a record of an iteration: {first_skipped[1]!r}.")
    if skipped:
        logger.warning(
            "%s: %d lines are not records and are skipped, such as line %d: %r", path, skipped, *first_skipped
        )


_HEAD_BYTES = 256


class RecordFollower:
    """Returns the records that were added to a file since the previous call, and counts lines that are not records.

    The file is opened again at each call, so that a shared disk shows the data written by other nodes. An incomplete
    last line is read once it is complete.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0
        self._inode = -1
        self._head = b""
        self.unreadable = 0

    def read(self) -> Iterator[tuple[bool, list[Record]]]:
        """Yield the new records in batches of some megabytes, each with False.

        If the file was replaced or truncated, ``(True, [])`` is yielded first: all earlier records are no longer valid.

        Raises:
            OSError: If the file cannot be read, is not a regular file, or is too large.
        """
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_RECORD_BYTES:
                raise OSError(f"{self._path}: expected a regular file of at most {MOST_RECORD_BYTES} bytes")
            head = file.read(_HEAD_BYTES)
            is_same = status.st_ino == self._inode and status.st_size >= self._offset and head.startswith(self._head)
            if not is_same:
                if self._offset:
                    yield True, []
                self._offset = self.unreadable = 0
            self._inode, self._head = status.st_ino, head
            file.seek(self._offset)
            while block := file.read(MOST_RECORD_LINE_BYTES):
                end = block.rfind(b"\n") + 1
                if not end and len(block) < MOST_RECORD_LINE_BYTES:  # a longer line is not a record
                    return
                block = block[:end] if end else block
                self._offset += len(block)
                found, lines = [], block.splitlines()
                for line in lines:
                    with contextlib.suppress(ValueError):
                        found.append(from_line(line))
                self.unreadable += len(lines) - len(found)
                yield False, found
                file.seek(self._offset)
