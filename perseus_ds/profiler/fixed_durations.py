"""Durations of the operations that have no clock to choose: loads, transfers and unprofiled tails; and corrections.

A profile is corrected by the parts of iterations that take longer or shorter than profiled, fixed ones or instructions.

A transfer that a schedule launches and waits for later is not surrounded by anything that could be timed. It is over
when the pass that waits for it begins, and it begins at the end of the pass whose result it sends; if the receiving
rank was still computing then, at the end of that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.clocks.timers import Span
from perseus_ds.pipeline.dag import Boundary, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Other, Schedule, Transfer, Wait

Key = tuple[int, Kind]
# Parts that are nearer to the profile are no part of a difference of an iteration, nor are parts that are shorter.
_OFF = 0.02
_SHORT = 0.005
_FACTORS = (0.5, 2.0)
K = TypeVar("K", bound=Any)
Iterations = Sequence[Sequence[Span]]
"""Spans of one rank, by iteration."""
Passes = Mapping[Instruction, tuple[float, float]]
"""When the instructions of one iteration began and ended, on all ranks, on a time axis that they have in common [s]."""


def without_gaps(spans: Sequence[Span], time_s: float) -> list[Span]:
    """Add the time that the engine spends between operations to the loads, transfers and tails next to it.

    The time before the tail is not added to an operation: there, ranks wait for each other.
    """
    result: list[Span] = []
    for before, span, after in zip([None, *spans], spans, [*spans[1:], None], strict=False):
        start_s, end_s = span.start_s, span.end_s
        if _is_tail(span) or not isinstance(span.operation, Compute | Other):
            if before is None:
                start_s = 0.0
            elif not _begins_tail(before, span):
                start_s = result[-1].end_s
            if after is None:
                end_s = max(end_s, time_s)
            elif not _begins_tail(span, after):
                end_s = after.start_s
        result.append(Span(span.operation, start_s, end_s))
    return result


def _begins_tail(before: Span, span: Span) -> bool:
    """Whether the tail begins between the two spans; ranks that begin it together wait for each other there."""
    return _is_tail(span) and not _is_tail(before)


def medians(found: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the median of the numbers of each key, by ascending key."""
    by_key: dict[K, list[float]] = defaultdict(list)
    for key, number in found:
        by_key[key].append(number)
    return {key: statistics.median(numbers) for key, numbers in sorted(by_key.items())}


def load_durations_s(ranks: Sequence[Iterations]) -> dict[int, float]:
    """Return the median load of each stage [s]."""
    return medians((s.operation.stage, s.time_s) for s in all_spans(ranks) if isinstance(s.operation, Load))


def other_durations_s(ranks: Sequence[Iterations]) -> dict[tuple[str, int], float]:
    """Return the median duration of each command that perseus-ds does not know, by command and stage [s]."""
    others = ((s.operation, s.time_s) for s in all_spans(ranks) if isinstance(s.operation, Other))
    return medians(((other.command, other.stage), time_s) for other, time_s in others)


def transfer_durations_s(ranks: Sequence[Iterations]) -> dict[Boundary, float]:
    """Return the median transfer over each boundary and direction, without waiting for the other rank [s].

    Both sides of a transfer end together. The side that begins last does not wait, so the shorter
    of the two spans is the duration of the transfer itself.
    """
    shorter: dict[tuple[int, Transfer], float] = {}
    for rank in ranks:
        for number, spans in enumerate(rank):
            for span in spans:
                if isinstance(span.operation, Exchange):
                    for transfer in span.operation.transfers:
                        key = (number, transfer)
                        shorter[key] = min(span.time_s, shorter.get(key, span.time_s))
    return medians(((t.payload, t.source, t.target), time_s) for (_, t), time_s in shorter.items())


def tail_durations_s(iterations: Iterations) -> dict[int, float]:
    """Return the median tail of each stage of a rank [s]; in all iterations, ranks began their tails at once.

    Where ranks exchange something within the tail, such as a gradient norm, the faster ones wait for
    the slowest; that wait is part of their tail.
    """
    return medians(tail for spans in iterations for tail in tails_s(spans).items())


