"""Calls the driver of one GPU on a thread, because a driver may refuse, be busy, or hang."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from perseus_ds.agent.gpu_records import GpuRecord, UnrecordedGpu
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_RETRY_S, _INSIST_S = 0.5, 120.0
"""How often a driver that refuses to reset a clock is called again, and for how long."""
_HANGS_S = 10.0


class GpuDriver:
    """Opens a GPU, and returns it to its default clock when that is requested.

    Attributes:
        record: The GPU's record of locked clocks.
        gpu: The GPU; None before it was opened.
        error: Why it could not be opened; None before.
    """

    def __init__(
        self,
        record: GpuRecord | UnrecordedGpu,
        open_gpu: Callable[[], Gpu],
        on_change: Callable[[], None],
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Open the GPU, and reset it first if another job left its clock locked.

        Args:
            record: The GPU's record of locked clocks.
            open_gpu: Opens it.
            on_change: Called on the thread when it was opened, could not be opened, or was reset.
            timebase: The time in which to wait.

        Raises:
            RuntimeError: No thread can be started.
        """
        self.record = record
        self._open_gpu = open_gpu
        self._on_change = on_change
        self._time = timebase
        self._notifier = timebase.notifier()
        self.gpu: Gpu | None = None
        self.error: Exception | None = None
        self._requested = int(record.left_by is not None and not record.is_of_same_job)
        self._done = 0
        self._requested_s = timebase.now_s()
        self._answered_s = self._requested_s
        self._is_closed = False
        timebase.thread(self._work, "perseus-gpu").start()

    @property
    def is_reset(self) -> bool:
        """Whether the clock was reset since the last request."""
        return self._done == self._requested

    @property
    def has_given_up(self) -> bool:
        """Whether the clock may stay locked: the driver has refused for two minutes, or not answered for 10 s."""
        now_s = self._time.now_s()
        insists = now_s < self._requested_s + _INSIST_S and now_s < self._answered_s + _HANGS_S
        return not self.is_reset and not insists

    def reset(self) -> None:
        """Request the default clock, without waiting for it."""
        if self.is_reset:
            self._requested_s = self._answered_s = self._time.now_s()
        self._requested += 1
        self._notifier.notify()

    def close(self) -> None:
        """End the thread once its call has returned."""
        self._is_closed = True
        self._notifier.notify()

    def _work(self) -> None:
        while not self._is_closed:
            requested = self._requested
            pause_s: float | None = None
            try:
                if self.gpu is None:
                    self.gpu = self._open_gpu()
                    self._on_change()
                if requested != self._done:
                    if self.record.is_current:
                        self.gpu.reset_clock()
                    self._done = requested
                    self._on_change()
            except Exception as error:  # of any kind: no other process would try again
                self.error = error
                self._on_change()
                pause_s = _RETRY_S if requested != self._done else None
            self._answered_s = self._time.now_s()
            if requested == self._requested:
                self._notifier.wait(pause_s)
        with contextlib.suppress(Exception):  # the driver may be gone
            if self.gpu is not None:
                self.gpu.close()

    def problem(self) -> GpuError | None:
        """Return why the GPU cannot be used, or None while that is not known."""
        return None if self.error is None or self.gpu is not None else GpuError(str(self.error))
