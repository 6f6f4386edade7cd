"""Anonymous memory files, which processes pass to each other by their file descriptors.

The kernel has had them since Linux 3.17, and seals too. A Python that was built against an older C library, such as
conda's, lacks the function and the constants, which are therefore written down here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform

_CLOSE_ON_EXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SYSTEM_CALLS = {"x86_64": 319, "aarch64": 279, "ppc64le": 360}


def create(name: str) -> int:
    """Create an empty memory file and return its file descriptor. Raises an ``OSError``."""
    flags = _CLOSE_ON_EXEC | _ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = _SYSTEM_CALLS.get(platform.machine())
    if number is None:
        message = f"this Python has no os.memfd_create, and its number on {platform.machine()} is not known"
        raise OSError(errno.ENOSYS, message)
    file = int(ctypes.CDLL(None, use_errno=True).syscall(number, name.encode(), flags))
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def seal_length(file: int) -> None:
    """Fix the length of a memory file permanently, for all processes."""
    fcntl.fcntl(file, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEALS)


def can_be_truncated(file: int) -> bool:
    """Return True unless the length of a memory file was fixed. Raises an ``OSError`` for other files."""
    return not fcntl.fcntl(file, _GET_SEALS) & _SEAL_SHRINK
