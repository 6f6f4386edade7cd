"""The process of a guardian: how it is found, and how it is started.

A guardian listens at an abstract Unix socket, which only one process can have: whoever starts guardians, and however
many at once, one stays for each name.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from perseus_ds.device import local_socket
from perseus_ds.errors import GpuError

GUARDIANS = 2
ANSWER_TIMEOUT_S = 30.0
_TIMEOUT_S = ANSWER_TIMEOUT_S
# A user's systemd that is stuck must not use up the time that ranks wait for an answer.
_SCOPE_TIMEOUT_S = 10.0
# This package, whichever others there are. What it imports is looked for elsewhere first: beside it there may be an old
# copy of a part of the standard library.
_CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); import perseus_ds; "
    "sys.path.append(sys.path.pop(0)); from perseus_ds.device.guardian_daemon import main; main()"
)


def names_of(job: str) -> list[str]:
    """Return the names of a job's guardians."""
    return [f"{job}/{number}" for number in range(GUARDIANS)]


def other_name(name: str) -> str:
    """Return the name of the other guardian of the job."""
    (other,) = set(names_of(name.rpartition("/")[0])) - {name}
    return other


def connect(name: str) -> socket.socket | None:
    """Return a connection to the guardian of a name; None if there is none.

    Raises:
        GpuError: Another user listens there.
    """
    try:
        connection = local_socket.connect(name, ANSWER_TIMEOUT_S)
    except OSError:
        return None
    _, uid = local_socket.peer(connection)
    if uid != os.getuid():
        connection.close()
        raise GpuError(f"The guardian's socket {name[1:]} belongs to user {uid}. Ask them to end that process.")
    return connection


def connect_or_start(name: str) -> socket.socket | None:
    """Return a connection to the guardian of a name, which is started if there is none; None if it ends just then.

    It gets a session of its own, and a cgroup where the user's systemd gives it a scope.

    Raises:
        GpuError: It cannot be started, or another user listens there.
    """
    connection = connect(name)
    if connection is None:
        _start(name)
        connection = connect(name)
    return connection


def _start(name: str) -> None:
    """Start a guardian; returns once it listens, or another one does."""
    complaint: str | None = ""
    for launcher in _launchers():
        timeout_s = _SCOPE_TIMEOUT_S if launcher else _TIMEOUT_S
        complaint = _run([*launcher, sys.executable, "-c", _CODE, name[1:]], timeout_s)
        if complaint is None:
            return
    raise GpuError(f"The guardian process failed to start: {complaint}")


def _launchers() -> list[list[str]]:
    """Return what to start a guardian with, best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    systemd_run = shutil.which("systemd-run")
    if systemd_run is None or not runtime or not Path(runtime, "systemd", "private").exists():
        return [[]]
    return [[systemd_run, "--user", "--scope", "--quiet", "--collect", "--"], []]


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
