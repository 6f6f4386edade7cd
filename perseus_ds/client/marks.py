"""Marks of the progress of a rank, for the agent of its node.

They are written by the CPU if operations are over when their call returns, and by the GPU, in the order of its stream,
if they are only launched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from perseus_ds.client.memory import SharedMemory
from perseus_ds.client.stream_writes import CUDA, HIP, StreamWrites
from perseus_ds.errors import GpuError
from perseus_ds.protocol.layout import BEGUN_OFFSET, ENDED_OFFSET, MARKS_OFFSET, RankMemory
from perseus_ds.timebase import REAL_TIME, Timebase

_TRIED = 2**32 - 1


class Marks(Protocol):
    """Writes marks, each when the device has done what was issued before."""

    def begin(self, iteration: int, positions: int) -> None:
        """Mark the begin of an iteration, and clear the marks of so many positions."""

    def mark(self, slot: int) -> None:
        """Mark a slot: twice an instruction's position where it begins, one more at its end."""

    def end(self, iteration: int) -> None:
        """Mark the end of an iteration."""


class HostMarks:
    """Marks by the CPU."""

    def __init__(self, memory: RankMemory, timebase: Timebase = REAL_TIME) -> None:
        self._memory = memory
        self._now_s = timebase.now_s

    def begin(self, iteration: int, positions: int) -> None:
        self._memory.mark_begun(iteration, self._now_s(), positions)

    def mark(self, slot: int) -> None:
        self._memory.mark(slot, self._now_s())

    def end(self, iteration: int) -> None:
        self._memory.mark_ended(iteration, self._now_s())


class StreamMarks:
    """Marks by a GPU on the current stream of a device.

    Args:
        writes: Writes into the rank's memory.
        device: The rank's device.
        cuda: The module ``torch.cuda``.
        current_stream: Returns the handle of a device's current stream.
    """

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
        # As in the code that torch.compile generates: to make a Stream object takes several times as long.
        fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._stream: Callable[[int], int] = current_stream or fast or self._slow_stream

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
        """A stream can only be used if its device is the current one."""
        is_current = self._cuda.current_device() == self._device
        return nullcontext() if is_current else self._cuda.device(self._device)

    def check(self, memory: RankMemory) -> None:
        """Have the GPU write a mark, and wait for it; before training.

        Raises:
            GpuError: It does not arrive in the memory.
        """
        self.end(_TRIED)
        self._cuda.synchronize(self._device)
        arrived = memory.ended
        memory.mark_ended(0, 0.0)
        if arrived != _TRIED:
            raise GpuError(
                f"A mark that GPU {self._device} wrote did not arrive in shared memory, so clocks cannot follow it. "
                "Update the driver."
            )

    def _slow_stream(self, device: int) -> int:
        return int(self._cuda.current_stream(device).cuda_stream)


def marks_of(device: torch.device, shared: SharedMemory, memory: RankMemory) -> Marks:
    """Return what writes the marks of a device, tried once if it is a GPU.

    Raises:
        GpuError: The GPU cannot write marks.
    """
    if device.type != "cuda":
        return HostMarks(memory)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        writes = StreamWrites(shared, CUDA if torch.version.hip is None else HIP)
    marks = StreamMarks(writes, index)
    marks.check(memory)
    return marks
