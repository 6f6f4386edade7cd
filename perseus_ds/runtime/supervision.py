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
from perseus_ds.clocks.guardian_daemon import open_gpu, restore
from perseus_ds.clocks.lock_records import HeldLock, left_locks
from perseus_ds.errors import GpuError
from perseus_ds.policy.control_socket import ControlServer
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.metrics import MetricsReporter
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.timebase import REAL_TIME

logger = logging.getLogger("perseus_ds")


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
                self._parts.callback(_end_watch, self._guardian, _hold(rank.gpu.address))
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


def _end_watch(guardian: Guardian, held: HeldLock | None) -> None:
    """Have the guardian restore the clock; the record that it is locked stays where it could not."""
    if guardian.close() and held is not None:
        held.release()


def reset_left_clocks() -> None:
    """Reset the clocks of GPUs of this node that processes of this user held locked when they died."""
    for left in left_locks():
        problem = None
        try:
            problem = restore(open_gpu(left.address), REAL_TIME)
        except GpuError as error:
            problem = str(error)
        if problem is None:
            left.forget()
        said = "it is reset" if problem is None else f"it cannot be reset ({problem})"
        logger.warning("perseus: process %d died and left the clock of %s locked: %s.", left.pid, left.address, said)


def _hold(address: str) -> HeldLock | None:
    """Keep a record, on this node, that this process may lock the clock of a GPU."""
    try:
        return HeldLock(address)
    except OSError as error:
        logger.debug("perseus: no record of the locked clock: %s", error)
        return None


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
