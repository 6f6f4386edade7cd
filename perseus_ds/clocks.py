"""Applies clocks without stalling training, and restores the default always."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu


class Moment(Protocol):
    """A point in the GPU's own progress, such as a CUDA event."""

    def synchronize(self) -> object: ...

    def query(self) -> bool: ...


class ClockController:
    """One worker thread applies requested clocks in order; the training thread only enqueues.

    A request that a later one has overtaken before the worker came to it is skipped: its
    instruction is over.

    Attributes:
        changes: Clock changes made.
        overtaken: Requests skipped because a later one was already due.
    """

    def __init__(self, gpu: Gpu, on_error: Callable[[Exception], None]) -> None:
        """Start the worker.

        Args:
            gpu: Whose clock to control.
            on_error: Called once, on the worker's thread, when the GPU refuses; nothing is requested after.
        """
        self._gpu = gpu
        self._on_error = on_error
        self._requests: deque[tuple[int | None, Moment | None]] = deque()
        self._wake = threading.Condition()
        self._idle = True
        self._stopping = False
        self._failed = False
        # None stands for the default, the driver's own clock management.
        self._requested: int | None = None
        self._applied: int | None = None
        self.changes = 0
        self.overtaken = 0
        self._called_s: float | None = None
        self._worker = threading.Thread(target=self._work, name="perseus-clocks", daemon=True)
        self._worker.start()

    def request(self, clock_mhz: int | None, after: Moment | None = None) -> None:
        """Ask for a clock (None for the default) once the GPU has passed a moment; returns at once."""
        if clock_mhz == self._requested:
            return
        self._requested = clock_mhz
        with self._wake:
            self._requests.append((clock_mhz, after))
            self._idle = False
            self._wake.notify_all()

    def set_and_wait(self, clock_mhz: int | None, timeout_s: float = 10.0) -> None:
        """Ask for a clock and wait until the driver has accepted it.

        Raises:
            GpuError: The driver refused, now or earlier.
            TimeoutError: It did not answer.
        """
        self.request(clock_mhz)
        with self._wake:
            answered = self._wake.wait_for(lambda: self._idle or self._failed, timeout_s)
            if self._failed:
                raise GpuError(f"{self._gpu.name}: the clock cannot be set any more; see the warning before.")
            if not answered:
                raise TimeoutError(f"{self._gpu.name}: the driver did not set the clock within {timeout_s} s.")

    @property
    def waiting_s(self) -> float:
        """How long the driver has not answered the call under way [s]; 0 if there is none."""
        called_s = self._called_s
        return 0.0 if called_s is None else time.monotonic() - called_s

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the worker and restore the default clock; harmless when called again."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify_all()
        self._worker.join(timeout_s)
        if self._worker.is_alive():
            return  # the driver hangs, and would hang us; the guardian restores the clock
        if self._applied is not None or self._failed:
            self._applied = None
            try:
                self._gpu.reset_clock()
            except Exception as error:
                if not self._failed:
                    self._on_error(error)

    def _work(self) -> None:
        while (request := self._next()) is not None:
            clock_mhz, after = request
            try:
                if after is not None:
                    after.synchronize()
                if self._is_overtaken():
                    self.overtaken += 1
                elif clock_mhz != self._applied:
                    self._apply(clock_mhz)
            except Exception as error:
                self._fail(error)
                return

    def _apply(self, clock_mhz: int | None) -> None:
        # Noted first: if the call fails half-way the clock may have changed, and must be restored.
        self._applied = clock_mhz
        self._called_s = time.monotonic()
        try:
            if clock_mhz is None:
                self._gpu.reset_clock()
            else:
                self._gpu.lock_clock(clock_mhz)
        finally:
            self._called_s = None
        self.changes += 1

    def _is_overtaken(self) -> bool:
        with self._wake:
            if not self._requests:
                return False
            _, after = self._requests[0]
            return after is None or after.query()

    def _next(self) -> tuple[int | None, Moment | None] | None:
        with self._wake:
            if not self._requests:
                self._idle = True
                self._wake.notify_all()
            self._wake.wait_for(lambda: self._requests or self._stopping)
            return None if self._stopping else self._requests.popleft()

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failed = True
            self._wake.notify_all()
        self._on_error(error)


class ExitGuard:
    """Calls ``restore`` when the process ends: normally, by an exception, SIGINT or SIGTERM.

    A signal handler that was there before is called afterwards; without one the process dies of
    the signal as it would have.
    """

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore
        self._previous: dict[int, Any] = {}
        atexit.register(restore)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)

    def release(self) -> None:
        """Stop watching; the handlers that were there before are put back."""
        atexit.unregister(self._restore)
        for number, previous in self._previous.items():
            # Somebody may have installed theirs on top of ours; that one stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
