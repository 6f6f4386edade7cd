"""The ranks' side of the guardian: a small process per node that restores default clocks when ranks are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so another process must notice its end. The
first rank of a node starts the guardian, and every rank registers its GPUs with it over a Unix socket. The guardian is
no descendant of the rank and has a session of its own, so a signal to the job's process tree or group does not reach
it. It sees a rank's end by the socket, which the kernel closes, and by the process itself (a forked data-loading worker
may hold the socket open for longer). It then restores the GPUs that no other rank has registered, and ends with the
last rank.

Where a scheduler kills by cgroup, or the container ends with the job, the guardian is killed too: run ``perseus-ds
reset`` in the scheduler's epilogue there.

The guardian itself is :mod:`perseus_ds.device.guardian_daemon`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from perseus_ds.device import local_socket
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_START_TIMEOUT_S = 30.0
_AGAIN_S = 0.05


class Guardian:
    """A rank's connection to the guardian of its node.

    Attributes:
        pid: The guardian's process id.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    @classmethod
    def start(cls, addresses: Sequence[str], job: str | None = None, timebase: Timebase = REAL_TIME) -> Guardian:
        """Have the node's guardian watch GPUs until this process ends; start a guardian if there is none.

        Args:
            addresses: The ``address`` of each GPU whose clock this process may lock.
            job: Ranks with the same text share a guardian. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``,
                or this process alone.
            timebase: The time in which to try again.

        Raises:
            GpuError: The guardian cannot be started, or it cannot open one of the GPUs.
        """
        name = socket_name(job)
        deadline_s = timebase.now_s() + _START_TIMEOUT_S
        while timebase.now_s() < deadline_s:
            guardian = cls._register(name, addresses)
            if guardian is not None:
                return guardian
            timebase.sleep(_AGAIN_S)  # It was just ending with its last rank, or does not listen yet.
        raise GpuError(
            f"No guardian answered within {_START_TIMEOUT_S:.0f} s. "
            f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
        )

    @classmethod
    def _register(cls, name: str, addresses: Sequence[str]) -> Guardian | None:
        """Register GPUs with the guardian of a name; None if it does not answer."""
        connection = _connect(name)
        if connection is None:
            _spawn(name)
            connection = _connect(name)
            if connection is None:
                return None
        try:
            answer = local_socket.exchange(connection, {"gpus": list(addresses)})
            connection.setblocking(False)
        except OSError:
            connection.close()
            return None
        if answer["error"] is not None:
            connection.close()
            raise GpuError(f"The guardian cannot watch {', '.join(addresses)}: {answer['error']}")
        return cls(connection, answer["pid"])

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
            Whether it did. If not, it is dead, or the driver refused or hangs: reset the clocks from this process.
        """
        if self._connection is None:
            return False
        connection, self._connection = self._connection, None
        with contextlib.closing(connection):
            connection.settimeout(timeout_s)
            try:
                return local_socket.exchange(connection, {"close": True})["error"] is None
            except OSError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # Also for forked children that hold the socket.


def socket_name(job: str | None) -> str:
    """Return the abstract name of a job's socket, which needs no file and vanishes with the guardian."""
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Sockets are per network namespace, process ids per pid namespace: containers may share one and not the other.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0perseus-ds-guardian/{os.getuid()}/{namespace}/{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _connect(name: str) -> socket.socket | None:
    try:
        connection = local_socket.connect(name, _START_TIMEOUT_S)
    except OSError:
        return None
    _, uid = local_socket.peer(connection)
    if uid != os.getuid():
        connection.close()
        raise GpuError(f"The guardian's socket {name[1:]} belongs to user {uid}. Ask them to end that process.")
    return connection


def _spawn(name: str) -> None:
    """Start a guardian; returns once it listens, or another one does."""
    package_parent = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "perseus_ds.device.guardian_daemon", name[1:]],
        cwd="/",  # Not among the user's modules, and in no file system that somebody may want to unmount.
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
