"""``run.jsonl``: what is known of each iteration and event of a job, written line by line and read while it grows.

Every rank reports each iteration (see :mod:`perseus_ds.policy.reports`). Rank 0 makes an
:class:`IterationRecord` of all reports and writes it to ``run.jsonl``, one JSON object a line, between the job's
events. What can be computed from a record (a saving, a lateness) is a property of it, and is never stored. What each
key means is in ``docs/file-formats.md``; an event also says in words what happened.
"""

from __future__ import annotations

import contextlib
import os
import stat
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.io import open_bounded, parse_json
from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.validation import (
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    MOST_RECORD_BYTES,
    MOST_RECORD_LINE_BYTES,
    MOST_RECORDS,
    UnixTime,
)
from perseus_ds.errors import ConfigError
from perseus_ds.units import bounded, duration, joules, less_or_more, percent, plain, watt_hours, watts

SCHEMA_VERSION = 1
FILE_NAME = "run.jsonl"
MOST_FAILED_RANKS = 16
"""Of a record; the others are counted."""
_MOST_IN_WORDS = 5

Limits = tuple[tuple[int, float | None, float | None], ...]
"""GPUs that may do less than profiled: rank, power limit [W], and the clock that heat or the machine allow [MHz]."""


class RunRecord(BaseModel):
    """A line of ``run.jsonl``."""

    # A later version may have more keys.
    model_config = ConfigDict(extra="ignore", frozen=True)

    simulated: bool = False


class IterationRecord(RunRecord):
    """One iteration of the whole job."""

    iteration: int
    ended: UnixTime | None = None
    phase: str
    next_phase: str | None = None
    next_in_s: float | None = None
    plan: int | None = None
    order: int | None = None
    shape: int | None = None
    limited: bool = False
    time_s: float = Field(gt=0)
    energy_j: float | None = None
    energy_by_pipeline_j: tuple[float, ...] | None = None
    # Jobs of more than 64 ranks have figures by rank in some records only: of all iterations since the last of these.
    energy_by_rank_j: tuple[float, ...] | None = None
    predicted_time_s: float | None = None
    predicted_energy_j: float | None = None
    default_time_s: float | None = None
    default_energy_j: float | None = None
    default_measured: bool = False
    drift: float | None = None
    clock_changes: int = 0
    clock_skips: int = 0
    failed_ranks: tuple[int, ...] = ()
    more_failed_ranks: int = 0
    clocks_asked_mhz: tuple[int | None, ...] | None = None
    clocks_reached_mhz: tuple[int | None, ...] | None = None

    @property
    def power_w(self) -> float | None:
        """Average power of all GPUs [W]."""
        return None if self.energy_j is None else self.energy_j / self.time_s

    @property
    def has_own_plans(self) -> bool:
        """Whether it is of an order or shape that has plans and default clocks of its own, or may have."""
        return bool(self.order or self.shape)

    @property
    def saved(self) -> float | None:
        """Energy saved against default clocks, as a fraction of theirs."""
        return _less(self.energy_j, self.default_energy_j)

    @property
    def promised_saving(self) -> float | None:
        """The same as its plan promises."""
        return _less(self.predicted_energy_j, self.default_energy_j)

    @property
    def promised_slowdown(self) -> float | None:
        """How much longer than at default clocks it takes by its plan's promise, as a fraction."""
        less = _less(self.predicted_time_s, self.default_time_s)
        return None if less is None else -less

    @property
    def late(self) -> float | None:
        """How much longer than predicted it took, as a fraction."""
        return None if self.predicted_time_s is None else self.time_s / self.predicted_time_s - 1


def _less(value: float | None, default: float | None) -> float | None:
    return None if value is None or not default else 1 - value / default


