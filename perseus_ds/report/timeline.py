"""The timeline of one iteration, predicted or measured, and its data for the page and for traces.

Traces are in Chrome's format ("Trace Event Format": complete ``X``, counter ``C`` and metadata ``M`` events, times in
microseconds), which Perfetto (https://ui.perfetto.dev) and chrome://tracing open. Each timeline is a process. Each rank
is a thread with its instructions and waits, a second thread with its transfers, and a counter with its clock.
"""

from __future__ import annotations

import base64
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import MeasuredIteration, Work, described
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import Dag, Seconds
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer

_US = 1e6
Event = dict[str, Any]
# As in publications on schedules that split the backward.
_LETTERS = {Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
# Sums of the same times in different orders differ by less than this [s].
_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Bar:
    """A period in which a rank is busy, relative to the iteration's start.

    Attributes:
        rank: Pipeline rank. A transfer has a bar for each of its two ranks.
        work: The instruction, load, transfer or unknown command.
        clock_mhz: The plan's clock, or None if there is no clock to choose.
        critical: Whether it is on the critical path.
    """

    rank: int
    work: Work
    start_s: float
    end_s: float
    clock_mhz: int | None
    critical: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """A period in which a rank waits, relative to the iteration's start.

    Attributes:
        awaited: The work that it waits for, or None for the end of the iteration.
    """

    rank: int
    awaited: Work | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One iteration of one pipeline, from 0 to ``time_s``.

    Attributes:
        bars: Busy periods by rank and start.
        waits: Waiting periods by rank and start.
        ranks: Number of pipeline ranks.
        energy_j: Energy of the iteration with one GPU per rank [J].
    """

    bars: tuple[Bar, ...]
    waits: tuple[Waiting, ...]
    ranks: int
    time_s: float
    energy_j: float


def timeline(dag: Dag, profile: StageProfile, plan: FrequencyPlan) -> Timeline:
    """Return the predicted timeline of a plan, in which every operation starts as early as possible.

    Raises:
        ProfileError: If the plan has a clock that was not measured.
    """
    clock_mhz = plan.clock_of_mhz
    durations_s = dag.fixed_durations_s(profile.info.fixed_durations)
    for index, node in enumerate(dag.nodes):
        if isinstance(node.work, Instruction) and node.work in clock_mhz:
            durations_s[index] = profile.at(node.work.stage, node.work.kind, clock_mhz[node.work]).time_s
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


def _waits(dag: Dag, finish_s: Seconds, durations_s: Seconds, time_s: float) -> tuple[Waiting, ...]:
    """Return the waiting periods of each rank, each named after the work that follows it."""
    busy_until_s = [0.0] * len(dag.schedule.ranks)
    waits = []
    # Nodes that take no time are included, because a rank may wait for such a transfer.
    for index in np.argsort(finish_s - durations_s, kind="stable"):
        start_s = float(finish_s[index] - durations_s[index])
        for rank in dag.nodes[index].ranks:
            if start_s > busy_until_s[rank] + _INSTANT_S:
                waits.append(Waiting(rank, dag.nodes[index].work, busy_until_s[rank], start_s))
            busy_until_s[rank] = max(busy_until_s[rank], float(finish_s[index]))
    waits += [
        Waiting(rank, None, end_s, time_s) for rank, end_s in enumerate(busy_until_s) if end_s < time_s - _INSTANT_S
    ]
    return tuple(sorted(waits, key=lambda wait: (wait.rank, wait.start_s)))


def measured_timeline(iteration: MeasuredIteration, *, energy_j: float) -> Timeline:
    """Return the timeline of a measured iteration.

    A rank in a transfer waits until the other rank has arrived, and only the rest of the time is the transfer. This
    division is derived from the starts on both ranks, so it is as exact as the synchronisation of their clocks: better
    than a millisecond on one host.
    """
    begun_s: dict[Transfer, float] = defaultdict(float)
    for operations in iteration.ranks:
        for operation in operations:
            work = operation.work
            if isinstance(work, Transfer):
                begun_s[work] = max(begun_s[work], operation.start_s)
    first_s = min((o.start_s for operations in iteration.ranks for o in operations), default=0.0)
    bars, waits = [], []
    for rank, operations in enumerate(iteration.ranks):
        for operation in operations:
            work, start_s, end_s = operation.work, operation.start_s, operation.end_s
            if isinstance(work, Transfer):
                both_s = min(max(start_s, begun_s[work]), end_s)
                if both_s > start_s:
                    waits.append(Waiting(rank, work, start_s - first_s, both_s - first_s))
                start_s = both_s
            if end_s > start_s:
                bars.append(Bar(rank, work, start_s - first_s, end_s - first_s, operation.clock_mhz, critical=False))
    time_s = max((bar.end_s for bar in bars), default=0.0)
    return Timeline(tuple(bars), tuple(waits), len(iteration.ranks), time_s, energy_j)


KINDS = (*(kind.value for kind in Kind), "load", "other", "activation", "grad")


def pipeline_data(dag: Dag, profile: StageProfile, frontier: Frontier) -> dict[str, Any]:
    """Return the DAG's nodes as columns, in topological order, and the data to evaluate plans with.

    ``option`` is the index of a node's clock in a plan, in which the clocks of all ranks are concatenated, or -1 for a
    node without a clock.
    """
    position = {instruction: number for number, instruction in enumerate(chain(*frontier.instructions))}
    fixed_s = dag.fixed_durations_s(profile.info.fixed_durations)
    columns = zip(*(_described(node.work) for node in dag.nodes), strict=True)
    return {
        "kinds": KINDS,
        "ranks": len(dag.schedule.ranks),
        **dict(zip(("kind", "stage", "target", "micro_batch"), columns, strict=True)),
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
    """Return a plan's clocks [MHz] by rank, as base64 of little-endian 16-bit numbers."""
    clocks = np.array([*chain(*plan.clocks_mhz)], dtype="<u2")
    return base64.b64encode(clocks.tobytes()).decode()


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the format that the page draws."""
    return {
        "ranks": timeline.ranks,
        "time_s": timeline.time_s,
        "energy_j": None if np.isnan(timeline.energy_j) else timeline.energy_j,
        "bars": [
            [bar.rank, round(bar.start_s, 6), round(bar.end_s, 6), *_described(bar.work), bar.clock_mhz]
            for bar in timeline.bars
        ],
    }


def _described(work: Work) -> tuple[int, int, int, int]:
    """Return kind, stage, receiving stage (-1 if it is not a transfer) and micro-batch."""
    kind, stage, target, micro_batch = described(work)
    return KINDS.index(kind), stage, -1 if target is None else target, micro_batch


def _rows(profile: StageProfile) -> dict[str, dict[int, Sequence[float]]]:
    """Return time [s] and energy [J] by stage and kind, and by clock."""
    rows: dict[str, dict[int, Sequence[float]]] = {}
    for m in profile.measurements:
        key = f"{m.stage}/{KINDS.index(m.kind.value)}"
        rows.setdefault(key, {})[m.clock_mhz] = (m.time_s, float(f"{m.energy_j:.6g}"))
    return rows


def chrome_trace(
    timelines: Mapping[str, Timeline], about: Mapping[str, Any], profile: StageProfile | None
) -> dict[str, Any]:
    """Return the contents of a trace file."""
    events: list[Event] = []
    for process, (name, shown) in enumerate(timelines.items(), start=1):
        events += _named("process", name, process, {"pid": process})
        for rank in range(shown.ranks):
            bars = [bar for bar in shown.bars if bar.rank == rank]
            own: list[Bar | Waiting] = [bar for bar in bars if not isinstance(bar.work, Transfer)]
            own += [wait for wait in shown.waits if wait.rank == rank]
            for lane, slices in enumerate([own, *_lanes([bar for bar in bars if isinstance(bar.work, Transfer)])]):
                # Perfetto confuses threads of different processes if they have the same number.
                thread = {"pid": process, "tid": 10_000 * process + 10 * rank + lane}
                label = f"rank {rank}" + (f" transfers{' (more)' if lane > 1 else ''}" if lane else "")
                events += _named("thread", label, thread["tid"], thread)
                events += [thread | _slice(item, profile) for item in sorted(slices, key=lambda item: item.start_s)]
            timed = sorted((bar for bar in bars if bar.clock_mhz is not None), key=lambda bar: bar.start_s)
            changes = (next(run) for _, run in groupby(timed, key=lambda bar: bar.clock_mhz))
            counter = {"ph": "C", "pid": process, "name": f"clock of rank {rank}"}
            events += [counter | {"ts": round(bar.start_s * _US, 3), "args": {"MHz": bar.clock_mhz}} for bar in changes]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _named(what: str, name: str, place: int, ids: Mapping[str, int]) -> list[Event]:
    """Return metadata events with the name and position of a process or thread."""
    common = {"ph": "M", "ts": 0, **ids}
    return [
        common | {"name": f"{what}_name", "args": {"name": name}},
        common | {"name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _lanes(bars: list[Bar]) -> list[list[Bar | Waiting]]:
    """Distribute bars over as few lanes as possible, since slices of one thread must not overlap."""
    lanes: list[list[Bar | Waiting]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        for lane in lanes:
            if lane[-1].end_s <= bar.start_s + 1e-9:
                lane.append(bar)
                break
        else:
            lanes.append([bar])
    return lanes


def _slice(item: Bar | Waiting, profile: StageProfile | None) -> Event:
    # Rounded at both ends, so that adjacent slices stay adjacent.
    start_us, end_us = round(item.start_s * _US, 3), round(item.end_s * _US, 3)
    event: Event = {"ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3)}
    if isinstance(item, Waiting):
        return event | {"name": "wait", "cat": "wait", "args": {"for": str(item.awaited or "the end of the iteration")}}
    arguments: dict[str, Any] = {"what": str(item.work), "critical": item.critical}
    if item.clock_mhz is not None and isinstance(item.work, Instruction):
        arguments["clock_mhz"] = item.clock_mhz
    if profile is not None and item.clock_mhz is not None and isinstance(item.work, Instruction):
        with contextlib.suppress(ProfileError):  # the profile may lack this clock
            row = profile.at(item.work.stage, item.work.kind, item.clock_mhz)
            arguments["profile_power_w"] = round(row.energy_j / row.time_s, 1)
            arguments["profile_energy_j"] = round(row.energy_j, 4)
    kind = item.work.kind.value if isinstance(item.work, Instruction) else type(item.work).__name__.lower()
    return event | {"name": short_name(item.work), "cat": kind, "args": arguments}


def short_name(work: Work) -> str:
    """Return a short name for a slice, such as ``F0`` for the forward of micro-batch 0."""
    match work:
        case Instruction(kind=Kind.TAIL):
            return "tail"
        case Instruction(kind=kind, micro_batch=micro_batch):
            return f"{_LETTERS.get(kind, kind.value[0].upper())}{micro_batch}"
        case Load(micro_batch=micro_batch):
            return f"load {micro_batch}"
        case Other(command=command):
            return command
        case Transfer(payload=payload, micro_batch=micro_batch):
            return f"{payload} {micro_batch}"
