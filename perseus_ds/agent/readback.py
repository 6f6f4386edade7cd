"""Reads the clock of a GPU back, to find latencies, clocks that are not reached, and limits."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.protocol.job_messages import ClockRefused, LatencyTable
from perseus_ds.timebase import REAL_TIME, Timebase

SLOWED_DOWN = frozenset({"hw_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"})
"""NVML's names of reasons for a lower clock other than a power limit."""
# A limit applies when it is lower than the profiled one by the first fraction, until it is lower by less than the
# second.
_LOWERED, _RAISED = 0.015, 0.01
# Power limits are rounded down to multiples of this fraction of the profiled one, so that small variations by a power
# manager cause no new plans. Clock limits are rounded down to steps of NVIDIA's clocks. A limit that rises by less than
# one and a half steps is kept.
_STEP, _STEP_MHZ, _STAYS = 0.01, 15.0, 1.5
# A plan below the limit cannot show that a slowdown has ended. It is assumed to have ended after this time, which
# doubles each time that this was wrong, up to the second value.
_LASTS_S, _LASTS_MOST_S = 30.0, 960.0


class LimitWatch:
    """Watches the power limit and the clock limit of a GPU.

    Heat, or others than Perseus, may lower them during a job. Only limits lower than when the profile was measured
    count, because a board may always be at its own limit. Used on the actor's thread.

    Attributes:
        profiled_w: Power limit recorded in the profile [W], or the first one read until it is known.
        power_w: Power limit [W]. Infinite if it is not lower than the profiled one.
        clock_mhz: Highest clock that the GPU reaches [MHz]. Infinite if nothing but the power limit limits it.
    """

    def __init__(self, gpu: Gpu, timebase: Timebase) -> None:
        self._gpu = gpu
        self._time = timebase
        self.profiled_w: float | None = None
        self.power_w = self.clock_mhz = math.inf
        self._slowed_at_s = self._over_at_s = -math.inf
        self._lasts_s = _LASTS_S

    def read(self) -> None:
        """Read the power limit, which takes a few microseconds. It is ignored if it cannot be read."""
        if self._time.now_s() > self._slowed_at_s + self._lasts_s and not math.isinf(self.clock_mhz):
            self._end_slowdown()
        limit_w = None
        with suppress(GpuError):
            limit_w = self._gpu.power_limit_w()
        if limit_w is None:
            return
        if self.profiled_w is None:
            self.profiled_w = limit_w
        least_w = (1 - (_LOWERED if math.isinf(self.power_w) else _RAISED)) * self.profiled_w
        step_w = _STEP * self.profiled_w
        if limit_w > least_w:
            self.power_w = math.inf
        elif not 0 <= limit_w - self.power_w < _STAYS * step_w:
            self.power_w = _rounded_down(limit_w, step_w)

    def reached(self, clock_mhz: int, reasons: tuple[str, ...] = ()) -> None:
        """Update the clock limit from a clock that the busy GPU has reached, and its throttle reasons."""
        if not SLOWED_DOWN.isdisjoint(reasons):
            now_s = self._time.now_s()
            if math.isinf(self.clock_mhz):
                comes_again = now_s < self._over_at_s + self._lasts_s
                self._lasts_s = min(2 * self._lasts_s, _LASTS_MOST_S) if comes_again else _LASTS_S
            self._slowed_at_s = now_s
            if clock_mhz < self.clock_mhz:
                self.clock_mhz = _rounded_down(clock_mhz, _STEP_MHZ)
        elif clock_mhz > self.clock_mhz + _STAYS * _STEP_MHZ:
            self._end_slowdown()

    def _end_slowdown(self) -> None:
        self.clock_mhz, self._over_at_s = math.inf, self._time.now_s()


def _rounded_down(value: float, step: float) -> float:
    return round(math.floor(value / step) * step, 3)