def tails_s(spans: Iterable[Span]) -> dict[int, float]:
    """Return the duration of each stage's tail, all its parts together, in one iteration of a rank [s]."""
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        if _is_tail(span) and isinstance(span.operation, Compute):
            found[span.operation.instruction.stage] += span.time_s
    return dict(found)


def _is_tail(span: Span) -> bool:
    return isinstance(span.operation, Compute) and span.operation.instruction.kind is Kind.TAIL


def all_spans(ranks: Sequence[Iterations]) -> list[Span]:
    """Return the operations of all iterations of all ranks."""
    return [span for rank in ranks for spans in rank for span in spans]


def launches_transfers(schedule: Schedule) -> bool:
    """Return whether ranks go on after they have launched a transfer."""
    return any(isinstance(operation, Launch) for stream in schedule.ranks for operation in stream)


def passes_of(ranks: Iterable[tuple[Sequence[Span], float]]) -> Passes:
    """Return the passes of one iteration, given each rank's operations and when it began the iteration [s]."""
    return {
        span.operation.instruction: (begin_s + span.start_s, begin_s + span.end_s)
        for spans, begin_s in ranks
        for span in spans
        if isinstance(span.operation, Compute)
    }


def launched_transfer_durations_s(schedule: Schedule, iterations: Iterable[Passes]) -> dict[Boundary, float]:
    """Return the median transfer over each boundary and direction [s].

    A transfer for which its receiver was waiting shows how long it takes; only where there is none such do those count
    that went on while the receiver computed.
    """
    sides = _sides(schedule)
    found: dict[Boundary, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for passes in iterations:
        for transfer, (made_by, needed_by, after) in sides.items():
            if made_by in passes and needed_by in passes:
                made_s = passes[made_by][1]
                free_s = made_s if after is None else passes[after][1]
                lasts_s = max(0.0, passes[needed_by][0] - max(made_s, free_s))
                found[transfer.payload, transfer.source, transfer.target][free_s > made_s].append(lasts_s)
    return {key: statistics.median(waited or hidden) for key, (waited, hidden) in sorted(found.items())}


def _sides(schedule: Schedule) -> dict[Transfer, tuple[Instruction, Instruction, Instruction | None]]:
    """Return the instructions around each transfer.

    Returns:
        The last one before it is sent, on the sending rank; the first one after it is waited for, on the receiving
        rank; and the one before that, on the receiving rank, None if there is none.
    """
    made_by: dict[Transfer, Instruction] = {}
    needed_by: dict[Transfer, tuple[Instruction, Instruction | None]] = {}
    for stream in schedule.ranks:
        before: Instruction | None = None
        awaited: list[Transfer] = []
        receives = {t for operation in stream if isinstance(operation, Exchange | Launch) for t in operation.receives}
        for operation in stream:
            if isinstance(operation, Compute):
                needed_by.update(dict.fromkeys(awaited, (operation.instruction, before)))
                before, awaited = operation.instruction, []
            elif before is not None and isinstance(operation, Exchange | Launch):
                made_by.update(dict.fromkeys(operation.sends, before))
            if isinstance(operation, Exchange | Wait):
                awaited += [transfer for transfer in operation.transfers if transfer in receives]
    return {t: (made_by[t], *needed_by[t]) for t in sorted(made_by) if t in needed_by}


@dataclass(frozen=True)
class PartTimes:
    """Typical times of the parts of iterations at default clocks [s].

    Attributes:
        instructions: Of each stage and kind.
        tail_s: Of the tail, of the rank that waits for no other.
        fixed: Loads, transfers and other commands, as in a profile.
    """

    instructions: Mapping[Key, float]
    tail_s: float
    fixed: FixedDurations = field(default_factory=FixedDurations)

    @classmethod
    def of(cls, ranks: Sequence[Iterations]) -> PartTimes:
        """Return those of one pipeline, given its ranks' operations by iteration."""
        instructions: dict[Key, float] = medians(
            ((span.operation.instruction.stage, span.operation.instruction.kind), span.time_s)
            for span in all_spans(ranks)
            if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL
        )
        tails = [[sum(tails_s(spans).values()) for spans in rank] for rank in ranks]
        fixed = FixedDurations(load_durations_s(ranks), transfer_durations_s(ranks), other_s=other_durations_s(ranks))
        return cls(instructions, min((statistics.median(found) for found in tails if found), default=0.0), fixed)


@dataclass(frozen=True)
class Difference:
    """The parts in which iterations at default clocks differ from the profile.

    Attributes:
        factors: By the name of the part, how many times as long it takes as profiled.
        profile: The profile with these times; None where no part differs.
    """

    factors: dict[str, float]
    profile: StageProfile | None


def differing_instructions(now: PartTimes, profiled_s: Mapping[Key, float]) -> dict[Key, float]:
    """Return how many times as long instructions take as profiled, of those that differ."""
    factors = {key: now_s / profiled_s[key] for key, now_s in now.instructions.items() if key in profiled_s}
    return {key: factor for key, factor in factors.items() if abs(factor - 1) > _OFF}


def difference(profile: StageProfile, now: PartTimes, before: Mapping[Key, float], time_s: float) -> Difference:
    """Compare the parts of iterations with a profile.

    Args:
        profile: The profile.
        now: Iterations at default clocks, after it was measured.
        before: Times of instructions at default clocks, before it was measured [s]. Where these are the same as now,
            an instruction that differs from its row at the highest clock shows that default clocks are others; the row
            is right.
        time_s: Iteration time, which tells parts that matter from others [s].
    """
    differing = differing_instructions(now, {key: profile.at_highest_clock(*key).time_s for key in profile.keys})
    factors = named(differing)
    of_key = {
        key: factor
        for key, factor in differing.items()
        if abs(now.instructions[key] / before.get(key, now.instructions[key]) - 1) > _OFF
    }
    info, now_s, each_s = profile.info, _fixed_s(now.fixed), time_s / (profile.info.micro_batches or 1)
    of_fixed = {
        name: now_s[name] / profiled_s
        for name, profiled_s in _fixed_s(info.fixed_durations).items()
        if name in now_s and profiled_s and _differs(now_s[name], profiled_s, each_s)
    }
    if of_fixed:
        info = info.with_fixed_durations(now.fixed)
    tails = [key for key in profile.keys if key[1] is Kind.TAIL]
    tail_s = min([profile.at_highest_clock(*key).time_s for key in tails] or [*info.tail_s.values()] or [0.0])
    if tail_s and _differs(now.tail_s, tail_s, time_s):
        factor = of_fixed["tail"] = now.tail_s / tail_s
        of_key.update(dict.fromkeys(tails, factor))
        info = info.model_copy(update={"tail_s": {stage: factor * own_s for stage, own_s in info.tail_s.items()}})
    if not (of_key or of_fixed) or not all(_FACTORS[0] < factor < _FACTORS[1] for factor in of_key.values()):
        return Difference({**factors, **of_fixed}, None)
    rows = [
        replace(row, time_s=row.time_s * factor, energy_j=row.energy_j * factor)
        for row in profile.measurements
        for factor in [of_key.get((row.stage, row.kind), 1.0)]
    ]
    return Difference({**factors, **of_fixed}, StageProfile(rows, info))


def _differs(now_s: float, profiled_s: float, of_s: float) -> bool:
    """Whether a duration differs from the profile, by more than what is short in a time [s]."""
    return abs(now_s - profiled_s) > max(_OFF * profiled_s, _SHORT * of_s)


def with_power(profile: StageProfile, factor: float) -> StageProfile:
    """Return a profile whose instructions cost so many times as much energy beyond waiting."""
    power_w = profile.info.blocking_power_w or 0.0
    rows = [
        replace(row, energy_j=power_w * row.time_s + factor * (row.energy_j - power_w * row.time_s))
        for row in profile.measurements
    ]
    return StageProfile(rows, profile.info)


def named(factors: Mapping[Key, float]) -> dict[str, float]:
    """Return the factors of instructions by their names."""
    return {f"{kind} of stage {stage}": factor for (stage, kind), factor in factors.items()}


def _fixed_s(fixed: FixedDurations) -> dict[str, float]:
    """Return the durations of loads, transfers and other commands by their names [s]."""
    found = {f"load of stage {stage}": time_s for stage, time_s in fixed.load_s.items()}
    found |= {f"transfer of {what} from stage {a} to {b}": time_s for (what, a, b), time_s in fixed.transfer_s.items()}
    return found | {f"{command} of stage {stage}": time_s for (command, stage), time_s in fixed.other_s.items()}
