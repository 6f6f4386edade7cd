"""Writes of a GPU into host memory in the order of a stream, as marks of its progress.

A write follows all work that was issued to its stream before, after a system-wide memory fence. It may be captured into
a graph, and is then executed at each replay. Sources: ``cuStreamWriteValue32_v2`` and ``cuMemHostRegister`` in the CUDA
driver API, and ``hipStreamWriteValue32`` in HIP, which is marked as beta there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from perseus_ds.client.memory import SharedMemory
from perseus_ds.errors import GpuError

_PORTABLE, _MAPPED = 1, 2


@dataclass(frozen=True)
class _Names:
    library: str
    register: str
    device_pointer: str
    write: str
    fill: str
    error: str


CUDA = _Names(
    "libcuda.so.1",
    "cuMemHostRegister_v2",
    "cuMemHostGetDevicePointer_v2",
    "cuStreamWriteValue32_v2",
    "cuMemsetD32Async",
    "cuGetErrorName",
)
HIP = _Names(
    "libamdhip64.so",
    "hipHostRegister",
    "hipHostGetDevicePointer",
    "hipStreamWriteValue32",
    "hipMemsetD32Async",
    "",
)


class StreamWrites:
    """Writes into shared memory by the GPUs of this process.

    Args:
        memory: Memory to map for all GPUs of the process. It is never unmapped.
        names: Names of the driver's functions.

    Raises:
        GpuError: The driver is missing, too old (CUDA before 11.7), or refuses to map the memory.
    """

    def __init__(self, memory: SharedMemory, names: _Names = CUDA) -> None:
        self._names = names
        try:
            # PyDLL keeps the interpreter's lock: releasing it costs up to 5 ms next to a busy Python thread.
            library = ctypes.PyDLL(names.library)
            self._library = library
            register, pointer = getattr(library, names.register), getattr(library, names.device_pointer)
            write, fill = getattr(library, names.write), getattr(library, names.fill)
        except (OSError, AttributeError) as error:
            raise GpuError(f"The GPU cannot write marks: {error}. CUDA 11.7 or later, or HIP, is needed.") from error
        register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        pointer.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint)
        write.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        fill.argtypes = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p)
        self._write, self._fill = write, fill
        self._check(register(memory.address, memory.length, _PORTABLE | _MAPPED), "mapping the shared memory")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # the GPU may write into it until the process ends
        base = ctypes.c_uint64()
        self._check(pointer(ctypes.byref(base), memory.address, 0), "looking up the address of the shared memory")
        self.base: int = base.value

    def write(self, stream: int, offset: int, value: int) -> None:
        """Write a word when the stream has executed all work that was issued before, and return immediately.

        Args:
            stream: Handle of a stream of the current context's device.
            offset: Offset in the memory, a multiple of 4 [bytes].
            value: Value of the word, below 2**32.

        Raises:
            GpuError: The driver refuses.
        """
        if self._write(stream, self.base + offset, value, 0):
            self._check(self._write(stream, self.base + offset, value, 0), "writing a mark")

    def fill(self, stream: int, offset: int, words: int, value: int = 0) -> None:
        """Set a range of words to one value in the order of the stream, and return immediately.

        Raises:
            GpuError: The driver refuses.
        """
        self._check(self._fill(self.base + offset, value, words, stream), "clearing marks")

    def _check(self, status: int, action: str) -> None:
        if status:
            name: Any = ctypes.c_char_p()
            if self._names.error:
                getattr(self._library, self._names.error)(status, ctypes.byref(name))
            reason = (name.value or b"").decode() or f"error {status}"
            raise GpuError(f"The GPU cannot write marks: {action} failed with {reason}.")
