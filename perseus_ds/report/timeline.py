"""When every instruction of one iteration runs under a plan, as a profile predicts it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.pipeline.dag import Dag, Seconds
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Load, Other, Transfer

# Sums of the same times in another order differ by less [s].
_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in which a rank is busy.

    Attributes:
        rank: Pipeline rank; a transfer has a bar for each of its two.
        work: What it is.
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
        rank: Pipeline rank.
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
        ranks: Pipeline ranks.
        time_s: Iteration time [s].
        energy_j: Energy of the iteration, one GPU per rank [J].
    """

    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    ranks: int
    time_s: float
    energy_j: float


def timeline(dag: Dag, profile: StageProfile, plan: FrequencyPlan) -> Timeline:
    """Return when each instruction runs if it starts as early as it can.

    Args:
        dag: The iteration.
        profile: How long each instruction takes at its clock.
        plan: A plan for this iteration.

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
