"""The ranks' side of the guardians: two small processes per node that restore default clocks when ranks are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so another process must notice its end. The
first rank of a node starts the guardians, and every rank registers its GPUs with both over Unix sockets: where one is
killed together with all ranks, the other one restores the clocks. A guardian watches the other one as well, and
starts it again if it ends while ranks live (:mod:`perseus_ds.device.guardian_peer`). Ranks do so where both are gone.

A guardian is no descendant of the rank and has a session of its own, and a systemd scope of its own where the user can
have one, so a signal to the job's process tree, group or cgroup does not reach it. It sees a rank's end by the
socket, which the kernel closes, and by the process itself (a forked data-loading worker may hold the socket open for
longer). It then restores the GPUs that no other rank has registered, and ends with the last rank.

Where there is no scope to have, a scheduler that kills by cgroup kills the guardians too, and so does the end of a
container: run ``perseus-ds reset`` in the scheduler's prologue and epilogue there. The next job of this user on the
node resets what is left as well (:mod:`perseus_ds.device.lock_records`), and in any case the clocks of its own GPUs.

The guardian itself is :mod:`perseus_ds.device.guardian_daemon`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from perseus_ds.device import guardian_process, local_socket
from perseus_ds.device.guarded_ranks import Registration
from perseus_ds.device.guardian_process import ANSWER_TIMEOUT_S, names_of
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_AGAIN_S = 0.05
_LOOK_S = 0.2


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
        self._names = names_of(name)
        self._registration = Registration(f"{os.getpid()}.{secrets.token_hex(8)}", tuple(addresses))
        self._closing = threading.Lock()
        self._closed = threading.Event()
        with ThreadPoolExecutor(len(self._names)) as pool:
            self._posts = list(pool.map(lambda name: _Post.start(name, self._registration, timebase), self._names))
        threading.Thread(target=self._register_again, name="perseus-guardians", daemon=True).start()

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

    def _register_again(self) -> None:
        """Register with guardians that have taken the place of others, as long as this rank is registered.

        The other guardian starts it again; where none is left, this rank does.
        """
        while not self._closed.wait(_LOOK_S):
            none_is_left = not self.alive
            for number, name in enumerate(self._names):
                if self._posts[number].alive:
                    continue
                with contextlib.suppress(GpuError, OSError):
                    connect = guardian_process.connect_or_start if none_is_left else guardian_process.connect
                    new = _Post.register(connect(name), self._registration)
                    if new is not None:
                        self._replace(number, new)

    def _replace(self, number: int, new: _Post) -> None:
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
    def start(cls, name: str, registration: Registration, timebase: Timebase) -> _Post:
        """Register with the guardian of a name; start it if there is none.

        Raises:
            GpuError: It cannot be started, or it cannot open one of the GPUs.
        """
        deadline_s = timebase.now_s() + ANSWER_TIMEOUT_S
        while timebase.now_s() < deadline_s:
            post = cls.register(guardian_process.connect_or_start(name), registration)
            if post is not None:
                return post
            timebase.sleep(_AGAIN_S)  # It was just ending with its last rank, or does not listen yet.
        raise GpuError(
            f"No guardian answered within {ANSWER_TIMEOUT_S:.0f} s. "
            f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
        )

    @classmethod
    def register(cls, connection: socket.socket | None, registration: Registration) -> _Post | None:
        """Register with a guardian; None if there is no connection with it, or it does not answer.

        Raises:
            GpuError: It cannot open one of the GPUs.
        """
        if connection is None:
            return None
        try:
            answer = local_socket.exchange(connection, asdict(registration))
            connection.setblocking(False)
        except OSError:
            connection.close()
            return None
        if answer["error"] is not None:
            connection.close()
            raise GpuError(f"The guardian cannot watch {', '.join(registration.gpus)}: {answer['error']}")
        return cls(connection, answer["pid"])

    @property
    def alive(self) -> bool:
        """Whether the guardian still watches."""
        connection = self._connection  # another thread may close it
        if connection is None:
            return False
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
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
