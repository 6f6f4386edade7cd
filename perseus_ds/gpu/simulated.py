"""A simulated GPU: a clock, a power limit, a lock with latency and an energy counter.

Only the physics is simulated. The rank that owns the GPU computes for real and then waits until the simulated GPU has
done the same work, at the speed of the clock that it has at each moment. On request, conditions make the GPU as
unpleasant as a real one may be; their sizes are assumptions, except where a source is given.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.validation import StrictModel
from perseus_ds.errors import ConfigError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import GpuState
from perseus_ds.gpu.device_models import COMPUTE_BOUND, DEVICES, DeviceModel, Workload
from perseus_ds.timebase import REAL_TIME, Timebase

Condition = Literal[
    "lock-contention", "slow-transfers", "sampled-counter", "warming", "duty-limit", "low-clock-waiting"
]

CONDITIONS: dict[Condition, str] = {
    "lock-contention": "the node's driver serves the clock-setting calls of its GPUs one after the other",
    "slow-transfers": "a transfer takes 10 ms longer for each change of the GPU's clock in the last 50 ms",
    "sampled-counter": "the energy counter looks at power during a quarter of the time",
    "warming": "power rises by 0.1 % per kelvin while the GPU warms up, for minutes",
    "duty-limit": "the board holds its mean power over a second at 85 % of its limit",
    "low-clock-waiting": "blocking power falls by up to half towards the lowest clock",
}

# NVIDIA/nccl#1551 reports that collectives were delayed when clocks were locked about every 50 ms, not by how much.
_DISTURBED_S, _DELAY_S = 0.05, 0.01
# The A100's and H100's power readings cover 25 ms of 100 ms (arXiv 2312.02741).
_SAMPLED = 0.25
_COLD_C, _C_PER_W, _WARMS_IN_S = 30.0, 0.1, 60.0
_RISE_PER_C = 0.001
_AVERAGED_S = 1.0
_SUSTAINED = 0.85
_GAIN = 4.0
_STEP_S = 0.02


class Board:
    """Temperature and mean power of a board, which follow its power."""

    def __init__(self, power_w: float) -> None:
        self.temperature_c = _COLD_C + _C_PER_W * power_w
        self._mean_w = power_w

    def spend(self, power_w: float, time_s: float) -> None:
        """Draw some power for some time."""
        warm_c = _COLD_C + _C_PER_W * power_w
        self.temperature_c += (warm_c - self.temperature_c) * -math.expm1(-time_s / _WARMS_IN_S)
        self._mean_w += (power_w - self._mean_w) * -math.expm1(-time_s / _AVERAGED_S)

    @property
    def power_factor(self) -> float:
        """How much more a warm GPU draws than a cold one."""
        return 1 + _RISE_PER_C * (self.temperature_c - _COLD_C)

    def allowed_w(self, limit_w: float) -> float:
        """Return the power that a board may draw now which holds its mean power near a part of its limit [W]."""
        sustained_w = _SUSTAINED * limit_w
        return min(limit_w, max(0.5 * sustained_w, sustained_w + _GAIN * (sustained_w - self._mean_w)))


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


class SimulatedConfig(StrictModel):
    """The GPU to simulate where there is none."""

    gpu: str = Field("a100-sxm", description="Device model: a100-sxm, a40, h100-sxm or h200.")
    longest_instruction_s: float = Field(
        0.1,
        gt=0,
        description="Time of the pipeline's longest forward or backward at the top clock [s]; the others follow "
        "from their floating-point operations.",
    )
    transfer_s: float = Field(0.0, ge=0, description="Time of a transfer between two stages [s].")
    tail_s: float = Field(0.0, ge=0, description="Time of gradient reduction and optimizer step at the top clock [s].")
    lock_latency_s: float = Field(0.015, ge=0, description="Time of a clock-setting call [s].")
    lock_latency: Literal["a100", "v100", "heavy-tail"] | None = Field(
        None, description="Distribution of that time, by target clock, instead of a constant."
    )
    counter_period_s: float = Field(0.1, gt=0, description="Refresh period of the energy counter [s].")
    time_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of instruction times.")
    power_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of power.")
    conditions: list[Condition] = Field(
        [],
        description="Conditions to simulate that make things harder: "
        + "; ".join(f"{name}: {text}" for name, text in CONDITIONS.items())
        + ".",
    )
    may_lock: bool = Field(True, description="Whether setting clocks is permitted.")


@contextmanager
def turn_on_node() -> Iterator[None]:
    """Surround a clock-setting call that waits for those of other processes of this node with the same parent.

    The ranks that a launcher has started on a node are such processes.
    """
    path = Path(tempfile.gettempdir()) / f"perseus-ds-simulated-driver-{os.getuid()}-{os.getppid()}"
    with open_without_links(path, append=True) as file:  # others can guess the name
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise GpuError(f"{path}: it belongs to another user. Remove it, or set TMPDIR to another folder.")
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class SimulatedGpu:
    """A GPU whose physics is simulated; see :class:`perseus_ds.gpu.base.Gpu`.

    Args:
        model: The kind of GPU.
        driver_turn: Surrounds each clock-setting call, such as :func:`turn_on_node`.
        seed: Of the noise. The others are those of :class:`SimulatedConfig`.

    Attributes:
        locked_clock_mhz: The clock that was set last; the highest one by default [MHz].
    """

    simulated = True
    settings = None
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
        driver_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_lock: bool = True,
        seed: int = 0,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self.model = model
        self.name = f"simulated {model.name}"
        self.driver: str | None = None
        self._lock_latency = LATENCIES[lock_latency] if lock_latency else LatencyModel(lock_latency_s, lock_latency_s)
        self._latency_random = random.Random(f"latency {seed}")  # so that other noise does not depend on clock changes
        self.counter_period_s = counter_period_s
        self._time_noise = time_noise
        self._power_noise = power_noise
        self._conditions = frozenset(conditions)
        self._driver_turn = driver_turn
        self._changes_s: deque[float] = deque(maxlen=16)
        self._may_lock = may_lock
        self._random = random.Random(seed)
        self.timebase = timebase
        self._changed = timebase.condition()
        self.locked_clock_mhz = model.top_clock_mhz
        self._power_limit_w, self._coolest_mhz = model.power_limit_w, math.inf
        self._board = Board(model.blocking_power_w)
        self._reached_mhz = float(model.top_clock_mhz)
        self._power_w = model.blocking_power_w
        self._power_factor = 1.0
        self._workload: Workload | None = None
        self._progress_s = 0.0
        self._last_s = self.timebase.now_s()
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
                return self.locked_clock_mhz
            return round(self._reached_mhz)

    def throttle_reasons(self) -> tuple[str, ...]:
        with self._changed:
            if self._workload is None:
                return ("idle",)
            if self._reached_mhz >= self.locked_clock_mhz:
                return ()
            return ("sw_thermal_slowdown",) if self._reached_mhz >= self._coolest_mhz else ("sw_power_cap",)

    def power_limit_w(self) -> float:
        return self._power_limit_w

    def limit(self, power_w: float | None = None, clock_mhz: float | None = None) -> None:
        """Change what the board may do, as an administrator, a power manager or heat would, from any thread.

        Args:
            power_w: The power limit; None for the board's own [W].
            clock_mhz: The highest clock that heat allows; None for any [MHz].
        """
        with self._changed:
            self._advance()
            self._power_limit_w = min(power_w or math.inf, self.model.power_limit_w)
            self._coolest_mhz = clock_mhz or math.inf
            self._update_power()
            self._changed.notify_all()

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
            now_s = self.timebase.now_s()
            return _DELAY_S * sum(now_s - changed_s < _DISTURBED_S for changed_s in self._changes_s)

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
        with self._driver_turn():
            self.timebase.sleep(self._lock_latency.sample_s(target, self._latency_random))
        with self._changed:
            self._advance()
            self.locked_clock_mhz = clock_mhz
            self._changes_s.append(self.timebase.now_s())
            self._update_power()
            self._changed.notify_all()

    def _update_power(self) -> None:
        """Set power and clock to those that hold from now on."""
        model, workload = self.model, self._workload
        self._reached_mhz = float(self.locked_clock_mhz)
        if workload is None:
            self._power_w = model.blocking_power_w
            if "low-clock-waiting" in self._conditions:
                self._power_w *= 0.5 + 0.5 * self.locked_clock_mhz / model.top_clock_mhz
        else:
            self._reached_mhz = model.reached_clock_mhz(self.locked_clock_mhz, workload)
            self._reached_mhz = min(self._reached_mhz, self._coolest_mhz)
            allowed_w = self._power_limit_w
            if "duty-limit" in self._conditions:
                allowed_w = self._board.allowed_w(allowed_w)
            if allowed_w < model.power_limit_w:
                self._reached_mhz = min(self._reached_mhz, model.highest_clock_mhz(allowed_w, workload))
            self._power_w = model.power_w(self._reached_mhz, workload) * self._power_factor
        if "warming" in self._conditions:
            self._power_w *= self._board.power_factor

    def _advance(self) -> None:
        """Account for the time since the last change, at the power and speed that held."""
        now_s, last_s = self.timebase.now_s(), self._last_s
        refreshed_s = math.floor(now_s / self.counter_period_s) * self.counter_period_s
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
        """Return how much of some time the counter accounts for; a sample stands for the whole period [s]."""
        if "sampled-counter" not in self._conditions:
            return until_s - from_s
        return self._sampled_s(until_s) - self._sampled_s(from_s)

    def _sampled_s(self, moment_s: float) -> float:
        periods, phase = divmod(moment_s / self.counter_period_s, 1.0)
        return (periods + max(0.0, phase - (1 - _SAMPLED)) / _SAMPLED) * self.counter_period_s
