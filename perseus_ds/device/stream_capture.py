"""Lets a thread use CUDA while another thread captures a CUDA graph.

While a thread captures in CUDA's global mode, which is torch's default, calls such as the query of an event fail on
every other thread, and make the capture fail as well, unless that thread has chosen the relaxed mode. torch has no
function for that; the CUDA runtime that torch has loaded does. Where it cannot be asked, such threads stay away while a
graph is captured.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from perseus_ds.timebase import Timebase

_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_EXCHANGE = "cudaThreadExchangeStreamCaptureMode"
_POLL_S = 0.0002


def relax_stream_capture(runtime: Any = None) -> bool:
    """Choose the relaxed mode for the calling thread.

    Args:
        runtime: The CUDA runtime's library; by default the one that torch has loaded.

    Returns:
        Whether the runtime did so. If not, captures in other threads fail where this thread uses CUDA meanwhile.
    """
    runtime = runtime or _loaded_runtime()
    exchange = getattr(runtime, _EXCHANGE, None)
    if exchange is None:
        return False
    mode = ctypes.c_int(_RELAXED)
    return bool(exchange(ctypes.byref(mode)) == 0)


def _loaded_runtime() -> ctypes.CDLL | None:
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


class Captures:
    """Captures of CUDA graphs in this process, which wait for calls of other threads, and those for them.

    Args:
        graph: The class whose objects capture.
    """

    def __init__(self, graph: Any) -> None:
        self._changed = threading.Condition()
        self._capturing: list[int] = []
        self._calls = 0
        begin, end = graph.capture_begin, graph.capture_end

        def begin_when_none_calls(captured: Any, *arguments: Any, **named: Any) -> Any:
            with self._changed:
                self._capturing.append(threading.get_ident())
                while self._calls:
                    self._changed.wait()
            try:
                return begin(captured, *arguments, **named)
            except BaseException:
                self._end()
                raise

        def end_and_tell(captured: Any) -> Any:
            try:
                return end(captured)
            finally:
                self._end()

        graph.capture_begin, graph.capture_end = begin_when_none_calls, end_and_tell

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Surround a short call of CUDA: it begins when no other thread captures."""
        with self._changed:
            while self._capturing and threading.get_ident() not in self._capturing:
                self._changed.wait()
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            if self._capturing:
                self._capturing.pop()
            self._changed.notify_all()


@cache
def captures_to_avoid() -> Captures | None:
    """Return the captures by torch, watched from now on, if threads cannot choose the relaxed mode; else None."""
    return None if hasattr(_loaded_runtime(), _EXCHANGE) else Captures(torch.cuda.CUDAGraph)


class EventOutsideCaptures:
    """An event of CUDA that is asked for only while no other thread captures.

    Args:
        event: The event.
        captures: In this process.
        timebase: The host's clock.
    """

    def __init__(self, event: Any, captures: Captures, timebase: Timebase) -> None:
        self.event = event
        self._captures = captures
        self._time = timebase

    def record(self) -> None:
        self.event.record()

    def query(self) -> bool:
        with self._captures.outside():
            return bool(self.event.query())

    def synchronize(self) -> None:
        while not self.query():  # a call that waits would keep captures waiting
            self._time.sleep(_POLL_S)

    def elapsed_time(self, end_event: EventOutsideCaptures) -> float:
        with self._captures.outside():
            return float(self.event.elapsed_time(end_event.event))
