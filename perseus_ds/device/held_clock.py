"""The clock that this process holds a GPU at: set by one thread, released by any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perseus_ds.device.gpu.base import Gpu
from perseus_ds.timebase import Timebase


class HeldClock:
    """Makes the calls that change a GPU's clock; after :meth:`release` it makes none.

    The default clock, the driver's own clock management, is None.
    """

    def __init__(self, gpu: Gpu, timebase: Timebase) -> None:
        self._gpu = gpu
        self._time = timebase
        self._changed = timebase.condition()
        self._called_s: float | None = None
        self._is_released = False
        self._releasing: threading.Thread | None = None
        self._clock_mhz: int | None = None
        self._is_known = True

    @property
    def waiting_s(self) -> float:
        """How long the driver has not answered the call under way [s]; 0 if there is none."""
        called_s = self._called_s
        return 0.0 if called_s is None else self._time.now_s() - called_s

    def is_at(self, clock_mhz: int | None) -> bool:
        """Return whether the driver was last told, and has accepted, to hold this clock [MHz]."""
        return self._is_known and self._clock_mhz == clock_mhz

    def set(self, clock_mhz: int | None) -> float | None:
        """Set a clock, None for the default; returns how long the call took [s], None if it was not made.

        Raises:
            GpuError: The driver refused.
        """
        with self._call() as may_call:
            if not may_call:
                return None
            self._is_known = False  # if the call fails half-way, the clock may have changed or not
            begin_s = self._time.now_s()
            if clock_mhz is None:
                self._gpu.reset_clock()
            else:
                self._gpu.lock_clock(clock_mhz)
            if self._is_released and clock_mhz is not None:  # the call was late, and release() has not waited for it
                self._gpu.reset_clock()
                clock_mhz = None
            self._clock_mhz, self._is_known = clock_mhz, True
            return self._time.now_s() - begin_s

    def reset(self) -> bool:
        """Return the clock to the default; returns whether that is done, or left to :meth:`release`."""
        try:
            self.set(None)
        except Exception:
            return False
        return True

    def try_out(self) -> None:
        """Set the highest clock, return to the default, and read the energy counter.

        Raises:
            GpuError: The driver refused.
        """
        self.set(self._gpu.supported_clocks_mhz()[-1])
        self.set(None)
        with self._call() as may_call:
            if may_call:
                self._gpu.energy_j()

    def read(self, read: Callable[[], None]) -> None:
        """Make a call that reads from the GPU."""
        with self._call() as may_call:
            if may_call:
                read()

    def release(self, timeout_s: float) -> None:
        """Return the clock to the default unless it is, after the call under way.

        If that call does not return in time, the driver hangs and would hang this thread as well: nothing is done.
        Called again, it waits for the first call.

        Args:
            timeout_s: How long to wait [s].

        Raises:
            GpuError: The driver refused.
        """
        with self._changed:
            if self._is_released:
                is_interrupted = self._releasing is threading.current_thread()  # by a signal whose handler is here
                if not is_interrupted:
                    self._wait_until(lambda: self._releasing is None, timeout_s)
                return
            self._is_released = True
            self._releasing = threading.current_thread()
            self._wait_until(lambda: self._called_s is None, timeout_s)
        try:
            if self._called_s is None and not self.is_at(None):
                self._gpu.reset_clock()
                self._clock_mhz, self._is_known = None, True
        finally:
            with self._changed:
                self._releasing = None
                self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        end_s = self._time.now_s() + timeout_s
        while not condition() and (rest_s := end_s - self._time.now_s()) > 0:
            self._changed.wait(rest_s)

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """Surround a call of the driver; yields whether it may be made."""
        with self._changed:
            may_call = not self._is_released
            if may_call:
                self._called_s = self._time.now_s()
        try:
            yield may_call
        finally:
            with self._changed:
                self._called_s = None
                if self._is_released:  # nobody else waits
                    self._changed.notify_all()
