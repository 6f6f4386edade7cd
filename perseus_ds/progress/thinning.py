"""Replaces the first iterations of a long ``run.jsonl`` by their sums, so that it stays readable.

All sums that are made from records (``progress/sums.py``) are the same before and after. Iterations are summed in parts
of about an hour, which end at an event and where a trial of plans begins, because the meaning of the following
iterations may change there. Figures by rank and pipeline, which are long, are summed over all parts of a start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.run_events import Event, Started
from perseus_ds.artifacts.run_iterations import IterationRecord, PhaseSums, SummedIterations, Sums
from perseus_ds.artifacts.run_records import Record, from_line, is_training, to_line
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.artifacts.validation import MOST_RECORD_LINE_BYTES
from perseus_ds.progress.series import PowerExtremes
from perseus_ds.progress.sums import AT_DEFAULT_CLOCKS, sums_by_place
from perseus_ds.savings import sums_of

KEPT = 50_000
"""Number of the last iterations that stay one by one."""
MORE = 10_000
"""Number of further ones after which they are summed up."""
_HOUR_S = 3600.0
_PAUSE_EVERY, _PAUSE_S = 100, 0.001
"""The thread that thins a file pauses after this number of lines, so that a server's decisions are not delayed."""


class ThinningStopped(Exception):  # noqa: N818  # it is no error
    """A file was not thinned, because that would have taken too long."""


