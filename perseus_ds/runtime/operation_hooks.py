"""Begin and end of each operation of an iteration: its clock is set, and its time taken."""

from __future__ import annotations

import contextlib
from types import TracebackType

from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.clock_transitions import ClockTransition
from perseus_ds.device.moments import Moment
from perseus_ds.device.rank_clocks import ClockPlan, IterationClocks
from perseus_ds.device.timers import Execution
from perseus_ds.distributed import Communicator
from perseus_ds.errors import ConnectionLostError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Operation

_LATENCY_MOVED = 0.2


class OperationHooks:
    """Called at the begin and end of the operations of one iteration after the other, on the training thread.

    Attributes:
        plan: The clocks of this iteration.
        requested: The clocks that are requested for it.
    """

    def __init__(self, timers: Execution, clocks: ClockController, communicator: Communicator) -> None:
        """Begin at default clocks.

        Args:
            timers: Times operations.
            clocks: Sets the clock.
            communicator: All ranks.
        """
        self._timers = timers
        self._clocks = clocks
        self._communicator = communicator
        self.plan = ClockPlan.none()
        self.requested = IterationClocks()
        self._requested_for: tuple[ClockPlan, float] = self.plan, 0.0
        self._transition: ClockTransition | None = None
        self._aligns_tail = False
        self._begun: Moment | None = None

    def start_iteration(self, plan: ClockPlan, *, aligns_tail: bool) -> Moment:
        """Request the first clock of an iteration, and plan the others; returns when the device begins it.

        Args:
            plan: The clocks.
            aligns_tail: Whether all ranks begin their tails together, so that waiting is not counted as work.
        """
        self._begun = self._timers.start_iteration()
        self.change_plan(plan)
        self._aligns_tail = aligns_tail
        return self._begun

    def change_plan(self, plan: ClockPlan) -> None:
        """Request the first clock of other clocks for an iteration of which no operation was issued yet."""
        self.plan = plan
        self._aligns_tail = False
        latency_s = self._clocks.latency_s
        planned, planned_latency_s = self._requested_for
        # Those of the iteration before are kept unless the plan or the latency has changed.
        if plan is not planned or abs(latency_s - planned_latency_s) > _LATENCY_MOVED * planned_latency_s:
            self.requested = plan.transitions(latency_s)
            self._requested_for = plan, latency_s
        # The device may still be at the iteration before, which keeps its clocks.
        self._clocks.request(self.requested.first_mhz, self._begun)

    def drop_plan(self) -> None:
        """Continue at default clocks; may be called from any thread."""
        self.plan, self.requested, self._transition = ClockPlan.none(), IterationClocks(), None
        self._clocks.request(None)

    def begin(self, operation: Operation) -> None:
        """An operation is about to be issued: its clock is due, and the next one's may have to be asked for early."""
        if not isinstance(operation, Compute):
            self._timers.begin(operation)
            return
        if self._aligns_tail and operation.instruction.kind is Kind.TAIL:
            self._aligns_tail = False
            self._timers.wait()
            with contextlib.suppress(ConnectionLostError):  # the next report says so
                self._communicator.barrier()
        transition = self._transition = self.requested.by_instruction.get(operation.instruction)
        if transition is None:
            self._timers.begin(operation)
            return
        self._clocks.request(transition.clock_mhz)
        begun = self._timers.begin(operation)
        if transition.early_s is not None:
            self._clocks.request_early(transition.next_clock_mhz, begun, transition.early_s)

    def end(self, operation: Operation) -> None:
        """An operation was issued: as soon as it is over, the next instruction's clock is due."""
        moment = self._timers.end(operation)
        transition = self._transition  # another thread may drop it
        if transition is not None and isinstance(operation, Compute):
            self._clocks.request(transition.next_clock_mhz, moment)


class OperationScope:
    """A context manager around one operation; no generator, since it is entered for each operation."""

    __slots__ = ("_hooks", "_operation")

    def __init__(self, hooks: OperationHooks, operation: Operation) -> None:
        self._hooks = hooks
        self._operation = operation

    def __enter__(self) -> None:
        self._hooks.begin(self._operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.end(self._operation)
