"""A simulated GPU with a clock, a power limit, lock latency and an energy counter.

Only the physics is simulated. The rank that owns the GPU computes for real and then waits until the simulated GPU has
done the same work at the speed of its current clock. Optional conditions reproduce difficulties of real GPUs. Their
sizes are assumptions unless a source is given.

The work that ran and the clocks that were set are two logs, which several processes may share and each of which has
one writer. All else (progress, clock reached, power, temperature, energy and its counter) is computed from the logs
and the device model, and does not depend on the reader or the time of reading.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import struct
import tempfile
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.validation import StrictModel
from perseus_ds.errors import ConfigError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import GpuState, gpu_facts
from perseus_ds.protocol.job_messages import GpuFacts
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES, WORKLOADS, DeviceModel, Workload
from perseus_ds.timebase import REAL_TIME, Timebase

Condition = Literal[
    "lock-contention", "slow-transfers", "sampled-counter", "warming", "duty-limit", "low-clock-waiting"
]

CONDITIONS: dict[Condition, str] = {
    "lock-contention": "the node's driver serves the clock-setting calls of its GPUs one at a time",
    "slow-transfers": "a transfer takes 10 ms longer for each change of the GPU's clock in the last 50 ms",
    "sampled-counter": "the energy counter samples power during a quarter of the time",
    "warming": "power rises by 0.1 % per kelvin while the GPU warms up, for minutes",
    "duty-limit": "the board holds its mean power over a second at 85 % of its limit",
    "low-clock-waiting": "blocking power falls by up to half towards the lowest clock",
}

# NVIDIA/nccl#1551 reports delayed collectives when clocks were locked about every 50 ms. The size is not reported.
_DISTURBED_S, _DELAY_S = 0.05, 0.01
# The A100's and H100's power readings cover 25 ms of 100 ms (arXiv 2312.02741).
_SAMPLED = 0.25
_COLD_C, _C_PER_W, _WARMS_IN_S = 30.0, 0.1, 60.0
_RISE_PER_C = 0.001
_AVERAGED_S = 1.0
_SUSTAINED = 0.85
_GAIN = 4.0
_STEP_S = 0.02

_DONE_S = 1e-9  # above the rounding errors of a sum of times
_POLL_S = 0.005
_LONGEST_CALL_S = 60.0
LogKind = Literal["work", "clock"]
G = TypeVar("G", bound="SimulatedGpu")
_MAGIC: dict[LogKind, bytes] = {"work": b"PDSSIMwk", "clock": b"PDSSIMck"}


class Log:
    """A ring buffer of entries of four numbers in a buffer such as shared memory, with one writer and many readers.

    An entry is complete before the counter of entries includes it. A reader may miss entries that are overwritten
    before it reads them. The next entry still gives the current state.
    """

    _HEADER = struct.Struct("=8sIIQd")  # magic and kind, version, capacity, entries written, begin
    _ENTRY = struct.Struct("4d")
    _VERSION = 1
    _COUNT = 2
    capacity: int
    began_s: float

    def __init__(self, memory: Any, kind: LogKind) -> None:
        self._bytes = memoryview(memory).cast("B")
        if self._bytes.nbytes < self._HEADER.size:
            raise GpuError(
                f"The log of a simulated GPU has {self._bytes.nbytes} bytes, expected at least {self._HEADER.size}."
            )
        found, version, self.capacity, _, self.began_s = self._HEADER.unpack_from(self._bytes)
        size = self._HEADER.size + self.capacity * self._ENTRY.size
        if found != _MAGIC[kind] or version != self._VERSION or not self.capacity or size > self._bytes.nbytes:
            raise GpuError(
                f"The {kind} log of a simulated GPU is damaged or of another version: expected {_MAGIC[kind]!r}, "
                f"version {self._VERSION} and at most {self._bytes.nbytes} bytes, got {found!r}, version {version} and "
                f"{size} bytes. Use the same version of perseus-ds on the whole node."
            )
        self._words: memoryview[int] = self._bytes[: self._HEADER.size].cast("Q")

    @classmethod
    def create(cls, kind: LogKind, began_s: float, memory: Any = None) -> Log:
        """Write an empty log into a buffer, by default private memory of 32 KiB."""
        memory = memoryview(bytearray(2**15) if memory is None else memory).cast("B")
        capacity = (memory.nbytes - cls._HEADER.size) // cls._ENTRY.size
        cls._HEADER.pack_into(memory, 0, _MAGIC[kind], cls._VERSION, capacity, 0, began_s)
        return cls(memory, kind)

    @property
    def count(self) -> int:
        """Number of entries written so far."""
        return self._words[self._COUNT]

    def append(self, *entry: float) -> None:
        """Publish an entry. Only one process may append entries."""
        count = self._words[self._COUNT]
        self._ENTRY.pack_into(self._bytes, self._offset(count), *entry)
        self._words[self._COUNT] = count + 1  # one aligned store, after the entry

    def since(self, count: int) -> tuple[int, list[tuple[float, ...]]]:
        """Return the number of entries written, and the available ones after the first ``count``."""
        written = self.count
        if written == count:
            return written, []
        first = max(count, written - self.capacity)
        entries = [self._ENTRY.unpack_from(self._bytes, self._offset(number)) for number in range(first, written)]
        overwritten = self.count - self.capacity + 1 - first  # during the reading, including the entry in progress
        return written, entries[max(0, overwritten) :]

    def _offset(self, number: int) -> int:
        return self._HEADER.size + number % self.capacity * self._ENTRY.size


class Physics:
    """State of a simulated GPU, computed from its two logs and its model.

    Time advances in closed form from one entry to the next, so that the result does not depend on when it is read.
    Memory does not grow, because the state includes the effects of all earlier entries.

    Entries of the work log have a time [s], the number of the workload (0 for none), a factor of its power, and, at its
    end, the amount of work done [s at the top clock]. Entries of the clock log have a time [s], 0 and the clock [MHz],
    or a time [s], 1, the power limit [W] and the highest clock allowed by the temperature [MHz].

    Attributes:
        at_s: Time of this state [s].
        workload: Workload that runs, or None.
        progress_s: Amount of its work done [s at the top clock].
        reached_mhz: Clock at which the GPU runs, which is below ``locked_mhz`` at a limit [MHz].
        counter_j: Energy that the counter shows, unlike ``energy_j`` [J].
        changes_s: Times of the last changes of the clock [s].
    """

    def __init__(
        self,
        model: DeviceModel,
        work_log: Log,
        clock_log: Log,
        conditions: Sequence[Condition],
        counter_period_s: float,
    ) -> None:
        self._model, self._conditions, self._period_s = model, frozenset(conditions), counter_period_s
        self._rise_per_c = _RISE_PER_C if "warming" in self._conditions else 0.0
        self._work_log, self._clock_log = work_log, clock_log
        self._work_read = self._clocks_read = 0
        self._pending: list[tuple[float, ...]] = []
        self.at_s = max(work_log.began_s, clock_log.began_s)
        self.workload: Workload | None = None
        self._power_factor = 1.0
        self.progress_s = self.energy_j = self._counted_j = self.counter_j = 0.0
        self.locked_mhz, self.thermal_mhz = model.top_clock_mhz, math.inf
        self.power_limit_w = model.power_limit_w
        self.changes_s: deque[float] = deque(maxlen=16)
        self._warmer_c = _C_PER_W * model.blocking_power_w
        self._mean_w = model.blocking_power_w
        self._update_clock_and_power()

    @property
    def power_w(self) -> float:
        return self._cold_w * (1 + self._rise_per_c * self._warmer_c)

    @property
    def temperature_c(self) -> float:
        return _COLD_C + self._warmer_c

    @property
    def unread(self) -> int:
        """Number of entries of a log that are not yet part of the state."""
        return max(self._work_log.count - self._work_read, self._clock_log.count - self._clocks_read)

    @property
    def next_change_s(self) -> float:
        """Time of the next known change of the clock [s]."""
        return min(self._next_update_s, self._pending[0][0] if self._pending else math.inf)

    def remaining_s(self, work_s: float) -> float:
        """Return the time that the rest of some work takes at the current clock [s]."""
        assert self.workload is not None
        return (work_s - self.progress_s) * self._model.slowdown(self.reached_mhz, self.workload)

    def advance(self, until_s: float) -> None:
        """Apply all entries up to a point in time.

        An entry that arrives late takes effect at the time that the state has already reached.
        """
        # The work log is read first, so that the clocks at which this work ran are in the other log by then.
        self._work_read, work = self._work_log.since(self._work_read)
        self._clocks_read, clocks = self._clock_log.since(self._clocks_read)
        latest_s = until_s + _LONGEST_CALL_S
        for entry in clocks:
            at_s, what, first, second = entry
            lowest_mhz, top_mhz = self._model.lowest_clock_mhz, self._model.top_clock_mhz
            is_valid = lowest_mhz <= first <= top_mhz if what == 0 else what == 1 and first > 0 and second > 0
            _require(is_valid and 0 <= at_s <= latest_s, "clock", entry)
            insort(self._pending, entry, key=itemgetter(0))
        for entry in work:
            at_s, number, factor, _ = entry
            _require(number in range(len(WORKLOADS) + 1) and 0 <= factor < 100 and 0 <= at_s <= latest_s, "work", entry)
            self._advance_to(at_s)
            self.workload = WORKLOADS[int(number) - 1] if number else None
            self._power_factor = factor
            self.progress_s = 0.0
            self._update_clock_and_power()
        self._advance_to(until_s)

    def _advance_to(self, until_s: float) -> None:
        while (change_s := self.next_change_s) <= until_s:
            self._integrate(change_s)
            while self._pending and self._pending[0][0] <= change_s:
                _, what, first, second = self._pending.pop(0)
                if what:
                    self.power_limit_w, self.thermal_mhz = min(first, self._model.power_limit_w), second
                else:
                    self.locked_mhz = int(first)
                    self.changes_s.append(change_s)
            self._update_clock_and_power()
        self._integrate(until_s)

    def _update_clock_and_power(self) -> None:
        model, workload = self._model, self.workload
        self.reached_mhz = float(self.locked_mhz)
        self._next_update_s = math.inf
        if workload is None:
            self._cold_w = model.blocking_power_w
            if "low-clock-waiting" in self._conditions:
                self._cold_w *= 0.5 + 0.5 * self.locked_mhz / model.top_clock_mhz
            return
        self.reached_mhz = min(model.reached_clock_mhz(self.locked_mhz, workload), self.thermal_mhz)
        allowed_w = self.power_limit_w
        if "duty-limit" in self._conditions:
            self._next_update_s = self.at_s + _STEP_S
            sustained_w = _SUSTAINED * allowed_w
            held_w = max(0.5 * sustained_w, sustained_w + _GAIN * (sustained_w - self._mean_w))
            allowed_w = min(allowed_w, held_w)
        if allowed_w < model.power_limit_w:
            self.reached_mhz = min(self.reached_mhz, model.highest_clock_mhz(allowed_w, workload))
        self._cold_w = model.power_w(self.reached_mhz, workload) * self._power_factor

    def _integrate(self, until_s: float) -> None:
        """Add energy, progress and heat up to a point in time at the current clock."""
        time_s, from_s = until_s - self.at_s, self.at_s
        if time_s <= 0:
            return
        energy_j = self._energy_j(time_s)
        is_sampled = "sampled-counter" in self._conditions
        refreshed_s = math.floor(until_s / self._period_s) * self._period_s
        if refreshed_s > from_s:
            seen = self._sampled(from_s, refreshed_s) if is_sampled else 1
            self.counter_j = self._counted_j + seen * self._energy_j(refreshed_s - from_s)
        self._counted_j += energy_j * (self._sampled(from_s, until_s) if is_sampled else 1)
        self.energy_j += energy_j
        if self.workload is not None:
            self.progress_s += time_s / self._model.slowdown(self.reached_mhz, self.workload)
        final_c, rate = self._warming()
        cooled = math.exp(-rate * time_s)
        if "duty-limit" in self._conditions:
            final_w = self._cold_w * (1 + self._rise_per_c * final_c)
            part_w = (self.power_w - final_w) / (1 - rate * _AVERAGED_S)
            forgotten = math.exp(-time_s / _AVERAGED_S)
            self._mean_w = final_w + part_w * cooled + (self._mean_w - final_w - part_w) * forgotten
        self._warmer_c = final_c + (self._warmer_c - final_c) * cooled
        self.at_s = until_s

    def _warming(self) -> tuple[float, float]:
        """Return the final temperature rise above a cold board [K] and its rate [1/s].

        Power rises with the temperature and the temperature with power, which gives an exponential with its own rate.
        """
        feedback = _C_PER_W * self._cold_w * self._rise_per_c
        return _C_PER_W * self._cold_w / (1 - feedback), (1 - feedback) / _WARMS_IN_S

    def _energy_j(self, time_s: float) -> float:
        """Return the energy used in the given time at the current clock [J]."""
        if not self._rise_per_c:
            return self._cold_w * time_s
        final_c, rate = self._warming()
        kelvin_s = final_c * time_s + (self._warmer_c - final_c) * -math.expm1(-rate * time_s) / rate
        return self._cold_w * (time_s + self._rise_per_c * kelvin_s)

    def _sampled(self, from_s: float, until_s: float) -> float:
        """Return the energy that the counter adds in a time window, relative to the energy used."""
        return (self._sampled_s(until_s) - self._sampled_s(from_s)) / (until_s - from_s)

    def _sampled_s(self, moment_s: float) -> float:
        periods, phase = divmod(moment_s / self._period_s, 1.0)
        return (periods + max(0.0, phase - (1 - _SAMPLED)) / _SAMPLED) * self._period_s


def _require(is_valid: bool, kind: LogKind, entry: tuple[float, ...]) -> None:
    if not is_valid:
        raise GpuError(f"The {kind} log of a simulated GPU is damaged: it contains {entry}. Restart the job.")


@dataclass(frozen=True)
class LatencyModel:
    """Log-normal distribution of the duration of a clock-setting call, with a tail.

    Its median is interpolated between those for the lowest and the highest target clock [s]. ``spread`` is the standard
    deviation of the logarithm. A share of calls is slower by a factor.
    """

    lowest_s: float
    highest_s: float
    spread: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def sample_s(self, target: float, source: random.Random) -> float:
        """Return the duration of one call [s], for a target from 0 for the lowest clock to 1 for the highest."""
        median_s = self.lowest_s + (self.highest_s - self.lowest_s) * target
        factor = self.slow_factor if source.random() < self.slow_share else 1.0
        return median_s * factor * math.exp(self.spread * source.gauss(0, 1))


LATENCIES = {
    # 10 to 20 ms, by the maintainer of Zeus (github.com/ml-energy/zeus, issue 29). Assumed: the spread.
    "a100": LatencyModel(0.013, 0.017, spread=0.12),
    # Under a compute load 3.2 ms at the median towards low clocks, 6.0 ms towards high ones; over 18 950 calls 4.5 ms
    # at the median, 9.2 ms at the 95th percentile, 11.5 ms at the 99th (github.com/thynics/gpu_ctl_probe, d577316).
    "v100": LatencyModel(0.0032, 0.0060, spread=0.36),
    # Assumed, to test robustness: two of a hundred calls take ten times as long.
    "heavy-tail": LatencyModel(0.013, 0.017, spread=0.12, slow_share=0.02, slow_factor=10.0),
}


class SimulatedConfig(StrictModel):
    """The GPU to simulate on machines without GPUs."""

    gpu: str = Field(
        "a100-sxm",
        description="Device model: a100-sxm, a40, h100-sxm or h200. Power limits are those of the measured boards: "
        "475, 298, 500 and 600 W. Most A100 boards have 400 W.",
    )
    longest_instruction_s: float = Field(
        0.1,
        gt=0,
        description="Time of the pipeline's longest forward or backward at the top clock [s]. The others follow "
        "from their floating-point operations.",
    )
    flops_per_s: float | None = Field(
        None,
        gt=0,
        description="Floating-point operations per second at the top clock, instead of longest_instruction_s. "
        "Allows to compare layouts of one model.",
    )
    transfer_s: float = Field(0.0, ge=0, description="Time of a transfer between two stages [s].")
    tail_s: float = Field(0.0, ge=0, description="Time of gradient reduction and optimizer step at the top clock [s].")
    lock_latency_s: float = Field(0.015, ge=0, description="Time of a clock-setting call [s].")
    lock_latency: Literal["a100", "v100", "heavy-tail"] | None = Field(
        None, description="Distribution of the call's duration by target clock, instead of a constant."
    )
    counter_period_s: float = Field(0.1, gt=0, description="Refresh period of the energy counter [s].")
    time_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of instruction times.")
    power_noise: float = Field(0.0, ge=0, lt=0.5, description="Relative standard deviation of power.")
    conditions: list[Condition] = Field(
        [],
        description="Difficulties of real GPUs to simulate: "
        + "; ".join(f"{name}: {text}" for name, text in CONDITIONS.items())
        + ".",
    )
    may_lock: bool = Field(True, description="Whether setting clocks is permitted.")


def open_address(identity: str, logs: Sequence[memoryview]) -> SimulatedGpu:
    """Open a GPU of another process by the part of its address after ``simulated:``, which is JSON."""
    try:
        work, clock = logs
        settings = json.loads(identity.rpartition("#")[0] or identity)
        turn = turn_on_node if "lock-contention" in settings["conditions"] else nullcontext
        return SimulatedGpu.named(
            **settings, driver_turn=turn, work_log=Log(work, "work"), clock_log=Log(clock, "clock")
        )
    except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise GpuError(f"The address of a simulated GPU cannot be used: {error!r}.") from error


@contextmanager
def turn_on_node() -> Iterator[None]:
    """Wait for clock-setting calls of the other ranks of this node, which have the same parent process."""
    path = Path(tempfile.gettempdir()) / f"perseus-ds-simulated-driver-{os.getuid()}-{os.getppid()}"
    with open_without_links(path, append=True) as file:  # other users can predict the name
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise GpuError(f"{path} belongs to another user. Remove it, or set TMPDIR to another folder.")
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class SimulatedGpu:
    """A GPU with simulated physics. It implements :class:`perseus_ds.gpu.base.Gpu`.

    The settings are those of :class:`SimulatedConfig`.

    Args:
        model: Device model of the GPU.
        driver_turn: Context of each clock-setting call, such as :func:`turn_on_node`.
        seed: Seed of the noise.
        work_log: Work log in memory shared with another process. Only one of them may run work. By default in private
            memory.
        clock_log: Clock log in shared memory. Running work polls it every 5 ms, because another process may write it.
    """

    simulated = True
    settings = None
    has_energy_counter = True
    address: str | None = None

    def __init__(
        self,
        model: DeviceModel,
        *,
        driver_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        seed: int = 0,
        timebase: Timebase = REAL_TIME,
        work_log: Log | None = None,
        clock_log: Log | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.name = f"simulated {model.name}"
        self.driver: str | None = None
        self._config = config = SimulatedConfig(**settings)
        constant = LatencyModel(config.lock_latency_s, config.lock_latency_s)
        self._lock_latency = LATENCIES[config.lock_latency] if config.lock_latency else constant
        self._latency_random = random.Random(f"latency {seed}")  # so that other noise does not depend on clock changes
        self._random = random.Random(seed)
        self._driver_turn = driver_turn
        self.timebase = timebase
        self._changed = timebase.condition()
        self._poll_s = math.inf if clock_log is None else _POLL_S
        began_s = timebase.now_s()
        self._work_log = work_log or Log.create("work", began_s)
        self._clock_log = clock_log or Log.create("clock", began_s)
        self._physics = Physics(model, self._work_log, self._clock_log, config.conditions, config.counter_period_s)

    @classmethod
    def named(cls: type[G], gpu: str, **settings: Any) -> G:
        """Create a GPU of one of the :data:`DEVICES`."""
        if gpu not in DEVICES:
            raise ConfigError(f"perseus.simulated.gpu is {gpu!r}, expected one of {', '.join(sorted(DEVICES))}.")
        return cls(DEVICES[gpu], **settings)

    @classmethod
    def shared(cls: type[G], work: memoryview, clock: memoryview, **settings: Any) -> G:
        """Create a GPU with logs in empty shared memory, which another process can open by its address.

        The settings, as for :meth:`named`, must be serializable as JSON.
        """
        began_s = REAL_TIME.now_s()
        made = cls.named(
            **settings, work_log=Log.create("work", began_s, work), clock_log=Log.create("clock", began_s, clock)
        )
        made.address = f"simulated:{json.dumps(settings)}"
        return made

    @property
    def facts(self) -> GpuFacts:
        return gpu_facts(self)

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        return self.model.clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        if clock_mhz not in self.model.clocks_mhz:
            raise GpuError(f"{self.name}: {clock_mhz} MHz is not a supported clock.")
        self._set_clock(clock_mhz)

    def reset_clock(self) -> None:
        self._set_clock(self.model.top_clock_mhz)

    def check_lock_permission(self) -> None:
        if not self._config.may_lock:
            raise GpuPermissionError(
                f"{self.name}: this process may not set clocks (perseus.simulated.may_lock is false). "
                "Set it to true. A real GPU requires root, CAP_SYS_ADMIN or zeusd."
            )

    @property
    def locked_clock_mhz(self) -> int:
        """Clock that is set, by default the highest one [MHz]."""
        with self._present() as gpu:
            return gpu.locked_mhz

    def clock_mhz(self) -> int:
        with self._present() as gpu:
            return gpu.locked_mhz if gpu.workload is None else round(gpu.reached_mhz)

    def throttle_reasons(self) -> tuple[str, ...]:
        with self._present() as gpu:
            if gpu.workload is None:
                return ("idle",)
            if gpu.reached_mhz >= gpu.locked_mhz:
                return ()
            return ("sw_thermal_slowdown",) if gpu.reached_mhz >= gpu.thermal_mhz else ("sw_power_cap",)

    def power_limit_w(self) -> float:
        with self._present() as gpu:
            return gpu.power_limit_w

    def limit(self, power_w: float | None = None, clock_mhz: float | None = None) -> None:
        """Limit the board as an administrator, a power manager or heat would. Thread-safe.

        Args:
            power_w: Power limit [W]. None for the board's own limit.
            clock_mhz: Highest clock allowed by the temperature [MHz]. None for no limit.
        """
        self._log_clock(self.timebase.now_s(), 1, power_w or math.inf, clock_mhz or math.inf)

    def energy_j(self) -> float:
        with self._present() as gpu:
            return math.floor(gpu.counter_j * 1000) / 1000

    @property
    def true_energy_j(self) -> float:
        """Energy used up to now, independent of the counter [J]."""
        with self._present() as gpu:
            return gpu.energy_j

    @property
    def state(self) -> GpuState:
        with self._present() as gpu:
            return GpuState(round(gpu.temperature_c), "P0")

    @property
    def transfer_delay_s(self) -> float:
        """Delay of a transfer that begins now, caused by recent clock changes [s]."""
        if "slow-transfers" not in self._config.conditions:
            return 0.0
        with self._present() as gpu:
            ages_s = (gpu.at_s - changed_s for changed_s in gpu.changes_s)
            # A change at the same time as the start of the transfer does not delay it.
            return _DELAY_S * sum(_DONE_S < age_s < _DISTURBED_S for age_s in ages_s)

    def power_w(self) -> float:
        with self._present() as gpu:
            return gpu.power_w

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def begin_work(self, workload: Workload = COMPUTE_BOUND) -> None:
        """Start some work. Until it ends, power is that of computing."""
        with self._changed:
            factor = max(0.0, 1 + self._config.power_noise * self._random.gauss(0, 1))
            self._append(self._work_log, self.timebase.now_s(), 1 + WORKLOADS.index(workload), factor, 0.0)

    def finish_work(self, top_clock_time_s: float) -> None:
        """Wait until the started work is done, at the speed of the current clocks.

        The duration is that at the top clock without a power limit [s].
        """
        work_s = top_clock_time_s * max(0.0, 1 + self._config.time_noise * self._random.gauss(0, 1))
        with self._present() as gpu:
            while (remaining_s := gpu.remaining_s(work_s)) > _DONE_S:
                self._changed.wait(min(remaining_s, max(0.0, gpu.next_change_s - gpu.at_s), self._poll_s))
                gpu.advance(self.timebase.now_s())
            self._append(self._work_log, gpu.at_s, 0, 1.0, work_s)

    def compute(self, device: object, seconds: float) -> None:
        """Run work that takes some time at the top clock [s], wherever the tensors of the rank are."""
        self.begin_work(COMPUTE_BOUND)
        self.finish_work(seconds)

    def _set_clock(self, clock_mhz: int) -> None:
        self.check_lock_permission()
        lowest_mhz, top_mhz = self.model.lowest_clock_mhz, self.model.top_clock_mhz
        target = (clock_mhz - lowest_mhz) / (top_mhz - lowest_mhz)
        with self._driver_turn():
            latency_s = self._lock_latency.sample_s(target, self._latency_random)
            self._log_clock(self.timebase.now_s() + latency_s, 0, clock_mhz, 0.0)
            self.timebase.sleep(latency_s)

    def _log_clock(self, at_s: float, what: int, first: float, second: float) -> None:
        with self._changed:
            self._append(self._clock_log, at_s, what, first, second)
            self._changed.notify_all()

    def _append(self, log: Log, *entry: float) -> None:
        if self._physics.unread > log.capacity // 2:  # before they are overwritten
            self._physics.advance(self.timebase.now_s())
        log.append(*entry)

    @contextmanager
    def _present(self) -> Iterator[Physics]:
        """Hold the lock of the present state."""
        with self._changed:
            self._physics.advance(self.timebase.now_s())
            yield self._physics
