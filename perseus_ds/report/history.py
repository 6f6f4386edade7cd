"""The history of a job, from its first iteration to its last, over all its starts, from ``run.jsonl``.

A folder may have served several jobs. Iterations of different jobs are not comparable, so a history is that of the job
that trained last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from perseus_ds.artifacts.run_records import (
    Event,
    Record,
    Started,
    iterate_records,
    trains,
)
from perseus_ds.measures import JobMeasures


@dataclass(frozen=True)
class Share:
    """A rank's part of the job's energy."""

    rank: int
    energy_j: float
    power_w: float


class RankSums:
    """What is known of the ranks' energies so far."""

    def __init__(self) -> None:
        self._sums_j: list[float] | None = None
        self._time_s = self._since_s = 0.0
        self._is_mixed = False

    def add(self, time_s: float, parts_j: tuple[float, ...] | None) -> None:
        """Add an iteration.

        Args:
            time_s: How long it took; 0 where its energy is not known.
            parts_j: Of all iterations since the last one that had them [J]; None where it has none.
        """
        self._since_s += time_s
        if parts_j is None:
            return
        self._time_s, self._since_s = self._time_s + self._since_s, 0.0
        if self._sums_j is None:
            self._sums_j = [0.0] * len(parts_j)
        self._is_mixed |= len(parts_j) != len(self._sums_j)  # the job was resumed at another size
        self._sums_j = [total + part for total, part in zip(self._sums_j, parts_j, strict=False)]

    def shares(self) -> list[Share]:
        """Return them by rank; none where not all records have as many, or no energy."""
        if self._is_mixed or not self._time_s:
            return []
        return [Share(rank, total_j, total_j / self._time_s) for rank, total_j in enumerate(self._sums_j or [])]


_PLANNING = ("auto", "run")


@dataclass(frozen=True, slots=True)
class Step:
    """What a report needs of an iteration's record, which takes ten times the memory, and its place in the history.

    Attributes:
        number: Position in the job's history over all starts, 1 first.
        frontier: Distinguishes the frontier of its plan from the job's earlier ones.
        disturbed: Whether it does not count; see :mod:`perseus_ds.measures`.
    """

    number: int
    frontier: tuple[str | None, int]
    disturbed: bool
    iteration: int
    ended: float | None
    phase: str
    plan: int | None
    shape: int | None
    time_s: float
    energy_j: float | None
    default_energy_j: float | None


@dataclass(frozen=True)
class Occurrence:
    """An event and its place in the job's history.

    Attributes:
        after: Number of steps before it.
    """

    after: int
    event: Event


@dataclass
class History:
    """All that a job did.

    Attributes:
        folder: Where its ``run.jsonl`` lies.
        starts: Its starts, the first one first.
        steps: All iterations but those that calibrate a simulated GPU.
        by_rank: The energy of each rank, where it is recorded.
        left_out: Number of iterations of other jobs in the same file.
    """

    folder: Path
    name: str
    starts: list[Started] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list, repr=False)
    occurrences: list[Occurrence] = field(default_factory=list, repr=False)
    measures: JobMeasures = field(default_factory=JobMeasures, repr=False)
    by_rank: RankSums = field(default_factory=RankSums, repr=False)
    simulated: bool = False
    left_out: int = 0

    def add(self, record: Record) -> None:
        """Add a record of this job."""
        self.simulated |= record.simulated
        counts = self.measures.add(record)
        if isinstance(record, Event):
            (record.model_extra or {}).clear()  # keys of later versions, of any size
            self.occurrences.append(Occurrence(len(self.steps), record))
            if isinstance(record, Started):
                self.starts.append(record)
        elif trains(record):
            step = Step(
                len(self.steps) + 1, self.measures.frontier, not counts, record.iteration, record.ended, record.phase,
                record.plan, record.shape, record.time_s, record.energy_j, record.default_energy_j,
            )  # fmt: skip
            self.steps.append(step)
            self.by_rank.add(0.0 if record.energy_j is None else record.time_s, record.energy_by_rank_j)

    @property
    def job(self) -> str | None:
        """The job's fingerprint; None where it is not recorded."""
        return self.starts[-1].job if self.starts else None

    @property
    def settings(self) -> str | None:
        """What was set of rank 0's GPU at the last start, in words; None where it is not recorded."""
        settings = self.starts[-1].settings if self.starts else None
        return None if settings is None else str(settings)

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
        planned = [step for step in self.steps if step.phase == "run" and step.plan is not None and not step.shape]
        return [step for step in planned if step.frontier == planned[-1].frontier]


def read_history(folder: Path, name: str | None = None) -> History:
    """Read a job's ``run.jsonl``.

    Raises:
        ConfigError: The file is missing, or a line of it is no record.
    """
    name = name or folder.resolve().name
    jobs: dict[str | None, History] = {}
    job = last = jobs[None] = History(folder, name)
    for record in iterate_records(folder):
        if isinstance(record, Started):
            job = jobs.setdefault(record.job, History(folder, name))
        job.add(record)
        # The job that trained last; where none did, the one that started last.
        if trains(record) or not last.steps:
            last = job
    last.left_out = sum(len(other.steps) for other in jobs.values() if other is not last)
    return last
