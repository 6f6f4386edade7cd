"""The profile that a job measures: which clocks it searches, and what it writes."""

from __future__ import annotations

import logging

import numpy as np

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.search import ClockSearch, clocks_to_choose_from
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.warm_up import Baseline

logger = logging.getLogger("perseus_ds")

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
    if baseline.tails_of is None:
        profile = _without_idle_tails(measured.profile, baseline)
    else:
        profile = _with_tails_of(baseline.tails_of, measured.profile)
    profile = _above_waiting(profile, baseline.info.blocking_power_w or 0.0)
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
    return profile.where(lambda stage, kind, _: kind is not Kind.TAIL or stage not in idle)


def _with_tails_of(other: StageProfile, profile: StageProfile) -> StageProfile:
    """Replace the rows of tails by those of another profile."""
    passes = profile.where(lambda stage, kind, clock_mhz: kind is not Kind.TAIL)
    tails = other.where(lambda stage, kind, clock_mhz: kind is Kind.TAIL)
    rows = [*passes.info.rows, *tails.info.rows]
    return StageProfile([*passes.measurements, *tails.measurements], profile.info.model_copy(update={"rows": rows}))


def _above_waiting(profile: StageProfile, blocking_power_w: float) -> StageProfile:
    """Leave out rows that noise has put below what waiting takes, which no plan can be made from; two clocks stay."""
    below: set[tuple[int, Kind, int]] = set()
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        is_below = options.effective_energy_j(blocking_power_w) <= 0
        if np.count_nonzero(~is_below) >= 2:
            below.update((stage, kind, int(clock_mhz)) for clock_mhz in options.clock_mhz[is_below])
    if below:
        clocks = sorted({clock_mhz for _, _, clock_mhz in below})
        logger.warning(
            "perseus: %d rows at %s MHz are left out of the profile: they say less power than waiting takes, %.1f W.",
            len(below),
            f"{clocks[0]} to {clocks[-1]}" if len(clocks) > 1 else clocks[0],
            blocking_power_w,
        )
    return profile.where(lambda *row: row not in below)
