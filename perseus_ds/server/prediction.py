"""Compares a profile with measured iterations at default clocks, and corrects the profile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Predicted
from perseus_ds.errors import PerseusError
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.fixed_durations import (
    Iterations,
    Key,
    fixed_durations,
    medians,
    shortest_tail_s,
)
from perseus_ds.server.job import Job
from perseus_ds.server.phases import DefaultIterations, ModeContext
from perseus_ds.server.profiling import Baseline

_OFF = 0.02
_SURE = 3.0
# Shorter parts, as a fraction of an iteration, are ignored. Larger factors are treated as mistakes.
_SHORT = 0.005
_FACTORS = (0.5, 2.0)


def is_predicted(job: Job, frontier: Frontier, sample: IterationSample) -> bool:
    """Return whether the profile predicts time and energy of iterations at default clocks."""
    predicted_j = job.gpus_per_rank * frontier.baseline.energy_j
    return not (
        _is_off(sample.time_s, frontier.baseline.time_s, sample.typical.time_error)
        or _is_off(sample.energy_j, predicted_j, sample.typical.energy_error)
    )


def _is_off(measured: float, predicted: float, error: float) -> bool:
    return abs(measured / predicted - 1) > _OFF + _SURE * error


def correct_profile(
    context: ModeContext, frontier: Frontier, default: DefaultIterations, *, before: Baseline | None = None
) -> bool:
    """Compare prediction and measurement of an iteration at default clocks, and return whether to plan again.

    A difference is printed, and the profile is corrected if factors of its parts explain it. The prediction is the
    baseline of the frontier. A profile that was not measured in this job, without iterations ``before`` it, is not
    corrected.
    """
    job, sample = context.job, default.sample
    if is_predicted(job, frontier, sample):
        return False
    now = PartTimes.of([default.spans(rank) for rank in job.shown])
    corrected: StageProfile | None = None
    if before is None:
        factors = _named(_differing(now, _predicted_s(frontier)))
    else:
        profile = StageProfile.load(job.profile_path)
        factors, by_time = difference(profile, now, PartTimes.of(before.spans).instructions, sample.time_s)
        # If parts differ but are not corrected, default clocks differ from the highest clock of the profile.
        if not factors or by_time is not None:
            corrected = _by_power(job, by_time or profile, sample) or by_time
        if corrected is not None:
            corrected.save(job.profile_path)
    event = Predicted(
        time_s=round(sample.time_s, 6),
        time_error=round(sample.typical.time_error, 5),
        energy_j=round(sample.energy_j, 6),
        energy_error=round(sample.typical.energy_error, 5),
        predicted_time_s=round(frontier.baseline.time_s, 6),
        predicted_energy_j=round(job.gpus_per_rank * frontier.baseline.energy_j, 6),
        parts={name: round(factor, 4) for name, factor in factors.items()},
        corrected=corrected is not None,
    )
    context.recorder.announce(event)
    return corrected is not None


def _predicted_s(frontier: Frontier) -> dict[Key, float]:
    """Return the times of instructions at the highest clock of the profile [s]."""
    times_s, plan = frontier.instruction_times_s, frontier.baseline
    keys = {
        (i.stage, i.kind): clock_mhz
        for stream, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True)
        for i, clock_mhz in zip(stream, clocks, strict=True)
    }
    return {key: times_s[(*key, clock)] for key, clock in keys.items() if (*key, clock) in times_s}


def _by_power(job: Job, profile: StageProfile, sample: IterationSample) -> StageProfile | None:
    """Return a profile with corrected power, given correct times. None if the power does not differ."""
    power_w, ranks = profile.info.blocking_power_w or 0.0, len(job.schedule.ranks)
    try:
        predicted = problem_for(job.schedule, profile).baseline()
    except PerseusError:  # no plan is possible with corrected times
        return None
    waiting_j = power_w * ranks * sample.time_s
    beyond_j = predicted.energy_j - power_w * ranks * predicted.time_s
    measured_j = sample.energy_j / job.gpus_per_rank
    if not _is_off(measured_j, waiting_j + beyond_j, sample.typical.energy_error):
        return None
    factor = (measured_j - waiting_j) / beyond_j
    return with_power(profile, factor) if 0 < factor < math.inf else None


@dataclass(frozen=True)
class PartTimes:
    """Typical times of the parts of iterations at default clocks [s].

    The tail is that of the rank that does not wait. ``fixed`` has loads, transfers and other commands.
    """

    instructions: Mapping[Key, float]
    tail_s: float
    fixed: FixedDurations = field(default_factory=FixedDurations)

    @classmethod
    def of(cls, ranks: Sequence[Iterations]) -> PartTimes:
        instructions: dict[Key, float] = medians(
            ((span.operation.instruction.stage, span.operation.instruction.kind), span.time_s)
            for rank in ranks
            for spans in rank
            for span in spans
            if isinstance(span.operation, Compute) and span.operation.instruction.kind is not Kind.TAIL
        )
        iterations = zip(*ranks, strict=True)
        tail_s = statistics.median([shortest_tail_s(spans) for spans in iterations] or [0.0])
        return cls(instructions, tail_s, fixed_durations(ranks))


def difference(
    profile: StageProfile, now: PartTimes, before: Mapping[Key, float], time_s: float
) -> tuple[dict[str, float], StageProfile | None]:
    """Return the ratios of measured to profiled time of parts that differ by name, and the corrected profile.

    Args:
        profile: The profile.
        now: Iterations at default clocks after its measurement.
        before: Times of instructions at default clocks before its measurement [s]. If an instruction has not changed
            since, but differs from its row at the highest clock, the row is right and default clocks differ from that
            clock.
        time_s: Iteration time, relative to which short parts are ignored [s].
    """
    differing = _differing(now, {key: profile.at_highest_clock(*key).time_s for key in profile.keys})
    of_key = {
        key: factor
        for key, factor in differing.items()
        if abs(now.instructions[key] / before.get(key, now.instructions[key]) - 1) > _OFF
    }
    info, now_s, each_s = profile.info, _fixed_s(now.fixed), time_s / (profile.info.micro_batches or 1)
    of_fixed = {
        name: now_s[name] / profiled_s
        for name, profiled_s in _fixed_s(info.fixed_durations).items()
        if name in now_s and profiled_s and _differs(now_s[name], profiled_s, each_s)
    }
    if of_fixed:
        info = info.with_fixed_durations(now.fixed)
    tails = [key for key in profile.keys if key[1] is Kind.TAIL]
    tail_s = min([profile.at_highest_clock(*key).time_s for key in tails] or [*info.tail_s.values()] or [0.0])
    if tail_s and _differs(now.tail_s, tail_s, time_s):
        factor = of_fixed["tail"] = now.tail_s / tail_s
        of_key.update(dict.fromkeys(tails, factor))
        info = info.model_copy(update={"tail_s": {stage: factor * own_s for stage, own_s in info.tail_s.items()}})
    factors = _named(differing) | of_fixed
    if not (of_key or of_fixed) or not all(_FACTORS[0] < factor < _FACTORS[1] for factor in of_key.values()):
        return factors, None
    rows = [
        replace(row, time_s=row.time_s * factor, energy_j=row.energy_j * factor)
        for row in profile.measurements
        for factor in [of_key.get((row.stage, row.kind), 1.0)]
    ]
    return factors, StageProfile(rows, info)


def _differing(now: PartTimes, profiled_s: Mapping[Key, float]) -> dict[Key, float]:
    factors = {key: now_s / profiled_s[key] for key, now_s in now.instructions.items() if key in profiled_s}
    return {key: factor for key, factor in factors.items() if abs(factor - 1) > _OFF}


def _differs(now_s: float, profiled_s: float, of_s: float) -> bool:
    return abs(now_s - profiled_s) > max(_OFF * profiled_s, _SHORT * of_s)


def with_power(profile: StageProfile, factor: float) -> StageProfile:
    """Return a profile with the energy beyond waiting multiplied by a factor."""
    power_w = profile.info.blocking_power_w or 0.0
    rows = [
        replace(row, energy_j=power_w * row.time_s + factor * (row.energy_j - power_w * row.time_s))
        for row in profile.measurements
    ]
    return StageProfile(rows, profile.info)


def _named(factors: Mapping[Key, float]) -> dict[str, float]:
    return {f"{kind} of stage {stage}": factor for (stage, kind), factor in factors.items()}


def _fixed_s(fixed: FixedDurations) -> dict[str, float]:
    """Return the durations of loads, transfers and other commands by their names [s]."""
    found = {f"load of stage {stage}": time_s for stage, time_s in fixed.load_s.items()}
    found |= {f"transfer of {what} from stage {a} to {b}": time_s for (what, a, b), time_s in fixed.transfer_s.items()}
    return found | {f"{command} of stage {stage}": time_s for (command, stage), time_s in fixed.other_s.items()}
