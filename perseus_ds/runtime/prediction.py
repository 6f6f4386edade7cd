"""Compares what a profile predicts for default clocks with the iterations that were measured, and corrects it."""

from __future__ import annotations

import math

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Predicted
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.fixed_durations import (
    Difference,
    PartTimes,
    difference,
    differing_instructions,
    named,
    with_power,
)
from perseus_ds.runtime.default_clocks import DefaultIterations
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_context import ModeContext
from perseus_ds.runtime.warm_up import Baseline

_OFF = 0.02
_SURE = 3.0


def is_predicted(rank: RankContext, frontier: Frontier, sample: IterationSample) -> bool:
    """Return whether iterations at default clocks take the time and energy that the profile predicts for them."""
    predicted_j = _gpus_per_rank(rank) * frontier.baseline.energy_j
    return not (
        _is_off(sample.time_s, frontier.baseline.time_s, sample.time_error)
        or _is_off(sample.energy_j, predicted_j, sample.energy_error)
    )


def _gpus_per_rank(rank: RankContext) -> int:
    return rank.communicator.world_size // rank.communicator.topology.pipeline_ranks


def correct_profile(
    context: ModeContext, frontier: Frontier, default: DefaultIterations, *, before: Baseline | None = None
) -> bool:
    """Compare prediction and measurement of an iteration at default clocks; every rank must do so at once.

    Where they differ, say so, and correct the profile if factors of its parts explain it.

    Args:
        context: Of the mode.
        frontier: The plans; its baseline is the prediction.
        default: The iterations that were measured.
        before: Iterations before the profile was measured; None where that was not in this job, whose profile is then
            not corrected.

    Returns:
        Whether the job's profile has been corrected, so that plans have to be made again.
    """
    job, rank, sample = context.job, context.rank, default.sample
    if is_predicted(rank, frontier, sample):
        return False
    gpus_per_rank = _gpus_per_rank(rank)
    first_pipeline = rank.communicator.topology.data_parallel_rank == 0
    own = (default.spans(), before and before.spans) if first_pipeline else None
    ranks = [found for found in rank.communicator.gather(own) if found is not None]

    def correct() -> tuple[bool, dict[str, float]]:
        now = PartTimes.of([spans for spans, _ in ranks])
        if before is None:
            return False, named(differing_instructions(now, _predicted_s(frontier)))
        earlier = PartTimes.of([spans for _, spans in ranks if spans])
        profile = StageProfile.load(job.profile_path)
        found = difference(profile, now, earlier.instructions, sample.time_s)
        corrected = _corrected(job, profile, found, sample, gpus_per_rank)
        if corrected is not None:
            corrected.save(job.profile_path)
        return corrected is not None, found.factors

    is_corrected, factors = rank.communicator.computed_on_rank_0(correct)
    event = Predicted(
        time_s=round(sample.time_s, 6),
        time_error=round(sample.time_error, 5),
        energy_j=round(sample.energy_j, 6),
        energy_error=round(sample.energy_error, 5),
        predicted_time_s=round(frontier.baseline.time_s, 6),
        predicted_energy_j=round(gpus_per_rank * frontier.baseline.energy_j, 6),
        parts={name: round(factor, 4) for name, factor in factors.items()},
        corrected=is_corrected,
    )
    context.recorder.announce(event)
    return is_corrected


def _is_off(measured: float, predicted: float, error: float) -> bool:
    return abs(measured / predicted - 1) > _OFF + _SURE * error


def _predicted_s(frontier: Frontier) -> dict[tuple[int, Kind], float]:
    """Return the times of instructions at the highest clock of the profile, by stage and kind [s]."""
    times_s, plan = frontier.instruction_times_s, frontier.baseline
    keys = {
        (i.stage, i.kind): clock_mhz
        for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True)
        for i, clock_mhz in zip(stream, clocks, strict=True)
    }
    return {key: times_s[(*key, clock)] for key, clock in keys.items() if (*key, clock) in times_s}


def _corrected(
    job: Job, profile: StageProfile, found: Difference, sample: IterationSample, gpus_per_rank: int
) -> StageProfile | None:
    """Return the profile with the times, and then with the power, that were measured; None where neither differs."""
    if found.factors and found.profile is None:  # default clocks are others than the highest of the profile
        return None
    corrected = found.profile or profile
    power_w, ranks = corrected.info.blocking_power_w or 0.0, len(job.schedule.ranks)
    try:
        predicted = problem_for(job.schedule, corrected, None).baseline()
    except PerseusError:
        return None
    waiting_s = ranks * sample.time_s
    predicted_j = predicted.energy_j + power_w * ranks * (sample.time_s - predicted.time_s)
    measured_j = sample.energy_j / gpus_per_rank
    if _is_off(measured_j, predicted_j, sample.energy_error):
        factor = (measured_j - power_w * waiting_s) / (predicted_j - power_w * waiting_s)
        return with_power(corrected, factor) if 0 < factor < math.inf else found.profile
    return found.profile
