"""Unix sockets between processes of one user on one node: one JSON object a line, each answered by one."""

from __future__ import annotations

import json
import math
import os
import socket
import socketserver
import struct
import time
from collections.abc import Mapping
from typing import Any

LONGEST_LINE = 65536
"""Bytes; a longer line is no message of ours, and must not fill the memory."""
_LONGEST_ANSWER = 64 * LONGEST_LINE
"""Bytes; the status of a job has figures of every rank."""


class LocalSocketError(OSError):
    """The other end sent something that is not one JSON object a line."""


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end, as the kernel recorded them.

    The process id is 0 if that process is in a pid namespace that this process cannot see.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


class LocalServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Serves clients of this user, and of root, each on a thread of its own.

    Args:
        address: A path, whose file only this user may then use.
        handler: Serves a client.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, handler: type[socketserver.BaseRequestHandler]) -> None:
        """Listen.

        Raises:
            OSError: The socket cannot be made.
        """
        super().__init__(address, handler)
        os.chmod(address, 0o600)

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Return whether a client may be served."""
        return peer(request)[1] in (os.getuid(), 0)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Ignore a client that is gone, or sends nothing."""


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to the process that listens at an address; its calls wait only so long.

    Raises:
        OSError: No process listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        # A connect with Python's time-out fails at once where the listener's queue is full; this one waits.
        wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        connection.connect(address)
        connection.settimeout(timeout_s)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send an object.

    Raises:
        OSError: The other end is gone, or does not read within the connection's time-out.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, most_bytes: int = LONGEST_LINE) -> dict[str, Any]:
    """Return the object that the other end sends next, in a line that is no longer than so many bytes.

    What comes with the line, after its end, is dropped.

    Raises:
        LocalSocketError: It sent something else, or closed the connection before the end of the line.
        OSError: The other end does not send all of it within the connection's time-out.
    """
    line = b""
    timeout_s = connection.gettimeout()
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        while b"\n" not in line:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(None if math.isinf(left_s) else left_s)
            received = connection.recv(LONGEST_LINE)
            line += received
            if not received or len(line) > most_bytes:
                raise LocalSocketError(f"expected a line with a JSON object, got {len(line)} bytes without its end")
    finally:
        connection.settimeout(timeout_s)
    return parse(line.partition(b"\n")[0])


def parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        LocalSocketError: It is not a JSON object, or its lists and objects are too deep.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LocalSocketError(f"expected a JSON object, got {line[:80]!r}: {error}") from None
    if not isinstance(message, dict):
        raise LocalSocketError(f"expected a JSON object, got {line[:80]!r}")
    return message


def exchange(connection: socket.socket, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send an object and return the answer.

    Raises:
        OSError: As :func:`send` and :func:`receive`.
    """
    send(connection, message)
    return receive(connection, _LONGEST_ANSWER)
