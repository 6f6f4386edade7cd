"""Time as a parameter: code that waits, polls or measures gets the timebase to use.

A training job uses :data:`REAL_TIME`. Tests and simulations pass a virtual one, in which minutes pass at once. Two
threads that wait for each other must do so through conditions and threads of the same timebase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Protocol


class Timebase(Protocol):
    """A clock to measure with, and the means to wait in it."""

    def now_s(self) -> float:
        """Return the time since some moment in the past [s]; it never decreases."""

    def date(self) -> datetime:
        """Return date and time, which may be set while a job runs."""

    def sleep(self, seconds: float) -> None: ...

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

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)


REAL_TIME = RealTime()


class Flag:
    """A flag that threads wait for, in a timebase.

    Unlike ``threading.Event`` it may be set by a signal handler that has interrupted the same thread setting it.
    """

    def __init__(self, timebase: Timebase) -> None:
        self._timebase = timebase
        self._changed = timebase.condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, at most for some time [s]; returns whether it is."""
        end_s = self._timebase.now_s() + timeout_s
        with self._changed:
            while not self._is_set and (rest_s := end_s - self._timebase.now_s()) > 0:
                self._changed.wait(rest_s)
        return self._is_set
