"""A ``perseus_ds.timebase.Timebase`` for tests, in which minutes pass immediately.

Threads made by :meth:`VirtualTime.thread` and the one that made the :class:`VirtualTime` take turns: exactly one of
them runs, until it waits. Time advances only when all of them wait, to the earliest moment at which one of them
continues. The order and times of events thus do not depend on the speed of the machine.

These threads are greenlets of one thread of the system, which change turns some ten times as fast as its threads.
"""

import heapq
import itertools
import sys
import threading
from collections import deque
from datetime import datetime, timedelta, timezone

from greenlet import getcurrent, greenlet

# Greenlets that wait forever, such as an agent's of a job that has ended. Collecting them would raise an error in them.
_ABANDONED = []


class DeadlockError(Exception):
    """All threads wait, and none of them has a timeout."""


class VirtualTime:
    """A virtual clock and its threads. See the module's docstring.

    Attributes:
        seconds: Current time; a test may advance it.
        epoch: Date at second 0; a test may change it.
    """

    def __init__(self, seconds=100.0):
        self.seconds = seconds
        self.epoch = datetime(2026, 11, 22, tzinfo=timezone.utc)
        self._ready = deque()
        self._sleeping = []
        self._numbers = itertools.count()
        self._maker = None

    def now_s(self):
        return self.seconds

    def date(self):
        return self.epoch + timedelta(seconds=self.seconds)

    def sleep(self, seconds):
        turn = _Turn()
        self._wake_at(self.seconds + seconds, turn)
        self._wait_for(turn)

    def notifier(self):
        return _Notifier(self)

    def condition(self):
        return _Condition(self)

    def thread(self, target, name):
        return _Thread(self, target, name)

    def _wake_at(self, when_s, turn):
        heapq.heappush(self._sleeping, (when_s, next(self._numbers), turn))

    def _make_ready(self, turn):
        if not turn.has_come:
            turn.has_come = True
            self._ready.append(turn)

    def _wait_for(self, turn):
        if getcurrent().parent is None:
            self._maker = turn
        chosen = self._next()
        if chosen is not turn:
            chosen.of.switch()
        if turn.is_deadlocked:
            raise DeadlockError

    def _next(self):
        if not self._ready:
            while self._sleeping:
                when_s, _, turn = heapq.heappop(self._sleeping)
                if not turn.has_come:
                    self.seconds = max(self.seconds, when_s)
                    self._make_ready(turn)
                    break
            else:
                self._maker.is_deadlocked = True
                self._make_ready(self._maker)
        return self._ready.popleft()


class _Turn:
    """A wait of a thread, by default of the one that runs. It ends once."""

    __slots__ = ("has_come", "is_deadlocked", "of")

    def __init__(self, of=None):
        self.of = getcurrent() if of is None else of  # a greenlet that has not begun is false
        self.has_come = False
        self.is_deadlocked = False


class _Condition:
    """Like ``threading.Condition``. Since one thread runs at a time, the lock is only checked."""

    def __init__(self, time):
        self._time = time
        self._waiting = []
        self._owner = None
        self._depth = 0

    def __enter__(self):
        me = getcurrent()
        assert self._owner in (None, me), f"{self._owner} waits or sleeps and holds a lock that {me} needs"
        self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *_):
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def wait(self, timeout=None):
        assert self._owner is getcurrent(), "the lock is not held"
        turn = _Turn()
        self._waiting.append(turn)
        if timeout is not None:
            self._time._wake_at(self._time.seconds + timeout, turn)
        depth, self._depth, self._owner = self._depth, 0, None
        try:
            self._time._wait_for(turn)
        finally:
            was_notified = turn not in self._waiting
            if not was_notified:
                self._waiting.remove(turn)
            self._depth, self._owner = depth, getcurrent()
        return was_notified

    def notify(self, n=1):
        assert self._owner is getcurrent(), "the lock is not held"
        for _ in range(min(n, len(self._waiting))):
            self._time._make_ready(self._waiting.pop(0))

    def notify_all(self):
        self.notify(len(self._waiting))


class _Notifier:
    """Like a condition with a count, but without a lock, since one thread runs at a time. Jobs wait here most often."""

    def __init__(self, time):
        self._time = time
        self._waiting = []
        self._notifications = 0

    def notify(self):
        self._notifications += 1
        if self._waiting:
            self._time._make_ready(self._waiting.pop(0))

    def wait(self, timeout_s=None):
        if not self._notifications:
            turn = _Turn()
            self._waiting.append(turn)
            if timeout_s is not None:
                self._time._wake_at(self._time.seconds + timeout_s, turn)
            try:
                self._time._wait_for(turn)
            finally:
                was_notified = turn not in self._waiting
                if not was_notified:
                    self._waiting.remove(turn)
            if not was_notified:
                return
        self._notifications -= 1


class _Thread:
    """Like ``threading.Thread``."""

    def __init__(self, time, target, name):
        self.name = name
        self._time = time
        self._function = target
        main = getcurrent()
        while main.parent is not None:
            main = main.parent
        self._greenlet = greenlet(self._run, main)
        self._begins = _Turn(self._greenlet)
        self._over = _Condition(time)
        self._is_over = False

    def start(self):
        _ABANDONED.append(self._greenlet)
        self._time._make_ready(self._begins)

    def _run(self, *_):
        try:
            self._function()
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
        with self._over:
            self._is_over = True
            self._over.notify_all()
        _ABANDONED.remove(self._greenlet)
        self._greenlet.parent = self._time._next().of  # runs when this one returns

    def join(self, timeout=None):
        end_s = None if timeout is None else self._time.seconds + timeout
        with self._over:
            while not self._is_over and (end_s is None or self._time.seconds < end_s):
                self._over.wait(None if end_s is None else end_s - self._time.seconds)

    def is_alive(self):
        return self._begins.has_come and not self._is_over
