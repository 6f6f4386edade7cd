"""The timeline of one iteration, predicted or measured, and its data for the page and for traces.

Traces are in Chrome's format ("Trace Event Format": complete ``X``, counter ``C`` and metadata ``M`` events, times in
microseconds), which Perfetto (https://ui.perfetto.dev) and chrome://tracing open. Each timeline is a process. Each rank
is a thread with its instructions and waits, a second thread with its transfers, and a counter with its clock.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import MeasuredIteration, Work, described
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import Dag
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

    A transfer has a bar for each of its two ranks. Without a clock to choose, ``clock_mhz`` is None.
    """

    rank: int
    work: Work
    start_s: float
    end_s: float
    clock_mhz: int | None
    critical: bool = False


class Waiting(NamedTuple):
    """A period in which a rank waits, and the work that follows it, None at the end of the iteration."""

    start_s: float
    end_s: float
    awaited: Work | None


@dataclass(frozen=True)
class DrawnTimeline:
    """One iteration of one pipeline, from 0 to ``time_s``.

    Attributes:
        bars: Busy periods by rank and start.
        ranks: Number of pipeline ranks.
        energy_j: Energy of the iteration with one GPU per rank [J].
    """

    bars: tuple[Bar, ...]
    ranks: int
    time_s: float
    energy_j: float

    def waits(self, rank: int) -> list[Waiting]:
        """Return the periods in which a rank is not busy."""
        busy_until_s, found = 0.0, []
        own = ((bar.start_s, bar.end_s, bar.work) for bar in self.bars if bar.rank == rank)
        for start_s, end_s, work in (*own, (self.time_s, self.time_s, None)):
            if start_s > busy_until_s + _INSTANT_S:
                found.append(Waiting(busy_until_s, start_s, work))
            busy_until_s = max(busy_until_s, end_s)
        return found


def timeline(dag: Dag, profile: StageProfile, plan: FrequencyPlan) -> DrawnTimeline:
    """Return the predicted timeline of a plan, in which every operation starts as early as possible."""
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
    return DrawnTimeline(tuple(bars), len(dag.schedule.ranks), float(finish_s.max(initial=0.0)), plan.energy_j)


def measured_timeline(iteration: MeasuredIteration, *, energy_j: float = math.nan) -> DrawnTimeline:
    """Return the timeline of a measured iteration.

    A rank in a transfer waits until the other rank has arrived, and only the rest of the time is the transfer. This
    division is derived from the starts on both ranks, so it is as exact as the synchronisation of their clocks: better
    than a millisecond on one host.
    """
    both_s: dict[Work, float] = {}
    for operation in chain(*iteration.ranks):
        if isinstance(operation.work, Transfer):
            both_s[operation.work] = max(both_s.get(operation.work, operation.start_s), operation.start_s)
    first_s = min((operation.start_s for operation in chain(*iteration.ranks)), default=0.0)
    bars = []
    for rank, operations in enumerate(iteration.ranks):
        for operation in operations:
            start_s = max(operation.start_s, both_s.get(operation.work, operation.start_s))
            if operation.end_s > start_s:
                times_s = start_s - first_s, operation.end_s - first_s
                bars.append(Bar(rank, operation.work, *times_s, operation.clock_mhz))
    bars.sort(key=lambda bar: (bar.rank, bar.start_s))
    time_s = max((bar.end_s for bar in bars), default=0.0)
    return DrawnTimeline(tuple(bars), len(iteration.ranks), time_s, energy_j)


KINDS = (*(kind.value for kind in Kind), "load", "other", "activation", "grad")


def pipeline_data(dag: Dag, profile: StageProfile, frontier: Frontier) -> dict[str, Any]:
    """Return the DAG's nodes as columns, in topological order, and the data to evaluate plans with.

    ``option`` is the index of a node's clock in a plan, in which the clocks of all ranks are concatenated, or -1 for a
    node without a clock.
    """
    position = {instruction: number for number, instruction in enumerate(chain(*frontier.instructions))}
    columns = zip(*(_described(node.work) for node in dag.nodes), strict=True)
    rows: defaultdict[str, dict[int, tuple[float, float]]] = defaultdict(dict)  # by stage and kind, and by clock
    for m in profile.measurements:
        rows[f"{m.stage}/{KINDS.index(m.kind.value)}"][m.clock_mhz] = m.time_s, float(f"{m.energy_j:.6g}")
    return {
        "ranks": len(dag.schedule.ranks),
        **dict(zip(("kind", "stage", "target", "micro_batch"), columns, strict=True)),
        "node_ranks": [node.ranks for node in dag.nodes],
        "predecessors": dag.predecessors,
        "option": [position.get(node.work, -1) if isinstance(node.work, Instruction) else -1 for node in dag.nodes],
        "fixed_s": [round(float(value), 7) for value in dag.fixed_durations_s(profile.info.fixed_durations)],
        "blocking_power_w": frontier.provenance.blocking_power_w,
        "rows": rows,
        "plans": [_packed_clocks(plan) for plan in frontier.plans],
        "baseline": _packed_clocks(frontier.baseline),
    }


