"""Orders to a running job from outside, over a Unix socket that only its owner and root can use.

A client sends one JSON object on a line and receives one: ``{"command": "status"}`` is answered by ``{"ok": true,
"status": {...}}`` or ``{"ok": false, "error": "..."}``. Orders take effect at one of the next iteration boundaries, at
the same one on all ranks.
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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from perseus_ds.artifacts.io import read_json, write_atomically
from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.policy.policies import PolicyConfig, fraction_not_percentage

ADDRESS_FILE = "control.json"
_TIMEOUT_S, _CLIENT_TIMEOUT_S = 15.0, 5.0
# A longer line is no message of ours, and must not fill the memory; the status of a job has figures of every rank.
_LONGEST_ORDER, _LONGEST_ANSWER = 1 << 16, 1 << 22
# Between clients, so that many of them do not take the interpreter away from training.
_PAUSE_S = 0.02


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Status(_Order):
    """Report the state of the job."""

    command: Literal["status"]


class SetPolicy(_Order):
    """Run under another policy."""

    command: Literal["policy"]
    policy: PolicyConfig


class SetStraggler(_Order):
    """Expect a pipeline to take this many times as long; 1 says that it has recovered."""

    command: Literal["straggler"]
    pipeline: int = Field(ge=0, lt=2**31)
    slowdown: float = Field(ge=1, le=1e6, allow_inf_nan=False)
    after_iterations: int = Field(0, ge=0, le=10**12)


class Pause(_Order):
    """Run at default clocks."""

    command: Literal["pause"]


class Resume(_Order):
    """Run under plans again."""

    command: Literal["resume"]


class Reduce(_Order):
    """Draw less power for a while, then run as before."""

    command: Literal["reduce"]
    power_fraction: Annotated[float, BeforeValidator(fraction_not_percentage)] = Field(gt=0, le=1)
    duration_s: float = Field(gt=0, le=1e9, allow_inf_nan=False)
    within_s: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)


AnyOrder = Status | SetPolicy | SetStraggler | Reduce | Pause | Resume
Order = Annotated[AnyOrder, Field(discriminator="command")]
_ORDER: TypeAdapter[AnyOrder] = TypeAdapter(Order)


def parse_order(words: object) -> AnyOrder:
    """Return an order that was checked.

    Raises:
        ConfigError: It is not a valid order; the message names the key.
    """
    try:
        return _ORDER.validate_python(words)
    except ValidationError as error:
        raise ConfigError(explain(error, Order, "order: ")) from None


class _Handler(socketserver.BaseRequestHandler):
    """Answers one line of a client."""

    server: ControlServer
    request: socket.socket

    def handle(self) -> None:
        answer = self.server.answer(receive_line(self.request, _LONGEST_ORDER, _CLIENT_TIMEOUT_S))
        self.request.sendall(json.dumps(answer).encode() + b"\n")


class ControlServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Listens on rank 0 until closed, and answers so many clients a second that training does not notice.

    Args:
        directory: The job's output folder, where ``perseus-ds control`` finds the address.
        carry_out: Carries out an order and returns what to answer; called on a thread of the server, one at a time.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, directory: Path, carry_out: Callable[[Any], dict[str, Any]]) -> None:
        """Start to listen.

        Raises:
            OSError: The socket or the address file cannot be made.
        """
        self._carry_out = carry_out
        self._one_at_a_time = threading.Lock()
        self._address_file = directory / ADDRESS_FILE
        # Paths of sockets must be short, so they cannot lie in just any folder; this one is made with mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="perseus-"))
        path = str(self._folder / "control.sock")
        try:
            super().__init__(path, _Handler)
            os.chmod(path, 0o600)
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._address_file, json.dumps({"socket": path, "pid": os.getpid()}) + "\n")
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        threading.Thread(target=self.serve_forever, name="perseus-control", daemon=True).start()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Return whether a client may be served: this user and root may."""
        time.sleep(_PAUSE_S)
        return user_of(request) in (os.getuid(), 0)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Ignore a client that is gone, or sends no line."""

    def close(self) -> None:
        """Stop listening and remove the socket and its address; harmless when called again."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.shutdown()
        self.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError, PerseusError):
            if read_json(self._address_file, ConfigError, ADDRESS_FILE).get("pid") == os.getpid():
                self._address_file.unlink()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the answer to a line of a client."""
        try:
            with self._one_at_a_time:
                return {"ok": True, **self._carry_out(parse_order(_parse(line)))}
        except Exception as error:  # whatever is wrong with an order, the job goes on
            return {"ok": False, "error": str(error) or type(error).__name__}


def send_order(directory: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Send an order to the job that writes to a folder, and return its answer.

    Raises:
        ConfigError: No job is running there, or it refused the order.
    """
    path = directory / ADDRESS_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no job is running that writes there, or it still starts, or has no plans.")
    address = read_json(path, ConfigError, ADDRESS_FILE)
    try:
        with _connect(str(address.get("socket"))) as connection:
            user, owner = os.getuid(), user_of(connection)
            if owner not in (user, 0) and user != 0:
                raise PermissionError
            connection.sendall(json.dumps(order).encode() + b"\n")
            answer = _parse(receive_line(connection, _LONGEST_ANSWER, _TIMEOUT_S))
    except PermissionError:
        raise ConfigError(f"{path}: the job belongs to another user, who alone can control it.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: process {address.get('pid')} does not answer ({error}). Run this on the node of rank 0; if the "
            "job is over, remove the file."
        ) from None
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("error")))
    return answer


def _connect(address: str) -> socket.socket:
    """Return a connection to the process that listens at an address; else raise an ``OSError``."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        # A connect with Python's time-out fails at once where the listener's queue is full; this one waits.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0))
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def user_of(connection: socket.socket) -> int:
    """Return the user id of the other end, as the kernel recorded it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def receive_line(connection: socket.socket, most_bytes: int, timeout_s: float) -> bytes:
    """Return the line that the other end sends next; else, or if it takes too long, raise an ``OSError``."""
    line, end_s = b"", time.monotonic() + timeout_s
    while b"\n" not in line:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        received = connection.recv(_LONGEST_ORDER)
        line += received
        if not received or len(line) > most_bytes:
            raise OSError(f"expected a line with a JSON object, got {len(line)} bytes without its end")
    connection.settimeout(timeout_s)
    return line.partition(b"\n")[0]


def _parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line; else raise an ``OSError``."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OSError(f"expected a JSON object, got {line[:80]!r}: {error}") from None
    if not isinstance(message, dict):
        raise OSError(f"expected a JSON object, got {line[:80]!r}")
    return message
