"""What keeps a job safe: guardian, exit guard, control socket and metrics; and a rank's fall back to default clocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from perseus_ds.artifacts.run_records import Event, Failed, Recovered
from perseus_ds.clocks.controller import ClockController, DriverCall, short_switch_interval
from perseus_ds.clocks.exit_guard import ExitGuard
from perseus_ds.clocks.guardian import Guardian
from perseus_ds.clocks.guardian_daemon import open_gpu
from perseus_ds.clocks.lock_records import left_locks
from perseus_ds.errors import GpuError
from perseus_ds.policy.control_socket import ControlServer
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.metrics import MetricsReporter
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_RESET_ATTEMPTS, _RETRY_S = 3, 0.5
_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# What fails again so soon had not passed: it is not warned of twice.
_OVER_S = 300.0


class Supervision:
    """Started before training; ended by :meth:`release`, then :meth:`close`."""

    def __init__(
        self, job: Job, rank: RankContext, recorder: Recorder, control: JobControl, restore: Callable[[], None]
    ) -> None:
        """Start the guardian and the control socket, and have clocks restored however the process ends.

        Raises:
            GpuError: On all ranks, if the guardian of one cannot be started.
        """
        self._rank = rank
        self._guardian: Guardian | None = None
        self._parts = ExitStack()

        def start() -> None:
            if job.config.mode != "observe" and rank.gpu.address is not None:  # otherwise no clock can stay locked
                reset_left_clocks()
                self._guardian = Guardian([rank.gpu.address])
                self._parts.callback(self._guardian.close)
            if rank.communicator.is_rank_0:
                self._listen(job, recorder, control)
                if (config := job.config.metrics) is not None:
                    failed = lambda problem: recorder.event(Failed(event="metrics", error=problem))  # noqa: E731
                    self._parts.callback(MetricsReporter(config, recorder.facts, failed).close)
            if job.config.mode != "observe":
                self._parts.enter_context(short_switch_interval())

        try:
            rank.communicator.raise_on_all_ranks(start)
        except BaseException:
            self.close()
            raise
        self._exit_guard = ExitGuard(restore, reset_clock=rank.clocks.close)

    def _listen(self, job: Job, recorder: Recorder, control: JobControl) -> None:
        """Take orders from outside; a job that runs no plans needs none."""
        if job.config.mode not in ("auto", "run"):
            return
        try:
            self._parts.callback(ControlServer(job.output_dir, control.carry_out).close)
        except OSError as error:
            logger.warning("perseus: `perseus-ds control` will not reach this job: %s.", error)
            recorder.event(Failed(event="control", error=str(error)))

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the rank's."""
        return self._exit_guard.is_forked

    def problem(self) -> GpuError | None:
        """Return what keeps clocks from being set safely, if anything."""
        if self._rank.clocks.is_closed:
            return GpuError("this process was told to end, and its clock was restored")
        if self._guardian is not None and not self._guardian.alive:
            return GpuError("the guardian, which restores the clocks if the job is killed, is gone")
        return self._rank.clocks.problem

    def release(self) -> None:
        """Restore the earlier signal handlers."""
        self._exit_guard.release()

    def close(self) -> None:
        """End metrics, control socket, and at last the guardian's watch over this rank; harmless when called again."""
        self._parts.close()


def reset_left_clocks(timebase: Timebase = REAL_TIME) -> None:
    """Reset the clocks of GPUs of this node that processes of this user held locked when they died."""
    for left in left_locks():
        said = ""
        for attempt in range(_RESET_ATTEMPTS):
            timebase.sleep(_RETRY_S if attempt else 0)
            try:
                open_gpu(left.address).reset_clock()
                left.forget()
                said = "it is reset"
                break
            except GpuError as error:
                said = f"it cannot be reset ({error})"
        logger.warning("perseus: process %d died and left the clock of %s locked: %s.", left.pid, left.address, said)


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
