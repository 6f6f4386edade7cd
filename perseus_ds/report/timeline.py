"""The timeline of one iteration: as predicted by a profile under a plan, as measured, and as the page needs it."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation
from perseus_ds.pipeline.dag import Dag, Node, Seconds
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer

# Sums of the same times in another order differ by less [s].
_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in which a rank is busy.

    Attributes:
        rank: Pipeline rank; a transfer has a bar for each of its two.
        start_s: From the iteration's start [s].
        end_s: From the iteration's start [s].
        clock_mhz: The plan's clock; None for what has no clock to choose.
        critical: On the critical path: slower here means a slower iteration.
    """

    rank: int
    work: Instruction | Load | Other | Transfer
    start_s: float
    end_s: float
    clock_mhz: int | None
    critical: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank waits.

    Attributes:
        awaited: What it could not begin before; None for the end of the iteration.
        start_s: From the iteration's start [s].
        end_s: From the iteration's start [s].
    """

    rank: int
    awaited: Instruction | Load | Other | Transfer | None
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"waiting for {self.awaited or 'the end of the iteration'}"


@dataclass(frozen=True)
class Timeline:
    """One iteration of one pipeline, from 0 to ``time_s``.

    Attributes:
        bars: What takes time, by rank and start.
        waits: What is left of the iteration, by rank and start.
        energy_j: Energy of the iteration, one GPU per rank [J].
    """

    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    ranks: int
    time_s: float
    energy_j: float


def timeline(dag: Dag, profile: StageProfile, plan: FrequencyPlan) -> Timeline:
    """Return when each instruction runs if it starts as early as it can.

    Raises:
        ProfileError: The plan has a clock that was not measured.
    """
    clock_mhz = {
        instruction: clock
        for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True)
        for instruction, clock in zip(stream, clocks, strict=True)
    }
    durations_s = _durations_s(dag, profile, clock_mhz)
    finish_s = dag.finish_s(durations_s)
    critical = set(dag.critical_path(durations_s))
    bars = [
        Bar(
            rank=rank,
            work=node.work,
            start_s=float(finish_s[index] - durations_s[index]),
            end_s=float(finish_s[index]),
            clock_mhz=clock_mhz.get(node.work) if isinstance(node.work, Instruction) else None,
            critical=index in critical,
        )
        for index, node in enumerate(dag.nodes)
        for rank in node.ranks
        if durations_s[index] > 0
    ]
    bars.sort(key=lambda bar: (bar.rank, bar.start_s))
    time_s = float(finish_s.max(initial=0.0))
    return Timeline(
        tuple(bars), _waits(dag, finish_s, durations_s, time_s), len(dag.schedule.ranks), time_s, plan.energy_j
    )


def _waits(dag: Dag, finish_s: Seconds, durations_s: Seconds, time_s: float) -> tuple[Wait, ...]:
    """Return the time of each rank between what it does, named after what it does next."""
    busy_until_s = [0.0] * len(dag.schedule.ranks)
    waits = []
    # Nodes that take no time count too: it is for a transfer that a rank waits.
    for index in np.argsort(finish_s - durations_s, kind="stable"):
        start_s = float(finish_s[index] - durations_s[index])
        for rank in dag.nodes[index].ranks:
            if start_s > busy_until_s[rank] + _INSTANT_S:
                waits.append(Wait(rank, dag.nodes[index].work, busy_until_s[rank], start_s))
            busy_until_s[rank] = max(busy_until_s[rank], float(finish_s[index]))
    waits += [Wait(rank, None, end_s, time_s) for rank, end_s in enumerate(busy_until_s) if end_s < time_s - _INSTANT_S]
    return tuple(sorted(waits, key=lambda wait: (wait.rank, wait.start_s)))


def _durations_s(dag: Dag, profile: StageProfile, clock_mhz: dict[Instruction, int]) -> Seconds:
    durations_s = dag.fixed_durations_s(profile.info.fixed_durations)
    for index, node in enumerate(dag.nodes):
        if isinstance(node.work, Instruction) and node.work in clock_mhz:
            work = node.work
            durations_s[index] = profile.at(work.stage, work.kind, clock_mhz[work]).time_s
    return durations_s


def measured_timeline(iteration: MeasuredIteration, *, energy_j: float) -> Timeline:
    """Return an iteration as it ran.

    A rank in a transfer whose partner has not come yet waits; only what follows is the transfer.
    Which of the two it is follows from when either side began, so it is as exact as the ranks'
    clocks are aligned: better than a millisecond on one host.

    Args:
        iteration: What was measured.
        energy_j: Of the iteration, one GPU per rank [J].
    """
    begun_s: dict[Transfer, float] = defaultdict(float)
    for operations in iteration.ranks:
        for operation in operations:
            work = _work(operation)
            if isinstance(work, Transfer):
                begun_s[work] = max(begun_s[work], operation.start_s)
    first_s = min((o.start_s for operations in iteration.ranks for o in operations), default=0.0)
    bars, waits = [], []
    for rank, operations in enumerate(iteration.ranks):
        for operation in operations:
            work, start_s, end_s = _work(operation), operation.start_s, operation.end_s
            if isinstance(work, Transfer):
                both_s = min(max(start_s, begun_s[work]), end_s)
                if both_s > start_s:
                    waits.append(Wait(rank, work, start_s - first_s, both_s - first_s))
                start_s = both_s
            if end_s > start_s:
                bars.append(Bar(rank, work, start_s - first_s, end_s - first_s, operation.clock_mhz, critical=False))
    time_s = max((bar.end_s for bar in bars), default=0.0)
    return Timeline(tuple(bars), tuple(waits), len(iteration.ranks), time_s, energy_j)


def _work(operation: MeasuredOperation) -> Instruction | Load | Other | Transfer:
    match operation.kind:
        case "activation" | "grad" as payload:
            assert operation.target is not None
            return Transfer(payload, operation.stage, operation.target, operation.micro_batch)
        case "load":
            return Load(operation.stage, operation.micro_batch)
        case "other":
            return Other(operation.command or "command", operation.stage, operation.micro_batch)
        case kind:
            return Instruction(operation.stage, Kind(kind), operation.micro_batch)


KINDS = (*(kind.value for kind in Kind), "load", "other", "activation", "grad")


def pipeline_data(dag: Dag, profile: StageProfile, frontier: Frontier) -> dict[str, Any]:
    """Return the DAG's nodes in columns, in topological order, and the data to evaluate plans with.

    ``option`` says which of a plan's clocks is a node's, -1 for a node without; a plan's clocks are
    those of its ranks one after the other.
    """
    position = {
        instruction: number for number, instruction in enumerate(i for stream in frontier.instructions for i in stream)
    }
    fixed_s = dag.fixed_durations_s(profile.info.fixed_durations)
    nodes = [_described(node) for node in dag.nodes]
    return {
        "kinds": KINDS,
        "ranks": len(dag.schedule.ranks),
        "kind": [kind for kind, _, _, _ in nodes],
        "stage": [stage for _, stage, _, _ in nodes],
        "target": [target for _, _, target, _ in nodes],
        "micro_batch": [micro_batch for _, _, _, micro_batch in nodes],
        "node_ranks": [node.ranks for node in dag.nodes],
        "predecessors": dag.predecessors,
        "option": [position.get(node.work, -1) if isinstance(node.work, Instruction) else -1 for node in dag.nodes],
        "fixed_s": [round(float(value), 7) for value in fixed_s],
        "blocking_power_w": frontier.provenance.blocking_power_w,
        "rows": _rows(profile),
        "plans": [packed_clocks(plan) for plan in frontier.plans],
        "baseline": packed_clocks(frontier.baseline),
    }


def packed_clocks(plan: FrequencyPlan) -> str:
    """Return a plan's clocks [MHz], rank by rank, as base64 of little-endian 16-bit numbers."""
    clocks = np.array([clock for stream in plan.clocks_mhz for clock in stream], dtype="<u2")
    return base64.b64encode(clocks.tobytes()).decode()


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the page draws it: what each rank does, and how long for."""
    return {
        "ranks": timeline.ranks,
        "time_s": timeline.time_s,
        "energy_j": None if np.isnan(timeline.energy_j) else timeline.energy_j,
        "bars": [
            [
                bar.rank,
                round(bar.start_s, 6),
                round(bar.end_s, 6),
                *_described(Node(bar.work, (bar.rank,))),
                bar.clock_mhz,
            ]
            for bar in timeline.bars
        ],
    }


def _described(node: Node) -> tuple[int, int, int, int]:
    """Return kind, stage, receiving stage (-1 if it is no transfer) and micro-batch."""
    match node.work:
        case Transfer(payload=payload, source=source, target=target, micro_batch=micro_batch):
            return KINDS.index(payload), source, target, micro_batch
        case Load(stage=stage, micro_batch=micro_batch):
            return KINDS.index("load"), stage, -1, micro_batch
        case Other(stage=stage, number=number):
            return KINDS.index("other"), stage, -1, number
        case Instruction(stage=stage, kind=kind, micro_batch=micro_batch):
            return KINDS.index(kind.value), stage, -1, micro_batch


def _rows(profile: StageProfile) -> dict[str, dict[int, Sequence[float]]]:
    """Return time [s] and energy [J] by clock, by stage and kind."""
    rows: dict[str, dict[int, Sequence[float]]] = {}
    for m in profile.measurements:
        key = f"{m.stage}/{KINDS.index(m.kind.value)}"
        rows.setdefault(key, {})[m.clock_mhz] = (m.time_s, float(f"{m.energy_j:.6g}"))
    return rows
