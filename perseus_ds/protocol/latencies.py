"""Latencies of clock changes, as measured by the agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

_ENOUGH, _POOLED = 3, 5
"""Minimum number of latencies, and the number up to which those of neighbouring clocks are added."""
_PERCENTILE = 0.9


class LatencyTable(msgspec.Struct, tag=True, frozen=True):
    """Times from the driver's call until the GPU runs at the clock, which agents send to the server.

    Clocks with few or no measurements use the latencies of neighbouring clocks. A latency that timed out is a lower
    bound.
    """

    samples_s: Mapping[tuple[int, bool], Sequence[float]] = {}  # by clock [MHz] and whether it was reached from below

    @property
    def is_known(self) -> bool:
        """True if enough latencies were measured."""
        return sum(map(len, self.samples_s.values())) >= _ENOUGH

    def latest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the 90th percentile of the latencies of a clock [s]. 0 if unknown."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def soonest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the 10th percentile of the latencies of a clock [s]. 0 if unknown."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[-1 - int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def lead_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the time by which a clock is requested in advance [s].

        A higher clock may take effect too early and a lower one too late. Both cost some energy but no time.
        """
        return self.latest_s(clock_mhz, rises=True) if rises else self.soonest_s(clock_mhz, rises=False)

    def dwell_s(self, clock_mhz: int) -> float:
        """Return the minimum time to stay at a clock [s], which is twice its latency."""
        return 2 * max(self.latest_s(clock_mhz, rises=rises) for rises in (False, True))

    def _near(self, clock_mhz: int, rises: bool) -> list[float]:
        if not self.is_known:
            return []
        same = {clock: seen_s for (clock, rose), seen_s in self.samples_s.items() if rose == rises and seen_s}
        found = list(_nearest(clock_mhz, same))
        if len(found) < _ENOUGH:
            found += _nearest(clock_mhz, {c: seen_s for (c, rose), seen_s in self.samples_s.items() if rose != rises})
        return sorted(found)


def _nearest(clock_mhz: int, by_clock: Mapping[int, Sequence[float]]) -> Iterator[float]:
    """Yield latencies of a clock and of neighbouring clocks, up to the number that is pooled."""
    count = 0
    for clock in sorted(by_clock, key=lambda clock: abs(clock - clock_mhz)):
        if count >= _POOLED:
            return
        yield from by_clock[clock]
        count += len(by_clock[clock])
