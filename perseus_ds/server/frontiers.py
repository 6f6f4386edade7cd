"""Frontiers of a job: read from a file, kept from an earlier run, or computed during training."""

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
from perseus_ds.artifacts.run_events import Failed, OrderPlanned
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import ConfigError, PerseusError, PlanError, ProfileError
from perseus_ds.optimizer.worker import OptimizeRequest, OptimizeWorker
from perseus_ds.planning import PlanningSettings
from perseus_ds.server.job import Job, Order
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.profiling import has_passes_of, save_once_possible, share_profile
from perseus_ds.server.recorder import Recorder
from perseus_ds.server.state import MOST_ROBUST

# Each time that plans are computed again because they were late, clocks are held longer by this factor.
_HELD_LONGER = 4
# If passes vary by less than this fraction, a reserve for it changes nothing.
_LEAST_RESERVE = 0.001
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
    frontier = read_frontier(path, None if job.simulated else job.facts[0].gpu.name)
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


def profile_of_an_earlier_run(job: Job, recorder: Recorder) -> StageProfile | None:
    """Copy the cached profile and frontier of an earlier run of a job, and return the profile. None without them."""
    try:
        if (source := _cache_of(job)) is None:
            return None
        job.output_dir.mkdir(parents=True, exist_ok=True)
        write_together((job.output_dir / name, (source / name).read_bytes()) for name in _FILES)
        profile = StageProfile.load(job.profile_path)
    except (PerseusError, OSError) as error:
        recorder.say(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    recorder.say(f"using plans profiled by an earlier run ({source})")
    return profile


def own_frontier(job: Job) -> Frontier | None:
    """Return the frontier that an earlier start of a job has computed from its profile, if it still fits."""
    path = job.output_dir / "frontier.json"
    with contextlib.suppress(PerseusError, OSError):
        if path.stat().st_mtime >= job.profile_path.stat().st_mtime:
            return load_frontier(job, path)
    return None


def own_profile(job: Job, recorder: Recorder) -> StageProfile | None:
    """Return the profile that an earlier start of the job has left. None if it is not complete.

    An interrupted search of clocks is resumed instead.
    """
    path = job.profile_path
    with contextlib.suppress(PerseusError, OSError):
        if path.stat().st_mtime_ns >= path.with_name("measured.csv").stat().st_mtime_ns:
            profile = StageProfile.load(path)
            if profile.info.job == job.profile_key():
                recorder.say(f"using {path}, which this job has measured")
                return profile
    return None


def has_profile_of_an_earlier_run(job: Job) -> bool:
    """Return whether the cache has a profile of an earlier run. It may be damaged."""
    try:
        return _cache_of(job) is not None
    except OSError:
        return False


def forget_for_later_runs(job: Job) -> None:
    """Remove a job from the cache, and mark its profile so that no later start uses it."""
    with contextlib.suppress(PerseusError, OSError):
        profile = StageProfile.load(job.profile_path)
        StageProfile(profile.measurements, profile.info.model_copy(update={"job": None})).save(job.profile_path)
    if job.config.cache:
        with contextlib.suppress(OSError):
            shutil.rmtree(cached(job.profile_key()))


def keep_for_later_runs(job: Job, recorder: Recorder) -> None:
    """Store profile and frontier for the next run of a job in auto mode."""
    if job.config.cache and job.config.mode == "auto":
        try:
            store(job.output_dir, cached(job.profile_key()))
        except OSError as error:
            recorder.event(Failed(event="cache", error=str(error)))


class Planner:
    """Computes the plans of all orders from the job's profile, one after the other in another process."""

    def __init__(self, context: ModeContext) -> None:
        self._context = context
        self._has_profile = False
        self._order: Order | None = None  # that is being planned
        self._worker: OptimizeWorker | None = None

    def use(self, order: Order, frontier: Frontier) -> None:
        """Use a frontier for an order."""
        order.frontier = frontier
        baseline = frontier.baseline
        energy_j = baseline.energy_j * self._context.job.gpus_per_rank
        size = frontier.provenance.tokens_per_micro_batch
        self._context.state.default.predict(order.number, baseline.time_s, energy_j, size)

    async def use_earlier(self) -> bool:
        """Use plans or the profile that an earlier start or run of the job has left. Return False without a profile."""
        first, recorder = self._context.orders.first, self._context.recorder
        job = first.job
        profile = own_profile(job, recorder) or profile_of_an_earlier_run(job, recorder)
        if profile is None or not has_passes_of(job, profile):
            return False
        if profile.info.streams != ScheduleStreams.of(job.schedule):  # it began with another order
            await save_once_possible(self._context, lambda: share_profile(job, profile))
        self._has_profile = True
        if (frontier := own_frontier(job)) is not None:
            self.use(first, frontier)
        return True

    def begin(self) -> None:
        """Plan all orders with the profile that has just been measured."""
        self._has_profile = True

    @property
    def can_use_larger_margins(self) -> bool:
        """True if there is a profile from which plans with larger margins can be computed."""
        if not self._has_profile or self._context.state.robustness >= MOST_ROBUST:
            return False
        try:
            profiled = StageProfile.load(self._context.orders.first.job.profile_path).info
        except ProfileError:
            return False
        return bool(profiled.least_dwell_s) or (profiled.pass_variation or 0.0) >= _LEAST_RESERVE

    def replan(self) -> None:
        """Plan all orders again with the same profile."""
        self.close()
        self._context.orders.forget_plans()

    def forget(self) -> None:
        """Forget profile and plans, because the profile no longer holds."""
        self.close()
        forget_for_later_runs(self._context.orders.first.job)
        self._context.orders.forget_plans()
        self._has_profile = False

    def keep(self) -> None:
        """Store profile and plans for later runs of the job."""
        if self._context.orders.first.frontier is not None:
            keep_for_later_runs(self._context.orders.first.job, self._context.recorder)

    def close(self) -> None:
        """End the computation."""
        if self._worker is not None:
            self._worker.stop()
        self._order = self._worker = None

    def remaining_s(self) -> float | None:
        """Estimate the time until the present computation ends [s]. None if unknown."""
        return None if self._worker is None else self._worker.remaining_s()

    def advance(self) -> None:
        """Take up plans that have been computed, and begin to plan the next order.

        Raises:
            PerseusError: The first plans of the job cannot be computed.
        """
        if self._worker is not None and self._worker.has_ended():
            self._finish()
        while self._has_profile and self._worker is None and (order := self._next()) is not None:
            try:
                self._plan(order)
            except (OSError, PerseusError) as error:  # noqa: PERF203
                self._fail(order, error)

    def _next(self) -> Order | None:
        """Return the next order to plan: the latest one if it has no plans."""
        orders = self._context.orders
        waiting = [order for order in orders.known if order.frontier is None and not order.is_given_up]
        return orders.latest if orders.latest in waiting else next(iter(waiting), None)

    def _plan(self, order: Order) -> None:
        job, first = order.job, self._context.orders.first
        if order is not first:
            share_profile(job, StageProfile.load(first.job.profile_path))
        self._context.job.fix_slow_ranks(self._context.recorder.say)
        # Everything else that plans depend on is in the profile, so that "perseus-ds optimize" makes the same ones.
        settings, robustness = PlanningSettings(), self._context.state.robustness
        if robustness:
            profiled = StageProfile.load(first.job.profile_path).info
            dwell_s = {clock: _HELD_LONGER**robustness * least_s for clock, least_s in profiled.least_dwell_s.items()}
            variation = profiled.pass_variation or 0.0
            reserve = min(1.0, robustness * variation) if variation >= _LEAST_RESERVE else 0.0
            settings = PlanningSettings(least_dwell_s=dwell_s, reserve=reserve)
        request = OptimizeRequest(
            profile=job.profile_path, out=job.output_dir, schedule=job.schedule, settings=settings
        )
        self._order, self._worker = order, self._context.worker(request, job.output_dir / "optimize.log")

    def _finish(self) -> None:
        order, worker = self._order, self._worker
        assert order is not None, "its plans have been computed"
        assert worker is not None, "it has ended"
        self.close()
        if worker.error:
            self._fail(order, PerseusError(f"optimising failed: {worker.error}"))
            return
        frontier = load_frontier(order.job, order.job.output_dir / "frontier.json")
        if order is self._context.orders.first:
            table = frontier.comparison()
            self._context.recorder.say("\n  ".join(["plans and simpler settings, computed from the profile", *table]))
        self._add(order, frontier)

    def _add(self, order: Order, frontier: Frontier) -> None:
        self.use(order, frontier)
        if order is not self._context.orders.first:
            micro_batches = order.job.schedule.micro_batches
            self._context.recorder.announce(OrderPlanned(order=order.number, micro_batches=micro_batches))

    def _fail(self, order: Order, error: Exception) -> None:
        orders = self._context.orders
        orders.give_up(order, error)
        if all(each.is_given_up for each in orders.known):
            orders.forget_plans()  # the error ends the mode, and when it restarts, they are planned again
            raise error
