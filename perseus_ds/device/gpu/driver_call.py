"""Calls to a driver that may hang, for a thread that must not."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.errors import GpuBusyError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase


class _Call:
    """One call: the function, and what came of it."""

    def __init__(self, function: Callable[[], float], timebase: Timebase) -> None:
        self._function = function
        self._value = 0.0
        self._error: Exception | None = None
        self.returned = Flag(timebase)

    def make(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error
        self.returned.set()

    def value(self) -> float:
        if self._error is not None:
            raise self._error
        return self._value


class DriverCall:
    """Makes calls to the driver on a thread of its own and waits for each only so long.

    As long as a call has not returned, no other one is made.
    """

    def __init__(self, limit_s: float, timebase: Timebase = REAL_TIME) -> None:
        """Start the thread.

        Args:
            limit_s: How long to wait for an answer [s].
            timebase: Its timebase.
        """
        self._limit_s = limit_s
        self._time = timebase
        self._last: _Call | None = None
        self._failing_since_s: float | None = None
        self._next: list[_Call | None] = []
        self._arrived = timebase.condition()
        timebase.thread(self._work, "perseus-driver").start()

    @property
    def failing_s(self) -> float:
        """How long the driver has been busy, or has not answered [s]; 0 if the last call was answered."""
        since_s = self._failing_since_s
        return 0.0 if since_s is None else self._time.now_s() - since_s

    def call(self, function: Callable[[], float]) -> float:
        """Return what a function returns.

        Raises:
            GpuBusyError: The function does not return in time, or an earlier one has still not returned.
            GpuError: The function's own.
        """
        begin_s = self._time.now_s()
        try:
            value = self._call(function)
        except GpuBusyError:
            if self._failing_since_s is None:
                self._failing_since_s = begin_s
            raise
        self._failing_since_s = None
        return value

    def _call(self, function: Callable[[], float]) -> float:
        if self._last is not None and not self._last.returned.is_set():
            raise GpuBusyError(f"the driver has not answered for {self.failing_s:.0f} s")
        call = self._last = _Call(function, self._time)
        self._put(call)
        if not call.returned.wait(self._limit_s):
            raise GpuBusyError(f"the driver has not answered for {self._limit_s:.0f} s")
        return call.value()

    def close(self) -> None:
        """End the thread once the call under way, if any, has returned."""
        self._put(None)

    def _put(self, call: _Call | None) -> None:
        with self._arrived:
            self._next.append(call)
            self._arrived.notify()

    def _work(self) -> None:
        while (call := self._take()) is not None:
            call.make()

    def _take(self) -> _Call | None:
        with self._arrived:
            while not self._next:
                self._arrived.wait()
            return self._next.pop(0)
