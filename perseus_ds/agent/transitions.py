"""When to request which clock of a program.

A clock follows its request only some 10 ms later or more, and only one request can be under way. So a request is made
earlier than the clock is due, by the latency of that clock. A higher one is due when the instruction before ends, and
its latency is the 90th percentile, as it would otherwise make the next instruction slower than planned. A lower one is
due when the next instruction has begun, after the transfers in between, which a change of clock may delay; its latency
is the 10th percentile, so that it does not come sooner. Plans hold clocks for long enough that every request fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.protocol.latencies import LatencyTable

_BEGUN_S = 0.001
"""A transfer that neither side waits for is launched within so long after an instruction."""

Spans = Sequence[tuple[float, float]]
"""When each instruction of a rank begins and ends, in an iteration [s]."""


@dataclass(frozen=True, slots=True)
class ClockTransition:
    """The clocks to request around one instruction.

    Attributes:
        clock_mhz: The one requested as it begins: its own, or the next one where that is requested still earlier.
        next_clock_mhz: To request when it ends.
        early_s: When to request that earlier, from its beginning [s]; None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(
    clocks_mhz: Sequence[int], spans_s: Spans, length_s: float, latencies: LatencyTable
) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank, which every iteration repeats.

    Where the times of instructions are not known, there are no spans.
    """
    requested = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(requested)

    def span_s(number: int) -> tuple[float, float]:
        """Below 0, of an instruction of the iteration before."""
        begin_s, end_s = spans_s[number]
        return (begin_s - length_s, end_s - length_s) if number < 0 else (begin_s, end_s)

    for position, clock_mhz in enumerate(clocks_mhz if spans_s and latencies.is_known else ()):
        before = position - 1
        if clock_mhz == clocks_mhz[before]:
            continue
        rises = clock_mhz > clocks_mhz[before]
        due_s = over_s = span_s(before)[1]
        if not rises:
            due_s = max(span_s(position)[0], over_s + _BEGUN_S)
        due_s = min(due_s - latencies.lead_s(clock_mhz, rises=rises), over_s)
        # Where the instruction before is shorter than the latency, the request falls into an earlier one. A lower clock
        # is not requested in the iteration before: its energy would be read only when the driver has set the clock.
        while (rises or before > 0) and span_s(before)[0] > due_s and clocks_mhz[before - 1] == clocks_mhz[before]:
            requested[before] = clock_mhz
            before -= 1
        begin_s, end_s = span_s(before)
        if due_s <= end_s:
            early_s[before] = max(0.0, due_s - begin_s)
        elif not rises:  # due while the rank waits: a lower clock must not come sooner, a higher one may
            requested[before + 1] = clocks_mhz[before]
            early_s[before + 1] = 0.0
    following = requested[1:] + requested[:1]
    return [ClockTransition(*values) for values in zip(requested, following, early_s, strict=True)]