class Event(RunRecord):
    """Something that happened between iterations; kinds that this version does not know are read as such."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event: str
    time: UnixTime = 0.0

    def in_words(self) -> str:
        """Return one line about it."""
        return self.event


class Started(Event):
    """The job started, or was resumed."""

    event: Literal["start"] = "start"
    schema_version: int = SCHEMA_VERSION
    mode: str | None = None
    gpu: str | None = None
    frontier: str | None = None
    job: str | None = None
    policy: dict[str, Any] | None = None
    engines: list[str] | None = None
    settings: GpuSettings | None = None

    def in_words(self) -> str:
        policy = f", {policy_in_words(self.policy)}" if self.policy and self.mode in ("auto", "run") else ""
        return f"start in {self.mode} mode{policy}"


class ProfileWritten(Event):
    """A profile was measured and written."""

    event: Literal["profile"] = "profile"
    path: str | None = None
    order: int = 0
    shape: int = 0
    resumed_clocks: int = 0
    iterations: int | None = None
    lost_s: float | None = None
    lost_j: float | None = None

    def in_words(self) -> str:
        cost = against_default_clocks(self.lost_s or 0.0, self.lost_j or 0.0)
        earlier = f" ({self.resumed_clocks} clocks were already measured)" if self.resumed_clocks else ""
        return f"wrote {self.path} after {self.iterations} profiled iterations{earlier}, which took {cost}"


class PlanChosen(Event):
    """Pipelines run under other plans from the next iteration on."""

    event: Literal["plan"] = "plan"
    plan: int | None = None
    plans: tuple[int, ...] = ()
    straggler: int | None = None
    slowdown: float = 1.0
    paused: bool = False

    def in_words(self) -> str:
        if self.paused:
            return "paused"
        late = f", pipeline {self.straggler} is {self.slowdown:g} times as slow" if self.straggler is not None else ""
        others = f", pipelines run {', '.join(map(str, self.plans))}" if len(set(self.plans)) > 1 else ""
        return f"plan {self.plan}{late}{others}"


class PlanJudged(Event):
    """Iterations under a plan were compared with iterations at default clocks, both measured in this job."""

    event: Literal["proof"] = "proof"
    plan: int | None = None
    order: int = 0
    shape: int = 0
    kept: bool = False
    reason: str = ""
    then: str = ""
    slowdown: float = 0.0
    slowdown_error: float = 0.0
    promised_slowdown: float = 0.0
    saved: float = 0.0
    saved_error: float = 0.0
    promised_saved: float = 0.0

    def in_words(self) -> str:
        energy = f"{percent(-self.saved)} ± {percent(self.saved_error).lstrip('+')} energy"
        time = f"{percent(self.slowdown)} ± {percent(self.slowdown_error).lstrip('+')} time"
        decided = f"plan {self.plan}{of_kind(self.order, self.shape)} is {'kept' if self.kept else 'dropped'}"
        decided += f", since {self.reason}" if self.reason else ""
        promised = changes(self.promised_slowdown, self.promised_saved)
        compared = f"{decided}: {energy}, {time} (promised {promised}), against default clocks of this job"
        return f"{compared}; {self.then}" if self.then else compared


class Predicted(Event):
    """Iterations at default clocks differ from what the profile predicts for them."""

    event: Literal["prediction"] = "prediction"
    time_s: float = 0.0
    time_error: float = 0.0
    energy_j: float = 0.0
    energy_error: float = 0.0
    predicted_time_s: float = 0.0
    predicted_energy_j: float = 0.0
    parts: dict[str, float] = {}
    corrected: bool = False

    def in_words(self) -> str:
        measured = ((self.time_s, self.predicted_time_s), (self.energy_j, self.predicted_energy_j))
        longer, more = (percent(value / predicted - 1) if predicted > 0 else "unknown" for value, predicted in measured)
        parts = ", ".join(f"{name} {percent(factor - 1)}" for name, factor in self.parts.items())
        kept = "the profile stays as it is; whether a plan is kept is decided by measured iterations alone"
        return (
            f"iterations at default clocks differ from the profile by {longer} time and {more} energy "
            f"({parts or 'no instruction, transfer or tail differs in time'}): "
            f"{'the profile is corrected, and plans are made again' if self.corrected else kept}"
        )


class OrderPlanned(Event):
    """Iterations of another number of micro-batches that come often get plans of their own, or lose them."""

    event: Literal["schedule"] = "schedule"
    order: int = 0
    micro_batches: int = 0
    shares_profile: bool = False
    given_up: str | None = None

    def in_words(self) -> str:
        if self.given_up:
            return f"order {self.order} is no longer planned ({self.given_up}): it runs at default clocks"
        profile = "the profile of the job's passes holds" if self.shares_profile else "it measures a profile first"
        return (
            f"many iterations have {self.micro_batches} micro-batches: they have plans of their own, as order "
            f"{self.order}; {profile}"
        )


class ShapePlanned(Event):
    """Inputs of a shape that comes often get a profile and plans of their own, or lose them."""

    event: Literal["shape"] = "shape"
    shape: int = 0
    given_up: str | None = None

    def in_words(self) -> str:
        if self.given_up:
            return f"shape {self.shape} is no longer planned ({self.given_up}): it runs at default clocks"
        return f"many iterations have inputs of one shape: it has plans of its own, as shape {self.shape}"


class PolicyChanged(Event):
    """Another policy is followed, or its condition cannot be met."""

    event: Literal["policy"] = "policy"
    policy: dict[str, Any] | None = None
    problem: str | None = None

    def in_words(self) -> str:
        return policy_in_words(self.policy) if self.policy else f"policy: {self.problem}"


class OrderGiven(Event):
    """Somebody has ordered another policy, a pause or its end; it is pending until it is in force."""

    event: Literal["order"] = "order"
    policy: dict[str, Any] | None = None
    paused: bool | None = None

    def in_words(self) -> str:
        return f"ordered: {policy_in_words(self.policy) if self.policy else 'pause' if self.paused else 'resume'}"


class PowerCapChanged(Event):
    """Another power cap is in force."""

    event: Literal["cap"] = "cap"
    watts: float | None = None
    source: str = ""

    def in_words(self) -> str:
        return "no power cap" if self.watts is None else f"power cap {watts(self.watts)}, by {self.source}"


class LimitsChanged(Event):
    """Other GPUs than before, or by more or less, may do less than when the profile was measured."""

    event: Literal["limits"] = "limits"
    limits: Limits = ()
    more: int = 0

    def in_words(self) -> str:
        text = limits_in_words(self.limits, self.more)
        return f"limited below what was profiled: {text}" if text else "no GPU is limited any more"


class Drifted(Event):
    """Instructions take longer or shorter than profiled."""

    event: Literal["drift"] = "drift"
    drift: float = 0.0
    then: str = ""

    def in_words(self) -> str:
        return f"instructions take {self.drift:.0%} longer or shorter than profiled; {self.then}"


class ClockRefused(Event):
    """A GPU does not reach a clock that its driver has accepted, or, at default clocks, its highest clock."""

    event: Literal["refused"] = "refused"
    rank: int = 0
    clock_mhz: int | None = None
    reached_mhz: int | None = None
    reasons: tuple[str, ...] = ()

    MEANINGS: ClassVar[Mapping[str, str]] = {
        "sw_power_cap": "power limit",
        "hw_power_brake_slowdown": "power brake of the machine",
        "sw_thermal_slowdown": "too hot",
        "hw_thermal_slowdown": "too hot",
    }
    """Of NVML's names of reasons."""

    def in_words(self) -> str:
        reasons = [f"{self.MEANINGS[name]}, {name}" if name in self.MEANINGS else name for name in self.reasons]
        why = f" ({'; '.join(reasons)})" if reasons else ""
        if self.clock_mhz is None:
            locked = ", though the driver names no limit: somebody may have locked its clock (nvidia-smi -q -d CLOCK)"
            return f"rank {self.rank}'s GPU at default clocks is kept at {self.reached_mhz} MHz{why or locked}"
        return f"rank {self.rank}'s GPU was asked for {self.clock_mhz} MHz and runs at {self.reached_mhz} MHz{why}"


