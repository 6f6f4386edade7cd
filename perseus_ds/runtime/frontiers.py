"""The frontier of a job: from the configured file, from an earlier run, or computed during training."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from platformdirs import user_cache_path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import write_together
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed
from perseus_ds.errors import ConfigError, PerseusError, PlanError
from perseus_ds.gpu.base import KnownGpu
from perseus_ds.optimizer.lengths import LengthsPlanner
from perseus_ds.optimizer.lengths_worker import PlannedJob
from perseus_ds.optimizer.worker import OptimizeRequest, OptimizeWorker
from perseus_ds.planning import PlanningSettings
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.default_clocks import DefaultIterations, run_at_default_clocks
from perseus_ds.runtime.iterations import NextPhase, Phase
from perseus_ds.runtime.job import ModeContext

# A clock changes about 15 ms after its request. Until then instructions run at another clock than planned.
_SWITCH_COST_J = 0.5
_FILES = ("profile.json", "profile.csv", "frontier.csv", "frontier.json")


def read_frontier(path: Path, gpu: KnownGpu | None = None) -> Frontier:
    """Return the frontier in a file. Called on rank 0, because only its node needs the file.

    Raises:
        PerseusError: The file is missing or invalid, or is from simulated GPUs and this one is real.
    """
    if not path.exists():
        raise ConfigError(f'"frontier": {path} does not exist on rank 0\'s node. Write it with "perseus-ds optimize".')
    frontier = Frontier.load(path)
    if gpu is not None and frontier.provenance.simulated and not gpu.simulated:
        raise PlanError(
            f"{path} was measured on simulated GPUs, this job runs on {gpu.name}. "
            'Measure a profile here: "mode": "profile".'
        )
    return frontier


def load_frontier(context: ModeContext, path: Path) -> Frontier:
    """Return the frontier that rank 0 reads, on all ranks.

    Raises:
        PerseusError: On all ranks, if the file is invalid, or its plans do not fit this schedule or GPU.
    """
    rank = context.rank

    def read() -> Frontier:
        frontier = read_frontier(path, rank.gpu)
        check_instructions(frontier.instructions, context.job.schedule.instructions)
        return frontier

    frontier = rank.communicator.computed_on_rank_0(read)

    def check() -> None:
        for plan in frontier.plans:
            ClockPlan.of_rank(plan, rank.communicator.topology.pipeline_rank).check(rank.gpu)

    rank.communicator.raise_on_all_ranks(check)
    return frontier


def cached(key: str) -> Path:
    """Return a folder of the user's cache, ``$XDG_CACHE_HOME/perseus-ds`` or ``~/.cache/perseus-ds``.

    Raises:
        OSError: This user has no home folder, as in some containers.
    """
    try:
        return user_cache_path("perseus-ds") / key
    except RuntimeError as error:
        raise OSError(f"no folder for the cache: {error}. Set XDG_CACHE_HOME") from error


def store(source: Path, cache: Path) -> None:
    """Store the files of a run's output folder in a folder of the cache.

    Raises:
        OSError: The disk is full, or the folder cannot be written. The cache is unchanged.
    """
    staging = cache.with_name(f"{cache.name}.{os.getpid()}")
    outdated = cache.with_name(f"{staging.name}.outdated")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        for name in _FILES:
            shutil.copyfile(source / name, staging / name)
        # A job that reads the cache, or is killed at this point, finds either all files or none.
        with contextlib.suppress(FileNotFoundError):
            cache.rename(outdated)
        staging.rename(cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)


def frontier_of_an_earlier_run(context: ModeContext) -> Frontier | None:
    """Return the frontier of an earlier run of this job, if it still fits. All ranks call this together."""
    job, communicator = context.job, context.rank.communicator
    key = job.profile_key(communicator)

    def restore() -> Path | None:
        if not job.config.cache or not all((cached(key) / name).is_file() for name in _FILES):
            return None
        job.output_dir.mkdir(parents=True, exist_ok=True)
        write_together((job.output_dir / name, (cached(key) / name).read_bytes()) for name in _FILES)
        return cached(key)

    try:
        source = communicator.computed_on_rank_0(restore)
        if source is None:
            return None
        frontier = load_frontier(context, job.output_dir / "frontier.json")
    except (PerseusError, OSError) as error:
        context.recorder.say(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    context.recorder.say(f"using plans profiled by an earlier run ({source})")
    return frontier


def has_own_profile(context: ModeContext) -> bool:
    """Return whether an earlier start of the job has left a complete profile; every rank must ask at once.

    A search that was interrupted goes on instead.
    """
    job, communicator = context.job, context.rank.communicator
    key = job.profile_key(communicator)

    def is_own() -> bool:
        path, measured = job.profile_path, job.profile_path.with_name("measured.csv")
        with contextlib.suppress(PerseusError, OSError):
            is_complete = path.stat().st_mtime_ns >= measured.stat().st_mtime_ns
            return is_complete and StageProfile.load(path).info.job == key
        return False

    found = communicator.computed_on_rank_0(is_own)
    if found:
        context.recorder.say(f"using {job.profile_path}, which an earlier start of this job has measured")
    return found


def forget_for_later_runs(context: ModeContext) -> None:
    """Remove the files for later runs of this job. All ranks call this together."""
    key = context.job.profile_key(context.rank.communicator)
    if not context.rank.communicator.is_rank_0:
        return
    with contextlib.suppress(PerseusError, OSError):
        profile = StageProfile.load(context.job.profile_path)
        StageProfile(profile.measurements, profile.info.model_copy(update={"job": None})).save(context.job.profile_path)
    if context.job.config.cache:
        with contextlib.suppress(OSError):
            shutil.rmtree(cached(key))


def keep_for_later_runs(context: ModeContext) -> None:
    """Store profile and frontier for the next run of this job. All ranks call this together."""
    key = context.job.profile_key(context.rank.communicator)
    if context.rank.communicator.is_rank_0 and context.job.config.cache:
        try:
            store(context.job.output_dir, cached(key))
        except OSError as error:
            context.recorder.event(Failed(event="cache", error=str(error)))


def optimise(
    context: ModeContext,
    default: DefaultIterations,
    switch_cost_s: float,
) -> Phase[Frontier]:
    """Compute the frontier of the job's profile, on rank 0's node with low priority.

    Args:
        context: Context of the mode.
        default: Iterations at default clocks during the computation are added to it.
        switch_cost_s: Delay caused by a clock change [s].

    Raises:
        PerseusError: On all ranks, if it cannot be computed, or does not fit this job.
    """
    job, rank = context.job, context.rank
    worker: OptimizeWorker | None = None
    latencies = rank.communicator.gather(rank.clocks.latencies)

    # A late request delays the instruction after it, independently of the learnt price.
    price_s = max(switch_cost_s, rank.communicator.all_max(rank.clocks.status.late_s))

    def start() -> None:
        nonlocal worker
        dwell_s = {
            clock_mhz: max(table.dwell_s(clock_mhz) for table in latencies)
            for clock_mhz in job.config.profile.clocks_of(rank.gpu)
        }
        settings = PlanningSettings(switch_cost_j=_SWITCH_COST_J, switch_cost_s=price_s, least_dwell_s=dwell_s)
        request = OptimizeRequest(
            profile=job.profile_path, out=job.output_dir, schedule=job.schedule, settings=settings
        )
        worker = OptimizeWorker(request, job.output_dir / "optimize.log")

    def stop() -> None:
        if worker is not None:
            worker.stop()

    def check() -> None:
        result = worker.poll() if worker is not None else None
        if result is not None and result.error is not None:
            raise PerseusError(f"optimising failed: {result.error}")

    with rank.beside_training.running(stop):
        rank.communicator.computed_on_rank_0(start)
        yield from run_at_default_clocks(
            "optimizing",
            default,
            goes_on=lambda: True,
            stops=lambda: worker is not None and worker.poll() is not None,
            next_phase=lambda: NextPhase("default", worker.remaining_s() if worker is not None else None),
        )
        rank.communicator.computed_on_rank_0(check)
    return load_frontier(context, job.output_dir / "frontier.json")


def plan_by_length(context: ModeContext, frontier: Frontier) -> bool:
    """Begin to plan iterations by the lengths that the job gives, if it does; every rank must do so at once.

    Returns:
        Whether they are planned so.
    """
    job, look_ahead = context.job, context.look_ahead
    look_ahead.stop_planner(context.order)
    if not look_ahead.is_used:
        return False

    def start() -> bool:
        settings = PlanningSettings(
            switch_cost_j=_SWITCH_COST_J,
            switch_cost_s=frontier.provenance.switch_cost_s or 0.0,
            least_dwell_s=frontier.provenance.least_dwell_s or 0.0,
        )
        try:
            profile = StageProfile.load(job.profile_path)
            if profile.info.by_length is None:
                context.recorder.say(
                    "micro-batches are planned as if all had one length: those given hardly vary, were not given "
                    "before the iteration ahead of theirs, or were not when this profile was measured"
                )
                return False
            LengthsPlanner(job.schedule, profile, settings)
            planned = PlannedJob(profile=job.profile_path, schedule=job.schedule, settings=settings)
            look_ahead.start_planner(planned, job.output_dir / "lengths.log", context.order, 0.0)
        except (PerseusError, OSError) as error:
            context.recorder.say(f"iterations are not planned by the lengths given: {str(error).rstrip('.')}")
            return False
        return True

    return context.rank.communicator.computed_on_rank_0(start)
