"""The server of a job as its agents see it: their connections to it, and its process on rank 0's node."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from perseus_ds.protocol import memory_files, places
from perseus_ds.protocol.job_messages import Joined, LatencyTable, Measured, ToRank, ToServer
from perseus_ds.protocol.messages import Connect, ServerStarted, StartServer
from perseus_ds.timebase import REAL_TIME, Timebase

_HEARTBEAT_S, _SILENT_S = 0.5, 2.0
"""Interval of an agent's messages, and time without a message after which a server counts as lost."""
_MOST_QUEUED = 10_000
_REPLACED_AFTER_S, _MOST_DOUBLINGS = 5.0, 6
"""A server is replaced after this time without a message. The time doubles with each server that has never sent one,
up to five minutes."""
_COUNTED_S = 1.0
"""Maximum time between two checks of the server that counts as silence."""
_MOST_ANSWER = 1 << 20
_RANK = struct.Struct("=I")
_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_CODE = places.main_of("perseus_ds.server.process")


class Uplink:
    """Connection of an agent to the server of its job, which may be slow, stopped, killed and restarted.

    Both sides send heartbeats several times a second. After two seconds without a message from the server, ranks return
    to default clocks. When the server, or a new one in its place, sends messages again, ranks join it again.

    Attributes:
        is_heard: Whether the server has sent messages recently.
        heard_s: Time of the last message, or of the creation of the connection [s].
    """

    def __init__(self, server: Connect, timebase: Timebase = REAL_TIME) -> None:
        self._server = server
        self._time = timebase
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(_MOST_QUEUED)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.IPV6, places.is_ipv6(server.address)),
            (zmq.CURVE_SERVERKEY, server.server_key),
            (zmq.CURVE_PUBLICKEY, server.public_key),
            (zmq.CURVE_SECRETKEY, server.secret_key),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(server.address)
        self._ranks: dict[int, Callable[[], int]] = {}
        # By rank, the latest of each kind, for a server that replaces another one.
        self._kept: dict[int, dict[type[ToServer], ToServer]] = {}
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
        return server.address == self._server.address and server.server_key == self._server.server_key

    def join(self, rank: int, issued: Callable[[], int]) -> None:
        """Join a rank to the server. ``issued`` returns the number of the iteration that the rank has begun last."""
        self._ranks[rank] = issued
        self.send(rank, Joined(issued()))

    def leave(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def send(self, rank: int, message: ToServer) -> None:
        """Send a message of a rank at the next call of :meth:`exchange`. Thread-safe.

        It is lost if the server has not received thousands of earlier ones.
        """
        if isinstance(message, LatencyTable | Measured):
            self._kept.setdefault(rank, {})[type(message)] = message
        self._outbox.append((_RANK.pack(rank), _encode(message)))

    def exchange(self) -> list[tuple[int, ToRank]]:
        """Send queued messages and a heartbeat if it is due, and return the messages received for ranks."""
        self.flush()
        now_s = self._time.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + _HEARTBEAT_S
            self._send(b"")
        found = []
        while True:  # after the last send: the file does not become readable again for what has arrived before
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._note_message(frames)
            if len(frames) == 2 and len(frames[0]) == _RANK.size:
                with contextlib.suppress(msgspec.DecodeError):  # a lost message is better than a stopped agent
                    found.append((_RANK.unpack(frames[0])[0], _to_rank.decode(frames[1])))
        return found

    def flush(self) -> None:
        while self._outbox:
            self._send(*self._outbox.popleft())

    def has_become_silent(self) -> bool:
        """Return True, once for each silence, if the server has become silent."""
        if self.is_heard and self._time.now_s() > self.heard_s + _SILENT_S:
            self.is_heard = False
            return True
        return False

    def close(self) -> None:
        """Close the connection. Earlier messages are still sent, within 1 s."""
        self._socket.close()

    def _note_message(self, frames: list[bytes]) -> None:
        self.heard_s = self._time.now_s()
        if len(frames) != 1:
            return
        was_heard, self.is_heard = self.is_heard, True
        if frames[0] != self._epoch or not was_heard:
            is_first = not self._epoch and frames[0] == b"0"  # which knows ranks from what they sent before
            self._epoch = frames[0]
            for rank, issued in self._ranks.items() if not is_first else ():
                self.send(rank, Joined(issued()))
                for message in [*self._kept.get(rank, {}).values()]:
                    self.send(rank, message)

    def _send(self, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)


class JobServerChild:
    """The server's process, which is restarted if it dies or stalls.

    Attributes:
        is_followed: Whether a rank of this node has connected with it.
    """

    def __init__(self, request: StartServer, description: bytes, timebase: Timebase = REAL_TIME) -> None:
        """Start the process without waiting, unless an earlier agent of this node has started it."""
        self._request = request
        self._description = description
        self._time = timebase
        self._checked_s, self._silent_s, self._unheard = timebase.now_s(), 0.0, 0
        self._answer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self.is_followed = self._is_restarting = False
        if (running := request.running) is None:
            server_key, server_secret = zmq.curve_keypair()
            public_key, secret_key = zmq.curve_keypair()
            self._server = ServerStarted(
                server_key=server_key, server_secret=server_secret, public_key=public_key, secret_key=secret_key
            )
            self._start(epoch=0)
        else:
            self._server = running

    def answer(self) -> ServerStarted | None:
        """Return the server's answer after a start, once. None before it arrives."""
        if self._process is None or self._process.stdout is None:
            return None
        try:
            while part := os.read(self._process.stdout.fileno(), _MOST_ANSWER):
                self._answer += part
        except BlockingIOError:
            return None
        self._process.stdout.close()
        self._process.stdout = None
        try:
            found = msgspec.msgpack.decode(self._answer, type=ServerStarted)
        except msgspec.DecodeError:
            return ServerStarted(kind="PerseusError", error="the job's server ended while it started")
        if found.kind:
            return found
        # Agents look for the next server at the same address.
        self._server = msgspec.structs.replace(
            self._server, address=found.address, output_dir=found.output_dir, answer=found.answer
        )
        return self._server

    def is_silent(self, *, is_heard: bool) -> bool:
        """Return True if it has to be restarted. Called often, with whether it has sent messages since."""
        now_s = self._time.now_s()
        self._silent_s += min(now_s - self._checked_s, _COUNTED_S)  # a pause of the machine pauses the server as well
        self._checked_s = now_s
        if is_heard:
            self._silent_s, self._unheard = 0.0, 0
        elif self.file is not None or self._is_restarting:
            self._silent_s = 0.0
        return not self.is_over and self._silent_s > _REPLACED_AFTER_S * 2.0 ** min(self._unheard, _MOST_DOUBLINGS)

    def restart(self) -> None:
        """End the process. :meth:`start_again` starts another one at the same address."""
        self.end()
        self._silent_s, self._unheard, self._is_restarting = 0.0, self._unheard + 1, True

    def start_again(self) -> bool:
        """Start another process if the one to be replaced has ended, without waiting. Returns True if it was started.

        A process that waits for a slow disk may take long to end.
        """
        if not self._is_restarting or (self._process is not None and self._process.poll() is None):
            return False
        self._is_restarting = False  # if it cannot be started, it is tried again after another silence
        self._start(epoch=max(1, int(self._time.now_s())))
        return True

    @property
    def is_over(self) -> bool:
        """True if the process has ended because the job has ended."""
        return not self._is_restarting and self._process is not None and self._process.poll() == 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def file(self) -> int | None:
        """File descriptor that is readable when there is an answer. None after the answer."""
        return None if self._process is None or self._process.stdout is None else self._process.stdout.fileno()

    def _start(self, *, epoch: int) -> None:
        server = self._server
        content = _encode(
            {
                "description": self._description,
                "host": self._request.host,
                "port": int(server.address.rpartition(":")[2]) if server.address else self._request.port,
                "epoch": epoch,
                "server_key": server.server_key,
                "server_secret": server.server_secret,
                "public_key": server.public_key,
                "output_dir": server.output_dir,
            }
        )
        self._answer = b""
        file = memory_files.create("perseus-ds-server")
        try:
            written = 0
            while written < len(content):
                written += os.write(file, content[written:])
            os.lseek(file, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
            )
        finally:
            os.close(file)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
