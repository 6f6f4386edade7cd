"""Communication among the ranks of a job that are threads of one virtual time."""

import threading
from collections import Counter

import numpy as np

from perseus_ds.errors import PerseusError


class RankLeftError(BaseException):
    """Another rank has ended with an error, so what this one waits for does not come; no code of the job handles it."""


class OrderError(BaseException):
    """Ranks call different collectives of one group at once, which on gloo mixes up what they send, or never ends."""


class Meetings:
    """What threads bring to the meetings of a name; each is over when all have come."""

    def __init__(self, time):
        self._time = time
        self._changed = time.condition()
        self._brought = {}
        self._taken = Counter()
        self._is_left = False

    def bring(self, name, who, value):
        """Come to a meeting without waiting for the others."""
        with self._changed:
            self._brought.setdefault(name, {})[who] = value
            self._changed.notify_all()

    def leave(self):
        """Tell all who wait that a rank does not come any more."""
        with self._changed:
            self._is_left = True
            self._changed.notify_all()

    def wait(self, name, size):
        """Wait until so many have come, each of whom waits once; return what they brought, by name."""
        with self._changed:
            while not self._are_there(name, size):
                self._changed.wait()
            self._taken[name] += 1
            if self._taken[name] < size:
                return self._brought[name]
            del self._taken[name]
            return self._brought.pop(name)

    def wait_within(self, name, size, timeout_s):
        """Wait for them for some time; return whether they have come."""
        end_s = self._time.now_s() + timeout_s
        with self._changed:
            while not self._are_there(name, size) and (rest_s := end_s - self._time.now_s()) > 0:
                self._changed.wait(rest_s)
            return self._are_there(name, size)

    def _are_there(self, name, size):
        if len(self._brought.get(name, ())) >= size:
            return True
        if self._is_left:
            raise RankLeftError
        return False


class VirtualCommunicator:
    """What ``Communicator`` does, among threads of a virtual time.

    Collectives of a group are matched by their order, as on gloo; where ranks call different ones, it is an error.
    """

    is_connected = True

    def __init__(self, meetings, topology):
        self._meetings = meetings
        self._calls = 0
        self.topology = topology
        self.world_size = topology.pipeline_ranks

    @property
    def is_first(self):
        return self.topology.rank == 0

    def start_all_gather(self, values):
        return self._start("start_all_gather", values)

    def all_gather(self, value):
        return self._start("all_gather", value).values()

    def pipeline_gather(self, value):
        return self._start("pipeline_gather", value).values()

    def gather(self, value):
        values = self._start("gather", value).values()
        return values if self.is_first else []

    def from_first(self, make):
        made = None
        if self.is_first:
            try:
                made = make()
            except (PerseusError, OSError) as error:
                made = error
        made = self._start("from_first", made).values()[0]
        if isinstance(made, Exception):
            raise made
        return made

    def together(self, check):
        problem = None
        try:
            check()
        except PerseusError as error:
            problem = error
        for found in self._start("together", problem).values():
            if found is not None:
                raise found

    def all_max(self, value):
        return max(self._start("all_max", value).values())

    def stage_max(self, value):
        return value

    def barrier(self):
        self._start("barrier", None).values()

    def pipeline_barrier(self):
        self._start("pipeline_barrier", None).values()

    def all_gather_numbers(self, values):
        return np.array(self._start("all_gather_numbers", values).values())

    def _start(self, collective, value):
        self._calls += 1
        self._meetings.bring(self._calls, self.topology.rank, (collective, value))
        return _Pending(self._meetings, self._calls, self.world_size)


class _Pending:
    def __init__(self, meetings, name, size):
        self._meetings, self._name, self._size = meetings, name, size
        self._values = None

    def values(self):
        if self._values is None:
            brought = [entry for _, entry in sorted(self._meetings.wait(self._name, self._size).items())]
            if len({collective for collective, _ in brought}) > 1:
                raise OrderError(f"collective {self._name}, by rank: {brought}")
            self._values = [value for _, value in brought]
        return self._values

    def result(self):
        return np.array(self.values())

    def is_there_within(self, timeout_s):
        return self._meetings.wait_within(self._name, self._size, timeout_s)


class Neighbours:
    """``torch.distributed`` as the measurement of blocking power uses it."""

    def __init__(self, meetings):
        self._meetings = meetings
        self._rank = threading.local()
        self._counts = {}

    def use(self, rank):
        self._rank.number = rank

    def send(self, tensor, target):
        self._meetings.bring(self._name("sent", self._rank.number, target), "sender", None)

    def recv(self, tensor, source):
        self._meetings.wait(self._name("received", source, self._rank.number), 1)

    def _name(self, side, source, target):
        key = side, source, target
        self._counts[key] = self._counts.get(key, 0) + 1
        return "blocking", source, target, self._counts[key]
