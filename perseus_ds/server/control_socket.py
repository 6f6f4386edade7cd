"""Commands to a running job, by a Unix socket on the server's node or the port of the server.

Only the owner of the job and root can use the socket, and read the key that other nodes need.

A client sends one line with a JSON object and receives one: ``{"command": "status"}`` is answered by ``{"ok": true,
"status": {...}}`` or ``{"ok": false, "error": "..."}``. A command takes effect at a later iteration boundary, which is
the same for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from perseus_ds.artifacts.io import read_json, write_atomically
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.policy.commands import AnyCommand, parse_command
from perseus_ds.protocol.places import boot_id, from_this_node, is_ipv6

ADDRESS_FILE, KEY_FILE = "control.json", "control.key"
CONTROL = b"control"
"""First part of a message to the server's port that is a command."""
_TIMEOUT_S, _CLIENT_TIMEOUT_S = 15.0, 5.0
# Longer lines are not valid commands and must not exhaust memory. The status of a job contains figures of every rank.
_LONGEST_COMMAND, _LONGEST_ANSWER = 1 << 16, 1 << 22
# Pause between clients, so that many of them cannot slow training down.
_PAUSE_S = 0.02


class _Handler(socketserver.StreamRequestHandler):
    """Answers one line from a client."""

    server: ControlServer
    timeout = _CLIENT_TIMEOUT_S

    def handle(self) -> None:
        self.wfile.write(json.dumps(self.server.answer(self.rfile.readline(_LONGEST_COMMAND))).encode() + b"\n")


class RemoteAccess(msgspec.Struct, frozen=True):
    """Address and keys for commands to a job's server from other nodes."""

    address: str  # of its port
    server_key: str  # public
    public_key: str  # of those who give commands
    secret_key: str


class ControlServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Listens on rank 0's node until closed. The rate of answers is limited to protect training."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, directory: Path, carry_out: Callable[[AnyCommand], dict[str, Any]], remote: RemoteAccess | None = None
    ) -> None:
        """Start to listen.

        Args:
            directory: The job's output folder, in which ``perseus-ds control`` finds the address.
            carry_out: Carries out a command and returns the answer. Called on several threads.
            remote: Written to a file that only the owner can read, for commands from other nodes.

        Raises:
            OSError: The socket or the address file cannot be created.
        """
        self._carry_out = carry_out
        self._address_file, self._key_file = directory / ADDRESS_FILE, directory / KEY_FILE
        # A socket's path must be short, so it cannot be in the output folder. This folder is created with mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="perseus-"))
        path = str(self._folder / "control.sock")
        try:
            super().__init__(path, _Handler)
            os.chmod(path, 0o600)
            directory.mkdir(parents=True, exist_ok=True)
            if remote is not None:
                self._key_file.unlink(missing_ok=True)
                with os.fdopen(os.open(self._key_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(remote))
            address = {"socket": path, "pid": os.getpid(), "node": boot_id()}
            write_atomically(self._address_file, json.dumps(address) + "\n")
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        threading.Thread(target=self.serve_forever, name="perseus-control", daemon=True).start()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Return True if the client runs as this user or root."""
        time.sleep(_PAUSE_S)
        return user_of(request) in (os.getuid(), 0)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Ignore clients that disconnect or send no line."""

    def close(self) -> None:
        """Stop listening and remove the socket and its address file. May be called repeatedly."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.shutdown()
        self.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError, PerseusError):
            if read_json(self._address_file, ConfigError, ADDRESS_FILE).get("pid") == os.getpid():
                self._address_file.unlink()
                self._key_file.unlink()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the answer to a line from a client."""
        try:
            return {"ok": True, **self._carry_out(parse_command(_parse(line)))}
        except Exception as error:  # a wrong command must not stop the job
            return {"ok": False, "error": str(error) or type(error).__name__}


def send_command(directory: Path, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command to the job that writes to a folder, and return its answer.

    Raises:
        ConfigError: No job is running there, it does not answer, or it refused the command.
    """
    path = directory / ADDRESS_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no job runs with this folder, or the job is still starting or has no plans.")
    address = read_json(path, ConfigError, ADDRESS_FILE)
    if address.get("node", boot_id()) == boot_id():
        answer = _ask_on_this_node(path, address, command)
    else:
        answer = _ask_from_another_node(directory / KEY_FILE, command)
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("error")))
    return answer


def _ask_on_this_node(path: Path, address: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            # With Python's timeout, a connect fails immediately if the listener's queue is full. This one waits.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0))
            connection.connect(str(address.get("socket")))
            connection.settimeout(_TIMEOUT_S)
            user, owner = os.getuid(), user_of(connection)
            if owner not in (user, 0) and user != 0:
                raise PermissionError
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return _parse(answer.readline(_LONGEST_ANSWER))
    except PermissionError:
        raise ConfigError(f"{path}: the job belongs to another user. Only that user can control it.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: process {address.get('pid')} does not answer ({error}). Run this on the node of rank 0; if the "
            "job is over, remove the file."
        ) from None


def _ask_from_another_node(path: Path, command: dict[str, Any]) -> dict[str, Any]:
    try:
        remote = msgspec.json.decode(path.read_bytes(), type=RemoteAccess)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: the key for commands from other nodes cannot be read ({error}). Only the owner of the job can "
            "read it. Otherwise run this on the node of rank 0."
        ) from None
    address = from_this_node(remote.address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.setsockopt(zmq.LINGER, 0)
        connection.setsockopt(zmq.IPV6, is_ipv6(address))
        connection.curve_serverkey = remote.server_key.encode()
        connection.curve_publickey, connection.curve_secretkey = remote.public_key.encode(), remote.secret_key.encode()
        connection.connect(address)
        connection.send_multipart([CONTROL, json.dumps(command).encode()])
        if not connection.poll(int(1000 * _TIMEOUT_S)):
            raise ConfigError(
                f"{path}: no server answers at {remote.address}. If this node cannot reach that address, set "
                "perseus.server, or run this on the node of rank 0. If the job is over, remove the file."
            )
        return _parse(connection.recv_multipart()[1])


def user_of(connection: socket.socket) -> int:
    """Return the user ID of the peer, as recorded by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _parse(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises an ``OSError`` if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OSError(f"expected a JSON object, got {line[:80]!r}: {error}") from None
    if not isinstance(message, dict):
        raise OSError(f"expected a JSON object, got {line[:80]!r}")
    return message
