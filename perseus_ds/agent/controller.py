"""Sets the clock of a rank's GPU and reads the GPU, on one thread.

Requests and calls are executed in order, each after the GPU has passed its event. Only calls of the driver count as
time of the driver, not waits for the GPU.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from perseus_ds.agent.readback import ClockReadback
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.protocol.job_messages import ClockRefused, RankFailed, RankRecovered
from perseus_ds.protocol.layout import DRIVER_HANGS_S, RankMemory
from perseus_ds.timebase import REAL_TIME, Timebase

_UNKNOWN_MHZ = -1
# Number of wake-up delays that are stored, number needed for a median, and delay that counts as late [s].
_REMEMBERED, _ENOUGH, _THREAD_LATE_S = 33, 3, 0.002
_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays before the next attempt after consecutive refusals by the driver. The last one repeats."""
_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_OVER_S = 300.0
"""A fault that recurs within this time is not reported again."""


class Event(Protocol):
    """A point in the GPU's own progress. A thread that notices its passing wakes the controller."""

    def query(self) -> bool: ...

    def passed_s(self) -> float:
        """Return when the GPU has passed it, on the host's clock [s]. Only valid after it has passed."""


class ClockStatus(NamedTuple):
    """Clock changes and readings of a GPU, as in :class:`~perseus_ds.protocol.job_messages.RankReport`."""

    changes: int = 0
    skips: int = 0
    asked_mhz: float = math.nan
    reached_mhz: float = math.nan
    late_s: float = 0.0
    limit_w: float = math.inf
    limit_mhz: float = math.inf
    default_mhz: float = 0.0


class ClockRequest(NamedTuple):
    """A clock to set (None for the default), after an event of the GPU if one is given.

    With a delay after the event [s], the request is dropped if the next request without one becomes due within it.
    """

    clock_mhz: int | None
    after: Event | None
    delay_s: float | None = None


class DriverCall(NamedTuple):
    """A function that calls the driver, after an event of the GPU if one is given."""

    function: Callable[[], None]
    after: Event | None


