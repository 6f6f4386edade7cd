"""Hears a signal at once, while the main thread is in a call that does not return, such as one of CUDA or gloo.

Python runs the handlers of signals on the main thread, between two of its instructions: a rank that waits for the GPU
or for another rank runs them only when that is over, often after the scheduler's SIGKILL. The interpreter's own part
of a handler runs at once, and can write the signal's number to a socket: ``signal.set_wakeup_fd``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Collection


class SignalListener:
    """Calls a function, on a thread of its own, once when one of some signals arrives that Python handles."""

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
        _stop_in_forked_processes(self)
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


def _stop_in_forked_processes(listener: SignalListener) -> None:
    """Keep a signal to a forked process, such as a Pool's worker, from being taken for one to this process."""
    reference = weakref.ref(listener)

    def stop() -> None:
        if (still_there := reference()) is not None:
            still_there.stop_in_this_process()

    os.register_at_fork(after_in_child=stop)
