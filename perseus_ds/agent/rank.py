"""A rank as its agent sees it: its connection, its lease, and its state."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
from collections import deque

from perseus_ds.agent.actor import GpuActor
from perseus_ds.agent.job_server import Uplink
from perseus_ds.agent.rank_clocks import RankClocks
from perseus_ds.protocol import messages, places
from perseus_ds.protocol.job_messages import ToServer
from perseus_ds.protocol.layout import RankMemory

_MOST_UNSENT = 100
_ENDS_WITHIN_S = 1.0
"""Time after the end of a connection within which its process is expected to end."""
_STALLED_S, _TIMES_AS_LONG = 2.0, 3.0
_REMEMBERED, _UNKNOWN_S = 8, 20.0
"""Number of stored times of iterations, and the time assumed for an iteration before there are any."""


class State(enum.Enum):
    """State of a rank."""

    JOINED = "joined"
    """It has connected, and may have requested a lease."""
    RUNNING = "running"
    """It has a lease, and its clocks are set."""
    STANDING_STILL = "standing still"
    """It has a lease, but does not train, and its clock was reset."""
    LEAVING = "leaving"
    """It has received a termination signal, or its lease has ended. Its clocks are not set any more."""
    GONE = "gone"
    """Its GPU was reset, or is used by another rank, or it has no GPU."""


class RankEvent(enum.Enum):
    """What happens to a rank."""

    GRANTED = "granted"
    STALLED = "stalled"
    CONTINUED = "continued"
    TERMINATED = "terminated"
    """It has received a termination signal, or its agent has."""
    ENDED = "ended"
    """Its process has ended, or has released the lease."""
    REFUSED = "refused"
    RESET = "reset"
    """Nothing is left to do for its GPU."""


TRANSITIONS = {
    (State.JOINED, RankEvent.GRANTED): State.RUNNING,
    (State.JOINED, RankEvent.REFUSED): State.GONE,
    (State.JOINED, RankEvent.ENDED): State.LEAVING,
    (State.RUNNING, RankEvent.STALLED): State.STANDING_STILL,
    (State.RUNNING, RankEvent.TERMINATED): State.LEAVING,
    (State.RUNNING, RankEvent.ENDED): State.LEAVING,
    (State.STANDING_STILL, RankEvent.CONTINUED): State.RUNNING,
    (State.STANDING_STILL, RankEvent.TERMINATED): State.LEAVING,
    (State.STANDING_STILL, RankEvent.ENDED): State.LEAVING,
    (State.LEAVING, RankEvent.RESET): State.GONE,
}
"""The next state after an event. Other events change nothing."""


class Progress:
    """Progress of a rank, and detection of stalls.

    A rank stands still 2 s after its last iteration, and within an iteration after three times the duration of recent
    ones, but only after its clock has been locked for as long.
    """

    def __init__(self) -> None:
        self._seen = -1
        self._since_s = self._looked_s = self._unlocked_s = 0.0
        self._taken_s: deque[float] = deque(maxlen=_REMEMBERED)

    def is_standing_still(self, memory: RankMemory, now_s: float, *, may_be_locked: bool) -> bool:
        """Return True if the rank makes no progress and its clock may be locked. Called often."""
        progress = memory.progress
        if progress != self._seen:
            if self._seen >= 0 and (self._seen % 2 or progress > self._seen + 1):
                begun_s = self._since_s if self._seen % 2 else self._looked_s
                iterations = max(1, (progress - self._seen) // 2)  # several if they are short
                self._taken_s.append((now_s - begun_s) / iterations)
            self._seen, self._since_s = progress, now_s
        self._looked_s = now_s
        if not may_be_locked:
            self._unlocked_s = now_s
        longest_s = _STALLED_S
        if progress % 2 or memory.ended != memory.iteration % 2**32:  # the GPU may not have finished the iteration
            longest_s = max(longest_s, _TIMES_AS_LONG * max(self._taken_s, default=_UNKNOWN_S))
        return now_s - max(self._since_s, self._unlocked_s) > longest_s


class Rank:
    """A client: its connection, its lease, and the lock that determines the end of the lease."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.state = State.JOINED
        # The request for a lease that was accepted, and the actor of its GPU.
        self.request: messages.RequestLease | None = None
        self.actor: GpuActor | None = None
        self.memory: RankMemory | None = None
        self.memory_file: int | None = None
        self.signals: int | None = None
        # From the grant of the lease until its end.
        self.clocks: RankClocks | None = None
        # When to look at the marks, and whether reports may be complete.
        self.look_at_s = 0.0
        self.is_update_due = False
        self.is_finding = False
        self.progress = Progress()
        self.stalled_at = 0
        self.is_connected, self.disconnected_s = True, 0.0
        self.is_released = False
        self.ended_s: float | None = None
        # The connection to the job's server, and the rank's number in the job.
        self.uplink: Uplink | None = None
        self.number = 0
        self._outbox: deque[bytes] = deque(maxlen=_MOST_UNSENT)

    def on(self, event: RankEvent) -> bool:
        """Change the state by an event. Returns True if it has changed."""
        before = self.state
        self.state = TRANSITIONS.get((before, event), before)
        return self.state is not before

    @property
    def sets_clocks(self) -> bool:
        return self.state in (State.RUNNING, State.STANDING_STILL)

    @property
    def has_ended(self) -> bool:
        if self.memory_file is None:
            return not self.is_connected
        return self.is_released or places.holder(self.memory_file) is None

    def is_ending(self, now_s: float) -> bool:
        """Return True if the end of the lease is about to be detected, or waits for the driver."""
        return (
            self.is_released
            or self.ended_s is not None
            or (not self.is_connected and self.disconnected_s > now_s - _ENDS_WITHIN_S)
        )

    def send(self, message: messages.ToClient) -> None:
        """Send a message, or the newest ones later if the client does not read its messages. Thread-safe."""
        self._outbox.append(messages.encode(message))
        self.flush()

    def send_to_server(self, message: ToServer) -> None:
        if self.uplink is not None:
            self.uplink.send(self.number, message)

    def flush(self) -> None:
        with contextlib.suppress(OSError, IndexError):  # another thread may send the last one
            while True:
                packet = self._outbox.popleft()
                try:
                    self.connection.send(packet)
                except BlockingIOError:
                    self._outbox.appendleft(packet)
                    raise

    def close(self) -> None:
        if self.clocks is not None:
            self.clocks.leave()
        self.connection.close()
        if self.memory_file is not None:
            os.close(self.memory_file)
            self.memory_file = None
        if self.signals is not None:
            os.close(self.signals)
            self.signals = None
