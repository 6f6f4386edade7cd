"""Plans for micro-batches whose lengths the job gives before their iteration begins.

When iteration n begins, each rank begins an exchange of its own channel with the lengths that it was given since the
last one. Rank 0 has iteration n + 1 planned by a separate process meanwhile, and answers with the plan as soon as that
is there, at the latest when n + 1 begins. A rank that has the answer by then runs the plan, any other default clocks:
training waits for neither. All ranks call all methods but :meth:`LookAhead.give` together.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from perseus_ds.errors import ConnectionLostError
from perseus_ds.optimizer.lengths import IterationPlan, Lengths
from perseus_ds.optimizer.lengths_worker import LengthsWorker, PlannedJob
from perseus_ds.ranks import Communicator, Pending, StoreChannel

_KEPT = 64
"""The lengths of so many iterations are kept, past ones and those to come."""
_MOST_LENGTHS, _LONGEST = 65_536, 1e15
_LOOK_S = 0.002
_LATE_IN_A_ROW = 10


@dataclass(frozen=True)
class Outlook:
    """Lengths of an iteration, and plans for it, as known when it begins.

    Attributes:
        iteration: Its number, as counted by :class:`LookAhead`.
        lengths: Of each pipeline's micro-batches.
        order: Number of the order that it was planned for.
        plan: Plans for all pipelines; None if there are none in time.
    """

    iteration: int
    lengths: tuple[Lengths, ...]
    order: int = 0
    plan: IterationPlan | None = None


def check_lengths(lengths: Sequence[float]) -> None:
    """Check the lengths of the micro-batches of an iteration.

    Raises:
        ValueError: They are no lengths.
    """
    wrong = [number for number, length in enumerate(lengths) if not 0 < length < _LONGEST]
    if wrong or not 1 <= len(lengths) <= _MOST_LENGTHS:
        given = f"{lengths[wrong[0]]!r} of micro-batch {wrong[0]}" if wrong else f"{len(lengths)} lengths"
        raise ValueError(
            f"next_lengths: expected the length of each micro-batch of an iteration, such as its number of tokens, "
            f"each above 0; given {given}. Give one number for each micro-batch."
        )


class LookAhead:
    """The lengths given for iterations to come, and plans for these.

    Attributes:
        iteration: Number of the iteration that runs or has ended last.
        outlook: What is known of it; None where it is not known on this rank.
        used_for: For how many iterations lengths have been exchanged; 0 while no rank has given any.
    """

    def __init__(self, communicator: Communicator, say: Callable[[str], None]) -> None:
        self._communicator = communicator
        self._say = say
        self.iteration = 0
        self.outlook: Outlook | None = None
        self.used_for = 0
        self.has_given = False
        self._given: deque[Lengths] = deque(maxlen=_KEPT)
        self._next = 1
        self._unsent: list[tuple[int, Lengths]] = []
        self._channel: StoreChannel | None = None
        self._pending: deque[Pending[Outlook | None]] = deque()
        self._lengths: dict[int, Lengths] = {}
        # On rank 0: the lengths of each pipeline by iteration, and who plans, by the number of micro-batches.
        self._of_pipelines: dict[int, dict[int, Lengths]] = {}
        self._planners: dict[int, _Planner] = {}

    def give(self, lengths: Sequence[float]) -> None:
        """Accept the lengths of the next iteration for which none were given yet, from any thread.

        Raises:
            ValueError: They are no lengths.
        """
        check_lengths(lengths)
        self.has_given = True
        self._given.append(tuple(map(float, lengths)))

    @property
    def is_used(self) -> bool:
        """True if lengths are exchanged."""
        return self._channel is not None

    def use(self) -> None:
        """Exchange lengths from the next iteration on: a rank has been given some."""
        if self._channel is None:
            self._channel = self._communicator.open_channel()

    def begin(self) -> None:
        """Set the outlook of the iteration that begins, and exchange lengths, without waiting."""
        self.iteration += 1
        self.outlook = None
        self._number_given()
        if self._channel is None:
            return
        self.used_for += 1
        try:
            while self._pending and self._pending[0].is_over_within(0.0):
                self._take(self._pending.popleft().result())
            unsent, self._unsent = self._unsent, []
            answer = partial(self._answer, self.iteration)
            self._pending.append(self._channel.exchange([], unsent or None, answer))
        except ConnectionLostError:  # the exchange of reports says so
            self._channel = None

    def _number_given(self) -> None:
        """Number the lengths given since the last iteration, and forget those of iterations that have begun."""
        while self._given:
            number = max(self._next, self.iteration)
            self._next = number + 1
            self._unsent.append((number, self._given.popleft()))
        self._unsent = [one for one in self._unsent if one[0] >= self.iteration][-_KEPT:]

    def _take(self, known: Outlook | None) -> None:
        if known is None:
            return
        self._lengths[known.iteration] = known.lengths[self._communicator.topology.data_parallel_rank]
        for number in [number for number in self._lengths if number <= known.iteration - _KEPT]:
            del self._lengths[number]
        if known.iteration == self.iteration:
            self.outlook = known

    def lengths_of(self, iteration: int) -> Lengths | None:
        """Return the lengths of this pipeline's micro-batches, or None if they are not known on this rank."""
        return self._lengths.get(iteration)

    def relative(self, iteration: int) -> tuple[float, float]:
        """Return, on rank 0, time and energy predicted at default clocks, relative to the profile's length.

        They are 1 if iterations are not planned, and NaN if those of this one are not known.
        """
        if not self._planners:
            return 1.0, 1.0
        found = (planner.plans.get(iteration) for planner in self._planners.values())
        plan = next((plan for plan in found if plan is not None), None)
        return (math.nan, math.nan) if plan is None else (plan.relative_time, plan.relative_energy)

    def start_planner(self, job: PlannedJob, log_path: Path, order: int, slowdown: float) -> None:
        """Start a process that plans iterations of an order, on rank 0.

        Raises:
            OSError: It cannot be started.
        """
        self.stop_planner(order)
        worker = LengthsWorker(job, log_path)
        self._planners[job.schedule.micro_batches] = _Planner(worker, order, slowdown, self._say)

    def set_slowdown(self, order: int, slowdown: float) -> None:
        """Let iterations of an order take so much longer than at the fastest clocks, as a fraction."""
        for planner in self._planners.values():
            if planner.order == order:
                planner.slowdown = slowdown

    def stop_planner(self, order: int) -> None:
        """Plan iterations of an order no more."""
        for micro_batches, planner in [*self._planners.items()]:
            if planner.order == order:
                del self._planners[micro_batches]
                planner.stop()

    def close(self) -> None:
        """End all processes."""
        for planner in [*self._planners.values()]:
            self.stop_planner(planner.order)

    def _answer(self, begun: int, _: npt.NDArray[Any], values: Sequence[Any]) -> Outlook | None:
        """Return the outlook of the iteration after one that has begun, on rank 0 and a thread of Perseus."""
        wanted, of_pipelines = begun + 1, self._of_pipelines
        for pipeline, given in zip(self._communicator.pipeline_of_rank.tolist(), values, strict=True):
            for number, lengths in given or ():
                of_pipelines.setdefault(number, {}).setdefault(pipeline, lengths)
        for number in [number for number in of_pipelines if not begun < number <= begun + _KEPT]:
            del of_pipelines[number]
        pipelines = 1 + int(self._communicator.pipeline_of_rank.max())
        known = {
            number: tuple(of_pipeline[pipeline] for pipeline in range(pipelines))
            for number, of_pipeline in sorted(of_pipelines.items())
            if len(of_pipeline) == pipelines
        }
        if (lengths := known.get(wanted)) is None:
            return None
        planner = self._planners.get(len(lengths[0]))
        if planner is None or any(len(own) != len(lengths[0]) for own in lengths):
            return Outlook(wanted, lengths)
        plan = planner.plan(wanted, known, lambda: self.iteration >= wanted)
        return Outlook(wanted, lengths, planner.order, plan)


