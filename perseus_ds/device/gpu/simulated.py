"""A simulated GPU: a clock, a power limit, a lock with latency and an energy counter, in real time.

Only the physics is simulated. The rank that owns the GPU computes for real and then waits until
the simulated GPU has done the same work, at the speed of whatever clock it has at each moment.

The constants of a :class:`DeviceModel` are fitted to the measurements published with the Perseus
paper (SOSP '24 artifact, GPT-3 175B stage profiles); the fits are stated with each device.
"""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from perseus_ds.errors import ConfigError, GpuError, GpuPermissionError


@dataclass(frozen=True)
class Workload:
    """What a GPU is busy with, relative to a forward or backward.

    Attributes:
        clock_share: How much of a forward's dependence on the clock its time has.
        dynamic_share: How much of a forward's dynamic power it draws.
    """

    clock_share: float
    dynamic_share: float


COMPUTE_BOUND = Workload(1.0, 1.0)
# Reducing gradients and stepping the optimizer wait for memory and links. Assumed: no measurement was published.
MEMORY_BOUND = Workload(0.3, 0.5)


@dataclass(frozen=True)
class DeviceModel:
    """How fast a GPU is and what it draws at each SM clock ``f`` [MHz].

    An instruction takes ``t(f) = t(top) * (compute_share * top / f + 1 - compute_share)``: a part
    that scales with the clock and a part, bound by memory, that does not. Power while computing is
    ``static + dynamic * f * v(f)^2`` with a relative voltage ``v`` that is flat up to ``knee`` and
    then rises, ``1 + curvature * (f - knee)^2``. At the power limit the board lowers the clock.
    These figures are those of a forward or backward; other work is described by a :class:`Workload`.
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
        """Return the power while computing if there were no limit [W]."""
        voltage = 1 + self.curvature_per_mhz2 * max(0.0, clock_mhz - self.knee_mhz) ** 2
        return self.static_power_w + workload.dynamic_share * self.dynamic_w_per_mhz * clock_mhz * voltage**2

    @cached_property
    def _limited_clocks_mhz(self) -> dict[Workload, float]:
        return {workload: self._limited_clock_mhz(workload) for workload in (COMPUTE_BOUND, MEMORY_BOUND)}

    @property
    def limited_clock_mhz(self) -> float:
        """The highest clock that forwards and backwards can be run at under the power limit [MHz]."""
        return self._limited_clocks_mhz[COMPUTE_BOUND]

    def _limited_clock_mhz(self, workload: Workload) -> float:
        """Return the highest clock the board can keep up under its power limit [MHz]."""
        low, high = float(self.lowest_clock_mhz), float(self.top_clock_mhz)
        if self.unlimited_power_w(high, workload) <= self.power_limit_w:
            return high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self.unlimited_power_w(middle, workload) <= self.power_limit_w else (low, middle)
            )
        return low

    def reached_clock_mhz(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the clock the board really runs at under its power limit [MHz]."""
        return min(clock_mhz, self._limited_clocks_mhz[workload])

    def power_w(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the power while computing [W]."""
        return self.unlimited_power_w(self.reached_clock_mhz(clock_mhz, workload), workload)

    def slowdown(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        """Return the time of an instruction relative to the top clock without a power limit."""
        scaling = self.compute_share * workload.clock_share
        return scaling * self.top_clock_mhz / self.reached_clock_mhz(clock_mhz, workload) + 1 - scaling


DEVICES = {
    # Forward of stage 0: 77.7 ms, 235 W at 855 MHz; 55.4 ms, 355 W at 1215 MHz; 50.2 ms, 475 W at 1410 MHz.
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
}


class Timebase(Protocol):
    """The time a simulation lives in."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Sleep, with the lock released, until notified at the latest."""


class RealTime:
    """``time.perf_counter``'s."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds)


class SimulatedGpu:
    """A GPU whose physics is simulated; see :class:`perseus_ds.device.gpu.base.Gpu`.

    Args:
        model: What it is.
        lock_latency_s: How long a clock-setting call takes before the clock is in effect [s].
        counter_period_s: How often the energy counter is refreshed [s].
        time_noise: Relative standard deviation of an instruction's time.
        power_noise: Relative standard deviation of an instruction's power.
        may_lock: Whether this process has the permission to set clocks.
        seed: Of the noise.
        timebase: The time it lives in.
    """

    simulated = True
    has_energy_counter = True
    address: str | None = None

    def __init__(
        self,
        model: DeviceModel,
        *,
        lock_latency_s: float = 0.015,
        counter_period_s: float = 0.1,
        time_noise: float = 0.0,
        power_noise: float = 0.0,
        may_lock: bool = True,
        seed: int = 0,
        timebase: Timebase | None = None,
    ) -> None:
        self.model = model
        self.name = f"simulated {model.name}"
        self.driver: str | None = None
        self._lock_latency_s = lock_latency_s
        self._counter_period_s = counter_period_s
        self._time_noise = time_noise
        self._power_noise = power_noise
        self._may_lock = may_lock
        self._random = random.Random(seed)
        self._time = timebase or RealTime()
        self._changed = threading.Condition()
        self._clock_mhz = model.top_clock_mhz
        self._power_w = model.blocking_power_w
        self._power_factor = 1.0
        self._workload: Workload | None = None
        self._progress_s = 0.0
        self._last_s = self._time.now_s()
        self._energy_j = 0.0
        self._counter_j = 0.0

    @classmethod
    def named(cls, name: str, **settings: float | bool | int) -> SimulatedGpu:
        """Make one of :data:`DEVICES`.

        Raises:
            ConfigError: There is no such device model.
        """
        if name not in DEVICES:
            raise ConfigError(f"perseus.simulated.gpu is {name!r}; expected one of {', '.join(sorted(DEVICES))}.")
        return cls(DEVICES[name], **settings)  # type: ignore[arg-type]

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        return self.model.clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self.model.clocks_mhz:
            raise GpuError(f"{self.name}: {clock_mhz} MHz is not a supported clock.")
        self._set_clock(clock_mhz)

    def reset_clock(self) -> None:
        self._set_clock(self.model.top_clock_mhz)

    def check_lock_permission(self) -> None:
        if not self._may_lock:
            raise GpuPermissionError(
                f"{self.name}: this process may not set clocks (perseus.simulated.may_lock is false). "
                "Set it to true, or see what a real GPU asks for: root, CAP_SYS_ADMIN or zeusd."
            )

    def clock_mhz(self) -> int:
        with self._changed:
            self._advance()
            if self._workload is None:
                return self._clock_mhz
            return round(self.model.reached_clock_mhz(self._clock_mhz, self._workload))

    def throttle_reasons(self) -> tuple[str, ...]:
        with self._changed:
            if self._workload is None:
                return ("idle",)
            is_limited = self.model.reached_clock_mhz(self._clock_mhz, self._workload) < self._clock_mhz
            return ("sw_power_cap",) if is_limited else ()

    def energy_j(self) -> float:
        with self._changed:
            self._advance()
            return math.floor(self._counter_j * 1000) / 1000

    def power_w(self) -> float:
        with self._changed:
            return self._power_w

    def close(self) -> None:
        """Nothing to release."""

    def begin_work(self, workload: Workload = COMPUTE_BOUND) -> None:
        """Start computing: from now on power is that of computing."""
        with self._changed:
            self._advance()
            self._power_factor = max(0.0, 1 + self._power_noise * self._random.gauss(0, 1))
            self._workload = workload
            self._progress_s = 0.0
            self._update_power()

    def finish_work(self, top_clock_time_s: float) -> None:
        """Wait until the work begun is done.

        Args:
            top_clock_time_s: How long it takes at the top clock without a power limit [s]. It
                progresses at the speed of whatever clock the GPU has at each moment.
        """
        work_s = top_clock_time_s * max(0.0, 1 + self._time_noise * self._random.gauss(0, 1))
        with self._changed:
            while True:
                self._advance()
                assert self._workload is not None
                remaining_s = (work_s - self._progress_s) * self.model.slowdown(self._clock_mhz, self._workload)
                if remaining_s <= 1e-9:  # what a sum of times rounds off
                    break
                self._time.wait(self._changed, remaining_s)
            self._workload = None
            self._update_power()

    def _set_clock(self, clock_mhz: int) -> None:
        self.check_lock_permission()
        self._time.sleep(self._lock_latency_s)
        with self._changed:
            self._advance()
            self._clock_mhz = clock_mhz
            self._update_power()
            self._changed.notify_all()

    def _update_power(self) -> None:
        if self._workload:
            self._power_w = self.model.power_w(self._clock_mhz, self._workload) * self._power_factor
        else:
            self._power_w = self.model.blocking_power_w

    def _advance(self) -> None:
        """Account for the time since the last change, at the power and speed that held."""
        now_s = self._time.now_s()
        refreshed_s = math.floor(now_s / self._counter_period_s) * self._counter_period_s
        if refreshed_s > self._last_s:
            self._counter_j = self._energy_j + self._power_w * (refreshed_s - self._last_s)
        self._energy_j += self._power_w * (now_s - self._last_s)
        if self._workload:
            self._progress_s += (now_s - self._last_s) / self.model.slowdown(self._clock_mhz, self._workload)
        self._last_s = now_s
