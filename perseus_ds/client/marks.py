"""Marks of the progress of a rank, for the agent of its node.

The CPU writes them if operations are complete when their call returns. If operations are only launched, the GPU writes
them in the order of its stream.

A write of a GPU follows all work that was issued to its stream before, after a system-wide memory fence. It may be
captured into a graph, and is then executed at each replay. Sources: ``cuStreamWriteValue32_v2`` and
``cuMemHostRegister`` in the CUDA driver API, and ``hipStreamWriteValue32`` in HIP, which is marked as beta there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perseus_ds.client.lease import SharedMemory
from perseus_ds.errors import GpuError
from perseus_ds.protocol.layout import BEGUN_OFFSET, ENDED_OFFSET, MARKS_OFFSET, RankMemory
from perseus_ds.timebase import REAL_TIME, Timebase

_TRIED = 2**32 - 1
_PORTABLE, _MAPPED = 1, 2


class Marks(Protocol):
    """Writes marks, each after the device has finished the work issued before it."""

    def begin(self, iteration: int, positions: int) -> None:
        """Mark the start of an iteration, and clear the marks of this number of positions."""

    def mark(self, slot: int) -> None:
        """Mark a slot: twice an instruction's position at its start, and one more at its end."""

    def end(self, iteration: int) -> None: ...


class HostMarks:
    """Marks written by the CPU."""

    def __init__(self, memory: RankMemory, timebase: Timebase = REAL_TIME) -> None:
        self._memory = memory
        self._slots = memory.slots
        self._now_s = timebase.now_s

    def begin(self, iteration: int, positions: int) -> None:
        self._memory.mark_begun(iteration, self._now_s(), positions)

    def mark(self, slot: int) -> None:
        self._slots[slot] = self._now_s()

    def end(self, iteration: int) -> None:
        self._memory.mark_ended(iteration, self._now_s())


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
    """Writes into shared memory by the GPUs of this process. The memory is mapped for all of them, and never unmapped.

    Raises a ``GpuError`` if the driver is missing, too old (CUDA before 11.7), or refuses.
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
        """Write a word below 2**32 when the stream has executed all earlier work, and return immediately.

        The stream must be one of the current context's device, and the offset [bytes] a multiple of 4.
        """
        if self._write(stream, self.base + offset, value, 0):
            self._check(self._write(stream, self.base + offset, value, 0), "writing a mark")

    def fill(self, stream: int, offset: int, words: int, value: int = 0) -> None:
        """Set a range of words to one value in the order of the stream, and return immediately."""
        self._check(self._fill(self.base + offset, value, words, stream), "clearing marks")

    def _check(self, status: int, action: str) -> None:
        if status:
            name: Any = ctypes.c_char_p()
            if self._names.error:
                getattr(self._library, self._names.error)(status, ctypes.byref(name))
            reason = (name.value or b"").decode() or f"error {status}"
            raise GpuError(f"The GPU cannot write marks: {action} failed with {reason}.")


class StreamMarks:
    """Marks written by a GPU on the current stream of a device."""

    def __init__(
        self,
        writes: StreamWrites,
        device: int,
        cuda: Any = torch.cuda,
        current_stream: Callable[[int], int] | None = None,
    ) -> None:
        self._writes = writes
        self._device = device
        self._cuda = cuda
        # As in code generated by torch.compile, because creating a Stream object takes several times longer.
        self._stream: Callable[[int], int] = current_stream or torch._C._cuda_getCurrentRawStream

    def begin(self, iteration: int, positions: int) -> None:
        with self._on_device():
            stream = self._stream(self._device)
            if positions:
                self._writes.fill(stream, MARKS_OFFSET, 4 * positions)
            self._writes.write(stream, BEGUN_OFFSET, iteration % 2**32)

    def mark(self, slot: int) -> None:
        self._writes.write(self._stream(self._device), MARKS_OFFSET + 8 * slot, 1)

    def end(self, iteration: int) -> None:
        with self._on_device():
            self._writes.write(self._stream(self._device), ENDED_OFFSET, iteration % 2**32)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device the current one, because a stream can only be used on the current device."""
        is_current = self._cuda.current_device() == self._device
        return nullcontext() if is_current else self._cuda.device(self._device)

    def check(self, memory: RankMemory) -> None:
        """Check before training that a mark written by the GPU arrives. Raises a ``GpuError``."""
        self.end(_TRIED)
        self._cuda.synchronize(self._device)
        arrived = memory.ended
        memory.mark_ended(0, 0.0)
        if arrived != _TRIED:
            raise GpuError(
                f"A mark that GPU {self._device} wrote did not arrive in shared memory, so clocks cannot follow it. "
                "Update the driver."
            )


def marks_of(device: torch.device, shared: SharedMemory, memory: RankMemory) -> Marks:
    """Return the writer of marks for a device. On a GPU, it is tested once. Raises a ``GpuError``."""
    if device.type != "cuda":
        return HostMarks(memory)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        writes = StreamWrites(shared, CUDA if torch.version.hip is None else HIP)
    marks = StreamMarks(writes, index)
    marks.check(memory)
    return marks
