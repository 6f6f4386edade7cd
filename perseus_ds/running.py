"""The phase that trains under plans: follows the policy, stragglers and orders, and watches for drift."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone

from perseus_ds.clock_plan import ClockPlan
from perseus_ds.errors import PlanError
from perseus_ds.execution import Span
from perseus_ds.frontier import Frontier
from perseus_ds.instruction import Kind
from perseus_ds.phases import Phase, Seen, Tools
from perseus_ds.plan import check_instructions
from perseus_ds.policy import Situation, decide, no_slower_than
from perseus_ds.ranks import Pending
from perseus_ds.schedule import Compute
from perseus_ds.stragglers import Straggler, StragglerWatch

ClockTimes = dict[tuple[int, Kind, int], float]
"""What the profile says that instructions take, by stage, kind and clock [s]."""

_WATCH_EVERY = 10
_STRIKES = 2
_REMEMBERED = 10
_NOBODY = -1.0


def load_frontier(tools: Tools, path: str) -> Frontier:
    """Return the frontier that rank 0 reads, on all ranks.

    Raises:
        PerseusError: On all ranks: the file is wrong, or its plans fit not this schedule or GPU.
    """

    def read() -> Frontier:
        frontier = Frontier.load(path)
        if frontier.provenance.simulated and not tools.gpu.simulated:
            raise PlanError(
                f"{path} was measured on simulated GPUs, this job runs on {tools.gpu.name}. "
                'Measure a profile here: "mode": "profile".'
            )
        check_instructions(frontier.instructions, tools.job.schedule.instructions)
        return frontier

    frontier = tools.ranks.from_first(read)
    rank = tools.ranks.place.pipeline_rank

    def check() -> None:
        for number, plan in enumerate(frontier.plans):
            ClockPlan.of_rank(plan, number, rank).check(tools.gpu)

    tools.ranks.together(check)
    return frontier


class Running:
    """Trains under the plan that the policy asks for.

    Once an iteration the ranks tell each other, while the next one runs, how long it took them, and
    rank 0 which plan it has decided on: so all ranks change plans at the same boundary, the second
    after what it is a response to.

    Args:
        tools: Of this rank.
        frontier: The plans.
        expected: What the profile says that instructions take; empty where it is not known.
        again: Makes the phase that profiles again when they take something else.
    """

    name = "run"
    records = False
    measures = False

    def __init__(
        self, tools: Tools, frontier: Frontier, expected: ClockTimes, again: Callable[[], Phase] | None = None
    ) -> None:
        self._tools = tools
        self._frontier = frontier
        self._expected = expected
        self._again = again
        self._pipelines = tools.ranks.all_gather(tools.ranks.place.data_parallel_rank)
        self._stragglers = StragglerWatch()
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._boundary_s = 0.0
        self._iterations = 0
        self._strikes = 0
        self._problem = ""
        self._pending: Pending | None = None
        self._clock_plan = ClockPlan.none()
        self._known: tuple[int, int | None, bool] | None = None
        self._apply(tools.ranks.from_first(self._decision))

    @property
    def clock_plan(self) -> ClockPlan:
        return self._clock_plan

    def after(self, seen: Seen) -> Phase:
        self._iterations += 1
        now_s = time.monotonic()
        if self._clock_plan.plan is not None and self._iterations > 1:
            # From boundary to boundary: what lies between iterations takes time too.
            self._times.append((now_s - self._boundary_s) / self._clock_plan.plan.time_s)
        self._boundary_s = now_s
        spans = seen.spans() if self._tools.ranks.place.data_parallel > 1 or self._is_watching else []
        if self._again is not None and self._drifts(spans):
            if self._pending is not None:
                self._pending.result()
            return self._again()
        self._agree(self._own_ratio(spans))
        return self

    @property
    def _is_watching(self) -> bool:
        return bool(self._expected) and self._iterations % _WATCH_EVERY == 0

    def _agree(self, ratio: float) -> None:
        """Take in what was told at the last boundary, and tell what is new."""
        if self._pending is not None:
            numbers = self._pending.result()
            self._apply([float(number) for number in numbers[0, 1:]])
            ratios = [
                max(float(numbers[rank, 0]) for rank, owner in enumerate(self._pipelines) if owner == pipeline)
                for pipeline in sorted(set(self._pipelines))
            ]
            if self._clock_plan.plan is not None and all(ratio > 0 for ratio in ratios):
                self._stragglers.update(ratios)
        decision = self._decision() if self._tools.ranks.is_first else [0.0] * 4
        self._pending = self._tools.ranks.start_all_gather([ratio, *decision])

    def _decision(self) -> list[float]:
        """Return plan, straggler, its slowdown, and whether to pause; on rank 0."""
        orders = self._tools.orders
        situation = Situation(
            step=orders.steps,
            now=datetime.now(timezone.utc),
            time_ratio=statistics.median(self._times) if self._times else 1.0,
            gpus_per_rank=self._tools.ranks.world_size // self._tools.ranks.place.pipeline_ranks,
        )
        decision = decide(orders.policy, self._frontier, situation)
        if decision.problem and not self._problem:
            self._tools.recorder.event("policy", problem=decision.problem)
            self._tools.announce(decision.problem)
        self._problem = decision.problem
        straggler = orders.straggler() or self._stragglers.found
        told = (float(straggler.pipeline), straggler.slowdown) if straggler else (_NOBODY, 1.0)
        return [float(decision.plan), *told, float(orders.paused)]

    def _apply(self, decision: list[float]) -> None:
        plan, pipeline, slowdown, paused = decision
        straggler = Straggler(int(pipeline), slowdown) if pipeline != _NOBODY else None
        ours = int(plan)
        place = self._tools.ranks.place
        if straggler is not None and straggler.pipeline != place.data_parallel_rank:
            ours = no_slower_than(self._frontier, ours, slowdown * self._frontier.plans[ours].time_s)
        if paused:
            self._clock_plan = ClockPlan.none()
        elif self._clock_plan.number != ours:
            self._clock_plan = ClockPlan.of_rank(
                self._frontier.plans[ours], ours, place.pipeline_rank, default=self._frontier.baseline
            )
        known = (int(plan), straggler.pipeline if straggler else None, bool(paused))
        if self._known is not None and known != self._known:
            self._tools.recorder.event(
                "plan", plan=known[0], straggler=known[1], slowdown=round(slowdown, 3), paused=known[2]
            )
        self._known = known

    def _own_ratio(self, spans: list[Span]) -> float:
        """Return when this rank had computed its last, relative to the plan's end; 0 if it is not known."""
        plan = self._clock_plan.plan
        computed = [
            span.end_s
            for span in spans
            if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL
        ]
        return max(computed) / plan.time_s if plan is not None and computed else 0.0

    def _drifts(self, spans: list[Span]) -> bool:
        """Whether instructions take longer or shorter than profiled, told by their median, twice in a row."""
        if not self._is_watching or self._clock_plan.plan is None:
            return False
        drift = self._tools.ranks.all_max(abs(self._instruction_ratio(spans) - 1))
        # A pipeline that straggles is no reason to measure all over again.
        drifted = drift > self._tools.config.max_drift and self._stragglers.found is None
        self._strikes = self._strikes + 1 if drifted else 0
        if self._strikes < _STRIKES:
            return False
        self._tools.recorder.event("drift", drift=drift)
        self._tools.announce(f"instructions take {drift:.0%} longer or shorter than profiled; profiling again")
        return True

    def _instruction_ratio(self, spans: list[Span]) -> float:
        ratios = []
        for span in spans:
            if isinstance(span.operation, Compute):
                instruction = span.operation.instruction
                key = (instruction.stage, instruction.kind, self._clock_plan.clock.get(instruction, 0))
                if key in self._expected:
                    ratios.append(span.time_s / self._expected[key])
        return statistics.median(ratios) if ratios else 1.0
