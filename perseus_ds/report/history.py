"""The history of a job, from its first iteration to its last, over all its starts, from ``run.jsonl``.

A folder may have served several jobs. Iterations of different jobs are not comparable, so a history is that of the job
that trained last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_file import read_records
from perseus_ds.artifacts.run_records import IterationRecord, ProfileWritten, Record, Started

# In this phase instructions are not yet stretched, so its times and energies are not valid.
_NOT_TRAINING = "calibrate"
_PLANNING = ("auto", "run")


@dataclass(frozen=True)
class Step:
    """An iteration and its place in the job's history.

    Attributes:
        number: Position in the job's history over all starts, 1 first.
        record: What is known of it.
        frontier: Distinguishes the frontier of its plan from the job's earlier ones.
        disturbed: Whether a rank has failed, or it is the first since a start, which allocates memory.
    """

    number: int
    record: IterationRecord
    frontier: tuple[str | None, int]
    disturbed: bool


@dataclass(frozen=True)
class Occurrence:
    """An event and its place in the job's history.

    Attributes:
        after: Number of steps before it.
        event: What is known of it.
    """

    after: int
    event: Event


@dataclass(frozen=True)
class History:
    """All that a job did.

    Attributes:
        folder: Where its ``run.jsonl`` lies.
        name: Its name in the report.
        starts: Its starts, the first one first.
        steps: All iterations but those that calibrate a simulated GPU.
        occurrences: All events.
        simulated: Whether any of it is simulated.
        left_out: Number of iterations of other jobs in the same file.
    """

    folder: Path
    name: str
    starts: tuple[Started, ...]
    steps: tuple[Step, ...] = field(repr=False)
    occurrences: tuple[Occurrence, ...] = field(repr=False)
    simulated: bool = False
    left_out: int = 0

    @property
    def job(self) -> str | None:
        """The job's fingerprint; None where it is not recorded."""
        return self.starts[-1].job if self.starts else None

    @property
    def mode(self) -> str | None:
        """The mode of its last start."""
        return self.starts[-1].mode if self.starts else None

    @property
    def gpu(self) -> str | None:
        """The GPU's name."""
        return self.starts[-1].gpu if self.starts else None

    @property
    def started(self) -> float:
        """When it first started [Unix seconds]; 0 where it is not recorded."""
        return self.starts[0].time if self.starts else 0.0

    @property
    def frontier(self) -> str | None:
        """Where the last start under plans had its frontier from, if it was named."""
        return next((start.frontier for start in reversed(self.starts) if start.mode in _PLANNING), None)

    @property
    def under_plans(self) -> list[Step]:
        """Iterations under a plan of the frontier last in use: a plan's number is only valid for its own frontier."""
        planned = [
            step
            for step in self.steps
            if step.record.phase == "run" and step.record.plan is not None and not step.record.shape
        ]
        return [step for step in planned if step.frontier == planned[-1].frontier]


def read_history(folder: Path, name: str | None = None) -> History:
    """Read a job's ``run.jsonl``.

    Args:
        folder: Where it lies.
        name: The job's name in the report; by default the folder's.

    Raises:
        ConfigError: The file is missing, or a line of it is no record.
    """
    everything = read_records(folder)
    records = _of_last_job(everything)
    return History(
        folder=folder,
        name=name or folder.resolve().name,
        starts=tuple(record for record in records if isinstance(record, Started)),
        steps=tuple(_steps(records)),
        occurrences=tuple(_occurrences(records)),
        simulated=any(record.simulated for record in records),
        left_out=sum(map(trains, everything)) - sum(map(trains, records)),
    )


def trains(record: Record) -> bool:
    """Return whether a record is of an iteration whose time and energy are valid."""
    return isinstance(record, IterationRecord) and record.phase != _NOT_TRAINING


def _of_last_job(records: Sequence[Record]) -> list[Record]:
    starts: list[list[Record]] = [[]]
    for record in records:
        if isinstance(record, Started):
            starts.append([])
        starts[-1].append(record)
    jobs = [start[0].job if start and isinstance(start[0], Started) else None for start in starts]
    trained = [job for job, start in zip(jobs, starts, strict=True) if any(map(trains, start))]
    last = (trained or jobs)[-1]
    return [record for job, start in zip(jobs, starts, strict=True) if job == last for record in start]


def _steps(records: Sequence[Record]) -> Iterator[Step]:
    number, profiles, frontier, is_first = 0, 0, None, True
    for record in records:
        if isinstance(record, Started):
            frontier, is_first = record.frontier, True
        elif isinstance(record, ProfileWritten):
            profiles += 1
        elif isinstance(record, IterationRecord) and trains(record):
            number += 1
            yield Step(number, record, (frontier, profiles), disturbed=is_first or bool(record.failed_ranks))
            is_first = False


def _occurrences(records: Sequence[Record]) -> Iterator[Occurrence]:
    steps = 0
    for record in records:
        if isinstance(record, Event):
            yield Occurrence(steps, record)
        else:
            steps += trains(record)
