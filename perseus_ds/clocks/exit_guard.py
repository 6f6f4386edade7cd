"""Restores the default clock when the process ends by itself or by a signal that it can handle."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

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
        """Stop watching; the handlers that were installed before are put back, where this is the main thread."""
        atexit.unregister(self._end)
        if threading.current_thread() is not threading.main_thread():
            return
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
            ctypes.CDLL(None).signal(number, None)  # SIG_DFL, which Python sets from the main thread only
            os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_handled.set()
        previous = self._previous.get(number)
        self._end()
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class SignalListener:
    """Calls a function, on a thread of its own, once when one of some signals arrives that Python handles.

    Python runs the handlers of signals on the main thread, between two of its instructions: a rank that waits for the
    GPU or for another rank runs them only when that is over, often after the scheduler's SIGKILL. The interpreter's own
    part of a handler runs at once, and can write the signal's number to a socket: ``signal.set_wakeup_fd``.
    """

    def __init__(self, numbers: Collection[int], on_signal: Callable[[int], None]) -> None:
        """Begin to listen; from the main thread.

        Args:
            numbers: The signals. Each needs a handler, set by ``signal.signal``.
            on_signal: Called on the thread, with the signal.
        """
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Somebody else, such as asyncio, may listen in the same way; that one is told of each signal as before.
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # A signal to a forked process, such as a Pool's worker, must not be taken for one to this process. What is
        # registered stays for good; the listener must not.
        stop = weakref.WeakMethod(self.stop_in_this_process)
        os.register_at_fork(after_in_child=lambda: (function := stop()) and function())
        threading.Thread(target=self._listen, name="perseus-signals", daemon=True).start()

    def close(self) -> None:
        """Stop listening; from the main thread. Harmless when called again."""
        self.stop_in_this_process()
        with contextlib.suppress(OSError):
            self._reader.shutdown(socket.SHUT_RDWR)  # ends the thread

    def stop_in_this_process(self) -> None:
        """Have the interpreter write signals to whom it wrote them before, if it still writes them here."""
        with contextlib.suppress(ValueError, OSError):  # not the main thread, or that one has closed its end
            current = signal.set_wakeup_fd(-1)
            if current != -1:
                ours = current == self._writer.fileno()
                signal.set_wakeup_fd(self._previous if ours else current, warn_on_full_buffer=False)

    def _listen(self) -> None:
        has_called = False
        with contextlib.suppress(OSError):
            while received := self._reader.recv(64):
                if self._previous != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._previous, received)
                heard = self._numbers.intersection(received)
                if not has_called and heard:
                    has_called = True
                    self._on_signal(min(heard))