def thin(path: Path, iterations: int, may_go_on: Callable[[], bool] = lambda: True) -> None:
    """Replace the first iterations of a ``run.jsonl`` by their sums. Other processes see the old or the new file.

    The caller must be the only process that writes to the file. ``may_go_on`` is called from time to time.

    Raises:
        OSError: If the disk is full. The old file stays.
        ThinningStopped: If ``may_go_on`` has returned False. The old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with path.open("rb") as file, open_without_links(temporary, append=False) as new:
            for record in summed(_records_with(file, iterations, may_go_on)):
                new.write(to_line(record).encode())
            shutil.copyfileobj(file, new)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _records_with(file: BinaryIO, iterations: int, may_go_on: Callable[[], bool]) -> Iterator[Record]:
    """Yield the records up to the one of the last of the first iterations."""
    lines = 0
    while iterations > 0 and (line := file.readline(MOST_RECORD_LINE_BYTES)):
        lines += 1
        if lines % _PAUSE_EVERY == 0:
            time.sleep(_PAUSE_S)
            if not may_go_on():
                raise ThinningStopped
        with contextlib.suppress(ValueError):
            record = from_line(line)
            iterations -= isinstance(record, IterationRecord)
            yield record


def summed(records: Iterable[Record]) -> Iterator[Record]:
    """Yield records with the sums of iterations instead of each of them."""
    order = 0
    part, of_start = _Hour(order), _OfStart()
    for record in records:
        if isinstance(record, Event):
            of_start.add(part.closed())
            if isinstance(record, Started):
                order = record.order
                yield from of_start.closed()
                of_start = _OfStart()
            part = _Hour(order)
            of_start.add(record)
        elif is_training(record):
            if part.is_full or part.is_before_trial_of(record):
                of_start.add(part.closed())
                part = _Hour(order)
            if isinstance(record, SummedIterations):
                part.add_summed(record)
                of_start.add_listed_sums(record)
            elif isinstance(record, IterationRecord):
                part.add_iteration(record)
                of_start.add_listed(record)
    of_start.add(part.closed())
    yield from of_start.closed()


class _Hour:
    """Iterations of about an hour."""

    def __init__(self, order: int) -> None:
        """Begin without iterations. ``order`` was declared at the start of the job."""
        self._order = order
        self._sums: dict[tuple[str, int, int | None], Sums] = {}
        self._first = self._last = 0
        self._ended: float | None = None
        self._time_s = 0.0
        self._plan: int | None = None
        self._power, self._planned_power = PowerExtremes(), PowerExtremes()
        self._first_pairs = 0
        self._trial: TrialState | None = None
        self._decided: TrialState | None = None
        self._default_measured = True
        self._simulated = False

    @property
    def is_full(self) -> bool:
        return self._time_s >= _HOUR_S

    def is_before_trial_of(self, record: Record) -> bool:
        """Return whether another trial of plans has begun when a record was written."""
        if self._trial is None:
            return False
        if isinstance(record, SummedIterations):
            return record.trial is not None and record.first_pairs < self._trial.pairs
        if not isinstance(record, IterationRecord) or record.phase != "run" or record.plan is None:
            return False
        return (record.trial or TrialState()).pairs < self._trial.pairs

    def add_iteration(self, record: IterationRecord) -> None:
        self._add_range(record.iteration, record.iteration, record.ended, simulated=record.simulated)
        self._add_sums(record.phase, record.order or 0, record.plan, sums_of(record))
        self._power.add(record.time_s, record.energy_j, record.ended)
        if record.phase == "run" and record.plan is not None:
            trial = record.trial or TrialState()
            self._add_trial(trial.pairs, trial, None if trial.is_undecided else trial)
            self._default_measured = record.default_measured
            if (record.order or 0) == self._order:
                self._plan = record.plan
                self._planned_power.add(record.time_s, record.energy_j, record.ended)

    def add_summed(self, record: SummedIterations) -> None:
        self._add_range(record.first, record.last, record.ended, simulated=record.simulated)
        self._plan = self._plan if record.plan is None else record.plan
        for each in record.parts:
            self._add_sums(each.phase, each.order, each.plan, each.sums)
        if record.power is not None:
            self._power.add_sums(record.power)
        if record.planned_power is not None:
            self._planned_power.add_sums(record.planned_power)
        if record.trial is not None:
            self._add_trial(record.first_pairs, record.trial, record.decided)
            self._default_measured = record.default_measured

    def _add_range(self, first: int, last: int, ended: float | None, *, simulated: bool) -> None:
        self._first = self._first if self._sums else first
        self._last, self._ended = last, ended
        self._simulated |= simulated

    def _add_sums(self, phase: str, order: int, plan: int | None, sums: Sums) -> None:
        self._sums.setdefault((phase, order, plan), Sums()).add(sums)
        self._time_s += sums.time_s

    def _add_trial(self, first_pairs: int, trial: TrialState, decided: TrialState | None) -> None:
        self._first_pairs = first_pairs if self._trial is None else self._first_pairs
        self._trial, self._decided = trial, decided or self._decided

    def closed(self) -> SummedIterations | None:
        """Return the sums. None if there are no iterations."""
        if not self._sums:
            return None
        parts = [
            PhaseSums(phase=phase, order=order, plan=plan, sums=sums)
            for (phase, order, plan), sums in self._sums.items()
        ]
        return SummedIterations(
            simulated=self._simulated,
            first=self._first,
            last=self._last,
            ended=self._ended,
            parts=tuple(parts),
            plan=self._plan,
            power=self._power.sums,
            planned_power=self._planned_power.sums,
            first_pairs=self._first_pairs,
            trial=self._trial,
            decided=self._decided,
            default_measured=self._default_measured,
        )


class _OfStart:
    """Records of one start of a job, and its energies by pipeline and rank."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._all_j: list[float] = []
        self._default_j: list[float] = []
        self._planned_j: list[float] = []
        self._by_rank_j: list[float] = []
        # Time of the iterations with energies by rank, and of those since the last record with them [s].
        self._by_rank_s = self._since_s = 0.0

    def add(self, record: Record | None) -> None:
        if record is not None:
            self._records.append(record)

    def add_listed(self, record: IterationRecord) -> None:
        """Add the energies by pipeline and rank of a record."""
        parts_j = record.energy_by_pipeline_j or ()
        self._all_j = sums_by_place(self._all_j, parts_j)
        if record.phase in AT_DEFAULT_CLOCKS:
            self._default_j = sums_by_place(self._default_j, parts_j)
        if record.phase == "run" and record.plan is not None:
            self._planned_j = sums_by_place(self._planned_j, parts_j)
        self._since_s += 0.0 if record.energy_j is None else record.time_s
        if record.energy_by_rank_j is not None:
            self._by_rank_j = sums_by_place(self._by_rank_j, record.energy_by_rank_j)
            self._by_rank_s, self._since_s = self._by_rank_s + self._since_s, 0.0

    def add_listed_sums(self, record: SummedIterations) -> None:
        self._all_j = sums_by_place(self._all_j, record.energy_by_pipeline_j)
        self._default_j = sums_by_place(self._default_j, record.default_by_pipeline_j)
        self._planned_j = sums_by_place(self._planned_j, record.planned_by_pipeline_j)
        self._by_rank_j = sums_by_place(self._by_rank_j, record.energy_by_rank_j)
        self._by_rank_s += record.by_rank_s
        self._since_s += record.unlisted_s

    def closed(self) -> Iterator[Record]:
        """Yield the records. The last sums contain the energies by pipeline and rank."""
        last = max((at for at, each in enumerate(self._records) if isinstance(each, SummedIterations)), default=None)
        for at, record in enumerate(self._records):
            yield record if at != last else record.model_copy(update=self._listed())

    def _listed(self) -> dict[str, object]:
        return {
            "energy_by_pipeline_j": _rounded(self._all_j),
            "default_by_pipeline_j": _rounded(self._default_j),
            "planned_by_pipeline_j": _rounded(self._planned_j),
            "energy_by_rank_j": _rounded(self._by_rank_j),
            "by_rank_s": self._by_rank_s,
            "unlisted_s": self._since_s,
        }


def _rounded(values_j: Iterable[float]) -> tuple[float, ...]:
    """Return energies rounded as in records of iterations."""
    return tuple(round(value_j, 6) for value_j in values_j)
