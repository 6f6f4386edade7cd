"""From the clocks of one rank's instructions to the moments at which to ask for them.

A clock is there only some 10 to 20 ms after it was asked for, and only one can be asked for at a time. Asking for a
lower one when the instruction before it ends costs some energy and no time. Asking for a higher one so late would make
the next instruction slower than planned: so it is asked for that much earlier, and a lower clock that there is no
time to visit in between is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Step:
    """What is asked of the clock around one instruction.

    Attributes:
        clock_mhz: Its own.
        next_clock_mhz: To ask for when it is over.
        early_s: When to ask for that already, counted from its beginning [s]; None for not before its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_steps(clocks_mhz: Sequence[int], times_s: Sequence[float], latency_s: float) -> list[Step]:
    """Return the steps of one rank's instructions, which are repeated in every iteration.

    Args:
        clocks_mhz: The plan's clocks.
        times_s: What the instructions take at them; empty if that is not known.
        latency_s: How late a clock follows its request; 0 if that is not known.
    """
    clocks = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(clocks)
    if times_s and latency_s > 0:
        bridged = without_short_visits(clocks_mhz, times_s, latency_s)
        clocks = list(bridged)
        for position, clock_mhz in enumerate(bridged):
            if clock_mhz > bridged[position - 1]:
                lead_s, asked = latency_s, position - 1
                # Instructions shorter than the latency: the one before them is when to ask.
                while times_s[asked] < lead_s and bridged[asked - 1] == bridged[asked]:
                    clocks[asked] = clock_mhz
                    lead_s -= times_s[asked]
                    asked -= 1
                early_s[asked] = max(0.0, times_s[asked] - lead_s)
    following = clocks[1:] + clocks[:1]
    return [Step(*step) for step in zip(clocks, following, early_s, strict=True)]


def without_short_visits(clocks_mhz: Sequence[int], times_s: Sequence[float], latency_s: float) -> list[int]:
    """Return the clocks, none lower than planned, without visits to a lower one that would end late.

    A visit needs the latency once for the request that ends it and, if it is begun from above, once for
    the one that begins it. What is shorter stays at the lower of the higher clocks beside it.

    Args:
        clocks_mhz: The plan's clocks; the last instruction is followed by the first.
        times_s: What the instructions take at them.
        latency_s: How late a clock follows its request.
    """
    result = list(clocks_mhz)
    top = result.index(max(result))
    # Beginning at a highest clock, no visit goes round the end.
    order = [*range(top, len(result)), *range(top)]
    while too_short := _too_short(result, order, times_s, latency_s):
        # The lowest first: what it is raised to may then be long enough.
        lowest = min(result[run[0]] for run, _ in too_short)
        for run, rim_mhz in too_short:
            if result[run[0]] == lowest:
                for position in run:
                    result[position] = rim_mhz
    return result


def _too_short(
    clocks_mhz: Sequence[int], order: Sequence[int], times_s: Sequence[float], latency_s: float
) -> list[tuple[list[int], int]]:
    """Return the visits to lower clocks that there is no time for, and the lower clock beside each."""
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
    """Return how often the clock changes from one instruction to the next, round the end."""
    return sum(clock != clocks_mhz[position - 1] for position, clock in enumerate(clocks_mhz))
