"""Durations of the operations without a clock to choose: loads, transfers and unprofiled tails.

A transfer that a schedule launches and awaits later cannot be timed directly. It ends when the pass that waits for it
begins. It begins at the end of the pass that produced its data, or at the end of the pass that the receiving rank was
computing then, whichever is later.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from perseus_ds.pipeline.dag import Boundary, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Other, Schedule, Span, Transfer, Wait

# A standard deviation needs this number of passes.
_FEWEST_EQUAL = 3
Key = tuple[int, Kind]
K = TypeVar("K", bound=Any)
Iterations = Sequence[Sequence[Span]]
"""Spans of one rank, by iteration."""
Passes = Mapping[Instruction, tuple[float, float]]
"""Begin and end of the instructions of one iteration, on all ranks, on a common time axis [s]."""


def without_gaps(spans: Sequence[Span], time_s: float) -> list[Span]:
    """Add the time that the engine spends between operations to the loads, transfers and tails next to it.

    The time before the tail is not added to an operation, because ranks wait for each other there.
    """
    result: list[Span] = []
    for before, span, after in zip([None, *spans], spans, [*spans[1:], None], strict=False):
        start_s, end_s = span.start_s, span.end_s
        if _is_tail(span) or not isinstance(span.operation, Compute | Other):
            if before is None:
                start_s = 0.0
            elif not _begins_tail(before, span):
                start_s = result[-1].end_s
            if after is None:
                end_s = max(end_s, time_s)
            elif not _begins_tail(span, after):
                end_s = after.start_s
        result.append(Span(span.operation, start_s, end_s))
    return result


def _begins_tail(before: Span, span: Span) -> bool:
    return _is_tail(span) and not _is_tail(before)


def medians(found: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the median of the numbers of each key, in ascending order of the keys."""
    by_key: dict[K, list[float]] = defaultdict(list)
    for key, number in found:
        by_key[key].append(number)
    return {key: statistics.median(numbers) for key, numbers in sorted(by_key.items())}


def fixed_durations(ranks: Sequence[Iterations]) -> FixedDurations:
    """Return the median durations of loads, transfers and commands unknown to perseus-ds, without tails.

    Both sides of a transfer end together. The side that begins last does not wait, so the shorter of the two spans is
    the duration of the transfer itself.
    """
    loads_s: list[tuple[int, float]] = []
    others_s: list[tuple[tuple[str, int], float]] = []
    shorter_s: dict[tuple[int, Transfer], float] = {}
    for rank in ranks:
        for number, spans in enumerate(rank):
            for span in spans:
                match span.operation:
                    case Load(stage=stage):
                        loads_s.append((stage, span.time_s))
                    case Other(command=command, stage=stage):
                        others_s.append(((command, stage), span.time_s))
                    case Exchange(transfers=transfers):
                        for transfer in transfers:
                            key = number, transfer
                            shorter_s[key] = min(span.time_s, shorter_s.get(key, span.time_s))
    transfers_s = (((t.payload, t.source, t.target), time_s) for (_, t), time_s in shorter_s.items())
    return FixedDurations(load_s=medians(loads_s), transfer_s=medians(transfers_s), other_s=medians(others_s))


def pass_variation(ranks: Sequence[Iterations]) -> float | None:
    """Return the relative standard deviation of the times of equal passes in an iteration, as a median over all.

    What lengthens all passes of an iteration alike has no influence. None if iterations have no three equal passes.
    """
    found = []
    for rank in ranks:
        for spans in rank:
            times_s: dict[Key, list[float]] = defaultdict(list)
            for span in spans:
                if isinstance(span.operation, Compute) and not _is_tail(span):
                    instruction = span.operation.instruction
                    times_s[instruction.stage, instruction.kind].append(span.time_s)
            enough = [equal_s for equal_s in times_s.values() if len(equal_s) >= _FEWEST_EQUAL]
            found += [statistics.stdev(equal_s) / statistics.fmean(equal_s) for equal_s in enough]
    return statistics.median(found) if found else None


def tails_s(spans: Iterable[Span]) -> dict[int, float]:
    """Return the duration of each stage's tail, all its parts together, in one iteration of a rank [s]."""
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        if _is_tail(span) and isinstance(span.operation, Compute):
            found[span.operation.instruction.stage] += span.time_s
    return dict(found)


