"""Records the operations of one iteration for each plan under which a job trains."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile
from perseus_ds.device.timers import Execution, Span
from perseus_ds.distributed import Communicator
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute, Load, Other

logger = logging.getLogger("perseus_ds")
_PHASES = ("warm-up", "observe", "run")
# The first iteration under a plan begins at the clocks of the one before.
_SETTLED = 2
_MOST = 6
_BARRIERS = 5


@dataclass(frozen=True)
class Ran:
    """The iteration that has just ended, as this rank knows it.

    Attributes:
        number: As in ``run.jsonl``.
        phase: What Perseus was doing.
        plan: Its place on the frontier; None at default clocks.
        clock_mhz: What the plan asks for.
    """

    number: int
    phase: str
    plan: int | None
    clock_mhz: Mapping[Instruction, int]


class TimelineLog:
    """Writes ``timeline.json`` on rank 0: a few iterations of its pipeline, one for each plan.

    Args:
        communicator: All ranks.
        directory: Where to write the file.
        gpu: The GPU's name.
        simulated: Whether it is simulated.
    """

    def __init__(self, communicator: Communicator, directory: Path, *, gpu: str, simulated: bool) -> None:
        self._communicator = communicator
        self._path = directory / "timeline.json"
        self._file = TimelineFile(simulated=simulated, gpu=gpu)
        self._seen: dict[tuple[str, int | None], int] = {}
        self._works = True

    def wants(self, phase: str, plan: int | None) -> bool:
        """Count an iteration; return whether rank 0 is to keep it, which all ranks then have to help with."""
        if not self._communicator.is_first or phase not in _PHASES:
            return False
        key = phase, plan
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._works and self._seen[key] == _SETTLED and len(self._file.iterations) < _MOST

    def keep(self, ran: Ran, execution: Execution) -> None:
        """Gather what all ranks of the first pipeline did; every rank must do so at the same time.

        Ranks on different hosts have no clock in common, so each reports how long ago its iteration began at moments
        common to all, the ends of barriers.
        """
        elapsed_s = []
        for _ in range(_BARRIERS):
            self._communicator.barrier()
            elapsed_s.append(execution.elapsed_s())
        topology = self._communicator.topology
        shown = topology.data_parallel_rank == 0 and topology.rank == min(topology.stage_peers, default=topology.rank)
        mine = (topology.pipeline_rank, elapsed_s, execution.spans(), dict(ran.clock_mhz)) if shown else None
        by_rank = sorted(
            (reported for reported in self._communicator.gather(mine) if reported is not None),
            key=lambda reported: reported[0],
        )
        if not self._communicator.is_first:
            return
        reference_s = by_rank[0][1]
        operations = []
        for _, theirs_s, spans, clock_mhz in by_rank:
            late_s = statistics.median(ours - theirs for ours, theirs in zip(reference_s, theirs_s, strict=True))
            operations.append([entry for span in spans for entry in _entries(span, late_s, clock_mhz)])
        self._file.iterations.append(
            MeasuredIteration(iteration=ran.number, phase=ran.phase, plan=ran.plan, ranks=operations)
        )
        self._write()

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, self._file.model_dump_json(exclude_none=True) + "\n")
        except OSError as error:
            self._works = False
            logger.warning("perseus: %s cannot be written (%s); training goes on without it.", self._path, error)


def _entries(span: Span, late_s: float, clock_mhz: Mapping[Instruction, int]) -> list[MeasuredOperation]:
    when = {"start_s": round(span.start_s + late_s, 6), "end_s": round(span.end_s + late_s, 6)}
    operation = span.operation
    if isinstance(operation, Compute):
        work = operation.instruction
        return [
            MeasuredOperation(
                kind=work.kind.value,
                stage=work.stage,
                micro_batch=work.micro_batch,
                clock_mhz=clock_mhz.get(work),
                **when,
            )
        ]
    if isinstance(operation, Load):
        return [MeasuredOperation(kind="load", stage=operation.stage, micro_batch=operation.micro_batch, **when)]
    if isinstance(operation, Other):
        other = {"command": operation.command, "stage": operation.stage, "micro_batch": operation.number}
        return [MeasuredOperation(kind="other", **other, **when)]
    return [
        MeasuredOperation(kind=t.payload, stage=t.source, target=t.target, micro_batch=t.micro_batch, **when)
        for t in operation.transfers
    ]
