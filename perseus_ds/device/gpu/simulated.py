"""A simulated GPU: a clock, a power limit, a lock with latency and an energy counter.

Only the physics is simulated. The rank that owns the GPU computes for real and then waits until the simulated GPU has
done the same work, at the speed of the clock that it has at each moment.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection
from typing import Any

from perseus_ds.device.gpu.base import GpuState
from perseus_ds.device.gpu.device_models import COMPUTE_BOUND, DEVICES, DeviceModel, Workload
from perseus_ds.device.gpu.lock_latency import LATENCIES, LatencyModel
from perseus_ds.device.gpu.simulated_conditions import (
    Board,
    Condition,
    DriverQueue,
    UnlimitedDriver,
    counted_s,
    transfer_delay_s,
)
from perseus_ds.errors import ConfigError, GpuError, GpuPermissionError
from perseus_ds.timebase import REAL_TIME, Timebase

_STEP_S = 0.02


class SimulatedGpu:
    """A GPU whose physics is simulated; see :class:`perseus_ds.device.gpu.base.Gpu`.

    Args:
        model: The kind of GPU.
        lock_latency_s: How long a clock-setting call takes before the clock is in effect [s].
        lock_latency: Name of a distribution of that time in :data:`LATENCIES`, instead; None for a constant one.
        counter_period_s: How often the energy counter is refreshed [s].
        time_noise: Relative standard deviation of an instruction's time.
        power_noise: Relative standard deviation of an instruction's power.
        conditions: See :data:`CONDITIONS`.
        driver_queue: Serves the clock-setting calls of this node.
        may_lock: Whether this process has the permission to set clocks.
        seed: Seed of the noise.
        timebase: Its timebase.
    """

    simulated = True
    has_energy_counter = True
    address: str | None = None

    def __init__(
        self,
        model: DeviceModel,
        *,
        lock_latency_s: float = 0.015,
        lock_latency: str | None = None,
        counter_period_s: float = 0.1,
        time_noise: float = 0.0,
        power_noise: float = 0.0,
        conditions: Collection[Condition] = (),
        driver_queue: DriverQueue | None = None,
        may_lock: bool = True,
        seed: int = 0,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self.model = model
        self.name = f"simulated {model.name}"
        self.driver: str | None = None
        self._lock_latency = LATENCIES[lock_latency] if lock_latency else LatencyModel(lock_latency_s, lock_latency_s)
        self._latency_random = random.Random(f"latency {seed}")  # so that other noise does not depend on clock changes
        self._counter_period_s = counter_period_s
        self._time_noise = time_noise
        self._power_noise = power_noise
        self._conditions = frozenset(conditions)
        self._driver_queue = driver_queue or UnlimitedDriver()
        self._changes_s: deque[float] = deque(maxlen=16)
        self._may_lock = may_lock
        self._random = random.Random(seed)
        self._time = timebase
        self._changed = timebase.condition()
        self._clock_mhz = model.top_clock_mhz
        self._board = Board(model.blocking_power_w)
        self._reached_mhz = float(model.top_clock_mhz)
        self._power_w = model.blocking_power_w
        self._power_factor = 1.0
        self._workload: Workload | None = None
        self._progress_s = 0.0
        self._last_s = self._time.now_s()
        self._energy_j = 0.0
        self._counted_j = 0.0
        self._counter_j = 0.0

    @classmethod
    def named(cls, name: str, **settings: Any) -> SimulatedGpu:
        """Make one of :data:`DEVICES`.

        Raises:
            ConfigError: There is no such device model.
        """
        if name not in DEVICES:
            raise ConfigError(f"perseus.simulated.gpu is {name!r}; expected one of {', '.join(sorted(DEVICES))}.")
        return cls(DEVICES[name], **settings)

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
                "Set it to true, or see what a real GPU requires: root, CAP_SYS_ADMIN or zeusd."
            )

    def clock_mhz(self) -> int:
        with self._changed:
            self._advance()
            if self._workload is None:
                return self._clock_mhz
            return round(self._reached_mhz)

    def throttle_reasons(self) -> tuple[str, ...]:
        with self._changed:
            if self._workload is None:
                return ("idle",)
            return ("sw_power_cap",) if self._reached_mhz < self._clock_mhz else ()

    def energy_j(self) -> float:
        with self._changed:
            self._advance()
            return math.floor(self._counter_j * 1000) / 1000

    @property
    def true_energy_j(self) -> float:
        """The energy used up to now, whatever the counter shows [J]."""
        with self._changed:
            self._advance()
            return self._energy_j

    @property
    def state(self) -> GpuState:
        """Temperature and performance state now."""
        with self._changed:
            self._advance()
            return GpuState(round(self._board.temperature_c), "P0")

    @property
    def transfer_delay_s(self) -> float:
        """How much longer than usual a transfer takes that begins now [s]."""
        if "slow-transfers" not in self._conditions:
            return 0.0
        with self._changed:
            return transfer_delay_s(self._time.now_s(), self._changes_s)

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
            top_clock_time_s: How long it takes at the top clock without a power limit [s]. It progresses at the
                speed of the clock that the GPU has at each moment.
        """
        work_s = top_clock_time_s * max(0.0, 1 + self._time_noise * self._random.gauss(0, 1))
        with self._changed:
            while True:
                self._advance()
                assert self._workload is not None
                remaining_s = (work_s - self._progress_s) * self.model.slowdown(self._reached_mhz, self._workload)
                if remaining_s <= 1e-9:  # rounding errors of the sum of times
                    break
                self._changed.wait(min(remaining_s, _STEP_S) if "duty-limit" in self._conditions else remaining_s)
            self._workload = None
            self._update_power()

    def _set_clock(self, clock_mhz: int) -> None:
        self.check_lock_permission()
        lowest_mhz, top_mhz = self.model.lowest_clock_mhz, self.model.top_clock_mhz
        target = (clock_mhz - lowest_mhz) / (top_mhz - lowest_mhz)
        with self._driver_queue.turn():
            self._time.sleep(self._lock_latency.sample_s(target, self._latency_random))
        with self._changed:
            self._advance()
            self._clock_mhz = clock_mhz
            self._changes_s.append(self._time.now_s())
            self._update_power()
            self._changed.notify_all()

    def _update_power(self) -> None:
        """Set power and clock to those that hold from now on."""
        model, workload = self.model, self._workload
        self._reached_mhz = float(self._clock_mhz)
        if workload is None:
            self._power_w = model.blocking_power_w
            if "low-clock-waiting" in self._conditions:
                self._power_w *= 0.5 + 0.5 * self._clock_mhz / model.top_clock_mhz
        else:
            self._reached_mhz = model.reached_clock_mhz(self._clock_mhz, workload)
            if "duty-limit" in self._conditions:
                allowed_w = self._board.allowed_w(model.power_limit_w)
                self._reached_mhz = min(self._reached_mhz, model.highest_clock_mhz(allowed_w, workload))
            self._power_w = model.power_w(self._reached_mhz, workload) * self._power_factor
        if "warming" in self._conditions:
            self._power_w *= self._board.power_factor

    def _advance(self) -> None:
        """Account for the time since the last change, at the power and speed that held."""
        now_s, last_s = self._time.now_s(), self._last_s
        refreshed_s = math.floor(now_s / self._counter_period_s) * self._counter_period_s
        if refreshed_s > last_s:
            self._counter_j = self._counted_j + self._power_w * self._counted_s(last_s, refreshed_s)
        self._counted_j += self._power_w * self._counted_s(last_s, now_s)
        self._energy_j += self._power_w * (now_s - last_s)
        self._board.spend(self._power_w, now_s - last_s)
        if self._workload:
            self._progress_s += (now_s - last_s) / self.model.slowdown(self._reached_mhz, self._workload)
        self._last_s = now_s
        if self._conditions and now_s > last_s:
            self._update_power()

    def _counted_s(self, from_s: float, until_s: float) -> float:
        period_s, sampled = self._counter_period_s, "sampled-counter" in self._conditions
        return counted_s(until_s, period_s, sampled=sampled) - counted_s(from_s, period_s, sampled=sampled)
