"""The pipe through which a rank's agent receives the numbers of the signals that the rank's process handles."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType


class SignalPipe:
    """Pipe into which the interpreter writes the number of each handled signal, even while native code runs.

    Python runs signal handlers on the main thread, between two bytecode instructions. A rank that waits for the GPU or
    for another rank runs them only after the wait, often after the scheduler's SIGKILL. The interpreter's own part of a
    handler runs immediately (``signal.set_wakeup_fd``). A signal without a handler ends the process, and with it the
    lease.

    Each agent receives the same reading end, so a number that arrives while there is no agent is read by the next one.
    This process keeps that end open as well: without any reader, each handled signal would print an error.

    Attributes:
        reader: File descriptor of the reading end.
    """

    def __init__(self) -> None:
        """Forward signals, unless another part of the process, such as asyncio, already does."""
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open = True
        self._masks = threading.local()
        # A signal to a forked process, such as a Pool's worker, is not one to this process.
        os.register_at_fork(
            before=_weakly(self._before_fork),
            after_in_parent=_weakly(self._after_fork),
            after_in_child=_weakly(self._begin_child),
        )
        if threading.current_thread() is not threading.main_thread():
            return
        if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # The kernel drops this signal for the first process of a container, unless it has a handler.
            signal.signal(signal.SIGTERM, _ignore)
        previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)

    def close(self) -> None:
        """Stop forwarding signals, and remove the handler of the first process. Has no effect when called again.

        The pipe stays open if signals may still be written to it: only the main thread can change that, and another
        part of the process that has replaced it may restore it.
        """
        if not self._is_open or threading.current_thread() is not threading.main_thread():
            return
        self._is_open = False
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current in (-1, self._writer):
            os.close(self.reader)
            os.close(self._writer)
        else:
            signal.set_wakeup_fd(current)

    def _before_fork(self) -> None:
        """Block SIGTERM if its handler ignores it, because the new process would lose it until its handler is gone."""
        if signal.getsignal(signal.SIGTERM) is _ignore:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        if hasattr(self._masks, "before"):
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)
            del self._masks.before

    def _begin_child(self) -> None:
        self.close()
        self._after_fork()


def _weakly(method: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls a method while its object exists, and does not keep it alive."""
    reference = weakref.WeakMethod(method)
    return lambda: (function := reference()) and function()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""
