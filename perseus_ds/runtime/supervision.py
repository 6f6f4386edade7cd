"""What a job runs beside training: control socket and metrics; and a rank's fall back to default clocks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack

from perseus_ds.artifacts.run_records import Event, Failed, Recovered
from perseus_ds.client.clocks import AgentClocks, Asked
from perseus_ds.errors import GpuError
from perseus_ds.policy.control_socket import ControlServer
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.metrics import MetricsReporter
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.timebase import Timebase

logger = logging.getLogger("perseus_ds")
_PROBED_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# What fails again so soon had not passed: it is not warned of twice.
_OVER_S = 300.0


class Supervision:
    """Started before training; ended by :meth:`close`."""

    def __init__(self, job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> None:
        """Open the control socket, and begin to report metrics; on rank 0."""
        self._rank = rank
        self._process = os.getpid()
        self._parts = ExitStack()

        def start() -> None:
            if rank.communicator.is_rank_0:
                self._listen(job, recorder, control)
                if (config := job.config.metrics) is not None:
                    failed = lambda problem: recorder.event(Failed(event="metrics", error=problem))  # noqa: E731
                    self._parts.callback(MetricsReporter(config, recorder.facts, failed).close)

        try:
            rank.communicator.raise_on_all_ranks(start)
        except BaseException:
            self.close()
            raise

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
        return os.getpid() != self._process

    def problem(self) -> GpuError | None:
        """Return what keeps clocks from being set safely, if anything."""
        return self._rank.clocks.problem

    def close(self) -> None:
        """End metrics and control socket; harmless when called again."""
        self._parts.close()


def may_pass(error: Exception) -> bool:
    """Return whether it may work later: errors of GPUs, drivers and disks. Others are mistakes, which stay."""
    return isinstance(error, GpuError | OSError)


class Fallback:
    """Whether a rank runs at default clocks because something has failed.

    The driver is probed at growing intervals; when it does everything that plans need, the rank runs under plans again.
    """

    def __init__(self, rank: int, clocks: AgentClocks, timebase: Timebase, warn: Callable[[str, Event], None]) -> None:
        """Begin under plans; each fault and each return from one is warned of and recorded by ``warn``."""
        self.is_in_force = False
        self._rank = rank
        self._clocks = clocks
        self._time = timebase
        self._warn = warn
        self._fault: type[Exception] | None = None
        self._may_pass = True
        self._probe: Asked | None = None
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
