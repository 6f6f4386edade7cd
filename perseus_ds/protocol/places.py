"""Location of an agent: a folder of this user on the node, lock files in it, and the agent's socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from perseus_ds.protocol.layout import VERSION

IN_MEMORY = Path("/dev/shm")
RUNTIME_VARIABLE = "PERSEUS_RUNTIME_DIR"
"""Replaces the folder in memory in tests, each of which is a separate node."""
_FLOCK = "hhqqi0q"
"""The C structure ``flock``."""


def user_folder() -> Path:
    """Return the folder of this user's files, which other users can neither read nor write.

    It is in memory, so a reboot removes it, as it removes locks of clocks. All processes of this user on this node use
    the same folder, because jobs exclude each other from GPUs by files in it. It therefore does not depend on variables
    such as ``XDG_RUNTIME_DIR``, which differ between jobs and may name a folder that several nodes share.

    Raises:
        OSError: There is no such folder.
    """
    parent = Path(os.environ.get(RUNTIME_VARIABLE) or (IN_MEMORY if IN_MEMORY.is_dir() else "/tmp"))
    if found := _folders_of_user(parent):
        return found[0]
    own = f"perseus-ds-{os.getuid()}"
    for name in (own, f"{own}-{time.time_ns()}"):  # everybody can write there, so another user may have taken the first
        with contextlib.suppress(FileExistsError):
            (parent / name).mkdir(mode=0o700)
        if found := _folders_of_user(parent):
            return found[0]
    raise OSError(f"{parent / name} is not a folder of this user alone")


def _folders_of_user(parent: Path) -> list[Path]:
    """Return the folders in which only this user can read or write, the first one of them first."""
    own = f"perseus-ds-{os.getuid()}"
    found = []
    for name in os.listdir(parent):
        if name == own or name.startswith(f"{own}-"):
            with contextlib.suppress(FileNotFoundError):
                status = (parent / name).lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                    found.append(parent / name)
    return sorted(found)


def boot_id() -> str:
    """Return what identifies this node since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def agent_name(job: str | None = None, gpu: str = "") -> str:
    """Return the name of an agent, which is the same for all ranks of a job on one node.

    By default, the job is identified by ``MASTER_ADDR`` and ``MASTER_PORT``, or by this process. If ranks do not see
    each other's GPUs, each agent serves only the GPU with a given address.
    """
    if job is None:
        port = os.environ.get("MASTER_PORT")
        job = f"{os.environ.get('MASTER_ADDR')}:{port}" if port else f"process {os.getpid()}"
    # Containers may share the folder but see different processes. Agents of different versions do not share a name.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{VERSION}/{namespace}/{job}/{gpu}".encode()).hexdigest()[:16]


def main_of(module: str) -> str:
    """Return Python code that calls ``main()`` of a module of this installation of the package.

    Other packages are searched elsewhere first, because there may be an old copy of a standard library module next to
    this package. They are not searched in the working folder, which is the root folder of the node.
    """
    return (
        "import sys; sys.path[:] = [folder for folder in sys.path if folder not in ('', '/')]; "
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); import perseus_ds; "
        f"sys.path.append(sys.path.pop(0)); from {module} import main; main()"
    )


def is_ipv6(address: str) -> bool:
    """Return True if an address such as ``tcp://[::1]:4711`` contains one of IPv6.

    Names are looked up as IPv4: of both, ZeroMQ would use only the one of IPv6, which often cannot be reached.
    """
    return "[" in address


def from_this_node(address: str) -> str:
    """Return an address such as ``tcp://node-1:4711`` with brackets if this node knows its name only by IPv6."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if is_ipv6(address):
        return address
    with contextlib.suppress(OSError):  # an unknown name remains one
        families = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if families == {socket.AF_INET6}:
            return f"tcp://[{host}]:{port}"
    return address


def cgroups() -> str:
    """Return a text that identifies the control groups of this process, which determine its GPUs."""
    try:
        return hashlib.sha256(Path("/proc/self/cgroup").read_bytes()).hexdigest()[:16]
    except OSError:  # for example, /proc of another PID namespace
        return ""


def agent_lock_path(name: str) -> Path:
    """Return the file that an agent keeps locked."""
    return user_folder() / f"agent.{name}"


def start_lock_path(name: str) -> Path:
    """Return the file that the rank that starts an agent keeps locked until the agent serves it."""
    return user_folder() / f"start.{name}"


def lock(path: Path) -> int:
    """Create or open a file and lock it until this process ends or the file is closed.

    If a process opens its own lock file again and closes it, it loses the lock.

    Raises:
        BlockingIOError: Another process has locked the file.
        OSError: The file cannot be opened or locked.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except PermissionError as error:  # what some network file systems return instead of EAGAIN
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from error
            if is_at(path, file):  # otherwise it was removed between these two calls
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def is_at(path: Path, file: int) -> bool:
    """Return True if an open file is the one at the path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(file))
    return False


def holder(file: int) -> int | None:
    """Return the process that has locked an open file, 0 if it is not visible here, or None.

    The kernel releases the lock when the last thread of the process ends. A forked process does not inherit it.
    """
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else pid


def holder_of(path: Path) -> int | None:
    """Return the process that has locked the file at a path. None if there is no file. See :func:`holder`.

    A process that holds the lock itself must not call this function, because it would lose the lock.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return holder(file)
        finally:
            os.close(file)
    return None


def listen(name: str) -> socket.socket:
    """Return the socket of an agent. It replaces one that a dead agent left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(name) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connect(name: str) -> socket.socket:
    """Connect to an agent. Raises an ``OSError`` if there is none."""
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
    """Return the names of agents of this user on this node. Some of them may be dead."""
    return [path.name.partition(".")[2] for path in user_folder().glob("agent.*")]


def forget_dead(own: str) -> None:
    """Remove the files of dead agents. ``own`` is the name of the calling agent."""
    for name in agents():
        if name != own:
            with contextlib.suppress(OSError):  # it is alive
                file = lock(agent_lock_path(name))
                forget(name)
                os.close(file)


def forget(name: str) -> None:
    """Remove the files of an agent that ends."""
    with _short(name) as path, contextlib.suppress(OSError):
        os.unlink(path)
    agent_lock_path(name).unlink(missing_ok=True)
    start_lock_path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _short(name: str) -> Iterator[str]:
    """Yield a path of a socket that is within the limit of 108 bytes for an address."""
    folder = os.open(user_folder(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/socket.{name}"
    finally:
        os.close(folder)
