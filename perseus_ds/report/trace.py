"""Timelines as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Each timeline is a process, each rank a thread with its instructions and waits, a second one with
its transfers, and a counter with its clock. Format: "Trace Event Format", complete (``X``),
counter (``C``) and metadata (``M``) events, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Other, Transfer
from perseus_ds.report.timeline import Bar, Timeline, Wait

_US = 1e6
Event = dict[str, Any]

# As in papers on schedules that split the backward.
_LETTERS = {Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


def chrome_trace(
    timelines: Mapping[str, Timeline], about: Mapping[str, Any], profile: StageProfile | None
) -> dict[str, Any]:
    """Return the content of a trace file."""
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _process(process, name, timeline, profile)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _process(process: int, name: str, timeline: Timeline, profile: StageProfile | None) -> list[Event]:
    events = [_metadata("process_name", process, name=name)]
    events.append(_metadata("process_sort_index", process, sort_index=process))
    for rank in range(timeline.ranks):
        bars = [bar for bar in timeline.bars if bar.rank == rank]
        own: list[Bar | Wait] = [bar for bar in bars if not isinstance(bar.work, Transfer)]
        own += [wait for wait in timeline.waits if wait.rank == rank]
        lanes = [own, *_lanes([bar for bar in bars if isinstance(bar.work, Transfer)])]
        for lane, slices in enumerate(lanes):
            # Perfetto confuses threads of different processes that have the same number.
            thread = 10_000 * process + 10 * rank + lane
            label = f"rank {rank}" + (f" transfers{' (more)' if lane > 1 else ''}" if lane else "")
            events.append(_metadata("thread_name", process, name=label) | {"tid": thread})
            events.append(_metadata("thread_sort_index", process, sort_index=thread) | {"tid": thread})
            events += [
                _slice((process, thread), item, profile) for item in sorted(slices, key=lambda item: item.start_s)
            ]
        events += _counter(process, rank, bars)
    return events


def _lanes(bars: list[Bar]) -> list[list[Bar | Wait]]:
    """Spread bars over as few lanes as they need; slices of one thread must not overlap."""
    lanes: list[list[Bar | Wait]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        for lane in lanes:
            if lane[-1].end_s <= bar.start_s + 1e-9:
                lane.append(bar)
                break
        else:
            lanes.append([bar])
    return lanes


def _slice(place: tuple[int, int], item: Bar | Wait, profile: StageProfile | None) -> Event:
    process, thread = place
    # Rounded at both ends, so that adjacent slices stay adjacent.
    start_us, end_us = round(item.start_s * _US, 3), round(item.end_s * _US, 3)
    event: Event = {"ph": "X", "pid": process, "tid": thread, "ts": start_us, "dur": round(end_us - start_us, 3)}
    if isinstance(item, Wait):
        return event | {"name": "wait", "cat": "wait", "args": {"for": str(item.awaited or "the end of the iteration")}}
    arguments: dict[str, Any] = {"what": str(item.work), "critical": item.critical}
    if item.clock_mhz is not None:
        arguments["clock_mhz"] = item.clock_mhz
        arguments |= _by_profile(item, profile)
    kind = item.work.kind.value if isinstance(item.work, Instruction) else type(item.work).__name__.lower()
    return event | {"name": short_name(item.work), "cat": kind, "args": arguments}


def short_name(work: Instruction | Load | Other | Transfer) -> str:
    """Return a name that fits into a slice: ``F0`` for the forward of micro-batch 0."""
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


def _by_profile(bar: Bar, profile: StageProfile | None) -> dict[str, float]:
    """Return power and energy as far as the profile knows this clock."""
    if profile is None or bar.clock_mhz is None or not isinstance(bar.work, Instruction):
        return {}
    try:
        row = profile.at(bar.work.stage, bar.work.kind, bar.clock_mhz)
    except ProfileError:
        return {}
    return {"profile_power_w": round(row.energy_j / row.time_s, 1), "profile_energy_j": round(row.energy_j, 4)}


def _counter(process: int, rank: int, bars: list[Bar]) -> list[Event]:
    """Return the clock that the plan asks for, whenever it changes."""
    events: list[Event] = []
    last = None
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        if bar.clock_mhz is not None and bar.clock_mhz != last:
            last = bar.clock_mhz
            counter = {"ph": "C", "pid": process, "ts": round(bar.start_s * _US, 3)}
            events.append(counter | {"name": f"clock of rank {rank}", "args": {"MHz": last}})
    return events


def _metadata(what: str, process: int, **arguments: Any) -> Event:
    return {"ph": "M", "pid": process, "ts": 0, "name": what, "args": arguments}
