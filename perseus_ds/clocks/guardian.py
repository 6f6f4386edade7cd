"""The ranks' side of the guardian: a small process on each node that restores default clocks when ranks are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so another process must notice its end. The
first rank of a node starts the guardian, which listens at an abstract Unix socket that only one process can have, and
every rank registers its GPUs there. Where the guardian dies, the ranks start another one.

The guardian is no descendant of the rank and has a session of its own, and a systemd scope of its own where the user
can have one, so a signal to the job's process tree, group or cgroup does not reach it. It sees a rank's end by the
socket, which the kernel closes, and by the process itself (a forked data-loading worker may hold the socket open for
longer). It then restores the GPUs that no other rank has registered, and ends with the last rank.

Where there is no scope to have, a scheduler that kills by cgroup kills the guardian too, and so does the end of a
container: run ``perseus-ds reset`` in the scheduler's prologue and epilogue there. The next job of this user on the
node resets what is left as well (:mod:`perseus_ds.clocks.lock_records`), and in any case the clocks of its own GPUs.

The guardian itself is :mod:`perseus_ds.clocks.guardian_daemon`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from perseus_ds.clocks import local_socket
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_ANSWER_TIMEOUT_S = 30.0
SCOPE_TIMEOUT_S = 10.0
"""A user's systemd that is stuck must not use up the time that ranks wait for an answer."""
_AGAIN_S = 0.05
_LOOK_S = 0.2
_REPLACED_WITHIN_S = 5.0
# This package, whichever others there are. What it imports is looked for elsewhere first: beside it there may be an old
# copy of a part of the standard library.
_CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); import perseus_ds; "
    "sys.path.append(sys.path.pop(0)); from perseus_ds.clocks.guardian_daemon import main; main()"
)


class Guardian:
    """A rank's connection to the guardian of its node."""

    def __init__(self, addresses: Sequence[str], job: str | None = None, timebase: Timebase = REAL_TIME) -> None:
        """Have the node's guardian watch GPUs until this process ends; start it if there is none.

        Args:
            addresses: The ``address`` of each GPU whose clock this process may lock.
            job: Ranks with the same text share a guardian. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``,
                or this process alone.
            timebase: The time in which to try again.

        Raises:
            GpuError: It cannot be started, or it cannot open one of the GPUs.
        """
        self._name = socket_name(job)
        self._addresses = list(addresses)
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._time = timebase
        self._connection: socket.socket | None = None
        deadline_s = timebase.now_s() + _ANSWER_TIMEOUT_S
        while (registered := self._register()) is None:
            if timebase.now_s() >= deadline_s:
                raise GpuError(
                    f"No guardian answered within {_ANSWER_TIMEOUT_S:.0f} s. "
                    f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
                )
            timebase.sleep(_AGAIN_S)  # It was just ending with its last rank, or does not listen yet.
        self._connection, self.pid = registered
        self._seen_s = timebase.now_s()
        threading.Thread(target=self._register_again, name="perseus-guardian", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the guardian watches, or has died just now, so that another one is being started."""
        return self._is_connected() or self._time.now_s() - self._seen_s < _REPLACED_WITHIN_S

    def close(self, timeout_s: float = 3.0) -> bool:
        """Have the guardian restore the default clocks now and stop watching; harmless when called again.

        Returns:
            Whether it did. If not, it is dead, or the driver refused or hangs: reset the clocks from this process.
        """
        with self._closing:
            self._closed.set()
            connection, self._connection = self._connection, None
        if connection is None:
            return False
        with contextlib.closing(connection):
            connection.settimeout(timeout_s)
            try:
                return local_socket.exchange(connection, {"close": True})["error"] is None
            except OSError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # Also for forked children that hold the socket.

    def _is_connected(self) -> bool:
        connection = self._connection  # another thread may close it
        if connection is None:
            return False
        try:
            return connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _register_again(self) -> None:
        """Register with another guardian when this one has died, as long as this rank is registered."""
        while not self._closed.wait(_LOOK_S):
            if self._is_connected():
                self._seen_s = self._time.now_s()
                continue
            with contextlib.suppress(GpuError, OSError):  # such as no memory for another process: tried again
                registered = self._register()
                if registered is not None:
                    self._replace(*registered)

    def _replace(self, connection: socket.socket, pid: int) -> None:
        with self._closing:
            if self._closed.is_set():
                connection.close()
                return
            dead, self._connection, self.pid = self._connection, connection, pid
        if dead is not None:
            dead.close()

    def _register(self) -> tuple[socket.socket, int] | None:
        """Register with the guardian, which is started if there is none; None if it ends just then, or is silent.

        Returns:
            The connection, and the guardian's process id.

        Raises:
            GpuError: It cannot be started, or it cannot open one of the GPUs, or another user listens there.
        """
        connection = _connect(self._name)
        if connection is None:
            _start(self._name)
            connection = _connect(self._name)
        if connection is None:
            return None
        try:
            answer = local_socket.exchange(connection, {"gpus": self._addresses})
        except OSError:
            connection.close()
            return None
        if answer["error"] is not None:
            connection.close()
            raise GpuError(f"The guardian cannot watch {', '.join(self._addresses)}: {answer['error']}")
        connection.setblocking(False)  # whoever asks whether it lives does not wait
        return connection, answer["pid"]


def socket_name(job: str | None) -> str:
    """Return the abstract name of a job's socket, which needs no file and vanishes with the guardian."""
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Sockets are per network namespace, process ids per pid namespace: containers may share one and not the other.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0perseus-ds-guardian/{os.getuid()}/{namespace}/{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _connect(name: str) -> socket.socket | None:
    """Return a connection to the guardian of a name; None if there is none.

    Raises:
        GpuError: Another user listens there.
    """
    try:
        connection = local_socket.connect(name, _ANSWER_TIMEOUT_S)
    except OSError:
        return None
    _, uid = local_socket.peer(connection)
    if uid != os.getuid():
        connection.close()
        raise GpuError(f"The guardian's socket {name[1:]} belongs to user {uid}. Ask them to end that process.")
    return connection


def _start(name: str) -> None:
    """Start a guardian; returns once it listens, or another one does.

    It gets a session of its own, and a cgroup where the user's systemd gives it a scope.

    Raises:
        GpuError: It cannot be started.
    """
    guardian = [sys.executable, "-c", _CODE, name[1:]]
    runtime, systemd_run = os.environ.get("XDG_RUNTIME_DIR"), shutil.which("systemd-run")
    if systemd_run and runtime and Path(runtime, "systemd", "private").exists():
        scope = [systemd_run, "--user", "--scope", "--quiet", "--collect", "--"]
        if _run([*scope, *guardian], SCOPE_TIMEOUT_S) is None:
            return
    if (complaint := _run(guardian, _ANSWER_TIMEOUT_S)) is not None:
        raise GpuError(f"The guardian process failed to start: {complaint}")


def _run(command: Sequence[str], timeout_s: float) -> str | None:
    """Run a guardian until it serves; return why it does not, None if it does."""
    try:
        process = subprocess.Popen(
            command,
            cwd="/",  # Not among the user's modules, and in no file system that somebody may want to unmount.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:  # no memory for another process, or too many of them
        return str(error)
    try:
        _, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"it did not start within {timeout_s:.0f} s: is the node overloaded?"
    last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"exit status {process.returncode}: {last[0]}" if process.returncode else None
