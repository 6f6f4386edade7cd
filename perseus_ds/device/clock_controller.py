"""Applies clocks without stalling training, and restores the default always."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from perseus_ds.device.clock_readback import ClockWatch, Refusal
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.errors import GpuError

_POLL_S = 0.001
_RESET_ATTEMPTS = 4
_RESET_AGAIN_S = 0.5


class Moment(Protocol):
    """A point in the GPU's own progress, such as a CUDA event."""

    def synchronize(self) -> object: ...

    def query(self) -> bool: ...


_Request: TypeAlias = tuple[int | None, Moment | None, float | None, float]
"""Clock [MHz], after which moment (None: now), how long after it if it may be early [s], when it was made [s].

A tuple, because the training thread makes one for every change of clock.
"""


class ClockController:
    """One worker thread applies requested clocks in order; the training thread only enqueues.

    A request that a later one has overtaken before the worker came to it is skipped: its
    instruction is over.

    Attributes:
        changes: Clock changes made.
        overtaken: Requests skipped because a later one was already due.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_error: Callable[[Exception], None],
        on_refusal: Callable[[Refusal], None] = lambda refusal: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the worker.

        Args:
            gpu: Whose clock to control.
            on_error: Called once, on the worker's thread, when the driver refuses; nothing is requested after.
            on_refusal: Called there when the GPU does not reach a clock that the driver has accepted.
            on_start: Called there first: makes moments safe to ask. (A thread that asks a CUDA event has a context
                made for it on GPU 0, in hundreds of MiB for every rank of the node, unless it has chosen its own.)
        """
        self._gpu = gpu
        self._on_error = on_error
        self._on_start = on_start
        self._watch = ClockWatch(gpu, on_refusal)
        self._inbox: queue.SimpleQueue[_Request | threading.Event] = queue.SimpleQueue()
        self._pending: deque[_Request | threading.Event] = deque()
        self._stopping = threading.Event()
        self._failed = False
        # None stands for the default, the driver's own clock management.
        self._requested: int | None = None
        self._is_idle = False
        self._applied: int | None = None
        self.changes = 0
        self.overtaken = 0
        self._called_s: float | None = None
        self._worker = threading.Thread(target=self._work, name="perseus-clocks", daemon=True)
        self._worker.start()

    def request(self, clock_mhz: int | None, after: Moment | None = None) -> None:
        """Ask for a clock (None for the default) once the GPU has passed a moment; returns at once."""
        if clock_mhz != self._requested or self._is_idle:
            self._requested = clock_mhz
            self._is_idle = False
            self._inbox.put((clock_mhz, after, None, 0.0))

    def request_early(self, clock_mhz: int, begun: Moment | None, delay_s: float) -> None:
        """Ask for a clock some time after a moment, or at the next :meth:`request` if that comes first.

        That one must follow, and decides what holds: this one only spares it the driver's latency.

        Args:
            clock_mhz: The clock.
            begun: The moment; None for now.
            delay_s: How long after it [s].
        """
        self._inbox.put((clock_mhz, begun, delay_s, time.monotonic()))

    def reset_when_idle(self, after_s: float) -> None:
        """Return to the default clock unless there is a :meth:`request` before some time has passed [s]."""
        if self._requested is not None:
            self._is_idle = True
            self._inbox.put((None, None, after_s, time.monotonic()))

    def set_and_wait(self, clock_mhz: int | None, timeout_s: float = 10.0) -> None:
        """Ask for a clock and wait until the driver has accepted it.

        Raises:
            GpuError: The driver refused, now or earlier.
            TimeoutError: It did not answer.
        """
        self.request(clock_mhz)
        handled = threading.Event()
        self._inbox.put(handled)
        answered = handled.wait(timeout_s)
        if self._failed:
            raise GpuError(f"{self._gpu.name}: the clock cannot be set any more; see the warning before.")
        if not answered:
            raise TimeoutError(f"{self._gpu.name}: the driver did not set the clock within {timeout_s} s.")

    @property
    def latency_s(self) -> float:
        """How late a clock follows its request [s]; 0 as long as it is not known."""
        return self._watch.latency_s

    @property
    def waiting_s(self) -> float:
        """How long the driver has not answered the call under way [s]; 0 if there is none."""
        called_s = self._called_s
        return 0.0 if called_s is None else time.monotonic() - called_s

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the worker and restore the default clock; harmless when called again."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._inbox.put(self._stopping)  # to wake it
        self._worker.join(timeout_s)
        if self._worker.is_alive():
            return  # the driver hangs, and would hang us; the guardian restores the clock
        if self._applied is not None:
            try:
                self._gpu.reset_clock()
                self._applied = None
            except Exception as error:
                if not self._failed:
                    self._on_error(error)

    def _work(self) -> None:
        try:
            self._on_start()
        except Exception as error:
            self._fail(error)
        while not self._stopping.is_set():
            self._serve()

    def _serve(self) -> None:
        try:
            item = self._next()
            if isinstance(item, threading.Event):
                item.set()
            elif not self._failed:
                self._handle(*item)
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Request | threading.Event:
        """Return the oldest request; as long as there is none, the clock is read back."""
        while not self._pending:
            if not self._receive(self._watch.reading_due_in_s()):
                self._read()
        return self._pending.popleft()

    def _receive(self, timeout_s: float | None) -> bool:
        """Wait for a request; returns whether one came."""
        try:
            self._pending.append(self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            return False
        return True

    def _handle(self, clock_mhz: int | None, after: Moment | None, delay_s: float | None, made_s: float) -> None:
        if after is not None:
            self._wait_for(after)
        if delay_s is not None:
            begun_s = made_s if after is None else time.monotonic()
            if self._sleep(begun_s + delay_s):
                return  # the next request says what to do
        elif self._is_overtaken():
            self.overtaken += 1
            return
        if clock_mhz != self._applied:
            self._apply(clock_mhz)

    def _apply(self, clock_mhz: int | None) -> None:
        # Noted first: if the call fails half-way the clock may have changed, and must be restored.
        self._applied = clock_mhz
        called_s = self._called_s = time.monotonic()
        try:
            if clock_mhz is None:
                self._gpu.reset_clock()
            else:
                self._gpu.lock_clock(clock_mhz)
        finally:
            self._called_s = None
        self._watch.changed(clock_mhz, time.monotonic() - called_s)
        self.changes += 1

    def _read(self) -> None:
        self._called_s = time.monotonic()
        try:
            self._watch.read()
        finally:
            self._called_s = None

    def _wait_for(self, moment: Moment) -> None:
        """Wait for the GPU; if the clock is to be read soon, it is."""
        while not moment.query() and not self._stopping.is_set():
            due_s = self._watch.reading_due_in_s()
            if due_s is None or due_s > 50 * _POLL_S:
                moment.synchronize()
            elif due_s > 0:
                time.sleep(min(due_s, _POLL_S))
            else:
                self._read()

    def _sleep(self, until_s: float) -> bool:
        """Sleep, but not beyond the time at which the next request is due; returns whether it was."""
        while not (overtaken := self._is_overtaken()) and (rest_s := until_s - time.monotonic()) > 0:
            # A moment of the GPU can only be asked for; a request without one wakes us.
            self._receive(min(rest_s, _POLL_S) if self._pending else rest_s)
        return overtaken

    def _is_overtaken(self) -> bool:
        """Whether the next request, not counting early ones, is due already."""
        while self._receive(0.0):
            pass
        for item in self._pending:
            if isinstance(item, threading.Event):
                return item is self._stopping
            _, after, delay_s, _ = item
            if delay_s is None:
                return after is None or after.query()
        return False

    def _fail(self, error: Exception) -> None:
        """Give up, and return the clock to the default if the driver lets us."""
        self._failed = True
        self._watch.changed(None, 0.0)
        self._on_error(error)
        for attempt in range(_RESET_ATTEMPTS):
            if self._reset():
                return
            self._stopping.wait(_RESET_AGAIN_S * 2**attempt)

    def _reset(self) -> bool:
        try:
            self._gpu.reset_clock()
        except Exception:
            return False
        self._applied = None
        return True
