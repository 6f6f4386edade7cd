"""Keeps a GPU busy during a measurement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perseus_ds.timebase import Flag

_PART_S = 0.05
_AHEAD = 2


@contextmanager
def full_load(machine: Any, launch: Callable[[float], None] | None = None) -> Iterator[None]:
    """Compute on another thread, without pauses on the GPU."""
    stop = Flag(machine.timebase)

    def work() -> None:
        launched: deque[Any] = deque()
        while not stop.is_set():
            (launch or machine.compute)(_PART_S)
            ended = machine.cuda.Event(enable_timing=True, blocking=True)
            ended.record()
            launched.append(ended)
            if len(launched) > _AHEAD:
                launched.popleft().synchronize()

    thread = machine.timebase.thread(work, "load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        machine.synchronize()
