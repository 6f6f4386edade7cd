"""How long a simulated GPU's clock-setting call takes: a distribution that depends on the target clock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyModel:
    """A log-normal distribution of the time of one call, with a tail.

    Attributes:
        lowest_s: Median towards the lowest clock [s]; between the clocks it is interpolated.
        highest_s: Median towards the highest clock [s].
        spread: Standard deviation of the logarithm.
        slow_share: Share of calls that are slow.
        slow_factor: How many times as long these take.
    """

    lowest_s: float
    highest_s: float
    spread: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def sample_s(self, target: float, source: random.Random) -> float:
        """Return the time of one call [s].

        Args:
            target: The target clock, from 0 for the lowest to 1 for the highest.
            source: Of randomness.
        """
        median_s = self.lowest_s + (self.highest_s - self.lowest_s) * target
        factor = self.slow_factor if source.random() < self.slow_share else 1.0
        return median_s * factor * math.exp(self.spread * source.gauss(0, 1))


LATENCIES = {
    # 10 to 20 ms, by the maintainer of Zeus (github.com/ml-energy/zeus, issue 29). Assumed: how it is spread.
    "a100": LatencyModel(0.013, 0.017, spread=0.12),
    # Under a compute load 3.2 ms at the median towards low clocks, 6.0 ms towards high ones; over 18 950 calls 4.5 ms
    # at the median, 9.2 ms at the 95th percentile, 11.5 ms at the 99th (github.com/thynics/gpu_ctl_probe, d577316).
    "v100": LatencyModel(0.0032, 0.0060, spread=0.36),
    # Assumed, to see what a job bears: two calls of a hundred take ten times as long.
    "heavy-tail": LatencyModel(0.013, 0.017, spread=0.12, slow_share=0.02, slow_factor=10.0),
}
