"""Where an agent is found: a folder of this user on the node, locked files in it, and the agent's socket."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from perseus_ds.protocol.layout import VERSION

IN_MEMORY = Path("/dev/shm")
_FLOCK = "hhqqi0q"
"""The C structure ``flock``."""


def user_folder() -> Path:
    """Return the folder of this user's files, which others can neither read nor write.

    It is in memory, so it is gone after a reboot, as locked clocks are.

    Raises:
        OSError: There is none.
    """
    # Schedulers hand on the variable of the node where the job was submitted; the folder need not be on this one.
    named = Path(os.environ.get("XDG_RUNTIME_DIR") or IN_MEMORY)
    parents = [parent for parent in (named, IN_MEMORY) if parent.is_dir()] or [Path("/tmp")]
    own = f"perseus-ds-{os.getuid()}"
    # Users of several containers, which may share the folder, can have the same number.
    names = own, f"{own}-{os.stat('/proc/self/ns/user').st_ino}"
    for folder in [parent / name for parent in parents for name in names]:
        with contextlib.suppress(OSError):  # such as the variable of another user
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return folder
    raise OSError(f"{folder} is not a folder of this user alone")


def agent_name(job: str | None = None, gpu: str = "") -> str:
    """Return the name of an agent, which the ranks of a job on one node share.

    Args:
        job: Text that is the same for all these ranks; by default from ``MASTER_ADDR`` and ``MASTER_PORT``, or this
            process alone.
        gpu: Address of the one GPU that the agent serves, if ranks do not see each other's GPUs.
    """
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Containers may share the folder and see different processes. Agents of other versions are never connected to.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{VERSION}/{namespace}/{job}/{gpu}".encode()).hexdigest()[:16]


def agent_lock_path(name: str) -> Path:
    """Return the file that an agent keeps locked."""
    return user_folder() / f"agent.{name}"


def lock(path: Path) -> int:
    """Create or open a file and lock it until this process ends or the file is closed.

    A process that opens its own file a second time, and closes it, loses the lock.

    Raises:
        OSError: Another process has locked it.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, file):  # otherwise it was removed between these two calls
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def is_at(path: Path, file: int) -> bool:
    """Return whether an open file is the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(file))
    return False


def holder(file: int) -> int | None:
    """Return the process that has locked an open file, 0 if it is not visible from here; None if no other has.

    The kernel ends the lock of a process with its last thread, and a forked process does not inherit it.
    """
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else pid


def holder_of(path: Path) -> int | None:
    """Return the process that has locked the file at a path, as :func:`holder`; None if there is no file.

    A process that holds the lock itself must not ask: it would lose it.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return holder(file)
        finally:
            os.close(file)
    return None


def listen(name: str) -> socket.socket:
    """Return the socket of an agent, which takes the place of one that a dead agent left.

    Raises:
        OSError: It cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(name) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connect(name: str) -> socket.socket:
    """Connect to an agent.

    Raises:
        OSError: There is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        with _short(name) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def agents() -> list[str]:
    """Return the names of agents of this user on this node, of which some may be dead."""
    return [path.name.partition(".")[2] for path in user_folder().glob("agent.*")]


def forget_dead(own: str) -> None:
    """Remove the files of agents that are dead; ``own`` is the name of the agent that asks."""
    for name in agents():
        if name != own:
            with contextlib.suppress(OSError):  # it lives
                file = lock(agent_lock_path(name))
                forget(name)
                os.close(file)


def forget(name: str) -> None:
    """Remove the files of an agent that ends."""
    with _short(name) as path, contextlib.suppress(OSError):
        os.unlink(path)
    agent_lock_path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _short(name: str) -> Iterator[str]:
    """Yield a path of a socket that is shorter than the 108 bytes which an address can have."""
    folder = os.open(user_folder(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/socket.{name}"
    finally:
        os.close(folder)
