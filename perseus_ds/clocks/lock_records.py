"""Which GPUs of this node processes hold locked: one small file for each, which tells when its process has died.

A process keeps a lock of the kernel on its file, which ends with the process, however it ends; a file without that lock
is of a dead one. The folder is on a file system in memory, so it is gone after a reboot, as locked clocks are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 4096
IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LeftLock:
    """A GPU that a dead process held locked."""

    address: str
    pid: int
    path: Path

    def forget(self) -> None:
        """Remove the file: the clock is the default one again."""
        self.path.unlink(missing_ok=True)


class HeldLock:
    """The file that says that this process may hold a GPU locked, until it is released or the process ends."""

    def __init__(self, address: str) -> None:
        """Write the file.

        Raises:
            OSError: There is no folder for it that is this user's alone.
        """
        folder = _folder()
        self._path = folder / f"{_own_prefix()}{secrets.token_hex(8)}"
        # Nobody may see the file before it is locked.
        hidden = folder / f".{self._path.name}"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._file, f"{address}\n".encode())
        os.rename(hidden, self._path)
        self._pid = os.getpid()

    def release(self) -> None:
        """Remove the file; harmless when called again, or in a forked process."""
        if self._file >= 0 and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def left_locks() -> Iterator[LeftLock]:
    """Yield the GPUs that this user's processes of this node held locked when they died, and that no living one holds.

    Meanwhile nobody else is told of them.
    """
    with contextlib.ExitStack() as files, contextlib.suppress(OSError):
        found = list(_records(files))
        held = {record.address for record, is_free in found if not is_free}
        for left, is_free in found:
            if is_free and left.address not in held and left.path.exists():
                yield left


def is_held(address: str) -> bool:
    """Return whether another living process of this user may hold the GPU of an address locked."""
    with contextlib.ExitStack() as files, contextlib.suppress(OSError):
        return any(record.address == address and not is_free for record, is_free in _records(files))
    return False


def _records(files: contextlib.ExitStack) -> Iterator[tuple[LeftLock, bool]]:
    """Yield the files of other processes, each with whether it is a dead one's; the dead ones' are kept locked."""
    for path in sorted(_folder().glob("[0-9]*.*")):
        pid = path.name.partition(".")[0]
        # A process that opens its own file and closes it would lose its lock.
        if not pid.isdecimal() or path.name.startswith(_own_prefix()):
            continue
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            files.callback(os.close, file)
            address = os.read(file, _LONGEST).decode(errors="replace").strip()
            yield LeftLock(address, int(pid), path), _is_free(file)


def _own_prefix() -> str:
    """Return how the names of this process's files begin; containers may share the folder, and not process ids."""
    return f"{os.getpid()}.{os.stat('/proc/self/ns/pid').st_ino}."


def _is_free(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    """Return the folder of this user's files, which others can neither read nor write.

    Raises:
        OSError: There is none.
    """
    # Schedulers hand on the variable of the node where the job was submitted; the folder need not be on this one.
    named = Path(os.environ.get("XDG_RUNTIME_DIR") or IN_MEMORY)
    parent = next((parent for parent in (named, IN_MEMORY) if parent.is_dir()), Path("/tmp"))
    folder = parent / f"perseus-ds-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder of this user alone")
    return folder
