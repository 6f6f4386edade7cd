"""Applies clocks without stalling training, and always restores the default."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from perseus_ds.device.clock_readback import ClockReadback, Refusal
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.device.moments import Moment, PassedMoment
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_POLL_S = 0.001
_RESET_ATTEMPTS = 4
_RESET_AGAIN_S = 0.5


class _Request(NamedTuple):
    """A clock to apply; a tuple, because the training thread makes one for every change of the clock.

    Attributes:
        clock_mhz: The clock; None for the default.
        after: Not before the GPU has passed this moment; None for now.
        delay_s: How long after that moment, unless the next request is due first [s]; None for one that must be done.
    """

    clock_mhz: int | None
    after: Moment | None
    delay_s: float | None = None


_Item: TypeAlias = _Request | Flag
"""A flag is set as soon as all requests before it are done."""


class ClockController:
    """One worker thread applies requested clocks in order; the training thread only enqueues them.

    A request is skipped if the next one is already due when the worker comes to it: its instruction is over.

    Attributes:
        changes: Clock changes made.
        overtaken: Requests skipped because a later one was already due.
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
            on_error: Called once, on the worker's thread, when the driver refuses; nothing is requested after.
            on_refusal: Called there when the GPU does not reach a clock that the driver has accepted.
            on_start: Called there first: makes moments safe to query. (A thread that queries a CUDA event gets a
                context on GPU 0, hundreds of MiB for every rank of the node, unless it has chosen its own GPU.)
            timebase: The time it lives in.
        """
        self._gpu = gpu
        self._on_error = on_error
        self._on_start = on_start
        self._time = timebase
        self._readback = ClockReadback(gpu, on_refusal, timebase)
        # Others append, the worker alone removes.
        self._pending: deque[_Item] = deque()
        # Notified when an item is pending, a call of the driver has returned, or the worker is to stop.
        self._changed = timebase.condition()
        self._stopping = Flag(timebase)
        self._failed = False
        # None stands for the default, the driver's own clock management.
        self._requested: int | None = None
        self._is_idle = False
        self._applied: int | None = None
        self.changes = 0
        self.overtaken = 0
        self._called_s: float | None = None
        self._worker = timebase.thread(self._work, "perseus-clocks")
        self._worker.start()

    def request(self, clock_mhz: int | None, after: Moment | None = None) -> None:
        """Request a clock (None for the default) once the GPU has passed a moment; returns at once."""
        if clock_mhz != self._requested or self._is_idle:
            self._requested = clock_mhz
            self._is_idle = False
            self._put(_Request(clock_mhz, after))

    def request_early(self, clock_mhz: int, begun: Moment, delay_s: float) -> None:
        """Request a clock some time after a moment, or at the next :meth:`request` if that comes first.

        A :meth:`request` for the same clock must follow. This one only makes the driver's call earlier.

        Args:
            clock_mhz: The clock.
            begun: The moment.
            delay_s: How long after it [s].
        """
        self._put(_Request(clock_mhz, begun, delay_s))

    def reset_when_idle(self, after_s: float) -> None:
        """Return to the default clock unless there is a :meth:`request` before some time has passed [s]."""
        if self._requested is not None:
            self._is_idle = True
            self._put(_Request(None, PassedMoment(self._time.now_s()), after_s))

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
            raise GpuError(f"{self._gpu.name}: the clock cannot be set any more; see the warning before.")
        if not is_done:
            raise TimeoutError(f"{self._gpu.name}: the driver did not set the clock within {timeout_s} s.")

    @property
    def latency_s(self) -> float:
        """How late a clock follows its request [s]; 0 as long as it is not known."""
        return self._readback.latency_s

    @property
    def waiting_s(self) -> float:
        """How long the driver has not answered the call under way [s]; 0 if there is none."""
        called_s = self._called_s
        return 0.0 if called_s is None else self._time.now_s() - called_s

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the worker and restore the default clock; harmless when called again.

        It waits for a call of the driver that is under way, but not for the GPU.
        """
        with self._changed:
            if self._stopping.is_set():
                return
            self._stopping.set()  # from now on the worker begins no call
            self._changed.notify_all()
            self._wait_until(lambda: self._called_s is None, timeout_s)
            if self._called_s is not None:
                return  # the driver hangs, and this thread would hang as well; the guardian restores the clock
        if self._applied is not None:
            try:
                self._gpu.reset_clock()
                self._applied = None
            except Exception as error:
                if not self._failed:
                    self._on_error(error)
        self._worker.join(timeout_s)

    def _put(self, item: _Item) -> None:
        self._pending.append(item)
        with self._changed:
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait, with the lock held, until something is so after a notification; at most for some time [s]."""
        end_s = math.inf if timeout_s is None else self._time.now_s() + timeout_s
        while not condition() and (rest_s := end_s - self._time.now_s()) > 0:
            self._changed.wait(None if timeout_s is None else rest_s)

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
                item.set()
            elif not self._failed:
                self._handle(item)
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Item:
        """Return the oldest item; while there is none, the clock is read back."""
        while not self._pending:
            if self._stopping.is_set():
                return self._stopping
            due_in_s = self._readback.due_in_s()
            if due_in_s == 0.0:
                self._read()
            else:
                self._wait_for_more_than(0, due_in_s)
        return self._pending.popleft()

    def _wait_for_more_than(self, count: int, timeout_s: float | None) -> None:
        """Wait until more items are pending, or the worker is to stop."""
        with self._changed:
            self._wait_until(lambda: len(self._pending) > count or self._stopping.is_set(), timeout_s)

    def _handle(self, request: _Request) -> None:
        if request.after is not None and not self._wait_for(request.after):
            return
        if request.after is not None and request.delay_s is not None:
            if self._sleep_until(request.after.passed_s() + request.delay_s):
                return  # the next request says what to do
        elif self._is_overtaken():
            self.overtaken += 1
            return
        if request.clock_mhz != self._applied:
            self._apply(request.clock_mhz)

    def _apply(self, clock_mhz: int | None) -> None:
        with self._driver_call() as may_call:
            if not may_call:
                return
            # Noted first: if the call fails half-way the clock may have changed, and must be restored.
            self._applied = clock_mhz
            begin_s = self._time.now_s()
            if clock_mhz is None:
                self._gpu.reset_clock()
            else:
                self._gpu.lock_clock(clock_mhz)
        self._readback.changed(clock_mhz, self._time.now_s() - begin_s)
        self.changes += 1

    def _read(self) -> None:
        with self._driver_call() as may_call:
            if may_call:
                self._readback.read()

    @contextmanager
    def _driver_call(self) -> Iterator[bool]:
        """Surround a call of the driver by the worker; yields whether it may be made."""
        with self._changed:
            may_call = not self._stopping.is_set()
            if may_call:
                self._called_s = self._time.now_s()
        try:
            yield may_call
        finally:
            with self._changed:
                self._called_s = None
                self._changed.notify_all()

    def _wait_for(self, moment: Moment) -> bool:
        """Wait until the GPU has passed a moment; returns whether it has, unless the worker is to stop.

        If a reading of the clock is due meanwhile, it is made.
        """
        while not self._stopping.is_set():
            if moment.query():
                moment.passed_s()  # the sooner it is asked, the better the moments after it are known
                return True
            due_in_s = self._readback.due_in_s()
            if due_in_s is None or due_in_s > 50 * _POLL_S:
                moment.synchronize()
            elif due_in_s > 0:
                self._time.sleep(min(due_in_s, _POLL_S))
            else:
                self._read()
        return False

    def _sleep_until(self, until_s: float) -> bool:
        """Sleep, but not beyond the time at which the next request is due; returns whether it is due, or to stop."""
        while True:
            count = len(self._pending)
            if self._is_overtaken() or self._stopping.is_set():
                return True
            rest_s = until_s - self._time.now_s()
            if rest_s <= 0:
                return False
            # A moment of the GPU can only be queried; a request without one wakes this thread.
            self._wait_for_more_than(count, min(rest_s, _POLL_S) if count else rest_s)

    def _is_overtaken(self) -> bool:
        """Whether the next request, not counting early ones, is due already."""
        for item in tuple(self._pending):
            if isinstance(item, Flag):
                return False
            if item.delay_s is None:
                return item.after is None or item.after.query()
        return False

    def _fail(self, error: Exception) -> None:
        """Give up, and return the clock to the default if the driver permits."""
        self._failed = True
        self._readback.changed(None, 0.0)
        self._on_error(error)
        for attempt in range(_RESET_ATTEMPTS):
            if self._reset():
                return
            self._stopping.wait(_RESET_AGAIN_S * 2**attempt)

    def _reset(self) -> bool:
        with self._driver_call() as may_call:
            if not may_call:
                return True  # who closes does it
            try:
                self._gpu.reset_clock()
            except Exception:
                return False
            self._applied = None
            return True
