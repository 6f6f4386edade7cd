"""Records of events in ``run.jsonl``: what happens between iterations, from the start of a job to its end.

An event also has a description in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.run_iterations import RunRecord
from perseus_ds.artifacts.run_savings import (
    OrderSummary,
    PlanSummary,
    SavingSummary,
    TokenSummary,
    TrialState,
    against_default_clocks,
    changes,
)
from perseus_ds.artifacts.validation import UnixTime
from perseus_ds.units import duration, plain, watt_hours, watts

SCHEMA_VERSION = 1
_MOST_IN_WORDS = 5
# Descriptions of NVML's reasons for a low clock.
_REASONS = {
    "sw_power_cap": "power limit",
    "hw_power_brake_slowdown": "power brake of the machine",
    "sw_thermal_slowdown": "too hot",
    "hw_thermal_slowdown": "too hot",
}
Limits = tuple[tuple[int, float | None, float | None], ...]
"""Limited GPUs: rank, power limit [W], and clock limit due to heat or the machine [MHz]."""


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
    killed: bool = Field(False, description="Whether a rank ended without closing Perseus, such as by SIGKILL.")
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
        how = "killed" if self.killed else "end"
        parts = [f"{how}. {self.iterations} iterations, {duration(self.time_s)}, {watt_hours(self.energy_j)}"]
        if self.without_energy:
            parts[0] += f" (not counting {self.without_energy} iterations with unknown energy)"
        if self.under_plans is not None:
            parts.append(f"Under plans ({self.under_plans.iterations} iterations): {self.under_plans.in_words()}")
        if self.whole is not None and not self.whole.is_undecided:
            parts.append(f"Whole job ({self.whole.iterations}), profiling counted: {self.whole.in_words()}")
        if self.tokens is not None:
            parts.append(self.tokens.in_words())
        return plain(". ".join(parts))


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
