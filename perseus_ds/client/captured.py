"""An iteration captured into a CUDA graph. Each replay marks and times its operations."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from perseus_ds.client.clocks import AgentClocks
from perseus_ds.clocks.timers import GraphTimes
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation


class CapturedIteration:
    """The operations of an iteration, which are captured and not executed.

    A graph marks the same slots in each replay, under any plan. So every instruction is marked, and its position is its
    place in the order in which instructions were captured.

    Attributes:
        instructions: Instructions in that order.
        inputs: Known shapes of the inputs of forwards.
        times: Times of the operations in a replay.
    """

    def __init__(self, clocks: AgentClocks, times: GraphTimes) -> None:
        self.instructions: list[Instruction] = []
        self.inputs: list[Hashable] = []
        self.times = times
        self._clocks = clocks

    @contextmanager
    def operation(self, operation: Operation, inputs: Hashable = None) -> Iterator[None]:
        """Context manager for capturing one operation. See ``PerseusRuntime.operation``."""
        if not isinstance(operation, Compute):
            with self.times.around(operation):
                yield
            return
        instruction, position = operation.instruction, len(self.instructions)
        self.instructions.append(instruction)
        if inputs and instruction.kind is Kind.FORWARD:
            self.inputs.append(inputs)
        self._clocks.mark(2 * position)
        with self.times.around(operation):
            yield
        if instruction.kind is not Kind.TAIL:  # it ends after the graph
            self._clocks.mark(2 * position + 1)

    @property
    def tail_stage(self) -> int | None:
        """Stage of the tail, which begins after all passes were captured. None if some were not."""
        last = self.instructions[-1] if self.instructions else None
        return last.stage if last is not None and last.kind is Kind.TAIL else None
