"""Control socket and metrics of a job, and a rank's fallback to default clocks."""

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
# A failure within this time counts as the same fault, and causes no second warning.
_OVER_S = 300.0


class Supervision:
    """Control socket and metrics, from before training until :meth:`close`."""

    def __init__(self, job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> None:
        """Open the control socket and start metrics on rank 0."""
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
        """Accept orders, if the job runs plans."""
        if job.config.mode not in ("auto", "run"):
            return
        try:
            self._parts.callback(ControlServer(job.output_dir, control.carry_out).close)
        except OSError as error:
            logger.warning("perseus: `perseus-ds control` will not reach this job: %s.", error)
            recorder.event(Failed(event="control", error=str(error)))

    @property
    def is_forked(self) -> bool:
        """Return True if this process was forked from the rank's."""
        return os.getpid() != self._process

    def problem(self) -> GpuError | None:
        """Return the error that keeps clocks from being set safely, if any."""
        return self._rank.clocks.problem

    def close(self) -> None:
        """End metrics and control socket. May be called repeatedly."""
        self._parts.close()


def may_pass(error: Exception) -> bool:
    """Return True for errors of GPUs, drivers and disks, which may be temporary. Others are permanent."""
    return isinstance(error, GpuError | OSError)


class Fallback:
    """Fallback of a rank to default clocks after a failure.

    The driver is probed at growing intervals. When all calls that plans need succeed, the rank uses plans again.
    """

    def __init__(self, rank: int, clocks: AgentClocks, timebase: Timebase, warn: Callable[[str, Event], None]) -> None:
        """Start without a fault. ``warn`` reports and records each fault and each return to plans."""
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
        """Return to default clocks. Thread-safe."""
        was_in_force, self.is_in_force = self.is_in_force, True
        self._may_pass = may_pass(error) and (self._may_pass or not was_in_force)
        if was_in_force:
            return
        fault = GpuError if isinstance(error, GpuError) else type(error)
        if self._fault is not fault:
            self._fault, self._probes = fault, 0
            text = str(error).rstrip(".")
            event = Failed(rank=self._rank, error=str(error))
            self._warn(f"perseus: {text}. Training continues at default clocks.", event)
        self._probe = None
        self._wait()

    def end_if_over(self, *, may_probe: bool) -> None:
        """Return to plans if the driver works again. Called between iterations, does not wait.

        Args:
            may_probe: Whether clocks may be set, apart from the failed calls.
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