_NO_READING = (math.nan, math.nan)
_REMEMBERED = 15
_TOLERANCE = 0.02
_SETTLE_EVERY = 16
"""The clock is polled until it is the requested one after each of the first changes, and later after every 16th."""
_SETTLE_POLL_S, _SETTLE_POLL = 0.001, 0.05
"""Polling interval: the larger of this time and this fraction of the time since the call."""
_SETTLED_S, _TIMED_OUT_S = 0.05, 1.0
"""Time after the call from which a clock counts as not reached: the minimum, and the time if it is polled."""
_MOVED = 0.2
"""Relative change from which a latency is replaced."""
_PERIOD_S = 0.5
_DEFAULT_READINGS = 120
_HELD_READINGS = 6
"""Number of consecutive readings below the highest clock that count as a limit, even if none is reported."""
_CHANGED_READINGS = 2
"""Number of consecutive readings above the requested clock that count as a change from outside."""
# Reasons that do not mean that the GPU cannot run faster.
_NO_LIMITS = frozenset({"idle", "applications_clocks_setting", "display_clock_setting", "sync_boost"})


class ClockReadback:
    """Decides when to read the clock back, and evaluates the readings. Used on the actor's thread.

    Attributes:
        reading: The requested clock, and the clock read after it has had time to settle [MHz]. NaN at default clocks.
        latencies: Latencies of clocks. The table is replaced when one of them has changed.
        limits: Power and clock limits that are lower than profiled.
        is_changed_from_outside: Whether the busy GPU runs above the clock that was set.
    """

    def __init__(self, gpu: Gpu, on_refusal: Callable[[ClockRefused], None], timebase: Timebase = REAL_TIME) -> None:
        """Begin with no clock to read.

        ``on_refusal`` is called once for each clock that a busy GPU stays below by more than 2 %.
        """
        self._gpu = gpu
        self._on_refusal = on_refusal
        self._time = timebase
        self.reading: tuple[float, float] = _NO_READING
        self.latencies = LatencyTable()
        self.limits = LimitWatch(gpu, timebase)
        self._samples_s: dict[tuple[int, bool], deque[float]] = {}
        self._changes = 0
        # The previous clock, and the time from the request until the last reading of either the previous clock or the
        # requested one.
        self._before_mhz = 0
        self._not_yet_s: float | None = None
        self._took_s = self._settled_s = 0.0
        self._settled_by_clock_s: dict[int, float] = {}
        self._refused: set[int] = set()
        self._clock_mhz: int | None = None
        self._called_s = 0.0
        self._is_settling = False
        self._read_s = 0.0
        self._default_readings = 0
        self._held_readings = self._changed_readings = 0
        self._default_mhz: deque[int] = deque(maxlen=_REMEMBERED)

    def watch_default_clocks(self) -> None:
        """Check during one minute of default clocks whether the busy GPU is kept below its highest clock."""
        self._default_readings = _DEFAULT_READINGS

    @property
    def is_changed_from_outside(self) -> bool:
        return self._changed_readings >= _CHANGED_READINGS

    @property
    def default_mhz(self) -> int | None:
        """Median clock of the busy GPU at default clocks [MHz]. None if it was not read."""
        read_mhz = tuple(self._default_mhz)
        return statistics.median_low(read_mhz) if read_mhz else None

    def changed(self, clock_mhz: int | None, took_s: float) -> None:
        """Record that the driver has accepted a clock (None for the default) in a call of some duration [s]."""
        if self._is_settling and self._not_yet_s is not None:
            self._add_latency(self._not_yet_s)
        self._called_s, self._took_s = self._time.now_s(), took_s
        self._before_mhz, self._clock_mhz = self._clock_mhz or self._highest_mhz(), clock_mhz
        self._not_yet_s = None
        self._changed_readings = 0
        if clock_mhz is None:
            self.reading = _NO_READING
        else:
            self._settled_s = self._settles_within_s(clock_mhz)
        self._changes += 1
        self._is_settling = clock_mhz is not None and (
            self._changes <= _REMEMBERED or self._changes % _SETTLE_EVERY == 0
        )

    def _highest_mhz(self) -> int:
        with suppress(GpuError):
            return self._gpu.supported_clocks_mhz()[-1]
        return 0  # a GPU that lists no clocks can still be observed

    def _settles_within_s(self, clock_mhz: int) -> float:
        """Return the earliest time after its request at which a clock is read [s]. Cached for each clock."""
        if clock_mhz not in self._settled_by_clock_s:
            self._settled_by_clock_s[clock_mhz] = max(_SETTLED_S, self.latencies.dwell_s(clock_mhz))
        return self._settled_by_clock_s[clock_mhz]

    def forget(self) -> None:
        """Read no clock until the next change, because the driver has refused one."""
        self._clock_mhz = None
        self.reading = _NO_READING
        self._is_settling = False

    def due_in_s(self) -> float | None:
        """Return the time until :meth:`read` is due [s]. None if it is not due before a change."""
        now_s = self._time.now_s()
        if self._clock_mhz is None:
            return max(0.0, self._read_s + _PERIOD_S - now_s) if self._default_readings else None
        if self._is_settling:
            poll_s = max(_SETTLE_POLL_S, _SETTLE_POLL * (now_s - self._called_s))
            return max(0.0, self._read_s + poll_s - now_s)
        return max(self._called_s + self._settled_s, self._read_s + _PERIOD_S, now_s) - now_s

    def read(self) -> None:
        """Read the clock back."""
        requested_mhz = self._clock_mhz
        if requested_mhz is None:
            self._read_default_clocks()
            return
        try:
            reached_mhz = self._gpu.clock_mhz()
        except GpuError:  # If the GPU is lost, the next request fails. If it has no such reading, none is needed.
            self._clock_mhz = None
            self._is_settling = False
            return
        self._read_s = self._time.now_s()
        since_s = self._read_s - self._called_s
        is_below = reached_mhz < requested_mhz * (1 - _TOLERANCE)
        is_above = reached_mhz > requested_mhz * (1 + _TOLERANCE)
        if self._is_settling:
            is_there = _is_at(reached_mhz, requested_mhz)
            # A clock that has changed, but not to the requested one, is limited, so its time is not a latency.
            stays = _is_at(reached_mhz, self._before_mhz)
            self._not_yet_s = self._took_s + since_s if is_there or stays else None
            if not is_there and since_s < _TIMED_OUT_S:
                return
            self._is_settling = False
            if self._not_yet_s is not None:
                self._add_latency(self._not_yet_s)
        reasons: tuple[str, ...] = ()
        if is_below or is_above or reached_mhz > self.limits.clock_mhz:
            with suppress(GpuError):
                reasons = self._gpu.throttle_reasons()
        if "idle" not in reasons:  # An idle GPU may lower its clock by itself.
            self.limits.reached(reached_mhz, reasons)
            if is_below and requested_mhz not in self._refused:
                self._refused.add(requested_mhz)
                self._on_refusal(ClockRefused(requested_mhz, reached_mhz, reasons))
        is_changed = is_above and "idle" not in reasons
        self._changed_readings = self._changed_readings + 1 if is_changed else 0
        self.reading = requested_mhz, reached_mhz

    def _add_latency(self, latency_s: float) -> None:
        """Add a latency of the requested clock, or a lower bound of it [s]."""
        if self._clock_mhz is None or self._before_mhz == self._clock_mhz:
            return
        clock_mhz, rises = self._clock_mhz, self._before_mhz < self._clock_mhz
        self._samples_s.setdefault((clock_mhz, rises), deque(maxlen=_REMEMBERED)).append(latency_s)
        table = LatencyTable({key: tuple(samples_s) for key, samples_s in self._samples_s.items()})
        known = self.latencies
        for figure in (LatencyTable.latest_s, LatencyTable.soonest_s):
            now_s, before_s = (figure(each, clock_mhz, rises=rises) for each in (table, known))
            if abs(now_s - before_s) > _MOVED * before_s:
                self.latencies = table
                self._settled_by_clock_s.clear()

    def _read_default_clocks(self) -> None:
        self._read_s = self._time.now_s()
        self._default_readings -= 1
        try:
            reached_mhz, reasons = self._gpu.clock_mhz(), self._gpu.throttle_reasons()
            highest_mhz = self._gpu.supported_clocks_mhz()[-1]
        except GpuError:  # one of these cannot be read, and training does not need it
            self._default_readings = 0
            return
        if "idle" not in reasons:
            self._default_mhz.append(reached_mhz)
        limits = tuple(reason for reason in reasons if reason not in _NO_LIMITS)
        is_below = reached_mhz < (1 - _TOLERANCE) * highest_mhz
        self._held_readings = self._held_readings + 1 if is_below and "idle" not in reasons else 0
        if limits or self._held_readings == _HELD_READINGS:
            self._default_readings = 0
            self._on_refusal(ClockRefused(None, reached_mhz, limits))


def _is_at(read_mhz: int, clock_mhz: int) -> bool:
    return abs(read_mhz - clock_mhz) <= _TOLERANCE * clock_mhz
