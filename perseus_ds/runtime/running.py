"""The phase that trains under plans: follows the policy, stragglers and orders, and watches for drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Span
from perseus_ds.distributed import Pending
from perseus_ds.errors import ConfigError, PlanError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.policy.assignment import Assignment, Choice
from perseus_ds.policy.drift import DriftWatch
from perseus_ds.policy.policies import Situation, decide
from perseus_ds.policy.run_statistics import RunStatistics
from perseus_ds.policy.stragglers import StragglerWatch
from perseus_ds.runtime.phases import Phase, Seen, Tools

_DRIFT_EVERY = 10


def load_frontier(tools: Tools, path: str) -> Frontier:
    """Return the frontier that rank 0 reads, on all ranks.

    Raises:
        PerseusError: On all ranks: the file is wrong, or its plans fit not this schedule or GPU.
    """

    def read() -> Frontier:
        if not Path(path).exists():
            raise ConfigError(
                f'"frontier": {path} does not exist on rank 0\'s node. Write it with "perseus-ds optimize".'
            )
        frontier = Frontier.load(path)
        if frontier.provenance.simulated and not tools.gpu.simulated:
            raise PlanError(
                f"{path} was measured on simulated GPUs, this job runs on {tools.gpu.name}. "
                'Measure a profile here: "mode": "profile".'
            )
        check_instructions(frontier.instructions, tools.job.schedule.instructions)
        return frontier

    frontier = tools.ranks.from_first(read)
    rank = tools.ranks.topology.pipeline_rank

    def check() -> None:
        for number, plan in enumerate(frontier.plans):
            ClockPlan.of_rank(plan, number, rank).check(tools.gpu)

    tools.ranks.together(check)
    return frontier


class Running:
    """Trains under the plan that the policy asks for.

    Once an iteration the ranks tell each other, while the next one runs, how it went, and rank 0
    what it has decided on: so all ranks change plans at the same boundary, the second after what it
    is a response to.

    Args:
        tools: Of this rank.
        frontier: The plans.
        again: Makes the phase that profiles again when instructions take something else than profiled; None where
            that is only said.
    """

    records = False
    measures = False

    def __init__(self, tools: Tools, frontier: Frontier, again: Callable[[], Phase] | None = None) -> None:
        topology = tools.ranks.topology
        self._tools = tools
        self._frontier = frontier
        self._again = again
        self._drift = DriftWatch(frontier.instruction_times_s, tools.config.max_drift)
        self._pipelines = torch.tensor(tools.ranks.all_gather(topology.data_parallel_rank))
        self._gpus_per_rank = tools.ranks.world_size // topology.pipeline_ranks
        self._stragglers = StragglerWatch(topology.data_parallel)
        self._pace = RunStatistics()
        self._ended_s: float | None = None
        self._iterations = 0
        self._policy = tools.orders.policy
        self._has_complained = False
        self._has_drifted_before = False
        self._pending: tuple[Pending, Assignment] | None = None
        self.clock_plan = ClockPlan.none()
        self._running: int | None = None
        self._assignment = self._assign(tools.ranks.from_first(self._choose))
        tools.orders.progress = self

    @property
    def name(self) -> str:
        return "pause" if self._assignment.choice.paused else "run"

    def after(self, seen: Seen) -> Phase:
        self._iterations += 1
        if self._ended_s is not None:
            self._pace.add_stop(seen.start_s - self._ended_s)
        self._ended_s = seen.start_s + seen.time_s
        looks_for_drift = bool(self._frontier.instruction_times_s) and self._iterations % _DRIFT_EVERY == 0
        spans = seen.spans() if self._tools.ranks.topology.data_parallel > 1 or looks_for_drift else []
        if looks_for_drift and self._has_drifted(seen, spans) and self._again is not None:
            self._drop_pending()
            self._tools.orders.progress, self._tools.recorder.drift = None, None
            return self._again()
        self._agree(seen, spans)
        return self

    def state(self) -> dict[str, Any]:
        return {"plan": self._running, "rooms": list(self._stragglers.rooms), "pace": self._pace.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was saved, from the next iteration on; all ranks do so at once."""
        self._drop_pending()
        if state:
            self._running = min(int(state["plan"]), len(self._frontier.plans) - 1)
            self._pace.restore(state["pace"])
            if len(state["rooms"]) == len(self._stragglers.rooms):
                self._stragglers.rooms = tuple(state["rooms"])
        self._assignment = self._assign(self._tools.ranks.from_first(self._as_before if state else self._choose))

    def _as_before(self) -> Choice:
        orders = self._tools.orders
        return Choice(self._running or 0, orders.paused, orders.straggler())

    def _agree(self, seen: Seen, spans: list[Span]) -> None:
        """Take in what was told at the last boundary, and tell what is new."""
        ran = self._assignment
        if self._pending is not None:
            pending, before = self._pending
            numbers = pending.result()
            self._take_in(numbers, before)
            self._assignment = self._assign(Choice.from_numbers(numbers[0, 4:].tolist()))
        choice = self._choose() if self._tools.ranks.is_first else Choice(0)
        told = [*_own_times_s(spans), seen.time_s, seen.energy_j, *choice.as_numbers()]
        self._pending = self._tools.ranks.start_all_gather(told), ran

    def _take_in(self, numbers: torch.Tensor, ran: Assignment) -> None:
        """Learn from an iteration of all ranks: computing, tail and all of it [s], energy [J]."""
        if ran.choice.paused:
            return
        promised = self._frontier.plans[ran.choice.plan]
        self._pace.add_iteration(
            time_s=float(numbers[:, 2].max()),
            energy_j=float(numbers[:, 3].sum()),
            promised_time_s=promised.time_s,
            promised_energy_j=promised.energy_j * self._gpus_per_rank,
        )
        if self._tools.ranks.topology.data_parallel > 1 and numbers[:, 0].min() > 0:
            # Whoever reduces last waits for nobody: its tail is what the tail takes.
            tail_s = numbers[:, 1].min()
            own_s = [numbers[self._pipelines == pipeline, 0].max() + tail_s for pipeline in range(len(ran.plans))]
            self._stragglers.update(
                [float(s / self._frontier.plans[plan].time_s) for s, plan in zip(own_s, ran.plans, strict=True)]
            )

    def _choose(self) -> Choice:
        """Decide; on rank 0."""
        tools, orders = self._tools, self._tools.orders
        if orders.policy != self._policy:
            self._policy, self._has_complained = orders.policy, False
            tools.recorder.event("policy", policy=orders.policy.model_dump(mode="json"))
        situation = Situation(
            step=orders.steps,
            now=datetime.now(timezone.utc),
            time_ratio=self._pace.time_ratio,
            power_ratio=self._pace.power_ratio,
            stopped_s=self._pace.stopped_s,
            gpus_per_rank=self._gpus_per_rank,
            running=self._running,
        )
        decision = decide(self._policy, self._frontier, situation)
        if decision.problem and not self._has_complained:
            self._has_complained = True
            tools.recorder.event("policy", problem=decision.problem)
            tools.announce(decision.problem)
        return Choice(decision.plan, orders.paused, orders.straggler())

    def _assign(self, choice: Choice) -> Assignment:
        """Give every pipeline its plan, from the next iteration on."""
        self._running = choice.plan
        assignment = Assignment.of(self._frontier, choice, self._stragglers.rooms)
        if self._iterations and assignment == self._assignment:
            return assignment
        topology = self._tools.ranks.topology
        ours = assignment.plans[topology.data_parallel_rank]
        self.clock_plan = ClockPlan.none()
        if not choice.paused:
            forecast = assignment.forecast(self._frontier, topology.tensor_parallel)
            self.clock_plan = ClockPlan.of_rank(
                self._frontier.plans[ours], ours, topology.pipeline_rank, forecast, self._frontier.instruction_times_s
            )
        straggler = assignment.straggler
        details = {
            "plan": choice.plan,
            "plans": list(assignment.plans),
            "straggler": straggler.pipeline if straggler else None,
            "slowdown": round(straggler.slowdown, 3) if straggler else 1.0,
            "paused": choice.paused,
        }
        if self._iterations:
            self._tools.recorder.event("plan", **details)
        self._tools.orders.decided = {**details, "t_min_s": self._frontier.t_min_s, "t_star_s": self._frontier.t_star_s}
        return assignment

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._pending[0].result()
            self._pending = None

    def _has_drifted(self, seen: Seen, spans: list[Span]) -> bool:
        """Whether instructions take longer or shorter than profiled; all ranks ask at once."""
        known = not (seen.failed or self._assignment.choice.paused)  # otherwise clocks are not the plan's
        ours = self._drift.of_rank(spans, seen.clock) if known else 0.0
        by_rank = self._tools.ranks.all_gather_numbers([ours])[:, 0]
        pipelines = [float(by_rank[self._pipelines == n].max()) for n in range(len(self._assignment.plans))]
        self._tools.recorder.drift = drift = max(pipelines)
        if not self._drift.has_drifted(pipelines) or self._has_drifted_before:
            return False
        self._has_drifted_before = True
        self._tools.recorder.event("drift", drift=round(drift, 4))
        remedy = "profiling again" if self._again else "the plans no longer fit: profile the job as it is now"
        self._tools.announce(f"instructions take {drift:.0%} longer or shorter than profiled; {remedy}")
        return True


def _own_times_s(spans: list[Span]) -> tuple[float, float]:
    """Return when this rank had computed its last, and how long its tail was, waiting included [s]; 0 if not known."""
    computed = [span.end_s for span in spans if isinstance(span.operation, Compute) and not _is_tail(span.operation)]
    tail = [span.end_s for span in spans if isinstance(span.operation, Compute) and _is_tail(span.operation)]
    last_s = max(computed, default=0.0)
    return last_s, max(0.0, max(tail, default=last_s) - last_s)


def _is_tail(operation: Compute) -> bool:
    return operation.instruction.kind is Kind.TAIL
