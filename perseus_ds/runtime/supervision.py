"""Guardian, control socket, metrics, switch interval, exit guard: parts of a job that must end however it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from perseus_ds.artifacts.run_records import Failed
from perseus_ds.clocks.controller import short_switch_interval
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
            if (server := _listen(job, rank, recorder, control)) is not None:
                self._parts.callback(server.close)
            if (metrics := _report_metrics(job, rank, recorder)) is not None:
                self._parts.callback(metrics.close)
            if job.config.mode != "observe":
                self._parts.enter_context(short_switch_interval())

        try:
            rank.communicator.raise_on_all_ranks(start)
        except BaseException:
            self.close()
            raise
        self._exit_guard = ExitGuard(restore, reset_clock=rank.clocks.close)

    @property
    def is_forked(self) -> bool:
        """Whether this process is another than the rank's: a copy that was forked from it."""
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


def _listen(job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> ControlServer | None:
    """Take orders from outside, on rank 0; a job that runs no plans needs none."""
    if job.config.mode not in ("auto", "run") or not rank.communicator.is_rank_0:
        return None
    try:
        return ControlServer(Path(job.config.output_dir), control.carry_out)
    except OSError as error:
        logger.warning("perseus: `perseus-ds control` will not reach this job: %s.", error)
        recorder.event(Failed(event="control", error=str(error)))
        return None


def _report_metrics(job: Job, rank: RankContext, recorder: Recorder) -> MetricsReporter | None:
    """Give figures to Prometheus, on rank 0 where they are asked for."""
    config = job.config.metrics
    if config is None or not rank.communicator.is_rank_0:
        return None
    return MetricsReporter(
        config, recorder.facts, lambda problem: recorder.event(Failed(event="metrics", error=problem))
    )
