"""Fallback of a rank to default clocks after a failure of its driver, and the return to programs."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.agent.controller import ClockController
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.protocol.job_messages import RankFailed, RankRecovered
from perseus_ds.protocol.layout import DRIVER_HANGS_S
from perseus_ds.timebase import Timebase

_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# A fault that recurs within this time is not reported again.
_OVER_S = 300.0


class Fallback:
    """Handles faults of one GPU's controller.

    The driver is probed at growing intervals. When all operations that programs need succeed, the rank runs programs
    again. Any error that is not one of the GPU, the driver or a disk is a bug, and the fallback is permanent.

    Attributes:
        is_in_force: Whether the rank runs at default clocks.
    """

    def __init__(
        self, clocks: ClockController, timebase: Timebase, report: Callable[[RankFailed | RankRecovered], None]
    ) -> None:
        """Begin with programs. ``report`` is called once for each fault, and once for each recovery."""
        self.is_in_force = False
        self._clocks = clocks
        self._time = timebase
        self._report = report
        self._fault: type[Exception] | None = None
        self._may_pass = True
        self._probes = 0
        self._next_s = 0.0
        self._failed: list[Exception] = []

    def begin(self, error: Exception) -> None:
        """Fall back at the next call of :meth:`update`. Thread-safe."""
        self._failed.append(error)

    def update(self) -> None:
        """Fall back after a fault, and probe the driver when it is due. Runs on the agent's loop."""
        failed, self._failed = self._failed, []
        for error in failed:
            self._fall_back(error)
        failing_s = self._clocks.failing_s
        if not self.is_in_force and failing_s >= DRIVER_HANGS_S:
            self._fall_back(GpuBusyError(f"the driver has not answered for {failing_s:.0f} s"))
        now_s = self._time.now_s()
        if not self.is_in_force:
            if self._fault is not None and now_s >= self._next_s:
                self._fault = None
                self._report(RankRecovered())
        elif self._may_pass and now_s >= self._next_s:
            self._schedule_probe()
            self._clocks.probe(self._has_worked)

    def _schedule_probe(self) -> None:
        self._next_s = self._time.now_s() + _PROBED_AFTER_S[min(self._probes, len(_PROBED_AFTER_S) - 1)]
        self._probes += 1

    def _has_worked(self) -> None:
        """End the fallback after a successful probe. Runs on the controller's thread."""
        if self._may_pass:
            self._next_s = self._time.now_s() + _OVER_S
            self.is_in_force = False
        else:  # a permanent error occurred during the probe
            self._clocks.give_up()

    def _fall_back(self, error: Exception) -> None:
        may_pass = isinstance(error, GpuError | OSError)
        self._may_pass = may_pass and (self._may_pass or not self.is_in_force)
        if self.is_in_force:
            return
        self.is_in_force = True
        self._clocks.give_up()
        fault = GpuError if isinstance(error, GpuError) else type(error)
        if self._fault is not fault:
            self._fault, self._probes = fault, 0
            self._report(RankFailed(str(error).rstrip(".")))
        self._schedule_probe()