def _packed_clocks(plan: FrequencyPlan) -> str:
    """Return a plan's clocks [MHz] by rank, as base64 of little-endian 16-bit numbers."""
    return base64.b64encode(np.array([*chain(*plan.clocks_mhz)], dtype="<u2").tobytes()).decode()


def timeline_data(timeline: DrawnTimeline) -> dict[str, Any]:
    """Return a timeline in the format that the page draws."""
    return {
        "ranks": timeline.ranks,
        "time_s": timeline.time_s,
        "energy_j": None if math.isnan(timeline.energy_j) else timeline.energy_j,
        "bars": [
            [bar.rank, round(bar.start_s, 6), round(bar.end_s, 6), *_described(bar.work), bar.clock_mhz]
            for bar in timeline.bars
        ],
    }


def _described(work: Work) -> tuple[int, int, int, int]:
    """Return kind, stage, receiving stage (-1 if it is not a transfer) and micro-batch."""
    kind, stage, target, micro_batch = described(work)
    return KINDS.index(kind), stage, -1 if target is None else target, micro_batch


def chrome_trace(
    timelines: Mapping[str, DrawnTimeline], about: Mapping[str, Any], profile: StageProfile | None
) -> dict[str, Any]:
    """Return the contents of a trace file."""
    events: list[Event] = []
    for process, (name, shown) in enumerate(timelines.items(), start=1):
        events += _named("process", name, process, {"pid": process})
        for rank in range(shown.ranks):
            bars = [bar for bar in shown.bars if bar.rank == rank]
            own = [_slice_of(bar, profile) for bar in bars if not isinstance(bar.work, Transfer)]
            own += [_slice(*wait[:2], "wait", "wait", {"for": str(wait.awaited or "the end of the iteration")})
                    for wait in shown.waits(rank)]  # fmt: skip
            transfers = _lanes([bar for bar in bars if isinstance(bar.work, Transfer)])
            slices_of_transfers = [[_slice_of(bar, profile) for bar in each] for each in transfers]
            for lane, slices in enumerate([own, *slices_of_transfers]):
                # Perfetto confuses threads of different processes if they have the same number.
                thread = {"pid": process, "tid": 10_000 * process + 10 * rank + lane}
                label = f"rank {rank}" + (f" transfers{' (more)' if lane > 1 else ''}" if lane else "")
                events += _named("thread", label, thread["tid"], thread)
                events += [thread | event for event in sorted(slices, key=lambda event: event["ts"])]
            timed = [bar for bar in bars if bar.clock_mhz is not None]
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


def _lanes(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Distribute bars over as few lanes as possible, since slices of one thread must not overlap."""
    lanes: list[list[Bar]] = []
    for bar in bars:
        free = next((lane for lane in lanes if lane[-1].end_s <= bar.start_s + _INSTANT_S), None)
        if free is None:
            lanes.append(free := [])
        free.append(bar)
    return lanes


def _slice(start_s: float, end_s: float, name: str, category: str, arguments: Mapping[str, Any]) -> Event:
    # Rounded at both ends, so that adjacent slices stay adjacent.
    start_us, end_us = round(start_s * _US, 3), round(end_s * _US, 3)
    shown = {"name": name, "cat": category, "args": arguments}
    return {"ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), **shown}


def _slice_of(bar: Bar, profile: StageProfile | None) -> Event:
    arguments: dict[str, Any] = {"what": str(bar.work), "critical": bar.critical}
    kind = type(bar.work).__name__.lower()
    if isinstance(bar.work, Instruction):
        kind = bar.work.kind.value
        if bar.clock_mhz is not None:
            arguments["clock_mhz"] = bar.clock_mhz
            with contextlib.suppress(ProfileError):  # the profile may lack this clock
                row = profile and profile.at(bar.work.stage, bar.work.kind, bar.clock_mhz)
                if row:
                    arguments["profile_power_w"] = round(row.energy_j / row.time_s, 1)
                    arguments["profile_energy_j"] = round(row.energy_j, 4)
    return _slice(bar.start_s, bar.end_s, short_name(bar.work), kind, arguments)


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
