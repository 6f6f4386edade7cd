"""Models of simulated GPUs: speed and power as functions of the clock.

The constants of a :class:`DeviceModel` are fitted to published measurements. For A100-SXM and A40 these are the GPT-3
175B stage profiles of the Perseus paper's artifact (SOSP '24). For the others the source is stated with the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Workload:
    """A kind of work: its clock-dependent share of time and dynamic power, relative to a forward's."""

    clock_share: float
    dynamic_share: float


COMPUTE_BOUND = Workload(1.0, 1.0)
# Gradient reduction and the optimizer step are bound by memory and links. Assumed; no measurement was published.
MEMORY_BOUND = Workload(0.3, 0.5)
WORKLOADS = (COMPUTE_BOUND, MEMORY_BOUND)


@dataclass(frozen=True)
class DeviceModel:
    """Speed and power of a GPU at each SM clock ``f`` [MHz].

    An instruction takes ``t(f) = t(top) * (compute_share * top / f + 1 - compute_share)``: one part scales with the
    clock and the other, bound by memory, does not. Power while computing is ``static + dynamic * f * v(f)^2`` with a
    relative voltage ``v`` that is constant up to ``knee`` and then rises, ``1 + curvature * (f - knee)^2``. At the
    power limit the board lowers the clock. The constants are those of a forward or backward. A :class:`Workload`
    describes other work.
    """

    name: str
    lowest_clock_mhz: int
    top_clock_mhz: int
    clock_step_mhz: int
    compute_share: float
    static_power_w: float
    dynamic_w_per_mhz: float
    knee_mhz: float
    curvature_per_mhz2: float
    power_limit_w: float
    blocking_power_w: float

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        return tuple(range(self.lowest_clock_mhz, self.top_clock_mhz + 1, self.clock_step_mhz))

    def unlimited_power_w(self, clock_mhz: float, workload: Workload) -> float:
        """Return the power while computing without a power limit [W]."""
        voltage = 1 + self.curvature_per_mhz2 * max(0.0, clock_mhz - self.knee_mhz) ** 2
        return self.static_power_w + workload.dynamic_share * self.dynamic_w_per_mhz * clock_mhz * voltage**2

    @cached_property
    def _limited_clocks_mhz(self) -> dict[Workload, float]:
        return {w: self.highest_clock_mhz(self.power_limit_w, w) for w in WORKLOADS}

    def highest_clock_mhz(self, power_w: float, workload: Workload) -> float:
        """Return the highest clock at which the board draws at most the given power [MHz]."""
        low, high = float(self.lowest_clock_mhz), float(self.top_clock_mhz)
        if self.unlimited_power_w(high, workload) <= power_w:
            return high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.unlimited_power_w(middle, workload) <= power_w else (low, middle)
        return low

    def reached_clock_mhz(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the clock at which the board runs under its power limit [MHz]."""
        return min(clock_mhz, self._limited_clocks_mhz[workload])

    def power_w(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the power while computing [W]."""
        return self.unlimited_power_w(self.reached_clock_mhz(clock_mhz, workload), workload)

    def slowdown(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the time of an instruction relative to the top clock without a power limit."""
        scaling = self.compute_share * workload.clock_share
        return scaling * self.top_clock_mhz / self.reached_clock_mhz(clock_mhz, workload) + 1 - scaling


DEVICES = {
    # Forward of stage 0: 77.7 ms, 235 W at 855 MHz; 55.4 ms, 355 W at 1215 MHz; 50.2 ms, 475 W at 1410 MHz. Its boards
    # draw 475 to 482 W from 1380 MHz on, where times are nearly constant: they are at a limit above the 400 W of most
    # A100-SXM4 boards. NVIDIA's data sheet allows up to 500 W for HGX A100 80GB with a custom cooling solution.
    # Below the limit, the model is also that of a board of 400 W, which reaches about 1275 MHz in this load.
    "a100-sxm": DeviceModel(
        name="A100-SXM",
        lowest_clock_mhz=210,
        top_clock_mhz=1410,
        clock_step_mhz=15,
        compute_share=0.95,
        static_power_w=82.0,
        dynamic_w_per_mhz=0.18,
        knee_mhz=980.0,
        curvature_per_mhz2=2.0e-6,
        power_limit_w=475.0,
        blocking_power_w=83.64,
    ),
    # Forward of stage 0: 164 ms, 177 W at 855 MHz; 120 ms, 250 W at 1305 MHz; 114 ms, 298 W from 1485 to 1740 MHz.
    "a40": DeviceModel(
        name="A40",
        lowest_clock_mhz=210,
        top_clock_mhz=1740,
        clock_step_mhz=15,
        compute_share=0.62,
        static_power_w=91.0,
        dynamic_w_per_mhz=0.10,
        knee_mhz=980.0,
        curvature_per_mhz2=1.0e-6,
        power_limit_w=298.0,
        blocking_power_w=70.38,
    ),
    # Matrix multiplications in FP64, back to back, at locked clocks: 141 W at 345 MHz, 273 W at 945 MHz, 461 W at
    # 1305 MHz; power limit 500 W (github.com/AyeshaAfzal91/GPU-Energy-Sweetspot, commit 242d142; an H100 of 96 GB). The
    # fit is within 1.3 % of eight clocks. Blocking power is the power when idle with a process loaded. Assumed: the
    # share of time that scales with the clock, from the A100.
    "h100-sxm": DeviceModel(
        name="H100-SXM",
        lowest_clock_mhz=345,
        top_clock_mhz=1980,
        clock_step_mhz=15,
        compute_share=0.95,
        static_power_w=66.0,
        dynamic_w_per_mhz=0.216,
        knee_mhz=793.0,
        curvature_per_mhz2=7.15e-7,
        power_limit_w=500.0,
        blocking_power_w=85.0,
    ),
    # The same load and source: 161 W at 345 MHz, 303 W at 945 MHz, 529 W at 1350 MHz; power limit 600 W. The fit is
    # within 3.4 % of nine clocks and 7 % off at 1200 MHz, where the board's power varies by 8 %. Assumed: blocking
    # power (76 W when idle, plus what a loaded process adds on the H100), and the share of time that scales, from the
    # A100.
    "h200": DeviceModel(
        name="H200",
        lowest_clock_mhz=345,
        top_clock_mhz=1980,
        clock_step_mhz=15,
        compute_share=0.95,
        static_power_w=84.3,
        dynamic_w_per_mhz=0.2243,
        knee_mhz=700.0,
        curvature_per_mhz2=5.09e-7,
        power_limit_w=600.0,
        blocking_power_w=95.0,
    ),
}
