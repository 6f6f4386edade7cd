"""``run.jsonl``: what is known of each iteration and event of a job, written line by line and read while it grows.

Every rank reports each iteration (see :mod:`perseus_ds.policy.reports`). Rank 0 makes an
:class:`IterationRecord` of all reports and writes it to ``run.jsonl``, one JSON object a line, between the job's
events. What can be computed from a record (a saving, a lateness) is a property of it, and is never stored.
"""

from __future__ import annotations

import contextlib
import os
import stat
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

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
from perseus_ds.units import bounded


class RunRecord(BaseModel):
    """A line of ``run.jsonl``."""

    # A later version may have more keys.
    model_config = ConfigDict(extra="ignore", frozen=True)

    simulated: bool = False


class Event(RunRecord):
    """Something that happened between iterations; kinds that this version does not know are read as such."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event: str
    time: UnixTime = Field(0.0, description="When [Unix seconds].")


SCHEMA_VERSION = 1
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
    limited: bool = Field(
        False, description="Whether its plan, or its default clocks, are those of GPUs under limits that others set."
    )
    time_s: float = Field(gt=0, description="Iteration time of the slowest rank [s].")
    energy_j: float | None = Field(None, description="Energy of all GPUs of the job [J].")
    energy_by_pipeline_j: tuple[float, ...] | None = Field(None, description="The same by data-parallel pipeline [J].")
    energy_by_rank_j: tuple[float, ...] | None = Field(
        None,
        description="The same by rank [J]. Jobs of more than 64 ranks have figures by rank in some records only; their "
        "energy is then that of all iterations since the last of these.",
    )
    predicted_time_s: float | None = Field(None, description="Iteration time that the plans promise [s].")
    predicted_energy_j: float | None = Field(None, description="Energy of all GPUs that the plans promise [J].")
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
    settings: GpuSettings | None = Field(None, description="What was set of rank 0's GPU, such as a power limit.")


class ProfileWritten(Event):
    """A profile was measured and written."""

    event: Literal["profile"] = "profile"
    path: str | None = None
    resumed_clocks: int = 0
    iterations: int | None = Field(None, description="Iterations that were measured.")
    lost_s: float | None = Field(None, description="By how much they took longer than at default clocks [s].")
    lost_j: float | None = Field(None, description="By how much they used more energy [J].")


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
    kept: bool = False
    reason: str = Field("", description="Why it is kept or dropped.")
    then: str = Field("", description="What follows: when it is compared or tried again.")
    slowdown: float = Field(0.0, description="As a fraction of the time at default clocks.")
    slowdown_error: float = Field(0.0, description="Its standard error.")
    promised_slowdown: float = Field(0.0, description="What the plan is held to, as a fraction of the same.")
    saved: float = Field(0.0, description="As a fraction of the energy at default clocks.")
    saved_error: float = Field(0.0, description="Its standard error.")
    promised_saved: float = Field(0.0, description="What the plan promises, as a fraction of the same.")


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


class OrderGiven(Event):
    """Somebody has ordered another policy, a pause or its end; it is pending until it is in force."""

    event: Literal["order"] = "order"
    policy: dict[str, Any] | None = Field(None, description="The policy that was ordered.")
    paused: bool | None = Field(None, description="Whether a pause was ordered, or its end.")


class PowerCapChanged(Event):
    """Another power cap is in force."""

    event: Literal["cap"] = "cap"
    watts: float | None = Field(None, description="Of all GPUs of the job [W]; None without a cap.")
    source: str = Field("", description="Where it comes from: the policy, or the file that it names.")


class LimitsChanged(Event):
    """Other GPUs than before, or by more or less, may do less than when the profile was measured."""

    event: Literal["limits"] = "limits"
    limits: tuple[tuple[int, float | None, float | None], ...] = Field(
        (), description="Rank, power limit [W], and the clock that heat or the machine allow [MHz], of each of them."
    )
    more: int = Field(0, description="GPUs that are left out of these.")


class Drifted(Event):
    """Instructions take longer or shorter than profiled."""

    event: Literal["drift"] = "drift"
    drift: float = 0.0
    then: str = Field("", description="What follows.")


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


class PlanSummary(BaseModel):
    """Iterations under one plan, against the same iterations at default clocks."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    plan: int
    iterations: int
    slowdown: float = Field(description="As a fraction of the time at default clocks.")
    saved: float | None = Field(description="As a fraction of the energy at default clocks.")


class Ended(Event):
    """The job ended; the totals of its iterations since it started."""

    event: Literal["end"] = "end"
    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = Field(0, description="Iterations whose energy could not be read.")
    clock_changes: int = 0
    clock_skips: int = 0
    planned: int = Field(0, description="Iterations under plans, over all starts of the job, like all that follows.")
    saved_j: float = Field(0.0, description="Energy that they saved [J].")
    gained_s: float = Field(0.0, description="Time that they gained [s].")
    saved: float | None = Field(None, description="Energy that a typical one saved, as a fraction.")
    slowdown: float | None = Field(None, description="How much longer a typical one took, as a fraction.")
    baseline: str | None = Field(None, description="The iterations at default clocks that this is relative to.")
    plans: tuple[PlanSummary, ...] = Field((), description="The same by plan, in the order in which they ran.")


Record = IterationRecord | Event


def trains(record: Record) -> bool:
    """Return whether a record is of an iteration whose time and energy are valid."""
    # While a simulated GPU is calibrated, instructions are not yet stretched.
    return isinstance(record, IterationRecord) and record.phase != "calibrate"


class TimetableMade(Event):
    """A cheapest policy has decided which plan runs when; costs are values of its signal times kWh."""

    event: Literal["timetable"] = "timetable"
    cost: float = Field(0.0, description="Of all steps that are left.")
    bound: float = Field(0.0, description="No assignment of plans to hours that ends in time costs less.")
    fastest_cost: float = Field(0.0, description="Of the same steps under the plan of slowdown 0.")
    unit: str = Field("", description="Of the signal.")
    entries: tuple[tuple[float, int], ...] = Field((), description="When each plan begins [Unix seconds]; -1 is none.")
    ends: float = Field(0.0, description="When the last step is done [Unix seconds].")
    mean_from: float | None = Field(None, description="From when on the signal's mean is assumed [Unix seconds].")


class CostsSoFar(Event):
    """What the energy has cost since a cheapest policy began, in values of its signal times kWh."""

    event: Literal["costs"] = "costs"
    iterations: int = Field(0, description="Iterations that are counted.")
    cost: float = 0.0
    fastest_cost: float = Field(0.0, description="Of as many iterations under the plan of slowdown 0.")
    bound: float | None = Field(None, description="Of all steps, as computed at the beginning.")
    halted_s: float = Field(0.0, description="How long training stood still [s].")
    done: bool = Field(False, description="Whether these are all; before, the fastest plan has had other hours.")


class Halted(Event):
    """All ranks waited before an iteration."""

    event: Literal["halt"] = "halt"
    time_s: float = 0.0
    energy_j: float | None = Field(None, description="Of all GPUs meanwhile [J]; null where it cannot be read.")


FILE_NAME = "run.jsonl"
_KNOWN: dict[str, type[Event]] = {
    name: kind for kind in Event.__subclasses__() for name in typing.get_args(kind.model_fields["event"].annotation)
}


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
