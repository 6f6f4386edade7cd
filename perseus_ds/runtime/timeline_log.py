"""Records the operations of one iteration for each plan under which a job trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile, Work
from perseus_ds.artifacts.validation import MOST_OPERATIONS
from perseus_ds.clocks.timers import Span
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Compute, Load, Other
from perseus_ds.ranks import Communicator
from perseus_ds.runtime.iterations import IterationMeasurement, NextIteration
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_PHASES = ("warm-up", "observe", "run")
# The first iteration under a plan begins at the clocks of the one before.
_SETTLED = 2
_MOST = 6


class TimelineLog:
    """Writes ``timeline.json`` on rank 0: a few iterations of its pipeline, one for each plan."""

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        *,
        gpu: str,
        simulated: bool,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self._communicator = communicator
        self._time = timebase
        self._path = directory / "timeline.json"
        self._file = TimelineFile(simulated=simulated, gpu=gpu)
        self._seen: dict[tuple[str, int | None], int] = {}
        self._kept = 0
        self._works = True

    def wants(self, phase: str, plan: int | None) -> bool:
        """Count an iteration; return whether it is to be kept, which all ranks of the first pipeline have to help with.

        They count alike; ranks of other pipelines keep nothing.
        """
        if phase not in _PHASES or not self._communicator.topology.is_shown:
            return False
        key = phase, plan
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] != _SETTLED or self._kept == _MOST:
            return False
        self._kept += 1
        return True

    def keep(self, ran: NextIteration, seen: IterationMeasurement) -> None:
        """Gather what all ranks of the first pipeline did; all of them must do so at the same time."""
        begun_s = seen.start_s - self._communicator.ahead_s(self._time)
        by_rank = self._communicator.pipeline_gather((begun_s, seen.spans(), dict(seen.clock_mhz)))
        if not self._communicator.is_rank_0 or not self._works:
            return
        first_s = by_rank[0][0]
        operations = [
            [entry for span in spans for entry in _entries(span, begun_s - first_s, clock_mhz)]
            for begun_s, spans, clock_mhz in by_rank
        ]
        iteration = MeasuredIteration(iteration=seen.number, phase=ran.phase, plan=ran.plan, ranks=operations)
        # What could not be read again is not written: iterations of large jobs are fewer.
        if self._file.operations + iteration.operations <= MOST_OPERATIONS:
            self._file.iterations.append(iteration)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, self._file.model_dump_json(exclude_none=True) + "\n")
            except OSError as error:
                self._works = False
                logger.warning("perseus: %s cannot be written (%s); training goes on without it.", self._path, error)


def _entries(span: Span, late_s: float, clock_mhz: Mapping[Instruction, int]) -> list[MeasuredOperation]:
    match span.operation:
        case Compute(instruction=instruction):
            parts: Sequence[Work] = (instruction,)
        case Load() | Other() as operation:
            parts = (operation,)
        case operation:
            parts = operation.transfers
    start_s, end_s = round(span.start_s + late_s, 6), round(span.end_s + late_s, 6)
    return [
        MeasuredOperation.of(part, start_s, end_s, clock_mhz.get(part) if isinstance(part, Instruction) else None)
        for part in parts
    ]
