"""The profile that a job measures: which clocks it searches, and what it writes."""

from __future__ import annotations

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.search import ClockSearch, clocks_to_choose_from
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.warm_up import Baseline

# A tail that takes less of an iteration than this needs no clock of its own.
TAIL_MATTERS = 0.02


def clock_search(job: Job, rank: Rank, baseline: Baseline, *, online: bool = False) -> ClockSearch:
    """Return what asks for the clocks to measure; every rank must make its own."""
    settings = job.config.profile
    clocks = clocks_to_choose_from(rank.gpu, settings)
    return ClockSearch(rank.communicator, clocks, settings, baseline.info, job.output_dir, online=online)


def save_profile(job: Job, search: ClockSearch, baseline: Baseline) -> None:
    """Write the profile, and the rows as they were measured beside it; on rank 0 only.

    Raises:
        ProfileError: No forward or backward was measured.
        OSError: The files cannot be written.
    """
    measured = search.finish(baseline.info)
    profile = measured.profile
    if baseline.tails_of is None:
        profile = _without_idle_tails(profile, baseline)
    else:
        profile = _with_tails_of(baseline.tails_of, profile)
    if not profile.keys:
        raise ProfileError("no forward or backward was measured")
    measured.raw.save(job.profile_path.with_name("measured.csv"))
    profile.save(job.profile_path)


def _without_idle_tails(profile: StageProfile, baseline: Baseline) -> StageProfile:
    """Leave out the rows of tails that are short, or in which the GPU draws no more than waiting: any clock will do."""
    blocking_power_w = baseline.info.blocking_power_w or 0.0
    idle = {
        stage
        for stage, kind in profile.keys
        if kind is Kind.TAIL
        and (
            profile.at_highest_clock(stage, kind).time_s < TAIL_MATTERS * baseline.time_s
            or min(profile.options(stage, kind).effective_energy_j(blocking_power_w)) <= 0
        )
    }
    rows = [row for row in profile.info.rows if row.kind is not Kind.TAIL or row.stage not in idle]
    return StageProfile(
        [m for m in profile.measurements if m.kind is not Kind.TAIL or m.stage not in idle],
        profile.info.model_copy(update={"rows": rows}),
    )


def _with_tails_of(other: StageProfile, profile: StageProfile) -> StageProfile:
    """Replace the rows of tails by those of another profile."""
    measurements = [m for m in profile.measurements if m.kind is not Kind.TAIL]
    rows = [row for row in profile.info.rows if row.kind is not Kind.TAIL]
    return StageProfile(
        [*measurements, *(m for m in other.measurements if m.kind is Kind.TAIL)],
        profile.info.model_copy(update={"rows": [*rows, *(r for r in other.info.rows if r.kind is Kind.TAIL)]}),
    )
