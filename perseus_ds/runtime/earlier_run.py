"""Profile and frontier of an earlier run of the same job: taken from the user's cache, kept there, removed from it."""

from __future__ import annotations

import contextlib

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.run_records import Failed
from perseus_ds.errors import PerseusError
from perseus_ds.runtime.cache import Cache
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.running import load_frontier


def frontier_of_an_earlier_run(job: Job, rank: Rank, recorder: Recorder) -> Frontier | None:
    """Return the frontier that an earlier run of this job left, if it still fits; every rank must ask at once."""
    cache = Cache(job.profile_key(rank.communicator))

    def restore() -> str | None:
        if not job.config.cache or not cache.is_complete:
            return None
        cache.restore(job.output_dir)
        return str(cache.directory)

    try:
        source = rank.communicator.from_first(restore)
        if source is None:
            return None
        frontier = load_frontier(job, rank, job.output_dir / "frontier.json")
    except (PerseusError, OSError) as error:
        recorder.say(f"the profile of an earlier run cannot be used ({error}); profiling again")
        return None
    recorder.say(f"using plans profiled by an earlier run ({source})")
    return frontier


def forget_for_later_runs(job: Job, rank: Rank) -> None:
    """Leave nothing of this job for later runs; every rank must do so at once."""
    cache = Cache(job.profile_key(rank.communicator))
    if rank.communicator.is_first and job.config.cache:
        with contextlib.suppress(OSError):
            cache.remove()


def keep_for_later_runs(job: Job, rank: Rank, recorder: Recorder) -> None:
    """Store profile and frontier for the next run of this job; every rank must call this together."""
    cache = Cache(job.profile_key(rank.communicator))
    if rank.communicator.is_first and job.config.cache:
        try:
            cache.store(job.output_dir)
        except OSError as error:
            recorder.event(Failed(event="cache", error=str(error)))
