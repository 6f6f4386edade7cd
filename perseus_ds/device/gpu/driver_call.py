"""Calls to a driver that may hang, from a thread that must not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from perseus_ds.errors import GpuError

_Call = tuple[Callable[[], float], "queue.SimpleQueue[float | Exception]"]


class Patience:
    """Makes calls on a thread of its own and waits for each only so long."""

    def __init__(self, limit_s: float) -> None:
        """Start the thread.

        Args:
            limit_s: How long to wait for an answer [s].
        """
        self._limit_s = limit_s
        self._hangs = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="perseus-reader", daemon=True).start()

    def call(self, function: Callable[[], float]) -> float:
        """Return what a function returns.

        Raises:
            GpuError: It does not return, or an earlier one did not.
        """
        if self._hangs:
            raise GpuError("the driver does not answer")
        answer: queue.SimpleQueue[float | Exception] = queue.SimpleQueue()
        self._calls.put((function, answer))
        try:
            value = answer.get(timeout=self._limit_s)
        except queue.Empty:
            self._hangs = True
            raise GpuError(f"the driver has not answered for {self._limit_s:.0f} s") from None
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        """End the thread once the call under way, if any, has returned."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _answer(*call)


def _answer(function: Callable[[], float], answer: queue.SimpleQueue[float | Exception]) -> None:
    try:
        answer.put(function())
    except Exception as error:
        answer.put(error)
