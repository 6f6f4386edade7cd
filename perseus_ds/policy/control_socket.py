"""Orders to a running job from outside, over a Unix socket that only its owner can use.

One JSON object a line, answered by one: ``{"command": "status"}`` →
``{"ok": true, "status": {...}}`` or ``{"ok": false, "error": "..."}``. Orders take effect at the next
iteration boundaries, on all ranks at the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from perseus_ds.artifacts.io import read_json, write_atomically
from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.policy.policies import PolicyConfig

ADDRESS_FILE = "control.json"
_TIMEOUT_S = 5.0
_LONGEST = 65536


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Status(_Order):
    """Tell how the job goes."""

    command: Literal["status"]


class SetPolicy(_Order):
    """Run under another policy."""

    command: Literal["policy"]
    policy: PolicyConfig


class SetStraggler(_Order):
    """A pipeline will take this many times as long; 1 ends it."""

    command: Literal["straggler"]
    pipeline: int = Field(ge=0)
    slowdown: float = Field(ge=1, allow_inf_nan=False)
    after_iterations: int = Field(0, ge=0)


class Pause(_Order):
    """Run at default clocks."""

    command: Literal["pause"]


class Resume(_Order):
    """Run under plans again."""

    command: Literal["resume"]


Order = Annotated[Status | SetPolicy | SetStraggler | Pause | Resume, Field(discriminator="command")]
_ORDER: TypeAdapter[Status | SetPolicy | SetStraggler | Pause | Resume] = TypeAdapter(Order)


def parse_order(words: object) -> Status | SetPolicy | SetStraggler | Pause | Resume:
    """Check an order.

    Raises:
        ConfigError: It is none; the message names the key.
    """
    try:
        return _ORDER.validate_python(words)
    except ValidationError as error:
        raise ConfigError(explain(error, Order, "order: ")) from None


class ControlServer:
    """Listens on rank 0 until closed.

    Args:
        directory: Where the address is left for ``perseus-ds control``: the job's output folder.
        handle: Carries out an order and returns what to answer; called on the server's thread.
    """

    def __init__(self, directory: Path, handle: Callable[[Any], dict[str, Any]]) -> None:
        """Start to listen.

        Raises:
            OSError: The socket or the address file cannot be made.
        """
        self._handle = handle
        self._address_file = directory / ADDRESS_FILE
        # Paths of sockets must be short, so they cannot lie in just any folder; this one is made with mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="perseus-"))
        path = self._folder / "control.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._address_file, json.dumps({"socket": str(path), "pid": os.getpid()}) + "\n")
        except OSError:
            self.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="perseus-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and leave nothing behind; harmless when called again."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._address_file.read_text(encoding="utf-8")).get("pid") == os.getpid():
                self._address_file.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                if _peer_uid(connection) in (os.getuid(), 0):
                    connection.sendall(json.dumps(self._answer(_line(connection))).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": True, **self._handle(parse_order(json.loads(line)))}
        except (ValueError, PerseusError) as error:
            return {"ok": False, "error": str(error)}


def send_order(directory: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Send an order to the job that writes to a folder, and return its answer.

    Raises:
        ConfigError: No job is running there, or it refused the order.
    """
    path = directory / ADDRESS_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no job is running that writes there, or it runs without plans.")
    address = read_json(path, ConfigError, ADDRESS_FILE)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(address.get("socket")))
            connection.sendall(json.dumps(order).encode() + b"\n")
            answer: dict[str, Any] = json.loads(_line(connection))
    except PermissionError:
        raise ConfigError(f"{path}: the job belongs to another user, who alone can control it.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: process {address.get('pid')} does not answer ({error}). Run this on the node of rank 0; if the "
            "job is over, remove the file."
        ) from None
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("error")))
    return answer


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        received = connection.recv(4096)
        if not received:
            break
        line += received
    return line


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
