"""An agent's connection to the server of its job, which may be slow, stopped, killed and restarted.

Both sides send a heartbeat twice a second. After two seconds without a message from the server, ranks return to default
clocks. When the server, or a new one in its place, sends messages again, ranks join it again.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from perseus_ds.protocol.job_messages import Joined, Latencies, ToRank, ToServer
from perseus_ds.protocol.messages import Connect
from perseus_ds.timebase import REAL_TIME, Timebase

HEARTBEAT_S = 0.5
SILENT_S = 2.0
"""A server or agent counts as lost after this time without a message."""
_MOST_QUEUED = 10_000
_RANK = struct.Struct("=I")
_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)


class Uplink:
    """Connection of an agent to the server of its job.

    Attributes:
        is_heard: Whether the server has sent messages recently.
        heard_s: Time of the last message, or of the creation of the connection before the first one [s].
    """

    def __init__(self, server: Connect, timebase: Timebase = REAL_TIME) -> None:
        """Connect to a server, without waiting."""
        self._server = server
        self._time = timebase
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server.server_key)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, server.public_key)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret_key)
        self._socket.connect(server.address)
        self._ranks: dict[int, Callable[[], int]] = {}
        # The latest of each rank, for a server that replaces another one.
        self._latencies: dict[int, Latencies] = {}
        self._outbox: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_QUEUED)
        self._epoch = b""
        self.is_heard = False
        self.heard_s = timebase.now_s()
        self._beat_at_s = 0.0

    @property
    def file(self) -> int:
        """File descriptor that is readable when there may be a message."""
        return int(self._socket.getsockopt(zmq.FD))

    def is_to(self, server: Connect) -> bool:
        """Return True if this is the connection to the given server."""
        return server.address == self._server.address and server.server_key == self._server.server_key

    def join(self, rank: int, issued: Callable[[], int]) -> None:
        """Join a rank to the server.

        ``issued`` returns the number of the iteration that the rank has begun last.
        """
        self._ranks[rank] = issued
        self.send(rank, Joined(issued()))

    def leave(self, rank: int) -> None:
        """Forget a rank."""
        self._ranks.pop(rank, None)

    def send(self, rank: int, message: ToServer) -> None:
        """Send a message of a rank at the next call of :meth:`look`. Thread-safe.

        It is lost if the server has not received thousands of earlier ones.
        """
        if isinstance(message, Latencies):
            self._latencies[rank] = message
        self._outbox.append((_RANK.pack(rank), _encode(message)))

    def look(self) -> list[tuple[int, ToRank]]:
        """Send queued messages and a heartbeat if it is due, and return the messages received for ranks."""
        self.flush()
        now_s = self._time.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + HEARTBEAT_S
            self._send(b"")
        found = []
        while True:  # after the last send: the file does not become readable again for what has arrived before
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._hear(frames)
            if len(frames) == 2 and len(frames[0]) == _RANK.size:
                with contextlib.suppress(msgspec.DecodeError):  # a lost message is better than a stopped agent
                    found.append((_RANK.unpack(frames[0])[0], _to_rank.decode(frames[1])))
        return found

    @property
    def has_unsent(self) -> bool:
        """True if there are messages to send."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Send what is queued, without waiting."""
        while self._outbox:
            self._send(*self._outbox.popleft())

    def has_become_silent(self) -> bool:
        """Return True, once for each silence, if the server has become silent."""
        if self.is_heard and self._time.now_s() > self.heard_s + SILENT_S:
            self.is_heard = False
            return True
        return False

    def close(self) -> None:
        """Close the connection. Earlier messages are still sent, within 1 s."""
        self._socket.close()

    def _hear(self, frames: list[bytes]) -> None:
        self.heard_s = self._time.now_s()
        if len(frames) != 1:
            return
        was_heard, self.is_heard = self.is_heard, True
        if frames[0] != self._epoch or not was_heard:
            is_first = not self._epoch and frames[0] == b"0"  # which knows ranks from what they sent before
            self._epoch = frames[0]
            for rank, issued in self._ranks.items() if not is_first else ():
                self.send(rank, Joined(issued()))
                if rank in self._latencies:
                    self.send(rank, self._latencies[rank])

    def _send(self, *frames: bytes) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return