class ClockController:
    """Sets clocks without stalling training.

    A request is skipped if the next one is already due, because its instruction is over. If the driver is busy, the
    GPU runs at default clocks until another attempt succeeds. After any other error, or if the driver does not answer,
    the rank falls back: requests are ignored until the driver works, which is tested at growing intervals. An error
    that is not one of the GPU, the driver or a disk is a bug, and this fallback is permanent.

    Attributes:
        changes: Number of clock changes made.
        skips: Number of requests skipped because a later one was already due.
        missed: Number of times that it set the default clock or none instead of a requested one, due to the driver.
        has_failed: Whether the rank has fallen back to default clocks.
        readback: Readings of the clock, latencies, and limits.
        is_closed: Whether it has stopped setting clocks.
        memory: Shared memory of the rank. It counts resets by the agent.
        source: Adds due requests and calls, on the thread. Returns True if it withdrew the item that the thread waits
            for.
    """

    def __init__(
        self,
        gpu: Gpu,
        report: Callable[[RankFailed | RankRecovered | ClockRefused], None],
        *,
        timebase: Timebase = REAL_TIME,
        memory: RankMemory | None = None,
        may_lock: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread.

        Args:
            gpu: The GPU whose clock to control.
            report: Called once for each fault, each recovery, and each clock that the GPU does not reach.
            timebase: Timebase of the GPU.
            memory: Shared memory of the rank. By default, memory of the controller's own.
            may_lock: Called before each clock is set, and returns whether it may be set.
        """
        self._gpu = gpu
        self._report = report
        self._time = timebase
        self.readback = ClockReadback(gpu, report, timebase)
        self.changes = self.skips = self.missed = 0
        # Any thread appends, and only the controller's thread removes.
        self._items: deque[ClockRequest | DriverCall] = deque()
        self._requested_mhz: int | None = None
        self._is_idle = False
        self._idle_at_s = 0.0
        self._notifier = timebase.notifier()
        self._is_waiting = False
        self._called_s: float | None = None
        self._busy_since_s: float | None = None
        self.is_closed = False
        self.memory = memory or RankMemory.create()
        self._may_lock = may_lock
        self.source: Callable[[], bool] = lambda: False
        self._resets = 0
        # The clock last requested from the driver, and the clock that it has accepted.
        self._wanted_mhz: int | None = None
        self._clock_mhz: int | None = None
        self.has_failed = False
        # The last fault, and whether it may pass. Time of the next probe, or from which on the fault is over.
        self._fault: type[Exception] | None = None
        self._may_pass = True
        self._probes = 0
        self._next_s = 0.0
        self._refusals = 0
        self._late_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._again_at_s: float | None = None
        self._awaited: Event | None = None
        timebase.thread(self._work, "perseus-clocks").start()

    def request(self, clock_mhz: int | None, after: Event | None = None) -> None:
        """Request a clock (None for the default) after an event, without waiting."""
        if clock_mhz != self._requested_mhz or self._is_idle or self._was_reset:
            self._requested_mhz = clock_mhz
            self._is_idle = False
            self._put(ClockRequest(clock_mhz, after))

    def request_early(self, clock_mhz: int, begun: Event, delay_s: float) -> None:
        """Request a clock some time after an event [s], before the :meth:`request` for it is due.

        A :meth:`request` for the same clock must follow. This one only makes the driver's call earlier.
        """
        self._put(ClockRequest(clock_mhz, begun, delay_s))

    def reset_when_idle(self, after_s: float) -> None:
        """Return to the default clock after some time [s] without a :meth:`request`."""
        if self._requested_mhz is not None:
            self._idle_at_s = self._time.now_s() + after_s
            self._is_idle = True
            self.wake()

    def call(self, function: Callable[[], None], after: Event | None = None) -> bool:
        """Queue a function that calls the driver. Returns False if the driver does not answer."""
        if self.problem is not None:
            return False
        self._put(DriverCall(function, after))
        return True

    def update(self) -> None:
        """Fall back if the driver hangs, and test it when that is due. Runs on the agent's loop."""
        if not self.has_failed and (problem := self.problem) is not None:  # read once: a call may return meanwhile
            self._report_failure(problem)
        now_s = self._time.now_s()
        if not self.has_failed:
            if self._fault is not None and now_s >= self._next_s:
                self._fault = None
                self._report(RankRecovered())
        elif self._may_pass and now_s >= self._next_s:
            self._schedule_probe()
            self.call(self._probe)

    def _report_failure(self, error: Exception) -> None:
        """Ignore requests from now on, and report the error unless it is a recent one again. Thread-safe."""
        may_pass = isinstance(error, GpuError | OSError)
        self._may_pass = may_pass and (self._may_pass or not self.has_failed)
        if not self.has_failed:
            self.has_failed = True
            fault = GpuError if isinstance(error, GpuError) else type(error)
            if self._fault is not fault:
                self._fault, self._probes = fault, 0
                self._report(RankFailed(str(error).rstrip(".")))
            self._schedule_probe()

    def _schedule_probe(self) -> None:
        self._next_s = self._time.now_s() + _PROBED_AFTER_S[min(self._probes, len(_PROBED_AFTER_S) - 1)]
        self._probes += 1

    def watch_default_clocks(self) -> None:
        """Report a limit that lowers the clock at default clocks, like a clock that is not reached."""
        self.readback.watch_default_clocks()
        self.wake()

    @property
    def thread_late_s(self) -> float:
        """Median delay until the thread notices that the GPU has passed an event [s].

        It does not depend on single events that pass while the thread waits for the driver. Up to 2 ms count as 0.
        """
        typical_s = statistics.median(self._late_s) if len(self._late_s) >= _ENOUGH else 0.0
        return typical_s if typical_s > _THREAD_LATE_S else 0.0

    @property
    def failing_s(self) -> float:
        """Time since the current call began, or since the driver is too busy to set a clock [s]. 0 if neither."""
        since_s = _sooner(self._called_s, self._busy_since_s)
        return 0.0 if since_s is None else self._time.now_s() - since_s

    @property
    def is_calling(self) -> bool:
        return self._called_s is not None

    @property
    def problem(self) -> GpuBusyError | None:
        """Reason why calls are refused, or None."""
        if self.failing_s < DRIVER_HANGS_S:
            return None
        return GpuBusyError(f"the driver has not answered for {self.failing_s:.0f} s")

    @property
    def _was_reset(self) -> bool:
        """True if the agent has reset the clock since it was set."""
        return self._clock_mhz is not None and self.memory.resets != self._resets

    def take_over(self) -> None:
        """Assume that another agent has locked the clock. Must be called before the first request."""
        self._clock_mhz = self._wanted_mhz = self._requested_mhz = _UNKNOWN_MHZ

    def leave(self) -> None:
        """Stop setting clocks, without waiting. The caller resets the current clock.

        If a call of the driver is in progress, it restores the default clock itself. Queued calls are still made.
        """
        self.is_closed = True
        self._notifier.notify()

    def _put(self, item: ClockRequest | DriverCall) -> None:
        if not self.is_closed:
            self._items.append(item)
            self.wake()

    def withdraw(self, is_void: Callable[[Any], bool]) -> bool:
        """Withdraw the items that wait for some events. Runs on the controller's thread.

        Returns True if the thread is waiting for one of these events.
        """
        for _ in range(len(self._items)):  # in place: other threads may append
            item = self._items.popleft()
            if not is_void(item.after):
                self._items.append(item)
        self._requested_mhz = _UNKNOWN_MHZ
        return self._awaited is not None and is_void(self._awaited)

    def wake(self) -> None:
        if self._is_waiting:  # otherwise the thread polls before it waits
            self._is_waiting = False  # one notification is enough, however late the thread continues
            self._notifier.notify()

    # The methods below run on the controller's thread.

    def _work(self) -> None:
        while self._items or not self.is_closed:
            self._serve()

    def _serve(self) -> None:
        """Wait for the oldest item, and process it."""
        try:
            self._wait(None, lambda: bool(self._items) or self.is_closed)
            item = self._items.popleft() if self._items else None
            if isinstance(item, ClockRequest):
                self._handle(item)
            elif item is not None and (item.after is None or self._wait_for(item.after)):
                self._in_call(item.function)
        except Exception as error:  # a mistake, which must leave no clock locked
            self.fail(error)

    def _wait(self, awaited: Event | None, is_over: Callable[[], bool], until_s: float | None = None) -> bool:
        """Wait for a condition, and do what is due while waiting. Returns False if ``awaited`` was withdrawn.

        ``awaited`` is an event that may make the condition true, and ``until_s`` the time at which it becomes true.
        """
        is_withdrawn = False
        while not is_withdrawn and not is_over():
            self._is_waiting, self._awaited = True, awaited  # from here on, other threads notify this one of changes
            is_withdrawn = self.source()
            due_in_s = self._due_in_s()
            if due_in_s is not None and due_in_s <= 0:
                self._do_what_is_due()
            elif not is_withdrawn and not is_over():
                left_s = None if until_s is None else until_s - self._time.now_s()
                self._notifier.wait(_sooner(due_in_s, left_s))
        self._is_waiting, self._awaited = False, None
        return not is_withdrawn

    def _due_in_s(self) -> float | None:
        """Return the time until the clock is to be read back, set again or reset [s]. None for never."""
        if self.is_closed:
            return None
        idle_at_s = self._idle_at_s if self._may_idle() else None
        at_s = _sooner(self._again_at_s, idle_at_s)
        return _sooner(self.readback.due_in_s(), None if at_s is None else max(0.0, at_s - self._time.now_s()))

    def _may_idle(self) -> bool:
        """Return True if no clock is requested after a future event."""
        return self._is_idle and self._wanted_mhz is not None and self._following() is None

    def _do_what_is_due(self) -> None:
        now_s = self._time.now_s()
        if self._may_idle() and self._idle_at_s <= now_s:
            self._set(None)
        elif self._again_at_s is not None and self._again_at_s <= now_s:
            self._set(self._wanted_mhz)
        else:
            self._in_call(self.readback.read)

    def _wait_for(self, event: Event) -> bool:
        """Wait until the GPU has passed an event. Returns False if it was withdrawn."""
        had_passed = event.query()
        if not self._wait(event, event.query):
            return False
        # Without delay, so that the times of later events are known better.
        late_s = self._time.now_s() - event.passed_s()
        if not had_passed:
            self._late_s.append(late_s)
        return True

    def _handle(self, request: ClockRequest) -> None:
        if self.has_failed:
            self.missed += 1
            return
        if request.after is not None and not self._wait_for(request.after):
            return
        if request.after is not None and request.delay_s is not None:
            if not self._wait_longer(request.after, request.delay_s):
                return  # the next request sets the clock
        elif self._is_overtaken():
            self.skips += 1
            return
        self._refusals = 0
        self._set(request.clock_mhz)

    def _wait_longer(self, after: Event, delay_s: float) -> bool:
        """Wait until a delay after an event [s] has passed. Returns False if the request is to be dropped."""
        until_s = after.passed_s() + delay_s
        is_due = self._wait(after, lambda: self._drops_early() or self._time.now_s() >= until_s, until_s)
        return is_due and not self._drops_early()

    def _drops_early(self) -> bool:
        return self.is_closed or self._is_overtaken()

    def _is_overtaken(self) -> bool:
        """Return True if the next required request is already due."""
        following = self._following()
        return following is not None and (following.after is None or following.after.query())

    def _following(self) -> ClockRequest | None:
        required = (item for item in tuple(self._items) if isinstance(item, ClockRequest) and item.delay_s is None)
        return next(required, None)

    def _set(self, clock_mhz: int | None) -> None:
        """Set a clock (None for the default). If the driver is busy, it is set later."""
        self._wanted_mhz, self._again_at_s = clock_mhz, None
        try:
            if clock_mhz != self._clock_mhz or self._was_reset:
                self._call_driver(clock_mhz)
            if self.has_failed and clock_mhz is not None:  # the call has hung, and the rank has fallen back
                self._wanted_mhz = None
                self._call_driver(None)
            self._refusals, self._busy_since_s = 0, None
        except GpuBusyError:
            if self._busy_since_s is None:
                self._busy_since_s = self._time.now_s()
            self._fall_back()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Fall back to default clocks because of an error."""
        self._report_failure(error)
        self._wanted_mhz, self._busy_since_s = None, None
        self._fall_back()

    def _fall_back(self) -> None:
        """Return to the default clock, if the driver allows it, until the next attempt."""
        self.missed += 1
        self.readback.forget()
        with suppress(Exception):
            if self._clock_mhz is not None:
                self._call_driver(None)
        if self._clock_mhz != self._wanted_mhz:
            self._again_at_s = self._time.now_s() + _AGAIN_AFTER_S[min(self._refusals, len(_AGAIN_AFTER_S) - 1)]
            self._refusals += 1

    def _call_driver(self, clock_mhz: int | None) -> None:
        """Have the driver set a clock. Raises its error."""
        self._in_call(partial(self._ask_driver, clock_mhz))

    def _ask_driver(self, clock_mhz: int | None) -> None:
        if self.is_closed or (clock_mhz is not None and (self.memory.is_revoked or not self._may_lock())):
            return
        self._resets = self.memory.resets
        self.memory.may_be_locked = True
        self._clock_mhz = _UNKNOWN_MHZ  # if the call fails, the clock may or may not have changed
        begin_s = self._time.now_s()
        if clock_mhz is None:
            self._gpu.reset_clock()
        else:
            clock_mhz = self._lock(clock_mhz)
        self._clock_mhz = clock_mhz
        self.memory.may_be_locked = clock_mhz is not None
        self.changes += 1
        self.readback.changed(clock_mhz, self._time.now_s() - begin_s)

    def _lock(self, clock_mhz: int) -> int | None:
        """Lock a clock, and return it, or None if it was reset because the lease ended during the call."""
        try:
            self._gpu.lock_clock(clock_mhz)
        finally:
            # The call returned late, and the agent did not wait for it. It may have taken effect even if it failed.
            is_over = self.is_closed or self.memory.is_revoked
            if is_over:
                self._gpu.reset_clock()
        return None if is_over else clock_mhz

    def _probe(self) -> None:
        """Test all operations of the driver that programs need, and set clocks again if they succeed."""
        try:
            self._call_driver(self._gpu.supported_clocks_mhz()[-1])
            self._call_driver(None)
            self._gpu.energy_j()
        except GpuError:
            self._fall_back()
            return
        self._refusals, self._busy_since_s, self._again_at_s = 0, None, None
        self._requested_mhz = _UNKNOWN_MHZ  # requests before this were ignored
        self._next_s = self._time.now_s() + _OVER_S
        self.has_failed = False

    def _in_call(self, function: Callable[[], None]) -> None:
        """Call the driver. :attr:`failing_s` includes the call."""
        self._called_s = self._time.now_s()
        try:
            function()
        finally:
            self._called_s = None

    def status(self) -> ClockStatus:
        """Return the current status. Runs on the controller's thread."""
        limits = self.readback.limits
        return ClockStatus(
            self.changes,
            self.skips,
            *self.readback.reading,
            self.thread_late_s,
            limits.power_w,
            limits.clock_mhz,
            self.readback.default_mhz or 0.0,
        )


def _sooner(first_s: float | None, second_s: float | None) -> float | None:
    return min((each_s for each_s in (first_s, second_s) if each_s is not None), default=None)
