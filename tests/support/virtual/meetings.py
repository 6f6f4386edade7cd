"""Where the ranks of a job in virtual time wait for each other: transfers, ends of iterations and collectives."""

import math
import weakref
from collections import Counter, defaultdict

import torch
from greenlet import getcurrent


class RankLeftError(BaseException):
    """Another rank ended with an error, so this one would wait forever."""


class Meetings:
    """Named meeting points of threads, to which each brings a value."""

    def __init__(self, time):
        self._time = time
        # A condition per name: threads are woken once all have arrived, not by every arrival at any meeting.
        self._waiting = defaultdict(time.condition)
        self._size = {}
        self._brought = {}
        self._taken = Counter()
        self._is_left = False

    def bring(self, name, who, value):
        """Arrive at a meeting without waiting for the others."""
        brought = self._brought.setdefault(name, {})
        brought[who] = value
        if len(brought) >= self._size.get(name, math.inf):
            self._wake(name)

    def leave(self):
        """Wake all waiting threads because a rank will not arrive any more."""
        self._is_left = True
        for name in self._size:
            self._wake(name)

    def wait(self, name, size):
        """Wait until ``size`` participants have arrived, and return their values by participant.

        Each of the ``size`` participants waits exactly once.
        """
        while not self._are_there(name, size):
            self._size[name] = size
            with self._waiting[name] as condition:
                condition.wait()
        self._taken[name] += 1
        if self._taken[name] < size:
            return self._brought[name]
        del self._taken[name]
        return self._brought.pop(name)

    def _wake(self, name):
        if condition := self._waiting.pop(name, None):
            with condition:
                condition.notify_all()

    def _are_there(self, name, size):
        if len(self._brought.get(name, ())) >= size:
            self._size.pop(name, None)
            return True
        if self._is_left:
            raise RankLeftError
        return False


class Collectives:
    """``torch.distributed`` as the measurement before training uses it."""

    def __init__(self, meetings, ranks):
        self._meetings = meetings
        self._ranks = ranks
        self._rank_of = weakref.WeakKeyDictionary()  # by greenlet
        self._counts = Counter()

    def use(self, rank):
        self._rank_of[getcurrent()] = rank

    ReduceOp = torch.distributed.ReduceOp

    def all_reduce(self, tensor, op=None):
        number = self._rank_of.get(getcurrent(), 0)
        self._counts[number] += 1
        name = "blocking", self._counts[number]
        self._meetings.bring(name, number, tensor.clone())
        brought = self._meetings.wait(name, self._ranks)
        if op is not None:
            tensor.copy_(torch.stack([*brought.values()]).amax(0))
