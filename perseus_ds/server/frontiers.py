"""Frontier of a job: read from a file, kept from an earlier run, or computed during training."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from platformdirs import user_cache_path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import write_together
from perseus_ds.artifacts.layout import Layout
from perseus_ds.artifacts.plan import check_instructions
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed
from perseus_ds.errors import ConfigError, PerseusError, PlanError
from perseus_ds.optimizer.worker import OptimizeRequest
from perseus_ds.planning import PlanningSettings
from perseus_ds.server.iterations import NextPhase, Run
from perseus_ds.server.job import Job
from perseus_ds.server.phases import DefaultIterations, ModeContext, default_iteration

_FILES = ("profile.json", "profile.csv", "frontier.csv", "frontier.json")


def read_frontier(path: Path, real_gpu: str | None) -> Frontier:
    """Return the frontier of a file on rank 0's node.

    ``real_gpu`` is the product name of the GPU that runs the plans, None if it is simulated.

    Raises:
        PerseusError: The file does not exist, is invalid, or was measured on simulated GPUs, unlike ``real_gpu``.
    """
    if not path.exists():
        raise ConfigError(f'"frontier": {path} does not exist on rank 0\'s node. Write it with "perseus-ds optimize".')
    frontier = Frontier.load(path)
    if real_gpu is not None and frontier.provenance.simulated:
        raise PlanError(
            f"{path} was measured on simulated GPUs, this job runs on {real_gpu}. "
            'Measure a profile here: "mode": "profile".'
        )
    return frontier


def load_frontier(job: Job, path: Path) -> Frontier:
    """Return the frontier of a file after checking that it fits a job.

    Raises:
        PerseusError: The file is invalid, or its plans do not fit the schedule, the model or the GPUs of the job.
    """
    frontier = read_frontier(path, None if job.simulated else job.facts[0].gpu)
    _check_origin(frontier, job, path)
    check_instructions(frontier.instructions, job.schedule.instructions)
    job.check_clocks([clock for plan in frontier.plans for clocks in plan.clocks_mhz for clock in clocks])
    return frontier


def _check_origin(frontier: Frontier, job: Job, path: Path) -> None:
    """Check that plans were made for GPU, engine, model and layout of a job, as far as both are known.

    Raises:
        PlanError: They were made for another one.
    """
    made, info = frontier.provenance, job.info
    compared = {
        "GPU": (made.gpu, info.gpu),
        "engine": (made.layout and made.layout.engine, info.layout and info.layout.engine),
        "model": (made.model, info.model),
        "stages": (_stages_in_words(made.layout), _stages_in_words(info.layout)),
    }
    for what, (planned, trained) in compared.items():
        if planned is not None and trained is not None and planned != trained:
            raise PlanError(
                f"{path}: its plans were made for another {what}: {planned}. This job has {trained}. Measure a profile "
                'of this job with "mode": "profile", and run "perseus-ds optimize".'
            )


def _stages_in_words(layout: Layout | None) -> str | None:
    if layout is None:
        return None
    stages = []
    for parts in layout.stages:
        parameters = sum(part.parameters for part in parts)
        stages.append(f"{len(parts)} parts with {parameters} parameters")
    return "; ".join(stages)


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
    """Copy profile and frontier from a run's output folder to a folder of the cache.

    Raises:
        OSError: The disk is full, or the folder cannot be written. No partial copy remains.
    """
    staging = cache.with_name(f"{cache.name}.{os.getpid()}")
    outdated = cache.with_name(f"{staging.name}.outdated")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        for name in _FILES:
            shutil.copyfile(source / name, staging / name)
        # Other jobs find all files or none, even if this process is killed here.
        with contextlib.suppress(FileNotFoundError):
            cache.rename(outdated)
        staging.rename(cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)


def _cache_of(job: Job) -> Path | None:
    """Return the folder of the cache with files of an earlier run of a job, if there is one."""
    if not job.config.cache:
        return None
    folder = cached(job.profile_key())
    return folder if all((folder / name).is_file() for name in _FILES) else None


def frontier_of_an_earlier_run(context: ModeContext) -> Frontier | None:
    """Return the cached frontier of an earlier run of this job, if it still fits."""
    job = context.job
    try:
        if (source := _cache_of(job)) is None:
            return None
        job.output_dir.mkdir(parents=True, exist_ok=True)
        write_together((job.output_dir / name, (source / name).read_bytes()) for name in _FILES)
        frontier = load_frontier(job, job.output_dir / "frontier.json")
    except (PerseusError, OSError) as error:
        context.recorder.say(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    context.recorder.say(f"using plans profiled by an earlier run ({source})")
    return frontier


def own_frontier(job: Job) -> Frontier | None:
    """Return the frontier that an earlier start of a job has computed from its profile, if it still fits."""
    path = job.output_dir / "frontier.json"
    with contextlib.suppress(PerseusError, OSError):
        if path.stat().st_mtime >= job.profile_path.stat().st_mtime:
            return load_frontier(job, path)
    return None


def has_own_profile(context: ModeContext) -> bool:
    """Return whether an earlier start of the job has left a complete profile.

    An interrupted search of clocks is resumed instead.
    """
    path, found = context.job.profile_path, False
    with contextlib.suppress(PerseusError, OSError):
        is_complete = path.stat().st_mtime_ns >= path.with_name("measured.csv").stat().st_mtime_ns
        found = is_complete and StageProfile.load(path).info.job == context.job.profile_key()
    if found:
        context.recorder.say(f"using {path}, which this job has measured")
    return found


def has_frontier_of_an_earlier_run(job: Job) -> bool:
    """Return whether the cache has a frontier of an earlier run. It may not fit the job."""
    try:
        return _cache_of(job) is not None
    except OSError:
        return False


def forget_for_later_runs(context: ModeContext) -> None:
    """Remove this job from the cache, and mark its profile so that no later start uses it."""
    with contextlib.suppress(PerseusError, OSError):
        profile = StageProfile.load(context.job.profile_path)
        StageProfile(profile.measurements, profile.info.model_copy(update={"job": None})).save(context.job.profile_path)
    if context.job.config.cache:
        with contextlib.suppress(OSError):
            shutil.rmtree(cached(context.job.profile_key()))


def keep_for_later_runs(context: ModeContext) -> None:
    """Store profile and frontier for the next run of a job in auto mode."""
    if context.job.config.cache and context.job.config.mode == "auto":
        try:
            store(context.job.output_dir, cached(context.job.profile_key()))
        except OSError as error:
            context.recorder.event(Failed(event="cache", error=str(error)))


async def optimise(context: ModeContext, default: DefaultIterations) -> Frontier:
    """Compute the frontier of the job's profile in another process, with low priority.

    The iterations at default clocks that run during the computation are added to ``default``.
    """
    job = context.job
    dwell_s = {
        clock_mhz: max(state.latencies.dwell_s(clock_mhz) for state in job.states) for clock_mhz in job.clocks_mhz()
    }
    settings = PlanningSettings(least_dwell_s=dwell_s)
    request = OptimizeRequest(profile=job.profile_path, out=job.output_dir, schedule=job.schedule, settings=settings)
    worker = context.worker(request, job.output_dir / "optimize.log")
    has_ended = False
    try:
        while not has_ended:
            run = Run("optimizing", times="all", next_phase=NextPhase("default", worker.remaining_s()))
            await default_iteration(run, default)
            has_ended = worker.has_ended()
    finally:
        worker.stop()
    if worker.error:
        raise PerseusError(f"optimising failed: {worker.error}")
    frontier = load_frontier(job, job.output_dir / "frontier.json")
    table = frontier.comparison()
    context.recorder.say("\n  ".join(["plans and simpler settings, computed from the profile", *table]))
    return frontier
