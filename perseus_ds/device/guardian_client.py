"""A small process per node that restores default clocks once the training processes are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so somebody else must notice its end. The
first rank of a node starts the guardian and every rank registers its GPUs with it over a Unix socket. The guardian is
no descendant of the rank and belongs to a session of its own, so what kills the job's process tree or group spares it.
It sees a rank's end by the socket (which the kernel closes) and by ``/proc`` (a forked data-loading worker may hold
the socket open for longer), restores the GPUs that no other rank has registered, and ends with the last rank.

Where a scheduler kills by cgroup, or the container ends with the job, the guardian dies too: run ``perseus-ds reset``
in the scheduler's epilogue there.

The guardian itself is :mod:`perseus_ds.device.guardian_daemon`; this module is the ranks' side of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perseus_ds.errors import GpuError

_START_TIMEOUT_S = 30.0


class Guardian:
    """A rank's connection to the guardian of its node.

    Attributes:
        pid: The guardian's process id.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    @classmethod
    def start(cls, addresses: Sequence[str], job: str | None = None) -> Guardian:
        """Have GPUs guarded until this process ends, by the node's guardian; start it if there is none.

        Args:
            addresses: The ``address`` of each GPU whose clock this process may lock.
            job: Ranks with the same text share a guardian. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``,
                or this process alone.

        Raises:
            GpuError: The guardian cannot be started, or it cannot open one of the GPUs.
        """
        name = _socket_name(job)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            connection = _connect(name)
            if connection is None:
                _spawn(name)
                connection = _connect(name)
            answer = _exchange(connection, {"gpus": list(addresses)}, _START_TIMEOUT_S) if connection else None
            if connection is not None and answer is not None:
                if answer["error"] is not None:
                    connection.close()
                    raise GpuError(f"The guardian cannot watch {', '.join(addresses)}: {answer['error']}")
                return cls(connection, answer["pid"])
            time.sleep(0.05)  # It was just ending with its last rank, or is not listening yet.
        raise GpuError(
            f"No guardian answered within {_START_TIMEOUT_S:.0f} s. "
            f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
        )

    @property
    def alive(self) -> bool:
        """Whether the guardian still watches."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self, timeout_s: float = 3.0) -> bool:
        """Have the guardian restore the default clocks now and stop watching; harmless when called again.

        Returns:
            Whether it did. When it did not (it is dead, or the driver refused or hangs), reset the clocks yourself.
        """
        if self._connection is None:
            return False
        connection, self._connection = self._connection, None
        with contextlib.closing(connection):
            answer = _exchange(connection, {"close": True}, timeout_s)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # Also for forked children that hold the socket.
        return answer is not None and answer["error"] is None


def _socket_name(job: str | None) -> str:
    """Return an abstract socket name, which needs no file and vanishes with the guardian."""
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Sockets are per network namespace, process ids per pid namespace: containers may share one and not the other.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0perseus-ds-guardian/{os.getuid()}/{namespace}/{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    _, uid = peer(connection)
    if uid != os.getuid():
        connection.close()
        raise GpuError(f"The guardian's socket {name[1:]} belongs to user {uid}. Ask them to end that process.")
    return connection


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _exchange(connection: socket.socket, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Send one line and return the answer; None if the other end is gone or silent."""
    try:
        connection.settimeout(timeout_s)
        connection.sendall(json.dumps(message).encode() + b"\n")
        line = connection.makefile("rb").readline()
        return json.loads(line) if line else None
    except OSError:
        return None
    finally:
        connection.setblocking(False)


def _spawn(name: str) -> None:
    """Start a guardian; returns once it listens, or another one does."""
    package_parent = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "perseus_ds.device.guardian_daemon", name[1:]],
        cwd="/",  # Away from the user's modules, and holding no file system.
        env={**os.environ, "PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, complaint = process.communicate(timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise GpuError(f"The guardian did not start within {_START_TIMEOUT_S:.0f} s: is the node overloaded?") from None
    if process.returncode != 0:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise GpuError(f"The guardian process failed to start (exit status {process.returncode}): {last[0]}")
