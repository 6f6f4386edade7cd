"""An agent's connection with the server of its job, which may be slow, stopped, killed and started again.

Both sides send a heartbeat twice a second. If the server has been silent for two seconds, ranks return to default
clocks; when it is heard again, or another one in its place, ranks join it anew.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from perseus_ds.protocol.job_messages import Joined, ToRank, ToServer
from perseus_ds.protocol.messages import Connect
from perseus_ds.timebase import REAL_TIME, Timebase

HEARTBEAT_S = 0.5
SILENT_S = 2.0
"""A server or agent that was not heard for so long is taken to be gone."""
_MOST_QUEUED = 10_000
_RANK = struct.Struct("=I")
_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)


class Uplink:
    """See the module.

    Attributes:
        is_heard: Whether the server was heard lately.
        heard_s: When it was heard last [s]; when the connection was made, before.
    """

    def __init__(self, server: Connect, timebase: Timebase = REAL_TIME) -> None:
        """Connect with a server, without waiting."""
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
        self._outbox: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_QUEUED)
        self._epoch = b""
        self.is_heard = False
        self.heard_s = timebase.now_s()
        self._beat_at_s = 0.0

    @property
    def file(self) -> int:
        """A descriptor that is readable when something may have come."""
        return int(self._socket.getsockopt(zmq.FD))

    def is_to(self, server: Connect) -> bool:
        """Return whether this is the connection with a server."""
        return server.address == self._server.address and server.server_key == self._server.server_key

    def join(self, rank: int, issued: Callable[[], int]) -> None:
        """Have a rank follow the server; ``issued`` returns the number of the iteration that it has begun last."""
        self._ranks[rank] = issued
        self.send(rank, Joined(issued()))

    def leave(self, rank: int) -> None:
        """Forget a rank."""
        self._ranks.pop(rank, None)

    def send(self, rank: int, message: ToServer) -> None:
        """Send a message of a rank when :meth:`look` is called next; from any thread.

        It is lost if the server has not taken in thousands before it.
        """
        self._outbox.append((_RANK.pack(rank), _encode(message)))

    def look(self) -> list[tuple[int, ToRank]]:
        """Return what has come for ranks, and send a heartbeat if it is due."""
        found = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._hear(frames)
            if len(frames) == 2 and len(frames[0]) == _RANK.size:
                with contextlib.suppress(msgspec.DecodeError):  # ranks at their clocks are worth more than a message
                    found.append((_RANK.unpack(frames[0])[0], _to_rank.decode(frames[1])))
        while self._outbox:
            self._send(*self._outbox.popleft())
        now_s = self._time.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + HEARTBEAT_S
            self._send(b"")
        return found

    def has_become_silent(self) -> bool:
        """Return, once each time, that the server is not heard any more."""
        if self.is_heard and self._time.now_s() > self.heard_s + SILENT_S:
            self.is_heard = False
            return True
        return False

    def close(self) -> None:
        """End the connection once what was sent before is on its way."""
        self._socket.close()

    def _hear(self, frames: list[bytes]) -> None:
        self.heard_s = self._time.now_s()
        if len(frames) != 1:
            return
        was_heard, self.is_heard = self.is_heard, True
        if frames[0] != self._epoch or not was_heard:
            is_first = not self._epoch
            self._epoch = frames[0]
            for rank, issued in self._ranks.items() if not is_first else ():
                self.send(rank, Joined(issued()))

    def _send(self, *frames: bytes) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return
