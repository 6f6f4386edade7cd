"""Time as a parameter: code that waits, polls or measures gets the timebase to use.

A training job uses :data:`REAL_TIME`. Tests and simulations pass a virtual one, in which minutes pass at once. Two
threads that wait for each other must do so through bells, conditions and threads of the same timebase.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Protocol


class Bell(Protocol):
    """Wakes a thread that waits for it, from any thread or signal handler.

    Cheaper for the thread that rings than to notify a condition, whose lock the other thread wants as it wakes.
    """

    def ring(self) -> None:
        """Wake one thread that waits, or else the next that does, at once."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it rings, at most for some time [s]."""


class Timebase(Protocol):
    """A clock to measure with, and the means to wait in it."""

    def now_s(self) -> float:
        """Return the time since some moment in the past [s]; it never decreases."""

    def date(self) -> datetime:
        """Return date and time, which may be set while a job runs."""

    def sleep(self, seconds: float) -> None: ...

    def bell(self) -> Bell:
        """Return a new bell whose time-outs pass in this time."""

    def condition(self) -> threading.Condition:
        """Return a new condition whose time-outs pass in this time; its lock is reentrant."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a new daemon thread of this timebase; not started yet."""


class RealTime:
    """The time of ``time.perf_counter``."""

    now_s = staticmethod(time.perf_counter)

    def date(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def bell(self) -> Bell:
        return _RealBell()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)


REAL_TIME = RealTime()


class _RealBell:
    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._rings.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:  # contextlib.suppress() would cost every wait three more calls
            return


class Flag:
    """A flag that threads wait for, in a timebase; a signal handler may set it."""

    def __init__(self, timebase: Timebase) -> None:
        self._timebase = timebase
        self._bell = timebase.bell()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._bell.ring()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, at most for some time [s]; returns whether it is."""
        end_s = self._timebase.now_s() + timeout_s
        while not self._is_set and (rest_s := end_s - self._timebase.now_s()) > 0:
            self._bell.wait(rest_s)
            if self._is_set:
                self._bell.ring()  # another thread may wait as well
        return self._is_set
