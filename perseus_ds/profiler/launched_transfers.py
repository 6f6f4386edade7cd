"""Durations of transfers that a schedule launches and waits for later, from the passes before and after them.

Such a transfer is not surrounded by anything that could be timed. It is over when the pass that waits for it begins,
and it begins at the end of the pass whose result it sends; if the receiving rank was still computing then, at the end
of that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.profile_metadata import TransferDuration
from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Payload, Schedule, Transfer, Wait

Passes = Mapping[Instruction, tuple[float, float]]
"""When the instructions of one iteration began and ended, on all ranks, on a time axis that they have in common [s]."""


def launches_transfers(schedule: Schedule) -> bool:
    """Return whether ranks go on after they have launched a transfer."""
    return any(isinstance(operation, Launch) for stream in schedule.ranks for operation in stream)


def passes_of(ranks: Iterable[tuple[Sequence[Span], float]]) -> Passes:
    """Return the passes of one iteration.

    Args:
        ranks: Of each rank, its operations, and when it began the iteration, from which they are timed [s].
    """
    return {
        span.operation.instruction: (begin_s + span.start_s, begin_s + span.end_s)
        for spans, begin_s in ranks
        for span in spans
        if isinstance(span.operation, Compute)
    }


def launched_transfer_durations(schedule: Schedule, iterations: Iterable[Passes]) -> list[TransferDuration]:
    """Return the median transfer over each boundary and direction.

    A transfer for which its receiver was waiting shows how long it takes; only where there is none such do those count
    that went on while the receiver computed.
    """
    sides = _sides(schedule)
    found: dict[tuple[Payload, int, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for passes in iterations:
        for transfer, side in sides.items():
            if side.made_by in passes and side.needed_by in passes:
                made_s = passes[side.made_by][1]
                free_s = made_s if side.after is None else passes[side.after][1]
                lasts_s = max(0.0, passes[side.needed_by][0] - max(made_s, free_s))
                found[transfer.payload, transfer.source, transfer.target][free_s > made_s].append(lasts_s)
    return [
        TransferDuration(payload=payload, source=source, target=target, time_s=statistics.median(waited or hidden))
        for (payload, source, target), (waited, hidden) in sorted(found.items())
    ]


@dataclass(frozen=True)
class _Sides:
    """The instructions around a transfer.

    Attributes:
        made_by: The last one before it is sent, on the sending rank.
        needed_by: The first one after it is waited for, on the receiving rank.
        after: The one before that, on the receiving rank; None if there is none.
    """

    made_by: Instruction
    needed_by: Instruction
    after: Instruction | None


def _sides(schedule: Schedule) -> dict[Transfer, _Sides]:
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
    return {t: _Sides(made_by[t], *needed_by[t]) for t in sorted(made_by) if t in needed_by}
