"""A rank that has fallen back to default clocks, and its return to plans once what failed works again."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.artifacts.run_records import Event, Failed, Recovered
from perseus_ds.clocks.controller import ClockController, DriverCall
from perseus_ds.errors import GpuError
from perseus_ds.timebase import Timebase

_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# What fails again so soon had not passed: it is not warned of twice.
_OVER_S = 300.0


def may_pass(error: Exception) -> bool:
    """Return whether it may work later: errors of GPUs, drivers and disks. Others are mistakes, which stay."""
    return isinstance(error, GpuError | OSError)


class Fallback:
    """Whether a rank runs at default clocks because something has failed.

    The driver is probed at growing intervals; when it does everything that plans need, the rank runs under plans again.
    """

    def __init__(
        self, rank: int, clocks: ClockController, timebase: Timebase, warn: Callable[[str, Event], None]
    ) -> None:
        """Begin under plans; each fault and each return from one is warned of and recorded by ``warn``."""
        self.is_in_force = False
        self._rank = rank
        self._clocks = clocks
        self._time = timebase
        self._warn = warn
        self._fault: type[Exception] | None = None
        self._may_pass = True
        self._probe: DriverCall | None = None
        self._probes = 0
        self._next_s = 0.0

    def begin(self, error: Exception) -> None:
        """Fall back; from any thread."""
        was_in_force, self.is_in_force = self.is_in_force, True
        self._may_pass = may_pass(error) and (self._may_pass or not was_in_force)
        if was_in_force:
            return
        fault = GpuError if isinstance(error, GpuError) else type(error)
        if self._fault is not fault:
            self._fault, self._probes = fault, 0
            text = str(error).rstrip(".")
            event = Failed(rank=self._rank, error=str(error))
            self._warn(f"perseus: {text}. Training goes on at default clocks.", event)
        self._probe = None
        self._wait()

    def end_if_over(self, *, may_probe: bool) -> None:
        """Return to plans if the driver does everything again; called between iterations, and returns at once.

        Args:
            may_probe: Whether clocks may be set but for what has failed.
        """
        if not self.is_in_force:
            if self._fault is not None and self._time.now_s() >= self._next_s:
                self._fault = None
                text = "perseus: the driver works again. This rank runs under plans again."
                self._warn(text, Recovered(rank=self._rank))
        elif self._probe is not None and self._probe.has_worked and may_probe:
            self.is_in_force, self._probe = False, None
            self._next_s = self._time.now_s() + _OVER_S
        elif self._may_pass and self._time.now_s() >= self._next_s and may_probe:
            if self._probe is None or self._probe.is_over:
                self._probe = self._clocks.probe()
            self._wait()

    def _wait(self) -> None:
        self._next_s = self._time.now_s() + _PROBED_AFTER_S[min(self._probes, len(_PROBED_AFTER_S) - 1)]
        self._probes += 1
