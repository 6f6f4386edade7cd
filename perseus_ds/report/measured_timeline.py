"""The measured timeline of an iteration, from ``timeline.json``."""

from __future__ import annotations

from collections import defaultdict

from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer
from perseus_ds.report.timeline import Bar, Timeline, Wait


def measured_timeline(iteration: MeasuredIteration, *, energy_j: float) -> Timeline:
    """Return an iteration as it ran.

    A rank in a transfer whose partner has not come yet waits; only what follows is the transfer.
    Which of the two it is follows from when either side began, so it is as exact as the ranks'
    clocks are aligned: better than a millisecond on one host.

    Args:
        iteration: What was measured.
        energy_j: Of the iteration, one GPU per rank [J].
    """
    begun_s: dict[Transfer, float] = defaultdict(float)
    for operations in iteration.ranks:
        for operation in operations:
            work = _work(operation)
            if isinstance(work, Transfer):
                begun_s[work] = max(begun_s[work], operation.start_s)
    first_s = min((o.start_s for operations in iteration.ranks for o in operations), default=0.0)
    bars, waits = [], []
    for rank, operations in enumerate(iteration.ranks):
        for operation in operations:
            work, start_s, end_s = _work(operation), operation.start_s, operation.end_s
            if isinstance(work, Transfer):
                both_s = min(max(start_s, begun_s[work]), end_s)
                if both_s > start_s:
                    waits.append(Wait(rank, work, start_s - first_s, both_s - first_s))
                start_s = both_s
            if end_s > start_s:
                bars.append(Bar(rank, work, start_s - first_s, end_s - first_s, operation.clock_mhz, critical=False))
    time_s = max((bar.end_s for bar in bars), default=0.0)
    return Timeline(tuple(bars), tuple(waits), len(iteration.ranks), time_s, energy_j)


def _work(operation: MeasuredOperation) -> Instruction | Load | Other | Transfer:
    match operation.kind:
        case "activation" | "grad" as payload:
            assert operation.target is not None
            return Transfer(payload, operation.stage, operation.target, operation.micro_batch)
        case "load":
            return Load(operation.stage, operation.micro_batch)
        case "other":
            return Other(operation.command or "command", operation.stage, operation.micro_batch)
        case kind:
            return Instruction(operation.stage, Kind(kind), operation.micro_batch)