def shortest_tail_s(ranks: Iterable[Sequence[Span]]) -> float:
    """Return the shortest time from the last pass of a rank to the end of its tail, in one iteration [s].

    Ranks that reduce gradients together wait for the last one, so the shortest tail has no wait in it.
    """
    tails_s = []
    for spans in ranks:
        ends_s = {False: 0.0, True: 0.0}
        for span in spans:
            if isinstance(span.operation, Compute | Other):
                ends_s[_is_tail(span)] = max(ends_s[_is_tail(span)], span.end_s)
        if ends_s[True]:
            tails_s.append(max(0.0, ends_s[True] - ends_s[False]))
    return min(tails_s, default=0.0)


def with_tail(spans: Sequence[Span], tail_s: float) -> list[Span]:
    """Return the operations of an iteration with a tail of another duration [s] and the same end."""
    tails = [span for span in spans if _is_tail(span)]
    rest = [span for span in spans if not _is_tail(span)]
    if not tails:
        return rest
    end_s = max(span.end_s for span in tails)
    return [*rest, Span(tails[0].operation, end_s - tail_s, end_s)]


def _is_tail(span: Span) -> bool:
    return isinstance(span.operation, Compute) and span.operation.instruction.kind is Kind.TAIL


def launches_transfers(schedule: Schedule) -> bool:
    """Return True if ranks continue after they have launched a transfer."""
    return any(isinstance(operation, Launch) for stream in schedule.ranks for operation in stream)


def passes_of(ranks: Iterable[tuple[Sequence[Span], float]]) -> Passes:
    """Return the passes of one iteration, given the operations and the begin [s] of each rank."""
    return {
        span.operation.instruction: (begin_s + span.start_s, begin_s + span.end_s)
        for spans, begin_s in ranks
        for span in spans
        if isinstance(span.operation, Compute)
    }


def launched_transfer_durations_s(schedule: Schedule, iterations: Iterable[Passes]) -> dict[Boundary, float]:
    """Return the median transfer over each boundary and direction [s].

    Only transfers for which the receiver was waiting show their duration. If there are none, those that ran while the
    receiver computed are used.
    """
    around_transfer = _around_transfers(schedule)
    while_waiting_s: dict[Boundary, list[float]] = defaultdict(list)
    while_computing_s: dict[Boundary, list[float]] = defaultdict(list)
    for passes in iterations:
        for transfer, around in around_transfer.items():
            if around.made_by in passes and around.needed_by in passes:
                _, made_s = passes[around.made_by]
                free_s = made_s
                if around.received_after is not None:
                    _, free_s = passes[around.received_after]
                needed_s, _ = passes[around.needed_by]
                durations_s = while_computing_s if free_s > made_s else while_waiting_s
                boundary = transfer.payload, transfer.source, transfer.target
                durations_s[boundary].append(max(0.0, needed_s - max(made_s, free_s)))
    found_s = {**while_computing_s, **while_waiting_s}
    return {boundary: statistics.median(durations_s) for boundary, durations_s in sorted(found_s.items())}


class _AroundTransfer(NamedTuple):
    """The instructions around a transfer.

    Attributes:
        made_by: The last one before it on the sending rank.
        needed_by: The first one that needs its data on the receiving rank.
        received_after: The one before that. None if there is none.
    """

    made_by: Instruction
    needed_by: Instruction
    received_after: Instruction | None


def _around_transfers(schedule: Schedule) -> dict[Transfer, _AroundTransfer]:
    """Return the instructions around each transfer."""
    made_by: dict[Transfer, Instruction] = {}
    needed_by: dict[Transfer, tuple[Instruction, Instruction | None]] = {}
    for stream in schedule.ranks:
        before: Instruction | None = None
        awaited: list[Transfer] = []
        receives = {t for operation in stream if isinstance(operation, Exchange | Launch) for t in operation.receives}
        for operation in stream:
            if isinstance(operation, Compute):
                needed_by.update(dict.fromkeys(awaited, (operation.instruction, before)))
                before, awaited = operation.instruction, []
            elif before is not None and isinstance(operation, Exchange | Launch):
                made_by.update(dict.fromkeys(operation.sends, before))
            if isinstance(operation, Exchange | Wait):
                awaited += [transfer for transfer in operation.transfers if transfer in receives]
    known = [transfer for transfer in sorted(made_by) if transfer in needed_by]
    return {transfer: _AroundTransfer(made_by[transfer], *needed_by[transfer]) for transfer in known}
