"""Determines when the clocks of a program are requested.

A clock takes effect 10 ms or more after its request, and only one request can be pending. So a request is made before
the clock is due, by the latency of that clock. A higher clock is due when the previous instruction ends, and its
latency is the 90th percentile, because a late one would slow the next instruction down. A lower one is due when the
next instruction has begun, after the transfers in between, which a clock change may delay. Its latency is the 10th
percentile, so that it is not early. Plans hold clocks for long enough that all requests fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.protocol.latencies import LatencyTable

_BEGUN_S = 0.001
"""Time after an instruction within which a transfer is launched that neither side waits for."""

Spans = Sequence[tuple[float, float]]
"""Start and end of each instruction of a rank in an iteration [s]."""


@dataclass(frozen=True, slots=True)
class ClockTransition:
    """Clocks to request around one instruction.

    Attributes:
        clock_mhz: Clock requested at its start: its own, or the next one if that is requested even earlier.
        next_clock_mhz: Clock requested at its end.
        early_s: Time after its start at which ``next_clock_mhz`` is requested [s]. None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(
    clocks_mhz: Sequence[int], spans_s: Spans, length_s: float, latencies: LatencyTable
) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank, in every iteration.

    If the times of instructions are unknown, ``spans_s`` is empty.
    """
    requested = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(requested)

    def span_s(number: int) -> tuple[float, float]:
        """Return start and end of an instruction. A negative number is one of the previous iteration."""
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
        # If the previous instruction is shorter than the latency, the request belongs to an earlier one. A lower clock
        # is not requested in the previous iteration, because its energy would be read only after the driver has set the
        # clock.
        while (rises or before > 0) and span_s(before)[0] > due_s and clocks_mhz[before - 1] == clocks_mhz[before]:
            requested[before] = clock_mhz
            before -= 1
        begin_s, end_s = span_s(before)
        if due_s <= end_s:
            early_s[before] = max(0.0, due_s - begin_s)
        elif not rises:  # due while the rank waits: a higher clock may be early, a lower one may not
            requested[before + 1] = clocks_mhz[before]
            early_s[before + 1] = 0.0
    following = requested[1:] + requested[:1]
    return [ClockTransition(*values) for values in zip(requested, following, early_s, strict=True)]