class _Planner:
    """Requests plans for iterations whose lengths are known, one after the other.

    Attributes:
        order: Number of the order whose iterations are planned.
        slowdown: How much longer they may take than at the fastest clocks, as a fraction.
        plans: By iteration, those made for the last ones.
    """

    def __init__(self, worker: LengthsWorker, order: int, slowdown: float, say: Callable[[str], None]) -> None:
        self._worker = worker
        self._say = say
        self._requested: int | None = None
        self._late = 0
        self.order = order
        self.slowdown = slowdown
        self.plans: dict[int, IterationPlan] = {}

    def plan(
        self, wanted: int, known: Mapping[int, tuple[Lengths, ...]], has_begun: Callable[[], bool]
    ) -> IterationPlan | None:
        """Return the plan for an iteration, or None if there is none when the iteration has begun."""
        self._request(known)
        while wanted not in self.plans and not self._worker.error:
            plan = self._worker.received(_LOOK_S)
            if plan is not None and self._requested is not None:
                self.plans[self._requested], self._requested = plan, None
                self._request(known)
            elif has_begun():
                break
        for number in [number for number in self.plans if number <= wanted - _KEPT]:
            del self.plans[number]
        found = self.plans.get(wanted)
        self._note(found)
        return found

    def _request(self, known: Mapping[int, tuple[Lengths, ...]]) -> None:
        """Request the plan for the first iteration without one."""
        number = next((number for number in known if number not in self.plans), None)
        if self._requested is None and number is not None:
            self._requested = number
            self._worker.request(known[number], self.slowdown)

    def _note(self, found: IterationPlan | None) -> None:
        """Say once that plans come too late, or no more."""
        self._late = 0 if found is not None else self._late + 1
        if self._late == _LATE_IN_A_ROW:
            why = self._worker.error or (
                "planning takes longer than an iteration: give lengths more iterations ahead, if they are known"
            )
            self._say(f"no plans for the lengths given, iterations run at default clocks: {why.rstrip('.')}")

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._worker.stop()
