"""Compares what a profile predicts for default clocks with the iterations that were measured, and corrects it."""

from __future__ import annotations

import math
from enum import Enum

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Predicted
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer import problem_for
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.correction import (
    Difference,
    PartTimes,
    difference,
    differing_instructions,
    named,
    with_power,
)
from perseus_ds.runtime.default_clocks import DefaultIterations
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.warm_up import Baseline
from perseus_ds.units import percent, plain

_OFF = 0.02
_SURE = 3.0


class Agreement(Enum):
    """How a prediction compares with what was measured.

    Attributes:
        GOOD: They agree.
        CORRECTED: They did not; the profile has been corrected, so that plans have to be made again.
        UNEXPLAINED: They do not, and no factor of a part explains it.
    """

    GOOD = "good"
    CORRECTED = "corrected"
    UNEXPLAINED = "unexplained"


def is_predicted(rank: RankContext, frontier: Frontier, sample: IterationSample) -> bool:
    """Return whether iterations at default clocks take the time and energy that the profile predicts for them."""
    predicted_j = _gpus_per_rank(rank) * frontier.baseline.energy_j
    return not (
        _is_off(sample.time_s, frontier.baseline.time_s, sample.time_error)
        or _is_off(sample.energy_j, predicted_j, sample.energy_error)
    )


def _gpus_per_rank(rank: RankContext) -> int:
    return rank.communicator.world_size // rank.communicator.topology.pipeline_ranks


def compare_prediction(
    job: Job,
    rank: RankContext,
    recorder: Recorder,
    frontier: Frontier,
    default: DefaultIterations,
    *,
    before: Baseline | None = None,
) -> Agreement:
    """Compare prediction and measurement of an iteration at default clocks; every rank must do so at once.

    Args:
        job: The job.
        rank: This rank.
        recorder: Of the job.
        frontier: The plans; its baseline is the prediction.
        default: The iterations that were measured.
        before: Iterations before the profile was measured; None where that was not in this job, whose profile is then
            not corrected.

    Returns:
        How they agree; after ``CORRECTED`` the job's profile has been written again.
    """
    sample = default.sample
    if is_predicted(rank, frontier, sample):
        return Agreement.GOOD
    gpus_per_rank = _gpus_per_rank(rank)
    predicted_s, predicted_j = frontier.baseline.time_s, gpus_per_rank * frontier.baseline.energy_j
    first_pipeline = rank.communicator.topology.data_parallel_rank == 0
    own = (default.spans(), before and before.spans) if first_pipeline else None
    ranks = [found for found in rank.communicator.gather(own) if found is not None]

    def correct() -> tuple[Agreement, dict[str, float]]:
        now = PartTimes.of([spans for spans, _ in ranks])
        earlier = PartTimes.of([spans for _, spans in ranks if spans])
        if before is None:
            return Agreement.UNEXPLAINED, named(differing_instructions(now, _predicted_s(frontier)))
        profile = StageProfile.load(job.profile_path)
        found = difference(profile, now, earlier.instructions, sample.time_s)
        corrected = _corrected(job, profile, found, sample, gpus_per_rank)
        if corrected is None:
            return Agreement.UNEXPLAINED, found.factors
        corrected.save(job.profile_path)
        return Agreement.CORRECTED, found.factors

    agreement, factors = rank.communicator.computed_on_rank_0(correct)
    if agreement is Agreement.CORRECTED:
        remedy = "the profile is corrected, and plans are made again"
    else:
        remedy = "the profile stays as it is; whether a plan is kept is decided by measured iterations alone"
    _tell(recorder, sample, (predicted_s, predicted_j), factors, remedy)
    recorder.event(
        Predicted(
            time_s=round(sample.time_s, 6),
            time_error=round(sample.time_error, 5),
            energy_j=round(sample.energy_j, 6),
            energy_error=round(sample.energy_error, 5),
            predicted_time_s=round(predicted_s, 6),
            predicted_energy_j=round(predicted_j, 6),
            parts={name: round(factor, 4) for name, factor in factors.items()},
            corrected=agreement is Agreement.CORRECTED,
        )
    )
    return agreement


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


def _tell(
    recorder: Recorder, sample: IterationSample, predicted: tuple[float, float], factors: dict[str, float], remedy: str
) -> None:
    time_s, energy_j = predicted
    longer, more = sample.time_s / time_s - 1, sample.energy_j / energy_j - 1
    parts = ", ".join(f"{name} {percent(factor - 1)}" for name, factor in factors.items())
    explained = parts or "no instruction, transfer or tail differs in time"
    recorder.say(
        plain(
            f"iterations at default clocks differ from the profile by {percent(longer)} time and "
            f"{percent(more)} energy ({explained}): {remedy}"
        )
    )
