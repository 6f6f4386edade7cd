"""Finds the parts of an iteration that take longer or shorter than profiled, and corrects the profile by them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.profiler.fixed_durations import (
    Iterations,
    all_spans,
    load_durations_s,
    medians,
    other_durations,
    tails_s,
    transfer_durations,
)

Key = tuple[int, Kind]
# Parts that are nearer to the profile are no part of a difference of an iteration, nor are parts that are shorter.
_OFF = 0.02
_SHORT = 0.005
_FACTORS = (0.5, 2.0)


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
    fixed: ProfileInfo = field(default_factory=ProfileInfo)

    @classmethod
    def of(cls, ranks: Sequence[Iterations]) -> PartTimes:
        """Return those of one pipeline, given its ranks' operations by iteration."""
        instructions: dict[Key, float] = medians(
            ((span.operation.instruction.stage, span.operation.instruction.kind), span.time_s)
            for span in all_spans(ranks)
            if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL
        )
        tails = [[sum(tails_s(spans).values()) for spans in rank] for rank in ranks]
        fixed = ProfileInfo(
            load_s=load_durations_s(ranks), transfers=transfer_durations(ranks), others=other_durations(ranks)
        )
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
        for name, profiled_s in _fixed_s(info).items()
        if name in now_s and profiled_s and _differs(now_s[name], profiled_s, each_s)
    }
    if of_fixed:
        info = _with_fixed(info, now.fixed)
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


def _with_fixed(info: ProfileInfo, now: ProfileInfo) -> ProfileInfo:
    """Return metadata with the loads, transfers and other commands of now, as far as they are known."""
    transfers = {(t.payload, t.source, t.target): t for t in (*info.transfers, *now.transfers)}
    others = {(other.command, other.stage): other for other in (*info.others, *now.others)}
    return info.model_copy(
        update={
            "load_s": {**info.load_s, **now.load_s},
            "transfers": list(transfers.values()),
            "others": list(others.values()),
        }
    )


def _fixed_s(info: ProfileInfo) -> dict[str, float]:
    """Return the durations of loads, transfers and other commands by their names [s]."""
    named = {f"load of stage {stage}": time_s for stage, time_s in info.load_s.items()}
    named |= {f"transfer of {t.payload} from stage {t.source} to {t.target}": t.time_s for t in info.transfers}
    return named | {f"{other.command} of stage {other.stage}": other.time_s for other in info.others}
