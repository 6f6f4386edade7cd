"""The ranks' side of the guardian: a small process on each node that restores default clocks when ranks are gone.

A locked clock survives the process that locked it, ``kill -9`` included, so another process must notice its end. Every
rank keeps a record of the GPU that it may lock (:mod:`perseus_ds.clocks.lock_records`), which the kernel marks when the
rank ends, however that happens. The guardian, started by the first rank of a job on a node, looks at these records. It
resets the GPUs of dead ranks that no living process holds, and ends with the last rank. Where it dies, the ranks start
another one.

The guardian is no descendant of the rank and has a session of its own, and a systemd scope of its own where the user
can have one, so a signal to the job's process tree, group or cgroup does not reach it.

Where there is no scope to have, a scheduler that kills by cgroup kills the guardian too, and so does the end of a
container: run ``perseus-ds reset`` in the scheduler's prologue and epilogue there. The next job of this user on the
node resets what the records name as well, and in any case the clocks of its own GPUs.

The guardian itself is :mod:`perseus_ds.clocks.guardian_daemon`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from perseus_ds.clocks.lock_records import HeldLock, guardian_path, holder
from perseus_ds.errors import GpuError
from perseus_ds.timebase import REAL_TIME, Timebase

_ANSWER_TIMEOUT_S = 30.0
SCOPE_TIMEOUT_S = 10.0
"""A user's systemd that is stuck must not use up the time that ranks wait for a guardian."""
_AGAIN_S = 0.02
_LOOK_S = 0.5
_REPLACED_WITHIN_S = 5.0
# This package, whichever others there are. What it imports is looked for elsewhere first: beside it there may be an old
# copy of a part of the standard library.
_CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); import perseus_ds; "
    "sys.path.append(sys.path.pop(0)); from perseus_ds.clocks.guardian_daemon import main; main()"
)


class Guardian:
    """A rank's part: its records of locked clocks, and a thread that starts a guardian where there is none."""

    def __init__(self, addresses: Sequence[str], job: str | None = None, timebase: Timebase = REAL_TIME) -> None:
        """Have the node's guardian watch GPUs until this process ends; start it if there is none.

        Args:
            addresses: The ``address`` of each GPU whose clock this process may lock.
            job: Ranks with the same text share a guardian. By default the job's ``MASTER_ADDR`` and ``MASTER_PORT``,
                or this process alone.
            timebase: The time in which to wait for it.

        Raises:
            GpuError: It cannot be started, or it cannot open one of the GPUs.
        """
        self._job = job_key(job)
        self._addresses = list(addresses)
        self._time = timebase
        self._process = os.getpid()
        self._held: dict[str, HeldLock] = {}
        self._closing = threading.Lock()
        self._closed = threading.Event()
        try:
            self._record()
            self._wait_for_a_guardian()
        except (GpuError, OSError) as error:
            for held in self._held.values():
                held.path.unlink(missing_ok=True)
                held.end()
            if isinstance(error, GpuError):
                raise
            raise GpuError(f"It cannot be recorded which clocks are locked: {error}.") from error
        self._seen_s = timebase.now_s()
        threading.Thread(target=self._watch, name="perseus-guardian", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The guardian's process id; None while there is none."""
        with contextlib.suppress(OSError):
            return holder(guardian_path(self._job))
        return None

    @property
    def alive(self) -> bool:
        """Whether there is a guardian, or it has died just now, so that another one is being started."""
        # Where this process stood still, its thread could not look.
        return self._time.now_s() - self._seen_s < _REPLACED_WITHIN_S or self.pid is not None

    def close(self, timeout_s: float = 3.0) -> bool:
        """Have the guardian restore the default clocks now and stop watching; harmless when called again.

        Returns:
            Whether it did. If not, it is dead, or the driver refuses or hangs, and the records stay.
        """
        if os.getpid() != self._process:
            return False
        with self._closing:
            if not self._closed.is_set():
                self._closed.set()
                for held in self._held.values():
                    held.end()
        end_s = self._time.now_s() + timeout_s
        while left := any(held.path.exists() for held in self._held.values()):
            if self.pid is None or self._time.now_s() >= end_s:
                break
            self._time.sleep(_AGAIN_S)
        return not left

    def _watch(self) -> None:
        """Have records and a guardian again where they are gone, as long as this rank is watched."""
        while not self._closed.wait(_LOOK_S):
            with contextlib.suppress(GpuError, OSError):  # such as no memory for another process: tried again
                self._record()
                if self.pid is None:
                    _start(self._job, self._addresses)
                else:
                    self._seen_s = self._time.now_s()

    def _record(self) -> None:
        """Record each GPU that has no record; the end of a login session removes this user's files in memory."""
        with self._closing:
            for address in self._addresses if not self._closed.is_set() else ():
                before = self._held.get(address)
                if before is None or not before.path.exists():
                    self._held[address] = HeldLock(address, self._job)
                    if before is not None:
                        before.end()

    def _wait_for_a_guardian(self) -> None:
        end_s = self._time.now_s() + _ANSWER_TIMEOUT_S
        while (pid := self.pid) is None or not all(held.is_watched for held in self._held.values()):
            is_late = self._time.now_s() >= end_s
            if pid is None and is_late:
                raise GpuError(
                    f"No guardian came within {_ANSWER_TIMEOUT_S:.0f} s. "
                    f"Clocks may stay locked after a kill -9; `perseus-ds reset` restores them."
                )
            if is_late:
                raise GpuError(
                    f"The guardian of this node cannot open {', '.join(self._held)}. Start all ranks of a node where "
                    "they see the GPUs of all of them, such as in one cgroup."
                )
            if pid is None:
                _start(self._job, self._addresses)
            self._time.sleep(_AGAIN_S)  # it has just begun, or was just ending with its last rank


def job_key(job: str | None) -> str:
    """Return the name of a job in files: ranks of one node with the same one share a guardian."""
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Containers may share the folder and see different processes and GPUs.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{namespace}/{job}".encode()).hexdigest()[:16]


def _start(job: str, addresses: Sequence[str]) -> None:
    """Start a guardian; returns once it is about to serve, or another one does.

    It gets a session of its own, and a cgroup where the user's systemd gives it a scope.

    Raises:
        GpuError: It cannot be started.
    """
    guardian = [sys.executable, "-c", _CODE, job, *addresses]
    runtime, systemd_run = os.environ.get("XDG_RUNTIME_DIR"), shutil.which("systemd-run")
    if systemd_run and runtime and Path(runtime, "systemd", "private").exists():
        scope = [systemd_run, "--user", "--scope", "--quiet", "--collect", "--"]
        if _run([*scope, *guardian], SCOPE_TIMEOUT_S) is None:
            return
    if (complaint := _run(guardian, _ANSWER_TIMEOUT_S)) is not None:
        raise GpuError(f"The guardian process failed to start: {complaint}")


def _run(command: Sequence[str], timeout_s: float) -> str | None:
    """Run a guardian until it has become a process of its own; return why it does not, None if it does."""
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