class Failed(Event):
    """A rank has fallen back to default clocks, or a part of Perseus outside training does not work."""

    event: Literal["failure", "cache", "control", "metrics", "signal"] = "failure"
    rank: int = 0
    error: str = ""

    def in_words(self) -> str:
        where = f" on rank {self.rank}" if self.event == "failure" else ""
        return f"{self.event}{where}: {self.error}"


class Recovered(Event):
    """A rank that had fallen back to default clocks runs under plans again."""

    event: Literal["recovery"] = "recovery"
    rank: int = 0

    def in_words(self) -> str:
        return f"rank {self.rank} runs under plans again"


class PlanSummary(BaseModel):
    """Iterations under one plan, against the same iterations at default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    plan: int
    iterations: int
    slowdown: float
    saved: float | None

    def in_words(self) -> str:
        """Return the plan and what it changes."""
        return f"plan {self.plan}: {self.iterations} iterations, {_less_or_more(self.slowdown, self.saved)}"


class Ended(Event):
    """The job ended: totals since it started, and what plans saved over all of its starts."""

    event: Literal["end"] = "end"
    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = 0
    clock_changes: int = 0
    clock_skips: int = 0
    planned: int = 0
    saved_j: float = 0.0
    gained_s: float = 0.0
    saved: float | None = None
    slowdown: float | None = None
    baseline: str | None = None
    plans: tuple[PlanSummary, ...] = ()

    def in_words(self) -> str:
        text = f"{self.iterations} iterations, {duration(self.time_s)}, {joules(self.energy_j)}"
        text += f" ({watt_hours(self.energy_j)})"
        if self.without_energy:
            text += f" (not counting {self.without_energy} iterations whose energy could not be read)"
        text += f", {self.clock_changes} clock changes, {self.clock_skips} skipped"
        if self.saved is not None and self.slowdown is not None:
            typical = _less_or_more(self.slowdown, self.saved)
            text += f"; {self.planned} under plans: a typical one takes {typical} than at {self.baseline}"
        if len(self.plans) > 1:
            longest = sorted(self.plans, key=lambda plan: -plan.iterations)[:_MOST_IN_WORDS]
            text += f" ({'; '.join(plan.in_words() for plan in longest if plan.saved is not None)})"
        return plain(text)


Record = IterationRecord | Event
_KNOWN: dict[str, type[Event]] = {
    name: kind for kind in Event.__subclasses__() for name in typing.get_args(kind.model_fields["event"].annotation)
}


def trains(record: Record) -> bool:
    """Return whether a record is of an iteration whose time and energy are valid."""
    # While a simulated GPU is calibrated, instructions are not yet stretched.
    return isinstance(record, IterationRecord) and record.phase != "calibrate"


def of_kind(order: int | None, shape: int | None) -> str:
    """Return of which order and shape something is, in words; empty for the first ones."""
    parts = [f"{name} {number}" for name, number in (("order", order), ("shape", shape)) if number]
    return f" of {', '.join(parts)}" if parts else ""


def limits_in_words(limits: Limits, more: int) -> str:
    """Return which GPUs may do less than when the profile was measured; empty for none."""
    each = []
    for rank, power_w, clock_mhz in limits[:_MOST_IN_WORDS]:
        parts = [f"to {watts(power_w)}"] if power_w is not None else []
        parts += [f"to {clock_mhz:.0f} MHz by heat or the machine"] if clock_mhz is not None else []
        each.append(f"rank {rank}'s GPU {' and '.join(parts)}")
    rest = max(0, len(limits) - _MOST_IN_WORDS) + more
    return ", ".join(each) + (f" and {rest} more" if rest else "")


def policy_in_words(policy: Mapping[str, Any]) -> str:
    """Return a policy and its settings, those of the policies that it names too."""
    return f"policy {_settings_in_words(policy)}"


def _settings_in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        given = {key: part for key, part in value.items() if part is not None and part is not False}
        name = given.pop("name", None)
        settings = ", ".join(f"{key} {_settings_in_words(part)}" for key, part in given.items())
        return settings if name is None else f"{name}: {settings}" if settings else str(name)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({'; '.join(map(_settings_in_words, value))})"
    return str(value)


def changes(slowdown: float | None, saved: float | None) -> str:
    """Return changes against default clocks, promised or measured; None for one that is not known."""
    time = "time not known" if slowdown is None else f"{percent(slowdown)} time"
    energy = "energy not known" if saved is None else f"{percent(-saved)} energy"
    return f"{time}, {energy}"


def _less_or_more(slowdown: float, saved: float | None) -> str:
    return plain(f"{less_or_more(-(saved or 0.0))} energy and {less_or_more(slowdown)} time")


def against_default_clocks(extra_s: float, extra_j: float) -> str:
    """Return how much more or less time and energy iterations took than at default clocks, in words."""
    parts = [(duration(abs(extra_s)), extra_s < 0), (joules(abs(extra_j)), extra_j < 0)]
    words = " and ".join(f"{amount} {'less' if less else 'more'}" for amount, less in parts)
    return plain(f"{words} than at default clocks")


def to_line(record: Record) -> str:
    """Return a record as its line of ``run.jsonl``; characters that UTF-8 does not have become question marks."""
    # Paths whose bytes are not UTF-8 have such characters, and errors quote paths.
    texts = {name: value.encode(errors="replace").decode() for name, value in record if isinstance(value, str)}
    return record.model_copy(update=texts).model_dump_json() + "\n"


def from_line(line: str | bytes) -> Record:
    """Return the record of a line of ``run.jsonl``.

    Raises:
        ValueError: It is no record.
    """
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if "event" in raw:
        raw = bounded(raw)
        return _KNOWN.get(str(raw["event"]), Event).model_validate(raw)
    known = IterationRecord.model_fields
    return IterationRecord.model_validate({key: value and bounded(value) for key, value in raw.items() if key in known})


def read_records(path: Path) -> list[Record]:
    """Return all records of a file, as :func:`iterate_records` does."""
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ``run.jsonl`` (or of the folder it is in), but for a last one that was cut off.

    Raises:
        ConfigError: The file is missing, a line of it is no record, or there are too many.
    """
    path = path / FILE_NAME if path.is_dir() else path
    problem = ""
    events = event_bytes = 0
    with open_bounded(path, ConfigError, "run.jsonl of a training run", MOST_RECORD_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_RECORD_LINE_BYTES), b""), start=1):
            if problem:
                raise ConfigError(problem)
            try:
                record = from_line(line)
            except ValueError:  # the last line may be cut off: the job was killed, or is still writing
                problem = f"{path}, line {number}: not a record of an iteration: {line[:80]!r}."
                continue
            if isinstance(record, Event):
                events, event_bytes = events + 1, event_bytes + len(line)
            if number > MOST_RECORDS or events > MOST_EVENTS or event_bytes > MOST_EVENT_BYTES:
                raise ConfigError(
                    f"{path}, line {number}: at most {MOST_RECORDS} records are read, of which {MOST_EVENTS} with "
                    f"{MOST_EVENT_BYTES} bytes may be events. Give each job an output_dir of its own."
                )
            yield record


_HEAD_BYTES = 256


class RecordFollower:
    """Returns the records of a file that were added since it was last asked.

    Each time the file is opened anew, so that a shared disk shows what other nodes have written. A last line without
    its end is read once it is complete.

    Attributes:
        unreadable: Number of lines that are no records.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0
        self._inode = -1
        self._head = b""
        self.unreadable = 0

    def read(self) -> Iterator[tuple[bool, list[Record]]]:
        """Yield the new records, those of some megabytes at a time, each time with False.

        Where the file is another one than before, or was cut, the first are True and none: the records before are no
        longer valid.

        Raises:
            OSError: It cannot be read, is no regular file, or too large.
        """
        # A FIFO is opened without waiting for who writes to it.
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
                if not end and len(block) < MOST_RECORD_LINE_BYTES:  # a longer line is no record
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
