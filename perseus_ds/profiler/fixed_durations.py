"""Durations of the operations that have no clock to choose: loads, transfers and unprofiled tails."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from perseus_ds.artifacts.profile_metadata import OtherDuration, TransferDuration
from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Load, Other, Transfer

Iterations = Sequence[Sequence[Span]]
"""Spans of one rank, by iteration."""


def without_gaps(spans: Sequence[Span], time_s: float) -> list[Span]:
    """Add the time that the engine spends between operations to the loads, transfers and tails next to it.

    The time before the tail is not added to an operation: there, ranks wait for each other.

    Args:
        spans: One rank's operations of one iteration, in order.
        time_s: The iteration time; the last operation lasts until then [s].
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
    """Whether the tail begins between the two spans; ranks that begin it together wait for each other there."""
    return _is_tail(span) and not _is_tail(before)


def load_durations_s(ranks: Sequence[Iterations]) -> dict[int, float]:
    """Return the median load of each stage [s]."""
    found: dict[int, list[float]] = defaultdict(list)
    for span in _spans(ranks):
        if isinstance(span.operation, Load):
            found[span.operation.stage].append(span.time_s)
    return {stage: statistics.median(times_s) for stage, times_s in sorted(found.items())}


def other_durations(ranks: Sequence[Iterations]) -> list[OtherDuration]:
    """Return the median duration of each command that perseus-ds does not know, by stage."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in _spans(ranks):
        if isinstance(span.operation, Other):
            found[span.operation.command, span.operation.stage].append(span.time_s)
    return [
        OtherDuration(command=command, stage=stage, time_s=statistics.median(times_s))
        for (command, stage), times_s in sorted(found.items())
    ]


def transfer_durations(ranks: Sequence[Iterations]) -> list[TransferDuration]:
    """Return the median transfer over each boundary and direction, without waiting for the other rank.

    Both sides of a transfer end together. The side that begins last does not wait, so the shorter
    of the two spans is the duration of the transfer itself.
    """
    shorter: dict[tuple[int, Transfer], float] = {}
    for rank in ranks:
        for number, spans in enumerate(rank):
            for span in spans:
                if isinstance(span.operation, Exchange):
                    for transfer in span.operation.transfers:
                        key = (number, transfer)
                        shorter[key] = min(span.time_s, shorter.get(key, span.time_s))
    found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for (_, transfer), time_s in shorter.items():
        found[transfer.payload, transfer.source, transfer.target].append(time_s)
    return [
        TransferDuration(payload=payload, source=source, target=target, time_s=statistics.median(times_s))
        for (payload, source, target), times_s in sorted(found.items())
    ]


def tail_durations_s(ranks: Sequence[Iterations]) -> dict[int, float]:
    """Return the median tail of each stage [s]; in all iterations, ranks began their tails together.

    Where ranks exchange something within the tail, such as a gradient norm, the faster ones wait for
    the slowest; that wait is part of their tail.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for spans in rank:
            for stage, time_s in tails_s(spans).items():
                found[stage].append(time_s)
    return {stage: statistics.median(times_s) for stage, times_s in sorted(found.items())}


def typical_tails_s(ranks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return the median over the ranks of each stage's tail, each rank's as :func:`tail_durations_s` says [s]."""
    found: dict[int, list[float]] = defaultdict(list)
    for tails in ranks:
        for stage, time_s in tails.items():
            found[stage].append(time_s)
    return {stage: statistics.median(times_s) for stage, times_s in sorted(found.items())}


def tails_s(spans: Iterable[Span]) -> dict[int, float]:
    """Return the duration of each stage's tail, all its parts together, in one iteration of a rank [s]."""
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        if _is_tail(span) and isinstance(span.operation, Compute):
            found[span.operation.instruction.stage] += span.time_s
    return dict(found)


def _is_tail(span: Span) -> bool:
    return isinstance(span.operation, Compute) and span.operation.instruction.kind is Kind.TAIL


def _spans(ranks: Sequence[Iterations]) -> list[Span]:
    return [span for rank in ranks for spans in rank for span in spans]
