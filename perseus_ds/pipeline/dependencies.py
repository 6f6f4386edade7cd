"""Checks that the stages of a schedule wait for each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule

_FORWARD = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class _StagePass(NamedTuple):
    """The forward or the backward pass of a stage on a micro-batch."""

    name: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.name} of micro-batch {self.micro_batch} on stage {self.stage}"


def check_dependencies(schedule: Schedule) -> None:
    """Check that each pass of a stage comes after the one that it depends on.

    A forward depends on that of the previous stage, and a backward on that of the next one, through transfers or on the
    same rank. The backward in a ``forward_backward`` is not checked, because it is not named.

    Raises:
        ScheduleError: A pass does not wait, or the schedule has no DAG (:meth:`Dag.build`).
    """
    dag = Dag.build(schedule)
    # By pass: its rank, and the number of nodes that have finished on the rank with it.
    finished_with: dict[_StagePass, tuple[int, int]] = {}
    counts = [0] * len(schedule.ranks)
    # By node and rank: the number of nodes that have finished on the rank before the node finishes.
    finished = np.zeros((len(dag.nodes), len(schedule.ranks)), np.int32)
    for index, node in enumerate(dag.nodes):
        if len(node.ranks) > 1:  # a transfer
            continue
        rank = node.ranks[0]
        counts[rank] += 1
        finished[index, rank] = counts[rank]
        if isinstance(node.work, Instruction) and (own := _pass_of(node.work)) is not None:
            finished_with[own] = rank, counts[rank]
    for index, node in enumerate(dag.nodes):
        before = finished[[*dag.predecessors[index]]].max(axis=0, initial=0)
        needed = _needed_by(node.work) if isinstance(node.work, Instruction) else None
        if needed in finished_with:
            rank, number = finished_with[needed]
            if before[rank] < number:
                raise ScheduleError(
                    f"{schedule.name}: the {node.work} on rank {node.ranks[0]} can begin before the {needed} on rank "
                    f"{rank}, on which it depends. Expected a transfer between these stages, which rank {rank} sends "
                    f"after the one and rank {node.ranks[0]} receives before the other. Let the schedule name all "
                    "transfers: plans for ranks that seem independent do not keep what they promise."
                )
        finished[index] = np.maximum(finished[index], before)


def _pass_of(instruction: Instruction) -> _StagePass | None:
    if instruction.kind in _FORWARD:
        return _StagePass("forward", instruction.micro_batch, instruction.stage)
    return _StagePass("backward", instruction.micro_batch, instruction.stage) if instruction.kind in _BACKWARD else None


def _needed_by(instruction: Instruction) -> _StagePass | None:
    """Return the pass on which an instruction depends, if any."""
    own = _pass_of(instruction)
    if own is None:
        return None
    return own._replace(stage=own.stage + (1 if own.name == "backward" else -1))
