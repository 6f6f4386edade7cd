"""Whether programs may use a driver, from its errors and from probes of it."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import RankFailed, RankRecovered
from perseus_ds.timebase import Timebase

_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_OVER_S = 300.0
"""A fault that recurs within this time is not reported again."""


class DriverHealth:
    """Reports each fault of a driver and each recovery once, and decides when the driver is probed.

    An error that is not one of the GPU, the driver or a disk is a bug, and its fallback is permanent.

    Attributes:
        has_failed: Whether the GPU has fallen back to default clocks, so that programs are not followed.
    """

    def __init__(self, report: Callable[[RankFailed | RankRecovered], None], timebase: Timebase) -> None:
        self._report = report
        self._time = timebase
        self.has_failed = False
        self._fault: type[Exception] | None = None
        self._may_pass = True
        self._probes = 0
        # Time of the next probe, or from which on the fault is over [s].
        self._next_s = 0.0

    def fail(self, error: Exception) -> None:
        """Fall back, and report the error unless it is a recent one again. Thread-safe."""
        may_pass = isinstance(error, GpuError | OSError)
        self._may_pass = may_pass and (self._may_pass or not self.has_failed)
        if self.has_failed:
            return
        self.has_failed = True
        fault = GpuError if isinstance(error, GpuError) else type(error)
        if self._fault is not fault:
            self._fault, self._probes = fault, 0
            self._report(RankFailed(str(error).rstrip(".")))
        self._schedule_probe()

    def recover(self) -> None:
        """Follow programs again, after a probe that succeeded."""
        self._next_s = self._time.now_s() + _OVER_S
        self.has_failed = False

    def is_probe_due(self) -> bool:
        """Return True, once for each probe, if the driver is to be probed. Reports a fault that is over."""
        if self._time.now_s() < self._next_s:
            return False
        if not self.has_failed:
            if self._fault is not None:
                self._fault = None
                self._report(RankRecovered())
            return False
        if self._may_pass:
            self._schedule_probe()
        return self._may_pass

    def _schedule_probe(self) -> None:
        self._next_s = self._time.now_s() + _PROBED_AFTER_S[min(self._probes, len(_PROBED_AFTER_S) - 1)]
        self._probes += 1
