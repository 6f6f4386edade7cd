"""Decides when to request which clock, from the clocks and times of one rank's instructions.

A clock follows its request only some 10 to 20 ms later, and only one request can be under way. A lower clock is
requested when the instruction before it ends: that costs some energy and no time. A higher clock requested so late
would make the next instruction slower than planned, so it is requested earlier by the latency; and a lower clock
between two higher ones is left out where there is no time for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ClockTransition:
    """The clocks to request around one instruction.

    Attributes:
        clock_mhz: The instruction's own.
        next_clock_mhz: To request when it ends.
        early_s: When to request that earlier, from its beginning [s]; None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(clocks_mhz: Sequence[int], times_s: Sequence[float], latency_s: float) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank; every iteration repeats them.

    Args:
        clocks_mhz: The plan's clocks [MHz].
        times_s: Times of the instructions at them [s]; empty if they are not known.
        latency_s: How late a clock follows its request [s]; 0 if that is not known.
    """
    clocks = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(clocks)
    if times_s and latency_s > 0:
        bridged = without_short_runs(clocks_mhz, times_s, latency_s)
        clocks = list(bridged)
        for position, clock_mhz in enumerate(bridged):
            if clock_mhz > bridged[position - 1]:
                lead_s, before = latency_s, position - 1
                # Where the instruction before is shorter than the latency, the request falls into an earlier one.
                while times_s[before] < lead_s and bridged[before - 1] == bridged[before]:
                    clocks[before] = clock_mhz
                    lead_s -= times_s[before]
                    before -= 1
                early_s[before] = max(0.0, times_s[before] - lead_s)
    following = clocks[1:] + clocks[:1]
    return [ClockTransition(*values) for values in zip(clocks, following, early_s, strict=True)]


def without_short_runs(clocks_mhz: Sequence[int], times_s: Sequence[float], latency_s: float) -> list[int]:
    """Return the clocks, none lower than planned, without runs at a lower clock that are too short.

    A run of instructions at a lower clock needs the latency once for the request that ends it and, if the clock
    before it is higher, once for the request that begins it. A shorter run gets the lower of the higher clocks
    beside it.

    Args:
        clocks_mhz: The plan's clocks [MHz]; the last instruction is followed by the first.
        times_s: Times of the instructions at them [s].
        latency_s: How late a clock follows its request [s].
    """
    result = list(clocks_mhz)
    top = result.index(max(result))
    # Begun at a highest clock, no run at a lower one continues across the end.
    order = [*range(top, len(result)), *range(top)]
    while too_short := _too_short(result, order, times_s, latency_s):
        # The lowest first: what it is raised to may then be long enough.
        lowest = min(result[run[0]] for run, _ in too_short)
        for run, higher_mhz in too_short:
            if result[run[0]] == lowest:
                for position in run:
                    result[position] = higher_mhz
    return result


def _too_short(
    clocks_mhz: Sequence[int], order: Sequence[int], times_s: Sequence[float], latency_s: float
) -> list[tuple[list[int], int]]:
    """Return the runs at lower clocks that are too short, each with the lower of the higher clocks beside it."""
    runs = [list(run) for _, run in groupby(order, key=clocks_mhz.__getitem__)]
    clocks = [clocks_mhz[run[0]] for run in runs]
    found = []
    for number, run in enumerate(runs):
        beside = clocks[number - 1], clocks[(number + 1) % len(runs)]
        higher = [clock for clock in beside if clock > clocks[number]]
        if higher and sum(times_s[position] for position in run) < len(higher) * latency_s:
            found.append((run, min(higher)))
    return found


def count_changes(clocks_mhz: Sequence[int]) -> int:
    """Return how often the clock changes from one instruction to the next, the last to the first included."""
    return sum(clock != clocks_mhz[position - 1] for position, clock in enumerate(clocks_mhz))
