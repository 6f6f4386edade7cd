"""The part of a schedule that repeats itself, and a shorter schedule with most of the repetitions left out.

In the middle of an iteration each rank does the same operations over and over, on later micro-batches each time. A
period is one repetition: the same number of micro-batches on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.operations import Compute, Load, Operation, Other, Transfer, Wait
from perseus_ds.pipeline.schedule import Schedule

Indices = npt.NDArray[np.intp]
Work: TypeAlias = Instruction | Load | Other | Transfer
Shape: TypeAlias = tuple[object, ...]
"""A piece of work without its micro-batch."""

_MOST_TRIED = 16
"""So many lengths of a period are tried for each rank."""


@dataclass(frozen=True)
class Repetition:
    """A schedule and a shorter one, in whose middle periods are left out.

    Attributes:
        short: The shorter schedule.
        left_out: How many periods it lacks.
        micro_batches: Micro-batches in a period.
        begin: How many forwards of its first stage each rank has done when all of them repeat themselves.
        repeating: The work that is part of a period.
    """

    short: Schedule
    left_out: int
    micro_batches: int
    begin: int
    repeating: frozenset[Shape]

    def cut(self, periods: int) -> list[int]:
        """Return for each rank the position in its shorter stream so many periods after all repeat themselves."""
        return [_cut(stream, self.begin + periods * self.micro_batches) for stream in self.short.ranks]


@dataclass(frozen=True)
class _Run:
    """Where a rank's stream repeats itself: operations ``begin`` to ``end``, with periods of ``length`` operations."""

    length: int
    begin: int
    end: int


def find_repetition(schedule: Schedule, kept: int) -> Repetition | None:
    """Return how a schedule is shortened to so many periods in its middle; None where it does not repeat itself."""
    found = [_runs(stream) for stream in schedule.ranks]
    for micro_batches in sorted(set.intersection(*(set(runs) for runs in found))):
        runs = [each[micro_batches] for each in found]
        left_out = min((run.end - run.begin) // run.length for run in runs) - kept
        periods = [stream[run.begin : run.begin + run.length] for stream, run in zip(schedule.ranks, runs, strict=True)]
        if left_out < 1 or not _is_whole(schedule, periods, micro_batches):
            continue
        repeating = frozenset(shape for period in periods for op in period for shape, _ in _parts(op))
        done = [
            sum(at < run.begin for at in _forwards(stream)) for stream, run in zip(schedule.ranks, runs, strict=True)
        ]
        begin = max(done) + 1
        if begin >= min(len(_forwards(stream)) for stream in schedule.ranks):
            continue
        cut = [_cut(stream, begin) for stream in schedule.ranks]
        fits = all(run.begin <= at and at + left_out * run.length <= run.end for at, run in zip(cut, runs, strict=True))
        if fits:
            by = left_out * micro_batches
            ranks = tuple(
                stream[:at] + tuple(_earlier(op, by, repeating) for op in stream[at + left_out * run.length :])
                for stream, at, run in zip(schedule.ranks, cut, runs, strict=True)
            )
            short = Schedule(schedule.name, schedule.micro_batches - by, ranks)
            return Repetition(short, left_out, micro_batches, begin, repeating)
    return None


def _runs(stream: tuple[Operation, ...]) -> dict[int, _Run]:
    """Return by micro-batches of a period where the middle of a stream repeats itself."""
    numbers: dict[Shape, int] = {}
    form, first = np.zeros((2, len(stream)), dtype=np.intp)
    for position, operation in enumerate(stream):
        parts = list(_parts(operation))
        first[position] = parts[0][1] if parts else 0
        key = (type(operation), *((shape, number - first[position]) for shape, number in parts))
        form[position] = numbers.setdefault(key, len(numbers))
    middle = len(stream) // 2
    result: dict[int, _Run] = {}
    candidates = np.flatnonzero(form[middle + 1 :] == form[middle])[:_MOST_TRIED] + 1 if len(stream) else np.arange(0)
    for length in candidates.tolist():
        micro_batches = int(first[middle + length] - first[middle])
        same = (form[length:] == form[:-length]) & (first[length:] - first[:-length] == micro_batches)
        different = np.flatnonzero(~same)
        begin = int(different[different < middle].max(initial=-1)) + 1
        end = int(different[different >= middle].min(initial=len(same))) + length
        if micro_batches > 0 and micro_batches not in result and end - middle >= 2 * length:
            result[micro_batches] = _Run(length, begin, end)
    return result


def _is_whole(schedule: Schedule, periods: list[tuple[Operation, ...]], micro_batches: int) -> bool:
    """Return whether a period of each rank has as many instructions of each stage and kind as micro-batches."""
    for instructions, period in zip(schedule.instructions, periods, strict=True):
        expected = {(i.stage, i.kind) for i in instructions if i.kind is not Kind.TAIL}
        found = Counter((op.instruction.stage, op.instruction.kind) for op in period if isinstance(op, Compute))
        if found != dict.fromkeys(expected, micro_batches):
            return False
    return True


def _forwards(stream: tuple[Operation, ...]) -> list[int]:
    """Return the positions of the forwards of the stage that a rank computes first."""
    computed = [(position, op.instruction) for position, op in enumerate(stream) if isinstance(op, Compute)]
    return [at for at, i in computed if i.kind is Kind.FORWARD and i.stage == computed[0][1].stage]


def _cut(stream: tuple[Operation, ...], forwards: int) -> int:
    """Return the position after the last instruction before the forward of this number."""
    before = stream[: _forwards(stream)[forwards]]
    return max((position + 1 for position, op in enumerate(before) if isinstance(op, Compute)), default=0)


def _parts(operation: Operation) -> Iterator[tuple[Shape, int]]:
    """Return the work of an operation, each with the number of its micro-batch."""
    if isinstance(operation, Compute):
        yield parts_of(operation.instruction)
    elif isinstance(operation, Load | Other):
        yield parts_of(operation)
    else:
        yield from map(parts_of, operation.transfers)


def parts_of(work: Work) -> tuple[Shape, int]:
    """Return a piece of work without its micro-batch, and the micro-batch."""
    if isinstance(work, Instruction):
        return (work.stage, work.kind), work.micro_batch
    if isinstance(work, Load):
        return (work.stage, "load"), work.micro_batch
    if isinstance(work, Other):
        return (work.stage, "other", work.command), work.number
    return (work.source, work.target, work.payload), work.micro_batch


def _earlier(operation: Operation, by: int, repeating: frozenset[Shape]) -> Operation:
    """Return an operation on micro-batches that are earlier by a number; work that does not repeat stays as it is."""

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(transfer, micro_batch=transfer.micro_batch - by) for transfer in transfers)

    if not any(shape in repeating for shape, _ in _parts(operation)):
        return operation
    if isinstance(operation, Compute):
        return Compute(replace(operation.instruction, micro_batch=operation.instruction.micro_batch - by))
    if isinstance(operation, Load):
        return replace(operation, micro_batch=operation.micro_batch - by)
    if isinstance(operation, Other):
        return replace(operation, number=operation.number - by)
    if isinstance(operation, Wait):
        return Wait(moved(operation.transfers))
    return type(operation)(moved(operation.sends), moved(operation.receives))
