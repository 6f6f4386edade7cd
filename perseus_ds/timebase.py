"""Time as a parameter of code that waits, polls or measures.

A training job uses :data:`REAL_TIME`. Tests and simulations use virtual time, in which minutes pass immediately.
Threads that wait for each other must use notifiers, conditions and threads of the same timebase.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Protocol


class Notifier(Protocol):
    """Wakes a waiting thread. May be used from any thread and from signal handlers.

    For the notifying thread this is cheaper than a condition, because the two threads do not compete for a lock.
    """

    def notify(self) -> None:
        """Wake one waiting thread, or the next thread that waits if there is none."""

    def wait(self, timeout_s: float | None = None) -> None: ...


class Timebase(Protocol):
    """A clock, and functions that wait by it."""

    def now_s(self) -> float:
        """Return a time that never decreases [s]."""

    def date(self) -> datetime:
        """Return the date and time of the system, which may be changed while a job runs."""

    def sleep(self, seconds: float) -> None: ...

    def notifier(self) -> Notifier:
        """Return a new notifier with timeouts in this timebase."""

    def condition(self) -> threading.Condition:
        """Return a new condition with a reentrant lock and timeouts in this timebase."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a new daemon thread of this timebase, which is not started yet."""


class RealTime:
    """Real time by ``time.perf_counter``."""

    now_s = staticmethod(time.perf_counter)

    def date(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def notifier(self) -> Notifier:
        return _RealNotifier()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)


REAL_TIME = RealTime()


class _RealNotifier:
    def __init__(self) -> None:
        self._notifications: queue.SimpleQueue[None] = queue.SimpleQueue()

    def notify(self) -> None:
        self._notifications.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._notifications.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:  # contextlib.suppress() would add three calls to each wait
            return


class Flag:
    """A flag for which threads wait. A signal handler may set it."""

    def __init__(self, timebase: Timebase) -> None:
        self._timebase = timebase
        self._notifier = timebase.notifier()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._notifier.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set or until the timeout [s]. Return True if it is set."""
        end_s = self._timebase.now_s() + timeout_s
        while not self._is_set and (rest_s := end_s - self._timebase.now_s()) > 0:
            self._notifier.wait(rest_s)
            if self._is_set:
                self._notifier.notify()  # another thread may wait as well
        return self._is_set
