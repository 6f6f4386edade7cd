"""Which GPUs of this node processes hold locked: one file for each, which tells when its process has died.

A process keeps a lock of the kernel on its file, which ends with its last thread, however that ends, and which forked
processes do not inherit; a file without that lock is of a dead one. The name of the file says all that is known of it;
it is empty until a guardian has opened the GPU. The
folder is on a file system in memory, so it is gone after a reboot, as locked clocks are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
_FLOCK = "hhqqi0q"
"""The C structure ``flock``."""


@dataclass(frozen=True)
class LockRecord:
    """A GPU that a process may hold locked, or held locked when it died.

    Attributes:
        job: The job of the process; see :func:`perseus_ds.clocks.guardian.job_key`.
    """

    address: str
    pid: int
    job: str
    path: Path

    def tell_watched(self) -> None:
        """Tell its process that a guardian has opened the GPU."""
        with contextlib.suppress(FileNotFoundError):
            file = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(file, b"watched")
            finally:
                os.close(file)

    def forget(self) -> None:
        """Remove the file: the clock is the default one again."""
        self.path.unlink(missing_ok=True)


class HeldLock:
    """The file that says that this process may hold a GPU locked, until it is released or the process ends."""

    def __init__(self, address: str, job: str) -> None:
        """Make the file.

        Raises:
            OSError: There is no folder for it that is this user's alone.
        """
        folder = _folder()
        self.path = folder / f"{_own_prefix()}{job}.{secrets.token_hex(8)}.{address}"
        # Nobody may see the file before it is locked.
        hidden = folder / f".{self.path.name}"
        self._file = lock(hidden)
        os.rename(hidden, self.path)

    @property
    def is_watched(self) -> bool:
        """Whether a guardian has opened the GPU."""
        return os.fstat(self._file).st_size > 0

    def end(self) -> None:
        """Leave the file as that of a dead process, whose clock is to be reset; once, and in this process."""
        os.close(self._file)


def left_locks() -> Iterator[LockRecord]:
    """Yield the GPUs that this user's processes of this node held locked when they died, and that no living one holds.

    Meanwhile no other caller gets them.
    """
    left: list[LockRecord] = []
    held: set[str] = set()
    with contextlib.ExitStack() as files, contextlib.suppress(OSError):
        for record in _records():
            with contextlib.suppress(OSError):
                files.callback(os.close, lock(record.path, create=False))
                left.append(record)
                continue
            held.add(record.address)  # its process lives
        for record in left:
            if record.address not in held and record.path.exists():
                yield record


def all_records() -> list[tuple[LockRecord, bool]]:
    """Return the records of other processes of this user, each with whether its process lives.

    Raises:
        OSError: They cannot be read.
    """
    found = []
    for record in _records():
        with contextlib.suppress(FileNotFoundError):
            found.append((record, holder(record.path) is not None))
    return found


def lock(path: Path, *, create: bool = True) -> int:
    """Open a file and lock it for as long as this process lives, or until the file is closed.

    A process that opens its own file a second time, and closes it, loses the lock.

    Raises:
        OSError: Another process has locked it.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def holder(path: Path) -> int | None:
    """Return the process that has locked a file, 0 if it cannot be seen from here; None if there is none.

    Raises:
        OSError: There is no such file.
    """
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else pid


def guardian_path(job: str) -> Path:
    """Return the file that the guardian of a job keeps locked.

    Raises:
        OSError: There is no folder for it that is this user's alone.
    """
    return _folder() / f"guardian.{job}"


def _records() -> Iterator[LockRecord]:
    """Yield the records of other processes."""
    for path in sorted(_folder().glob("[0-9]*.*.*.*.*")):
        pid, _, job, _, address = path.name.split(".", 4)
        if pid.isdecimal() and not path.name.startswith(_own_prefix()) and not path.is_symlink() and path.is_file():
            yield LockRecord(address, int(pid), job, path)


def _own_prefix() -> str:
    """Return how the names of this process's files begin; containers may share the folder, and not process ids."""
    return f"{os.getpid()}.{os.stat('/proc/self/ns/pid').st_ino}."


def _folder() -> Path:
    """Return the folder of this user's files, which others can neither read nor write.

    Raises:
        OSError: There is none.
    """
    # Schedulers hand on the variable of the node where the job was submitted; the folder need not be on this one.
    named = Path(os.environ.get("XDG_RUNTIME_DIR") or IN_MEMORY)
    parent = next((parent for parent in (named, IN_MEMORY) if parent.is_dir()), Path("/tmp"))
    own = f"perseus-ds-{os.getuid()}"
    # Users of several containers, which may share the folder, can have the same number.
    for name in (own, f"{own}-{os.stat('/proc/self/ns/user').st_ino}"):
        folder = parent / name
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    raise OSError(f"{folder} is not a folder of this user alone")
