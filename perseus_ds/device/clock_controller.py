"""Applies clocks without stalling training, and always restores the default."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from perseus_ds.device.clock_readback import ClockReadback, Refusal
from perseus_ds.device.clock_request import ClockRequest, Trial, next_request
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.held_clock import HeldClock
from perseus_ds.device.moments import Moment, PassedMoment
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_POLL_S = 0.001
_RESET_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0)
_TRY_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""After each refusal in a row of a driver that is busy; after the last one there is no further attempt."""

_Item: TypeAlias = ClockRequest | Trial | Flag
"""A flag is set as soon as all requests before it are done."""


class ClockController:
    """One worker thread applies requested clocks in order; the training thread only enqueues them.

    A request is skipped if the next one is already due when the worker comes to it: its instruction is over.

    Attributes:
        changes: Clock changes made.
        overtaken: Requests skipped because a later one was already due.
        readback: What was read of the clock.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_error: Callable[[Exception], None],
        on_refusal: Callable[[Refusal], None] = lambda refusal: None,
        on_start: Callable[[], None] = lambda: None,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Start the worker.

        Args:
            gpu: The GPU whose clock to control.
            on_error: Called on the worker's thread when the driver refuses, or is busy for a minute; nothing is set
                then until :meth:`try_again` finds that it works.
            on_refusal: Called there when the GPU does not reach a clock that the driver has accepted.
            on_start: Called there first: makes moments safe to query. (A thread that queries a CUDA event gets a
                context on GPU 0, hundreds of MiB for every rank of the node, unless it has chosen its own GPU.)
            timebase: Its timebase.
        """
        self._name = gpu.name
        self._clock = HeldClock(gpu, timebase)
        self._on_error = on_error
        self._on_start = on_start
        self._time = timebase
        self.readback = ClockReadback(gpu, on_refusal, timebase)
        self._pending: deque[_Item] = deque()  # others append, the worker alone removes
        # Notified when an item is pending, or the worker is to stop.
        self._changed = timebase.condition()
        self._stopping = Flag(timebase)
        self._putting: int | None = None  # the thread that adds an item
        self._failed = self._is_idle = self._is_waiting = False
        self._requested: int | None = None  # the default, the driver's own clock management
        self._busy_since_s: float | None = None
        self.changes = self.overtaken = self._refusals = 0
        self._worker = timebase.thread(self._work, "perseus-clocks")
        self._worker.start()

    def request(self, clock_mhz: int | None, after: Moment | None = None) -> None:
        """Request a clock (None for the default) once the GPU has passed a moment; returns at once."""
        if clock_mhz != self._requested or self._is_idle:
            self._requested = clock_mhz
            self._is_idle = False
            self._put(ClockRequest(clock_mhz, after))

    def request_early(self, clock_mhz: int, begun: Moment, delay_s: float) -> None:
        """Request a clock some time after a moment, or at the next :meth:`request` if that comes first.

        A :meth:`request` for the same clock must follow. This one only makes the driver's call earlier.

        Args:
            clock_mhz: The clock.
            begun: The moment.
            delay_s: How long after it [s].
        """
        self._put(ClockRequest(clock_mhz, begun, delay_s))

    def reset_when_idle(self, after_s: float) -> None:
        """Return to the default clock unless there is a :meth:`request` before some time has passed [s]."""
        if self._requested is not None:
            self._is_idle = True
            self._put(ClockRequest(None, PassedMoment(self._time.now_s()), after_s))

    def set_and_wait(self, clock_mhz: int | None, timeout_s: float = 10.0) -> None:
        """Request a clock and wait until the driver has accepted it.

        Raises:
            GpuError: The driver refused, now or earlier.
            TimeoutError: It did not answer.
        """
        self.request(clock_mhz)
        done = Flag(self._time)
        self._put(done)
        is_done = done.wait(timeout_s)
        if self._failed:
            raise GpuError(f"{self._name}: the clock cannot be set any more; see the warning before.")
        if not is_done:
            raise TimeoutError(f"{self._name}: the driver did not set the clock within {timeout_s} s.")

    def try_again(self) -> Trial:
        """Have the driver do once all that plans need; if it does, clocks are set again. Returns at once."""
        self._put(trial := Trial())
        return trial

    def has_settled(self) -> bool:
        """Return whether the GPU runs at the clock of the last :meth:`set_and_wait`, or is known not to reach it.

        It is read back for up to a second; an idle GPU may lower its clock, so let it work meanwhile.
        """
        return self.readback.has_settled

    def watch_default_clocks(self) -> None:
        """Report, like a clock that is not reached, a limit that keeps the GPU down at default clocks."""
        self.readback.watch_default_clocks()
        self._put(Flag(self._time))  # so that the worker looks when the next reading is due

    @property
    def latency_s(self) -> float:
        """How late a clock follows its request [s]; 0 as long as it is not known."""
        return self.readback.latency_s

    @property
    def failing_s(self) -> float:
        """How long the driver has been busy, or has not answered the call under way [s]; 0 if neither."""
        since_s = self._busy_since_s
        return self._clock.waiting_s if since_s is None else self._time.now_s() - since_s

    @property
    def is_closed(self) -> bool:
        """Whether the default clock was restored for good."""
        return self._stopping.is_set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the worker and restore the default clock; from any thread, and harmless when called again.

        It waits for a call of the driver that is under way, but not for the GPU.
        """
        end_s = self._time.now_s() + timeout_s
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        try:
            self._clock.release(timeout_s)
        except Exception as error:
            if not self._failed:
                self._on_error(error)
        # Unless a signal has interrupted this thread while it held the lock that the worker needs to end.
        if self._putting != threading.get_ident():
            self._worker.join(max(0.0, end_s - self._time.now_s()))

    def _put(self, item: _Item) -> None:
        if not self.is_closed:
            self._pending.append(item)
        if self._is_waiting:  # otherwise the worker looks before it waits
            self._putting = threading.get_ident()
            with self._changed:
                self._changed.notify_all()
            self._putting = None

    def _work(self) -> None:
        try:
            self._on_start()
        except Exception as error:
            self._fail(error)
        while not self._stopping.is_set():
            self._serve()

    def _serve(self) -> None:
        try:
            item = self._next()
            if isinstance(item, Flag):
                self.readback.watch()
                item.set()
            elif isinstance(item, Trial):
                item.make(self._clock)
                self._failed, self._refusals, self._busy_since_s = False, 0, None
            elif not self._failed:
                self._handle(item)
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Item:
        """Return the oldest item; while there is none, the clock is read back."""
        while not self._pending:
            if self._stopping.is_set():
                return self._stopping
            due_in_s = self.readback.due_in_s()
            if due_in_s == 0.0:
                self._clock.read(self.readback.read)
            else:
                self._wait_for_more_than(0, due_in_s)
        return self._pending.popleft()

    def _wait_for_more_than(self, count: int, timeout_s: float | None) -> None:
        """Wait until more items are pending, or the worker is to stop; at most for some time [s]."""
        with self._changed:
            self._is_waiting = True
            if len(self._pending) <= count and not self._stopping.is_set():
                self._changed.wait(timeout_s)
            self._is_waiting = False

    def _handle(self, request: ClockRequest) -> None:
        if request.after is not None and not self._wait_for(request.after):
            return
        if request.after is not None and request.delay_s is not None:
            if self._sleep_until(request.after.passed_s() + request.delay_s, is_idle=request.clock_mhz is None):
                return  # the next request says what to do
        elif self._is_overtaken():
            self.overtaken += 1
            return
        if not self._clock.is_at(request.clock_mhz):
            self._apply(request.clock_mhz)
        else:
            self._busy_since_s = None  # nothing that was requested is left undone

    def _apply(self, clock_mhz: int | None) -> None:
        while not self._stopping.is_set():
            try:
                took_s = self._clock.set(clock_mhz)
            except GpuBusyError:
                if self._refusals == len(_TRY_AGAIN_AFTER_S):
                    raise
                self._wait_after_refusal()
                if self._is_overtaken():
                    self.overtaken += 1
                    return
                continue
            self._refusals, self._busy_since_s = 0, None
            if took_s is not None:
                self.readback.changed(clock_mhz, took_s)
                self.changes += 1
            return

    def _wait_after_refusal(self) -> None:
        """Return the clock to the default, if the driver does that, and wait a while, the longer the more often."""
        if self._busy_since_s is None:
            self._busy_since_s = self._time.now_s()
        self.readback.changed(None, 0.0)
        self._clock.reset()
        self._stopping.wait(_TRY_AGAIN_AFTER_S[self._refusals])
        self._refusals += 1

    def _wait_for(self, moment: Moment) -> bool:
        """Wait until the GPU has passed a moment, or to stop, and read the clock meanwhile; returns whether it has."""
        while not self._stopping.is_set():
            if moment.query():
                moment.passed_s()  # the sooner it is asked, the better the moments after it are known
                return True
            due_in_s = self.readback.due_in_s()
            if due_in_s is None or due_in_s > 50 * _POLL_S:
                moment.synchronize()
            elif due_in_s > 0:
                self._time.sleep(min(due_in_s, _POLL_S))
            else:
                self._clock.read(self.readback.read)
        return False

    def _sleep_until(self, until_s: float, *, is_idle: bool) -> bool:
        """Sleep until a moment [s], or the next request is due, or there is one at all; returns whether it was that."""
        while True:
            count = len(self._pending)
            is_asked = is_idle and next_request(self._pending) is not None
            if is_asked or self._is_overtaken() or self._stopping.is_set():
                return True
            rest_s = until_s - self._time.now_s()
            if rest_s <= 0:
                return False
            # A moment of the GPU can only be queried; a request without one wakes this thread.
            self._wait_for_more_than(count, min(rest_s, _POLL_S) if count else rest_s)

    def _is_overtaken(self) -> bool:
        """Whether the next request is due already."""
        following = next_request(self._pending)
        return following is not None and (following.after is None or following.after.query())

    def _fail(self, error: Exception) -> None:
        """Give up, and return the clock to the default if the driver permits."""
        self._failed, self._busy_since_s = True, None
        self.readback.changed(None, 0.0)
        self._on_error(error)
        for again_s in _RESET_AGAIN_AFTER_S:
            if self._clock.reset():
                return
            self._stopping.wait(again_s)
