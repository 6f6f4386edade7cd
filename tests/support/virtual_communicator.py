"""Communication among the ranks of a job that are threads of one virtual time."""

import threading
from collections import Counter

import numpy as np

from perseus_ds.distributed import Messages
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
        self._calls = self._exchanges = self._connected = 0
        self.messages = Messages()
        self.topology = topology
        self.world_size = topology.pipeline_ranks

    @property
    def is_first(self):
        return self.topology.rank == 0

    @property
    def pipeline_of_rank(self):
        return np.zeros(self.world_size if self.is_first else 0, int)

    def start_exchange(self, numbers, answers, widths):
        self._exchanges += 1
        return self._exchange(("exchange", self._exchanges), numbers, answers, widths)

    def more_exchanges(self):
        self._connected += 1
        return _MoreExchanges(self._exchange, self._connected)

    def _exchange(self, name, numbers, answers, widths):
        size = 0 if self.is_first else widths.message_bytes
        block = self.messages.take_block(size) if size else None
        self._meetings.bring(name, self.topology.rank, (numbers, answers, block))
        return _Exchange(self._meetings, name, self.topology.rank, self.world_size, self.messages)

    def pipeline_gather(self, value):
        return self._all("pipeline_gather", value)

    def gather(self, value):
        values = self._all("gather", value)
        return values if self.is_first else []

    def from_first(self, make):
        made = None
        if self.is_first:
            try:
                made = make()
            except (PerseusError, OSError) as error:
                made = error
        made = self._all("from_first", made)[0]
        if isinstance(made, Exception):
            raise made
        return made

    def together(self, check):
        problem = None
        try:
            check()
        except PerseusError as error:
            problem = error
        found = self.first_of(problem)
        if found is not None:
            raise found

    def first_of(self, value):
        return next((found for found in self._all("first_of", value) if found is not None), None)

    def agree(self, value, combined):
        return combined(self._all("agree", value))

    def all_max(self, value):
        return max(self._all("all_max", value))

    def all_sum(self, value):
        return sum(self._all("all_sum", value))

    def stage_max(self, value):
        return value

    def barrier(self):
        self._all("barrier", None)

    def pipeline_barrier(self):
        self._all("pipeline_barrier", None)

    def _all(self, collective, value):
        """Meet all ranks; those of a collective of all ranks have begun the same exchanges, which share its groups."""
        self._calls += 1
        kind = collective if collective.startswith("pipeline") else f"{collective} after {self._exchanges} exchanges"
        self._meetings.bring(self._calls, self.topology.rank, (kind, value))
        brought = [entry for _, entry in sorted(self._meetings.wait(self._calls, self.world_size).items())]
        if len({name for name, _ in brought}) > 1:
            raise OrderError(f"collective {self._calls}, by rank: {brought}")
        return [theirs for _, theirs in brought]


class _MoreExchanges:
    """Exchanges that may be under way beside others."""

    def __init__(self, exchange, number):
        self._exchange, self._number = exchange, number
        self._begun = 0

    def start(self, numbers, answers, widths):
        self._begun += 1
        return self._exchange(("more", self._number, self._begun), numbers, answers, widths)


class _Exchange:
    """Numbers on their way to rank 0 and back; the answers are made once, when the first rank has all numbers."""

    def __init__(self, meetings, name, rank, size, messages):
        self._meetings, self._name, self._rank, self._size = meetings, name, rank, size
        self._messages = messages
        self._answer = None

    def result(self):
        if self._answer is None:
            brought = self._meetings.wait(self._name, self._size)
            if "answers" not in brought:
                numbers = [brought[rank][0] for rank in range(self._size)]
                common, own = brought[0][1](np.array(numbers, dtype=float))
                brought["answers"] = [np.concatenate([common, alone]) for alone in own]
            self._answer = brought["answers"][self._rank]
            if self._rank == 0:
                for _, _, block in (brought[rank] for rank in range(self._size) if brought[rank][2] is not None):
                    self._messages.add_block(block)
        return self._answer

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
