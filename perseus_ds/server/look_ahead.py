"""Lengths of micro-batches in future iterations, and plans for these iterations.

Ranks send lengths before their iteration begins. When those of all pipelines are known, another process plans the
iteration. Training never waits for a plan: an iteration that begins before its plan arrives runs at default clocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from perseus_ds.optimizer.lengths import IterationPlan, Lengths, LengthsWorker, PlannedJob

_KEPT = 128
"""Number of past iterations, and of future ones, for which lengths and plans are kept."""
_MISSED_IN_A_ROW = 10


class LookAhead:
    """Collects lengths and requests plans from one process for each order.

    Attributes:
        is_used: Whether any lengths were received.
    """

    def __init__(
        self, pipelines: int, say: Callable[[str], None], worker: Callable[..., LengthsWorker] = LengthsWorker
    ) -> None:
        """Begin without lengths, given the number of data-parallel pipelines."""
        self.is_used = False
        self._pipelines = pipelines
        self._say = say
        self._is_announced = False
        self._worker = worker
        # By iteration, the lengths of each pipeline.
        self._given: dict[int, dict[int, Lengths]] = {}
        # By number of the order.
        self._planners: dict[int, _Planner] = {}

    def give(self, iteration: int, pipeline: int, lengths: Lengths, begun: int) -> None:
        """Add the lengths of a pipeline's micro-batches in an iteration, none if they were too late.

        ``begun`` is the number of the last iteration that has begun.
        """
        self.is_used = True
        if not lengths or iteration > begun + _KEPT:
            return
        self._given.setdefault(iteration, {}).setdefault(pipeline, lengths)
        for number in [number for number in self._given if number <= begun - _KEPT]:
            del self._given[number]

    def lengths_of(self, iteration: int, pipeline: int) -> Lengths | None:
        """Return the lengths of a pipeline's micro-batches, or None if they are unknown."""
        return self._given.get(iteration, {}).get(pipeline)

    def relative(self, iteration: int) -> tuple[float, float]:
        """Return predicted time and energy at default clocks, relative to the profile's length.

        They are 1 if iterations are not planned by length, and NaN if this one has no plan.
        """
        if not self._planners:
            return 1.0, 1.0
        found = (planner.plans.get(iteration) for planner in self._planners.values())
        plan = next((plan for plan in found if plan is not None), None)
        return (math.nan, math.nan) if plan is None else (plan.relative_time, plan.relative_energy)

    def plans_of(self, order: int) -> Mapping[int, IterationPlan]:
        """Return the plans for iterations of an order, by iteration."""
        return self._planners[order].plans if order in self._planners else {}

    def new_plans(self, begun: int) -> list[tuple[int, int]]:
        """Request plans for iterations after ``begun``, and return order and iteration of new plans."""
        if not self._planners:
            return []
        known = {
            number: tuple(of_pipeline[pipeline] for pipeline in range(self._pipelines))
            for number, of_pipeline in sorted(self._given.items())
            if number > begun and len(of_pipeline) == self._pipelines
        }
        return [(order, number) for order, planner in self._planners.items() for number in planner.new_plans(known)]

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when a plan arrives."""
        return [file for planner in self._planners.values() for file in planner.files]

    def has_ended(self, iteration: int, order: int, *, is_missed: bool) -> None:
        """Record whether an iteration ran without its plan, and print once if plans keep being late."""
        planner = self._planners.get(order)
        if planner is not None and len(self._given.get(iteration, ())) == self._pipelines:
            why = planner.count_missed(is_missed=is_missed or iteration not in planner.plans)
            if why is not None and not self._is_announced:
                self._is_announced = True
                self._say(f"no plans for the lengths given, iterations run at default clocks: {why}")

    def start(self, job: PlannedJob, log_path: Path, order: int) -> None:
        """Start a process that plans iterations of an order."""
        self.stop(order)
        self._planners[order] = _Planner(self._worker(job, log_path), job.schedule.micro_batches)

    def set_slowdown(self, order: int, slowdown: float) -> None:
        """Set how much longer iterations of an order may take than at the highest clocks, as a fraction."""
        if order in self._planners:
            self._planners[order].slowdown = slowdown

    def stop(self, order: int) -> None:
        if (planner := self._planners.pop(order, None)) is not None:
            planner.stop()

    def close(self) -> None:
        """End all processes."""
        for order in [*self._planners]:
            self.stop(order)


class _Planner:
    """Requests plans for iterations of one order, one at a time.

    Attributes:
        slowdown: How much longer iterations may take than at the highest clocks, as a fraction.
        plans: Plans of the last iterations, by iteration.
    """

    def __init__(self, worker: LengthsWorker, micro_batches: int) -> None:
        self.slowdown = 0.0
        self.plans: dict[int, IterationPlan] = {}
        self._worker = worker
        self._micro_batches = micro_batches
        self._requested: int | None = None
        self._missed = 0

    def new_plans(self, known: Mapping[int, tuple[Lengths, ...]]) -> list[int]:
        """Request plans for iterations with known lengths, and return the iterations with new plans."""
        made: list[int] = []
        while not self._worker.error:
            if self._requested is not None:
                plan = self._worker.received(0.0)
                if plan is None:
                    break
                self.plans[self._requested] = plan
                made.append(self._requested)
                self._requested = None
            wanted = (number for number, lengths in known.items() if number not in self.plans and self._fits(lengths))
            self._requested = next(wanted, None)
            if self._requested is None:
                break
            self._worker.request(known[self._requested], self.slowdown)
        for number in sorted(self.plans)[: -2 * _KEPT]:
            del self.plans[number]
        return made

    @property
    def files(self) -> list[int]:
        is_awaited = self._requested is not None and not self._worker.error
        return [self._worker.file] if is_awaited else []

    def _fits(self, lengths: tuple[Lengths, ...]) -> bool:
        return all(len(of_pipeline) == self._micro_batches for of_pipeline in lengths)

    def count_missed(self, *, is_missed: bool) -> str | None:
        """Count iterations in a row without their plan, and return the reason once these are too many."""
        self._missed = self._missed + 1 if is_missed else 0
        if self._missed < _MISSED_IN_A_ROW:
            return None
        return self._worker.error.rstrip(".") or (
            "planning takes longer than an iteration: give lengths more iterations ahead, if they are known"
        )

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._worker.stop()
