"""The ranks' side of the guardians: two small processes per node that restore default clocks when ranks are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so another process must notice its end. The
first rank of a node starts the guardians, and every rank registers its GPUs with both over Unix sockets: where one is
killed together with all ranks, the other one restores the clocks. Ranks start a guardian again that is gone.

A guardian is no descendant of the rank and has a session of its own, one of them also a systemd scope of its own where
the user can have one, so a signal to the job's process tree or group does not reach it. It sees a rank's end by the
socket, which the kernel closes, and by the process itself (a forked data-loading worker may hold the socket open for
longer). It then restores the GPUs that no other rank has registered, and ends with the last rank.

Where a scheduler kills by cgroup, or the container ends with the job, the guardians are killed too: run ``perseus-ds
reset`` in the scheduler's prologue and epilogue there. The next job of this user on the node resets what is left as
well (:mod:`perseus_ds.device.lock_records`).

The guardian itself is :mod:`perseus_ds.device.guardian_daemon`.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from perseus_ds.device import local_socket
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_START_TIMEOUT_S = 30.0
_AGAIN_S = 0.05
_LOOK_S = 0.2
GUARDIANS = 2


class Guardian:
    """A rank's connections to the guardians of its node.

    Args:
        name: Abstract name of their sockets, without their numbers.
        addresses: Of the GPUs they watch.
        timebase: The time to live in.
    """

    def __init__(self, name: str, addresses: Sequence[str], timebase: Timebase) -> None:
        """Have two guardians watch GPUs.

        Raises:
            GpuError: One cannot be started, or it cannot open one of the GPUs.
        """
        self._names = [f"{name}/{number}" for number in range(GUARDIANS)]
        self._addresses = addresses
        self._time = timebase
        self._closing = threading.Lock()
        self._closed = threading.Event()
        with ThreadPoolExecutor(GUARDIANS) as pool:
            self._posts = list(pool.map(self._post, self._names))
        threading.Thread(target=self._replace_dead_ones, name="perseus-guardians", daemon=True).start()

    @classmethod
    def start(cls, addresses: Sequence[str], job: str | None = None, timebase: Timebase = REAL_TIME) -> Guardian:
        """Have the node's guardians watch GPUs until this process ends; start them if there are none.

        Args:
            addresses: The ``address`` of each GPU whose clock this process may lock.
            job: Ranks with the same text share guardians. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``,
                or this process alone.
            timebase: The time in which to try again.

        Raises:
            GpuError: One cannot be started, or it cannot open one of the GPUs.
        """
        return cls(socket_name(job), addresses, timebase)

    @property
    def pids(self) -> tuple[int, ...]:
        """The guardians' process ids."""
        return tuple(post.pid for post in self._posts)

    @property
    def alive(self) -> bool:
        """Whether a guardian still watches."""
        return any(post.alive for post in self._posts)

    def close(self, timeout_s: float = 3.0) -> bool:
        """Have the guardians restore the default clocks now and stop watching; harmless when called again.

        Returns:
            Whether one did. If not, they are dead, or the driver refused or hangs: reset the clocks from this process.
        """
        with self._closing:
            self._closed.set()
        closed = [post.close(timeout_s) for post in self._posts]  # all of them
        return any(closed)

    def _post(self, name: str) -> _Post:
        return _Post.start(name, self._addresses, self._time)

    def _replace_dead_ones(self) -> None:
        """Start guardians again that are gone, as long as this rank is registered."""
        while not self._closed.wait(_LOOK_S):
            for number, post in enumerate(self._posts):
                if post.alive:
                    continue
                with contextlib.suppress(GpuError, OSError):
                    new = self._post(self._names[number])
                    with self._closing:
                        if self._closed.is_set():
                            new.close()
                        else:
                            self._posts[number] = new


class _Post:
    """A rank's connection to one guardian.

    Attributes:
        pid: The guardian's process id.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    @classmethod
    def start(cls, name: str, addresses: Sequence[str], timebase: Timebase) -> _Post:
        """Register GPUs with the guardian of a name; start it if there is none.

        Raises:
            GpuError: It cannot be started, or it cannot open one of the GPUs.
        """
        deadline_s = timebase.now_s() + _START_TIMEOUT_S
        while timebase.now_s() < deadline_s:
            post = cls._register(name, addresses)
            if post is not None:
                return post
            timebase.sleep(_AGAIN_S)  # It was just ending with its last rank, or does not listen yet.
        raise GpuError(
            f"No guardian answered within {_START_TIMEOUT_S:.0f} s. "
            f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
        )

    @classmethod
    def _register(cls, name: str, addresses: Sequence[str]) -> _Post | None:
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
    complaint = ""
    for launcher in _launchers(name):
        status, complaint = _run([*launcher, sys.executable, "-m", "perseus_ds.device.guardian_daemon", name[1:]])
        if status == 0:
            return
    raise GpuError(f"The guardian process failed to start: {complaint}")


def _launchers(name: str) -> list[list[str]]:
    """Return what to start a guardian with, best first; the last guardian gets a systemd scope, and so a cgroup."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    systemd_run = shutil.which("systemd-run")
    if not name.endswith(f"/{GUARDIANS - 1}") or systemd_run is None or not runtime:
        return [[]]
    if not Path(runtime, "systemd", "private").exists():
        return [[]]
    return [[systemd_run, "--user", "--scope", "--quiet", "--collect", "--"], []]


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a guardian until it serves; return its exit status and the last line of its complaint."""
    package_parent = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
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
    last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return process.returncode, f"exit status {process.returncode}: {last[0]}"
