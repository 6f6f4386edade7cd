"""Calls the driver of one GPU on a thread, because a driver may refuse, be busy, or hang."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from perseus_ds.agent.gpu_records import GpuRecord, UnrecordedGpu
from perseus_ds.errors import GpuError, GpuPermissionError
from perseus_ds.gpu.base import Gpu
from perseus_ds.protocol.messages import Fault, GpuDescription
from perseus_ds.timebase import REAL_TIME, Timebase

_RETRY_S = 0.5
"""Interval of repeated calls to a driver that refuses to reset a clock."""
INSIST_S = 120.0
"""Time after which a clock that the driver does not reset is given up."""


class GpuDriver:
    """Opens a GPU, and resets its clock on request.

    Attributes:
        gpu: The GPU. None before it was opened.
        error: Reason why it could not be opened, or None.
        description: Description of the GPU for clients. None before it was read.
        description_error: Reason why it cannot be read, or None.
        left_error: Reason why a clock that another process left locked cannot be reset. Empty if it can.
    """

    def __init__(
        self,
        record: GpuRecord | UnrecordedGpu,
        open_gpu: Callable[[], Gpu],
        on_change: Callable[[], None],
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Open the GPU, and reset it first if another job left its clock locked.

        ``on_change`` is called on the thread after the GPU was opened, could not be opened, was reset or described.
        """
        self.record = record
        self._open_gpu = open_gpu
        self._on_change = on_change
        self._time = timebase
        self._notifier = timebase.notifier()
        self.gpu: Gpu | None = None
        self.error: Exception | None = None
        self.description: GpuDescription | None = None
        self.description_error: Exception | None = None
        self.left_error = ""
        self._has_locked = False
        self._describes = self._checks_permission = False
        self._requested = int(record.left_by is not None and not record.is_of_same_job)
        self._done = 0
        self._requested_s = timebase.now_s()
        self._is_closed = False
        timebase.thread(self._work, "perseus-gpu").start()

    @property
    def is_reset(self) -> bool:
        """True if the clock was reset since the last request."""
        return self._done == self._requested

    @property
    def has_given_up(self) -> bool:
        """True if the clock may stay locked: the driver has refused or not answered for two minutes."""
        return not self.is_reset and self._time.now_s() >= self._requested_s + INSIST_S

    def reset(self) -> None:
        """Request a reset of the clock, without waiting for it."""
        if self.is_reset:
            self._requested_s = self._time.now_s()
        self._requested += 1
        self._notifier.notify()

    def may_lock(self) -> bool:
        """Return True if the clock may be locked, which the caller is about to do."""
        self._has_locked = True
        return self.record.is_current

    def describe(self, checks_permission: bool) -> None:
        """Request a description of the GPU, without waiting. ``checks_permission`` resets the clock."""
        self._describes = True
        self._checks_permission |= checks_permission
        self._notifier.notify()

    def is_described(self, checks_permission: bool) -> bool:
        if self.description is None:
            return self.description_error is not None
        return self.description.is_permission_checked or not checks_permission

    @property
    def left_problem(self) -> str:
        """Reason why a clock that another process left locked is still locked. Empty if it was reset."""
        return self.left_error if self.is_reset else str(self.error or "its driver does not answer")

    def close(self) -> None:
        """End the thread after its current call."""
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
                        self._reset(self.gpu)
                    self._done = requested
                    self._on_change()
                if self._describes and not self.is_described(self._checks_permission):
                    try:
                        self.description = description_of(self.gpu, checks_permission=self._checks_permission)
                    except Exception as error:  # a client waits for it
                        self.description, self.description_error = None, error
                    self._on_change()
            except Exception as error:  # no other process would try again
                self.error = error
                self._on_change()
                pause_s = _RETRY_S if requested != self._done else None
            if requested == self._requested:
                self._notifier.wait(pause_s)
        with contextlib.suppress(Exception):  # the driver may not work
            if self.gpu is not None:
                self.gpu.close()

    def _reset(self, gpu: Gpu) -> None:
        try:
            gpu.reset_clock()
        except GpuPermissionError as error:
            if self._has_locked:
                raise
            # A process that may not reset a clock has not locked it. Another process may have had the permission.
            if self.record.left_by is not None:
                self.left_error = str(error)


def description_of(gpu: Gpu, *, checks_permission: bool) -> GpuDescription:
    """Return the description of a GPU for clients. ``checks_permission`` resets the clock."""
    clocks_mhz: tuple[int, ...] = ()
    clocks_fault = permission_fault = None
    try:
        clocks_mhz = gpu.supported_clocks_mhz()
    except GpuError as error:
        clocks_fault = Fault.of(error)
    try:
        if checks_permission:
            gpu.check_lock_permission()
    except GpuError as error:
        permission_fault = Fault.of(error)
    return GpuDescription(
        text=str(gpu),
        name=gpu.name,
        driver=gpu.driver,
        settings=gpu.settings,
        notices=tuple(getattr(gpu, "administrator_settings", ())),
        clocks_mhz=clocks_mhz,
        clocks_fault=clocks_fault,
        permission_fault=permission_fault,
        is_permission_checked=checks_permission,
        counter=getattr(gpu, "counter", ""),
    )
