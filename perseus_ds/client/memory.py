"""The memory that a training process shares with the agent of its node."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from perseus_ds.errors import GpuError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Anonymous memory of a fixed size that another process can map by its file descriptor.

    It stays mapped until the process ends, because GPUs write into it and captured graphs hold its address.

    Attributes:
        file: File descriptor for other processes.
        address: Its address in this process.
        length: Its size [bytes].
        view: Its contents.
    """

    def __init__(self, length: int, name: str = "perseus-ds") -> None:
        """Create it, filled with zeros.

        Raises:
            GpuError: The system has no memory for it.
        """
        self.length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Otherwise, a later write to a full tmpfs would end the process with SIGBUS.
            os.posix_fallocate(self.file, 0, self.length)
            # Neither the agent nor this process may truncate it.
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.file, self.length)
        except OSError as error:
            raise GpuError(
                f"Perseus could not allocate {self.length / 2**10:.0f} KiB of shared memory: {error.strerror}. "
                "Free memory or raise the memory limit of the job."
            ) from error
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
