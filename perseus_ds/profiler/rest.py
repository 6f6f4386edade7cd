"""How long the parts of an iteration take that have no clock to choose: loads, transfers, the tail."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from perseus_ds.execution import Span
from perseus_ds.instruction import Kind
from perseus_ds.schedule import Compute, Exchange, Load, Transfer
from perseus_ds.stage_profile import TransferDuration

Iterations = Sequence[Sequence[Span]]
"""One rank's spans, by iteration."""


def without_gaps(spans: Sequence[Span], time_s: float) -> list[Span]:
    """Give the time that the engine spends between operations to the loads, transfers and tails beside it.

    Args:
        spans: One rank's operations of one iteration, in order.
        time_s: The iteration time; the last operation lasts until then [s].
    """
    result: list[Span] = []
    for number, span in enumerate(spans):
        start_s, end_s = span.start_s, span.end_s
        if _is_tail(span) or not isinstance(span.operation, Compute):
            start_s = result[-1].end_s if result else 0.0
            end_s = spans[number + 1].start_s if number + 1 < len(spans) else max(end_s, time_s)
        result.append(Span(span.operation, start_s, end_s))
    return result


def load_durations_s(ranks: Sequence[Iterations]) -> dict[int, float]:
    """Return the median load of each stage [s]."""
    found: dict[int, list[float]] = defaultdict(list)
    for span in _spans(ranks):
        if isinstance(span.operation, Load):
            found[span.operation.stage].append(span.time_s)
    return {stage: statistics.median(times_s) for stage, times_s in sorted(found.items())}


def transfer_durations(ranks: Sequence[Iterations]) -> list[TransferDuration]:
    """Return the median transfer over each boundary and direction, without the wait for the partner.

    Both sides of a transfer end together, so the side that came last, which waited for nobody,
    shows what the transfer itself takes: the shorter of the two.
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
    """Return the median tail of each stage [s], without the waits for other ranks.

    Reductions, and an optimizer step that agrees on a gradient norm, end together on the ranks that
    take part: what such a part takes itself begins when the last of them has come. Ranks begin an
    iteration together, so their times can be compared.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for iteration in zip(*ranks, strict=True):
        tails = [[span for span in spans if _is_tail(span)] for spans in iteration]
        parts = list(zip_longest(*tails))
        for tail in tails:
            if tail and isinstance(tail[0].operation, Compute):
                own_s = [_without_wait_s(parts[number], span) for number, span in enumerate(tail)]
                found[tail[0].operation.instruction.stage].append(sum(own_s))
    return {stage: statistics.median(times_s) for stage, times_s in sorted(found.items())}


def _without_wait_s(part: Sequence[Span | None], span: Span) -> float:
    """Return the time since the last rank that began this part before it was over."""
    return span.end_s - max(s.start_s for s in part if s is not None and s.start_s <= span.end_s)


def _is_tail(span: Span) -> bool:
    return isinstance(span.operation, Compute) and span.operation.instruction.kind is Kind.TAIL


def _spans(ranks: Sequence[Iterations]) -> list[Span]:
    return [span for rank in ranks for spans in rank for span in spans]
