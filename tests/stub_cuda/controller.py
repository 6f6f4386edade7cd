"""Launches work on the devices of the stub CUDA driver (stub_cuda.c)."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stub_nvml.controller import StubGpu

SOURCE = Path(__file__).with_name("stub_cuda.c")
LIBRARY = "libcuda.so.1"


def compiled(folder: Path) -> Path:
    """Compile the library into a folder and return its path."""
    path = folder / LIBRARY
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, "-o", path, SOURCE], check=True)
    return path


class Event:
    """Records when a stream reached a point, on the host's monotonic clock."""

    def __init__(self, cuda: StubCuda) -> None:
        self._cuda = cuda
        self.at_s = ctypes.c_double(0.0)

    def record(self, stream: object = None) -> None:
        """Record the event on the current stream."""
        self.at_s.value = 0.0
        self._cuda.check(self._cuda.library.stub_event(self._cuda.stream, ctypes.byref(self.at_s)))

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        return self.at_s.value > 0.0

    def elapsed_time(self, end: Event) -> float:
        """Return the time until another event [ms]."""
        return (end.at_s.value - self.at_s.value) * 1e3


class Graph:
    """A graph captured on a stream."""

    def __init__(self, cuda: StubCuda, handle: int) -> None:
        self._cuda, self._handle = cuda, handle

    def replay(self, stream: int | None = None) -> None:
        self._cuda.check(self._cuda.library.stub_replay(self._handle, stream or self._cuda.stream))


class TorchCuda:
    """The library as the module ``torch.cuda``, with the functions that Perseus calls.

    Attributes:
        device: The current device.
    """

    def __init__(self, cuda: StubCuda, device: int = 0) -> None:
        self._cuda = cuda
        self.device = device

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: object = None) -> int:
        return self._cuda.stream

    def synchronize(self, device: object = None) -> None:
        self._cuda.synchronize()

    def Event(self, **_: bool) -> Event:  # noqa: N802
        return self._cuda.external_event()


class StubCuda:
    """The library in this process, which stands for ``libcuda.so.1``.

    Attributes:
        library: The library itself.
        stream: The current stream.
    """

    def __init__(self, path: Path) -> None:
        # Once loaded, it is found under the name "libcuda.so.1".
        self.library: Any = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("stub_stream", "stub_capture_end"):
            getattr(self.library, name).restype = ctypes.c_void_p
        arguments = {
            "stub_delay": (ctypes.c_void_p, ctypes.c_double),
            "stub_wait": (ctypes.c_void_p, ctypes.c_void_p),
            "stub_event": (ctypes.c_void_p, ctypes.c_void_p),
            "stub_store": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
            "stub_replay": (ctypes.c_void_p, ctypes.c_void_p),
        }
        for name, types in arguments.items():
            getattr(self.library, name).argtypes = types
        for name in ("stub_synchronize", "stub_capture_begin", "stub_capture_end"):
            getattr(self.library, name).argtypes = (ctypes.c_void_p,)
        self._streams: list[int] = []
        self.set_device(0)
        self.stream = self.new_stream(0)

    def set_device(self, device: int) -> None:
        """Make a device current on this thread, or none if it is -1."""
        self.library.stub_set_device(device)

    def fail(self, *, register: int = 0, write: int = 0) -> None:
        """Make the driver return these error codes, where 0 is success."""
        self.library.stub_fail(register, write)

    def use_gpu(self, gpu: StubGpu, power_w: float) -> None:
        """Run kernels at the clock of a GPU, and let them draw this power at its top clock [W]."""
        clock_mhz = ctypes.byref(gpu, StubGpu.locked_clock_mhz.offset)
        counted_j = ctypes.byref(gpu, StubGpu.counted_j.offset)
        settings = (float(gpu.clocks_mhz[0]), power_w, gpu.counter_period_s)
        self.library.stub_use_gpu(clock_mhz, counted_j, *map(ctypes.c_double, settings))

    def new_stream(self, device: int = 0) -> int:
        """Return the handle of another stream."""
        self._streams.append(self.library.stub_stream(device))
        return self._streams[-1]

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Launch on another stream within the context."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def delay(self, seconds: float) -> None:
        """Launch a kernel of this duration."""
        self.check(self.library.stub_delay(self.stream, seconds))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Launch a kernel that runs until the end of the context."""
        is_over = ctypes.c_int64(0)
        self.check(self.library.stub_wait(self.stream, ctypes.byref(is_over)))
        try:
            yield
        finally:
            is_over.value = 1
            self.synchronize()

    def event(self) -> Event:
        """Return an event recorded on the current stream."""
        event = self.external_event()
        event.record()
        return event

    def external_event(self) -> Event:
        """Return an event whose time is that of its latest record, also by a graph."""
        return Event(self)

    def store(self, where: Any, value: int) -> None:
        """Launch a store into host memory."""
        self.check(self.library.stub_store(self.stream, ctypes.byref(where), value))

    def synchronize(self) -> None:
        """Wait for all streams."""
        for stream in self._streams:
            self.library.stub_synchronize(stream)

    def captured(self, body: Callable[[], None]) -> Graph:
        """Return a graph of a function's launches on the current stream."""
        self.library.stub_capture_begin(self.stream)
        body()
        return Graph(self, self.library.stub_capture_end(self.stream))

    def check(self, status: int) -> None:
        """Raise an error if a status is not 0."""
        if status:
            raise RuntimeError(f"CUDA error {status}")
