"""The agent's state of one rank, without processes and sockets, in virtual time."""

import math

from perseus_ds.agent.actor import GpuActor
from perseus_ds.agent.gpu_records import UnrecordedGpu
from perseus_ds.agent.rank_clocks import RankClocks
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.marks import HostMarks
from perseus_ds.protocol.job_messages import Joined
from perseus_ds.protocol.layout import RankMemory
from perseus_ds.protocol.messages import Connect

_BY_GPU = 5e-324
"""The integer 1, written by a GPU, as an 8-byte float."""


def actor_of(gpu, time):
    """Return the actor of a GPU, which is open."""
    actor = GpuActor(UnrecordedGpu("virtual"), lambda: gpu, timebase=time)
    time.sleep(0.0)
    return actor


class DirectLink:
    """A connection to :class:`RankClocks` that delivers immediately.

    Attributes:
        late_s: Delay until the agent checks marks; a test may set it [s].
    """

    def __init__(self, gpu, memory, time, tell=lambda message: None):
        self.grants = 1
        self.late_s = 0.0
        self._received = []
        self._time = time
        self._notifier = time.notifier()
        self._is_waiting = False
        self._tell = tell
        self.actor = actor_of(gpu, time)
        self.agent = RankClocks(self.actor, memory, self._deliver, tell, time, on_record=self._recorded)
        self._loop_notifier = time.notifier()
        self._wakes_s = math.inf
        self._is_closed = False
        time.thread(self._loop, "loop").start()

    def send(self, message, file=None):
        if isinstance(message, Connect):
            self._tell(Joined(message.issued))
        else:
            self.agent.receive_from_client(message)

    def received(self):
        received, self._received = self._received, []
        return received

    def wake(self):
        self._look_now()
        self.agent.update()

    def _recorded(self):
        self.agent.update()
        self._look_now()
        self._ring()

    def look(self):
        """Have the agent look for marks."""
        if self.late_s:
            self._time.thread(self._look_late, "late").start()
        else:
            self._look_now()

    def _look_late(self):
        self._time.sleep(self.late_s)
        self._look_now()

    def _look_now(self):
        self.agent.timeline.advance()
        if self.agent.timeline.due_s < self._wakes_s:
            self._loop_notifier.notify()

    def _loop(self):
        """Do what waits for no mark, like the agent's loop. All marks are looked for at once."""
        while not self._is_closed:
            self.agent.timeline.advance()
            self._wakes_s = self.agent.timeline.due_s
            self._loop_notifier.wait(None if self._wakes_s == math.inf else self._wakes_s - self._time.now_s())

    def wait(self, timeout_s):
        self._is_waiting = True
        if not self._received:
            self._notifier.wait(timeout_s)
        self._is_waiting = False

    def is_watched(self):
        return True

    def close(self, timeout_s=3.0):
        end_s = self._time.now_s() + 0.5
        while self.agent.has_reports and self._time.now_s() < end_s:
            self._time.sleep(0.01)
        self.agent.leave()
        if self.actor.may_be_locked:
            self.actor.reset()
        self._is_closed = True
        self._loop_notifier.notify()
        end_s = self._time.now_s() + timeout_s
        while not self.actor.is_reset and self._time.now_s() < end_s:
            self._time.sleep(0.01)
        self.actor.close()
        return self.actor.is_reset

    def _deliver(self, message):
        self._received.append(message)
        self._ring()

    def _ring(self):
        if self._is_waiting:
            self._is_waiting = False
            self._notifier.notify()


class SeenMarks:
    """Marks for which the agent looks immediately.

    Args:
        marks: Writes the marks.
        write: Calls a function when the device arrives at the current position.
        link: The connection to the agent.
    """

    def __init__(self, marks, write, link):
        self._marks, self._write, self._link = marks, write, link

    def begin(self, iteration, positions):
        self._then_look(self._marks.begin, iteration, positions)

    def mark(self, slot):
        self._then_look(self._marks.mark, slot)

    def end(self, iteration):
        self._then_look(self._marks.end, iteration)

    def _then_look(self, mark, *arguments):
        def mark_and_look():
            mark(*arguments)
            self._link.look()

        self._write(mark_and_look)


class GpuMarks:
    """Marks as a GPU writes them, which knows no time."""

    def __init__(self, memory):
        self._memory = memory

    def begin(self, iteration, positions):
        self._memory.mark_begun(iteration, 0.0, positions)

    def mark(self, slot):
        self._memory.slots[slot] = _BY_GPU

    def end(self, iteration):
        self._memory.mark_ended(iteration, 0.0)


def clocks_of(gpu, time, cuda=None, tell=lambda message: None):
    """Return the clocks of a rank that computes on a GPU, or on a CUDA stream."""
    memory = RankMemory.create()
    link = DirectLink(gpu, memory, time, tell)
    marks, write = (HostMarks(memory, time), lambda run: run()) if cuda is None else (GpuMarks(memory), cuda.enqueue)
    return AgentClocks(link, memory, SeenMarks(marks, write, link), time)
