"""Rank 0's decisions from the moment at which they are made until all ranks run by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.rank_report import JobReport
from perseus_ds.distributed import Communicator
from perseus_ds.policy.assignment import Assignment, PipelineOrder, PlanChoice
from perseus_ds.policy.plan_follower import PlanFollower


@dataclass(frozen=True)
class InForce:
    """What iterations run by.

    Attributes:
        order: As this rank is told.
        assignment: On rank 0, the plans of all pipelines; None elsewhere.
    """

    order: PipelineOrder
    assignment: Assignment | None


class PlanOrders:
    """Numbers rank 0's decisions, and brings each of them into force on all ranks at the same boundary.

    Attributes:
        now: What the next iteration runs by.
        decided: On rank 0, what it has decided last, which is sent with its report; elsewhere that of the beginning.

    Args:
        communicator: All ranks.
        frontier: The plans.
        follower: Assigns plans to pipelines.
        choose: Decides, on rank 0.
    """

    def __init__(
        self,
        communicator: Communicator,
        frontier: Frontier,
        follower: PlanFollower,
        choose: Callable[[], PlanChoice],
    ) -> None:
        self._communicator = communicator
        self._frontier = frontier
        self._follower = follower
        self._numbers = 0
        self._begin(lambda: self._order_of(follower.assign(choose()), 0))

    def begin_again(self, choose: Callable[[], PlanChoice]) -> bool:
        """Bring what rank 0 decides into force at once, on all ranks; return whether it is another assignment."""
        before = self.now.order.number
        self._begin(lambda: self._numbered(self._follower.assign(choose())))
        return self.now.order.number != before

    def _begin(self, decide: Callable[[], InForce]) -> None:
        decided = self._communicator.from_first(decide)
        assert decided.assignment is not None
        factor = decided.assignment.stretch_factors[self._communicator.topology.data_parallel_rank]
        order = replace(decided.order, stretch_factor=factor)
        self.now = InForce(order, decided.assignment if self._communicator.is_first else None)
        self.decided = self.now
        self._follower.follow(order.plan)

    def decide(self, choice: PlanChoice) -> None:
        """Assign plans to all pipelines, on rank 0: they come into force once all ranks have been told."""
        self.decided = self._numbered(self._follower.assign(choice))

    @property
    def stretch_factors(self) -> Sequence[float]:
        """Of each pipeline, as decided; none for 1 throughout, and on other ranks."""
        assignment = self.decided.assignment
        return () if assignment is None or max(assignment.stretch_factors) == 1 else assignment.stretch_factors

    def take(self, report: JobReport) -> bool:
        """Bring what all ranks have been told into force; return whether it is another assignment."""
        before = self.now.order.number
        self.now = InForce(PipelineOrder.of_report(report), self.decided.assignment)
        self._follower.follow(report.plan)
        return report.assignment != before

    def _numbered(self, assignment: Assignment) -> InForce:
        for known in (self.now, self.decided):
            if assignment == known.assignment:
                return known
        self._numbers += 1
        return self._order_of(assignment, self._numbers)

    def _order_of(self, assignment: Assignment, number: int) -> InForce:
        choice = assignment.choice
        by_profile = assignment.forecast(self._frontier, 1)
        order = PipelineOrder(
            number=number,
            plan=choice.plan,
            paused=choice.paused,
            halts=choice.halts,
            stretch_factor=assignment.stretch_factors[0],
            promised_slowdown=by_profile.time_s / by_profile.default_time_s - 1,
        )
        return InForce(order, assignment)
