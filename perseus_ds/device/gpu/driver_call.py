"""Calls to a driver that may hang, for a thread that must not."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.errors import GpuBusyError
from perseus_ds.timebase import REAL_TIME, Flag, Timebase


class Answer:
    """The result of a call that the driver's thread makes."""

    def __init__(self, driver: DriverCall, function: Callable[[], float], timebase: Timebase) -> None:
        self._driver = driver
        self._function = function
        self._value = 0.0
        self._error: Exception | None = None
        self._returned = Flag(timebase)
        self.given_s = timebase.now_s()

    def make(self) -> None:
        """Make the call."""
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error
        self._returned.set()

    def refuse(self, error: Exception) -> None:
        """Answer without making the call."""
        self._error = error
        self._returned.set()

    def is_there(self) -> bool:
        """Return whether the call has returned."""
        return self._returned.is_set()

    def is_there_within(self, limit_s: float) -> bool:
        """Wait for the call, at most for some time [s]; return whether it has returned."""
        return self._returned.wait(limit_s)

    def value(self) -> float:
        """Wait for the driver, for as long as it may take, and return the function's value.

        Raises:
            GpuBusyError: The function does not return in time, or an earlier one has still not returned.
            GpuError: The function's own.
        """
        self._driver.wait_for(self)
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def is_refusal(self) -> bool:
        """Whether the driver was busy."""
        return isinstance(self._error, GpuBusyError)


class DriverCall:
    """Makes calls to the driver on a thread of its own and waits for each only so long.

    As long as a call has not returned, no other one is made.
    """

    def __init__(
        self, limit_s: float, timebase: Timebase = REAL_TIME, on_start: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread.

        Args:
            limit_s: How long to wait for an answer [s].
            timebase: Its timebase.
            on_start: Called there first.
        """
        self._limit_s = limit_s
        self._time = timebase
        self._on_start = on_start
        self._given_up: Answer | None = None
        self._failing_since_s: float | None = None
        self._next: list[Answer | None] = []
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
        return self.start(function).value()

    def start(self, function: Callable[[], float]) -> Answer:
        """Have a function called after those before it; returns at once."""
        answer = Answer(self, function, self._time)
        if self._given_up is not None and not self._given_up.is_there():
            answer.refuse(GpuBusyError(f"the driver has not answered for {self.failing_s:.0f} s"))
        else:
            self._given_up = None
            self._put(answer)
        return answer

    def wait_for(self, answer: Answer) -> None:
        """Wait for an answer.

        Raises:
            GpuBusyError: It does not come in time.
        """
        is_there = answer.is_there_within(self._limit_s)
        if is_there and not answer.is_refusal:
            self._failing_since_s = None
            return
        if self._failing_since_s is None:
            self._failing_since_s = answer.given_s
        if not is_there:
            self._given_up = answer
            raise GpuBusyError(f"the driver has not answered for {self._limit_s:.0f} s")

    def close(self) -> None:
        """End the thread once the calls given before have returned."""
        self._put(None)

    def _put(self, call: Answer | None) -> None:
        with self._arrived:
            self._next.append(call)
            self._arrived.notify()

    def _work(self) -> None:
        self._on_start()
        while (call := self._take()) is not None:
            call.make()

    def _take(self) -> Answer | None:
        with self._arrived:
            while not self._next:
                self._arrived.wait()
            return self._next.pop(0)
