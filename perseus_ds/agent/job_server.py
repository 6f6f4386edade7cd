"""Starts the server of a job on rank 0's node, and restarts it if it dies or stalls."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import msgspec
import zmq

from perseus_ds.protocol import places
from perseus_ds.protocol.messages import ServerStarted, StartServer
from perseus_ds.timebase import REAL_TIME, Timebase

_SILENT_S, _MOST_DOUBLINGS = 5.0, 6
"""A server is replaced after this time without a message. The time doubles with each server that has never sent one,
up to five minutes."""
_COUNTED_S = 1.0
"""Maximum time between two checks of the server that counts as silence."""
_MOST_ANSWER = 1 << 20
_encode = msgspec.msgpack.Encoder().encode
_CODE = places.main_of("perseus_ds.server.process")


class JobServerChild:
    """The server's process.

    Attributes:
        is_followed: Whether a rank of this node has connected with it.
    """

    def __init__(self, request: StartServer, description: bytes, timebase: Timebase = REAL_TIME) -> None:
        """Start the process without waiting, unless an earlier agent of this node has started it.

        Args:
            request: Address at which it is to listen.
            description: Description of the job.
            timebase: Timebase of its silence.

        Raises:
            OSError: No process can be started.
        """
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
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._process.stdout.fileno(), _MOST_ANSWER):
                self._answer += part
            self._process.stdout.close()
            self._process.stdout = None
            return self._completed()
        return None

    def is_silent(self, *, is_heard: bool) -> bool:
        """Return True if it has to be restarted. Called often, with whether it has sent messages since."""
        now_s = self._time.now_s()
        self._silent_s += min(now_s - self._checked_s, _COUNTED_S)  # a pause of the machine pauses the server as well
        self._checked_s = now_s
        if is_heard:
            self._silent_s, self._unheard = 0.0, 0
        elif self.file is not None or self._is_restarting:
            self._silent_s = 0.0
        return not self.is_over and self._silent_s > _SILENT_S * 2.0 ** min(self._unheard, _MOST_DOUBLINGS)

    def restart(self) -> None:
        """End the process. :meth:`start_again` starts another one at the same address."""
        self.end()
        self._silent_s, self._unheard, self._is_restarting = 0.0, self._unheard + 1, True

    def start_again(self) -> bool:
        """Start another process if the one to be replaced has ended, without waiting.

        Returns True if it was started. A process that waits for a slow disk may take long to end.

        Raises:
            OSError: No process can be started.
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
        """Process id of the server. None if an earlier agent has started it."""
        return None if self._process is None else self._process.pid

    def end(self) -> None:
        """End the process, without waiting."""
        if self._process is not None:
            self._process.kill()

    @property
    def file(self) -> int | None:
        """File descriptor that is readable when there is an answer. None after the answer."""
        return None if self._process is None or self._process.stdout is None else self._process.stdout.fileno()

    def _completed(self) -> ServerStarted:
        try:
            found = msgspec.msgpack.decode(self._answer, type=ServerStarted)
        except msgspec.DecodeError:
            return ServerStarted(kind="PerseusError", error="the job's server ended while it started")
        if not found.kind:
            # Agents look for the next server at the same address.
            self._server = msgspec.structs.replace(
                self._server, address=found.address, output_dir=found.output_dir, answer=found.answer
            )
            return self._server
        return found

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
        file = os.memfd_create("perseus-ds-server", os.MFD_CLOEXEC)
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
