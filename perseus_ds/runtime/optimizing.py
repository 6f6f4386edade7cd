"""Optimises in a separate process while the job trains at default clocks."""

from __future__ import annotations

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer.worker import OptimizeRequest, OptimizeWorker
from perseus_ds.runtime.default_clocks import DefaultIterations, run_at_default_clocks
from perseus_ds.runtime.frontiers import load_frontier
from perseus_ds.runtime.iterations import IterationMeasurement, NextPhase, Phase
from perseus_ds.runtime.job import Job, RankContext

# A clock changes about 15 ms after its request; until then instructions run at another clock than planned.
_SWITCH_COST_J = 0.5


def optimise(job: Job, rank: RankContext, default: DefaultIterations, switch_cost_s: float) -> Phase[Frontier]:
    """Make the frontier of the job's profile; rank 0's node does it, with low priority.

    Args:
        job: The job.
        rank: This rank.
        default: The iterations meanwhile are added, which run at default clocks.
        switch_cost_s: By how much a change of clock delays what follows it [s].

    Raises:
        PerseusError: On all ranks: it cannot be made, or does not fit this job.
    """
    worker: OptimizeWorker | None = None
    latencies = rank.communicator.gather(rank.clocks.latencies)

    # A request that comes late delays the instruction after it, whatever was learnt from plans that ran.
    price_s = max(switch_cost_s, rank.communicator.all_max(rank.clocks.thread_late_s))

    def start() -> None:
        nonlocal worker
        request = OptimizeRequest(
            profile=job.profile_path,
            out=job.output_dir,
            schedule=ScheduleStreams.of(job.schedule),
            switch_cost_j=_SWITCH_COST_J,
            switch_cost_s=price_s,
            least_dwell_s={
                clock_mhz: max(table.dwell_s(clock_mhz) for table in latencies)
                for clock_mhz in job.config.profile.clocks_of(rank.gpu)
            },
        )
        worker = OptimizeWorker(request, job.output_dir / "optimize.log")
        rank.beside_training.callback(worker.stop)

    def check() -> None:
        result = worker.poll() if worker is not None else None
        if result is not None and not result.ok:
            raise PerseusError(f"optimising failed: {result.error}")

    rank.communicator.computed_on_rank_0(start)
    try:
        yield from run_at_default_clocks(
            "optimizing",
            default,
            goes_on=_nobody_has_finished,
            vote=lambda: worker is not None and worker.poll() is not None,
            next_phase=lambda: NextPhase("default", worker.remaining_s() if worker is not None else None),
        )
        rank.communicator.computed_on_rank_0(check)
    finally:
        if worker is not None:
            worker.stop()
    return load_frontier(job, rank, job.output_dir / "frontier.json")


def _nobody_has_finished(seen: IterationMeasurement | None) -> bool:
    return seen is None or seen.reports is None or not seen.reports.rank_0_votes
