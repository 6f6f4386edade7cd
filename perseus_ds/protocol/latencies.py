"""How late clocks follow their requests, as the agent has measured it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_ENOUGH, _POOLED = 3, 5
"""Below so many latencies nothing is known; those of the clocks next to a clock are added until there are so many."""
_PERCENTILE = 0.9


@dataclass(frozen=True)
class LatencyTable:
    """Times from the driver's call until the GPU runs at the clock.

    A clock that was not requested, or seldom, has the latencies of the clocks next to it.

    Attributes:
        samples_s: By clock [MHz] and whether it was reached from below: the latencies seen [s]. One that timed out is
            how late the clock is at least.
    """

    samples_s: Mapping[tuple[int, bool], Sequence[float]] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether enough latencies were seen."""
        return sum(map(len, self.samples_s.values())) >= _ENOUGH

    def latest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return the 90th percentile of the latencies of a clock; 0 if they are not known [s]."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def soonest_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return their 10th percentile [s]."""
        seen_s = self._near(clock_mhz, rises)
        return seen_s[-1 - int(_PERCENTILE * (len(seen_s) - 1))] if seen_s else 0.0

    def lead_s(self, clock_mhz: int, *, rises: bool) -> float:
        """Return how long before it is due a clock is requested [s].

        A higher clock may come too soon, a lower one too late: both cost some energy, and no time.
        """
        return self.latest_s(clock_mhz, rises=True) if rises else self.soonest_s(clock_mhz, rises=False)

    def dwell_s(self, clock_mhz: int) -> float:
        """Return how long to stay at a clock at least, twice its latency: once to begin and once to end [s]."""
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
    """Return latencies of a clock and of those next to it, as many as are pooled."""
    count = 0
    for clock in sorted(by_clock, key=lambda clock: abs(clock - clock_mhz)):
        if count >= _POOLED:
            return
        yield from by_clock[clock]
        count += len(by_clock[clock])
