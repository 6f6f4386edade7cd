"""Restores the default clock when the process ends by itself or by a signal that it can handle."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from perseus_ds.device.signal_listener import SignalListener

_STUCK_S = 1.0


class ExitGuard:
    """Calls ``restore`` when the process ends: normally, by an exception, SIGINT or SIGTERM.

    Upon a signal, ``reset_clock`` is called first and at once, on a thread of its own: the main thread may be in a call
    that does not return before the job is killed, such as a collective that waits for a rank that is gone.

    A signal handler that was installed before is called afterwards; without one the signal ends the process as it
    would have, a second later if the main thread is in such a call. A signal that is ignored, as SIGINT is under
    ``nohup … &``, stays ignored. Processes forked from this one, such as those of a ``multiprocessing.Pool``, inherit
    the handlers; in them ``restore`` is not called, because the clock is the parent's.
    """

    def __init__(self, restore: Callable[[], None], reset_clock: Callable[[], None]) -> None:
        self._restore = restore
        self._reset_clock = reset_clock
        self._is_handled = threading.Event()
        self._listener: SignalListener | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        atexit.register(self._end)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            self._listener = SignalListener(self._previous.keys(), self._hear)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that is watched."""
        return os.getpid() != self._pid

    def release(self) -> None:
        """Stop watching; the handlers that were installed before are put back."""
        atexit.unregister(self._end)
        if self._listener is not None:
            self._listener.close()
        for number, previous in self._previous.items():
            # A handler that was installed after this one stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous.clear()

    def _end(self) -> None:
        if not self.is_forked:
            self._restore()

    def _hear(self, number: int) -> None:
        """Reset the clock; end the process if the main thread, which is to do so, cannot run its handler."""
        self._reset_clock()
        is_ours = signal.getsignal(number) == self._handle and self._previous.get(number) == signal.SIG_DFL
        if not self._is_handled.wait(_STUCK_S) and is_ours:
            _end_by(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_handled.set()
        previous = self._previous.get(number)
        self._end()
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _end_by(number: int) -> None:
    """End this process by a signal, from any thread; Python changes what a signal does from the main thread only."""
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
