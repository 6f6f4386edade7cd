"""What surrounds each operation of an iteration: its clock is set, and its time taken."""

from __future__ import annotations

from types import TracebackType

from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.clock_transitions import ClockTransition
from perseus_ds.device.rank_clocks import ClockPlan, IterationClocks
from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Operation

_LATENCY_MOVED = 0.2


class Operations:
    """Surrounds the operations of one iteration after the other, on the training thread.

    Attributes:
        plan: The clocks of this iteration.
        steps: What is asked of the clock for it.
    """

    def __init__(self, execution: Execution, clocks: ClockController, ranks: Communicator) -> None:
        """Begin at default clocks.

        Args:
            execution: Times operations.
            clocks: Sets the clock.
            ranks: All ranks.
        """
        self._execution = execution
        self._clocks = clocks
        self._ranks = ranks
        self.plan = ClockPlan.none()
        self.steps = IterationClocks()
        self._steps_for: tuple[ClockPlan, float] = self.plan, 0.0
        self._step: ClockTransition | None = None
        self._aligns_tail = False

    def prepare(self, plan: ClockPlan, *, align_tail: bool) -> None:
        """Ask for the first clock of an iteration, and plan for the others.

        Args:
            plan: The clocks.
            align_tail: Have all ranks begin their tails together, so that no wait is taken for work.
        """
        self.plan = plan
        self._aligns_tail = align_tail
        latency_s = self._clocks.latency_s
        planned, planned_latency_s = self._steps_for
        # Those of the iteration before are kept unless the plan or the latency has changed.
        if plan is not planned or abs(latency_s - planned_latency_s) > _LATENCY_MOVED * planned_latency_s:
            self.steps = plan.transitions(latency_s)
            self._steps_for = plan, latency_s
        self._clocks.request(self.steps.first_mhz)

    def drop_plan(self) -> None:
        """Go on at default clocks; from any thread."""
        self.plan, self.steps, self._step = ClockPlan.none(), IterationClocks(), None
        self._clocks.request(None)

    def begin(self, operation: Operation) -> None:
        """An operation is about to be issued: its clock is due, and the time has come to plan for the next one's."""
        if not isinstance(operation, Compute):
            self._execution.begin(operation)
            return
        if self._aligns_tail and operation.instruction.kind is Kind.TAIL:
            self._aligns_tail = False
            self._execution.wait()
            self._ranks.barrier()
        step = self._step = self.steps.by_instruction.get(operation.instruction)
        if step is None:
            self._execution.begin(operation)
            return
        self._clocks.request(step.clock_mhz)
        begun = self._execution.begin(operation)
        if step.early_s is not None:
            self._clocks.request_early(step.next_clock_mhz, begun, step.early_s)

    def end(self, operation: Operation) -> None:
        """An operation was issued: as soon as it is over, the next instruction's clock is due."""
        moment = self._execution.end(operation)
        if self._step is not None and isinstance(operation, Compute):
            self._clocks.request(self._step.next_clock_mhz, moment)


class Surround:
    """A context manager around one operation; without a generator, since it runs once for each."""

    __slots__ = ("_operation", "_operations")

    def __init__(self, operations: Operations, operation: Operation) -> None:
        self._operations = operations
        self._operation = operation

    def __enter__(self) -> None:
        self._operations.begin(self._operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._operations.end(self._operation)
